"""Text: from files to batches of token ids.

sets, module   the LightningDataModules: StdlibText, TextFiles, and what they share
tokenizer      what a tokenizer does; byte_tokenizer, subword_tokenizer: two that do; restored: out of text and names
sources        which files; readers: the documents in them; parts: which are held out
tokenise       documents to the folder of their tokens; progress: how far it is
cache, content folders built once, and hashes of what files hold
corpus         the tokens of one part, mapped from the disk
packed         blocks of equal length, for causal language models
documents      one by one, for masked language models and classification; buckets: batches of about one length
loose          files that a user names, to be classified or scored
batches        data sets that hand out whole batches
"""

from holotrain.data.text.buckets import BucketBatchSampler, padding
from holotrain.data.text.byte_tokenizer import ByteTokenizer
from holotrain.data.text.loose import text_files
from holotrain.data.text.module import TextDataModule
from holotrain.data.text.restored import tokenizer_from_json
from holotrain.data.text.sets import StdlibText, TextFiles
from holotrain.data.text.tokenizer import Tokenizer

__all__ = [
    "BucketBatchSampler",
    "ByteTokenizer",
    "StdlibText",
    "TextDataModule",
    "TextFiles",
    "Tokenizer",
    "padding",
    "text_files",
    "tokenizer_from_json",
]
