"""Text: from files to batches of token ids. A file takes these steps:

sources   files -> rows: which files, the rows in them, which are held out; StdlibText, TextFiles, HubText
tokenise  rows -> documents -> tokens of a part, in memory-mapped Arrow files
chat_forms rows of OpenAI's, ShareGPT's and Alpaca's files -> chats: messages, and which of them are learned
learned   chats -> tokens, by a chat template or plainly, and which of them are learned
answers   rows -> sequences of which a causal language model learns the answers alone: chats, prompts with completions
batches   tokens -> blocks of equal length for causal language models, also while the text is read; or single documents, in
          batches of similar length, for masked language models and classification
module    the LightningDataModule that takes the steps: options, cache, loaders
"""
