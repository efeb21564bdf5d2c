"""Text: from files to batches of token ids.

sets, module   the LightningDataModules: StdlibText, TextFiles, and what all text shares
files          which files, the rows in them, and which are held out
tokenise       from rows to documents and the tokens of a part, memory-mapped
packed         blocks of equal length, for causal language models, also while the text is read
documents      single documents, for masked language models and classification
loose          files that a user names, to classify or score
"""

from holotrain.data.text.loose import text_files
from holotrain.data.text.module import TextDataModule
from holotrain.data.text.sets import StdlibText, TextFiles

__all__ = ["StdlibText", "TextDataModule", "TextFiles", "text_files"]
