"""Text: from files to batches of token ids.

sets, module   the LightningDataModules: StdlibText, TextFiles, and what they share
tokenizer      the interface; byte_tokenizer, subword_tokenizer: two implementations; restored: from JSON or a name
sources        which files; readers: the documents in them; parts: which are held out
tokenise       from documents to a folder of tokens; progress: a progress bar for it
cache, content folders that are built once, and hashes of file contents
corpus         the tokens of one part, memory-mapped
packed         blocks of equal length, for causal language models
documents      single documents, for masked language models and classification; buckets: batches of similar length
loose          files that a user names, to classify or score
batches        data sets that return whole batches
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
