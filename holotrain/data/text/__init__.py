"""Text: from files to batches of token ids.

sets, module   the LightningDataModules: StdlibText, TextFiles, HubText, and what all text shares
sources    which files, the rows in them, and which are held out; files that a user names, to classify or score
tokenise   from rows to documents and the tokens of a part, memory-mapped
packed     blocks of equal length, for causal language models, also while the text is read
documents  single documents, in batches of similar length, for masked language models and classification
"""

from holotrain.data.text.module import TextDataModule
from holotrain.data.text.sets import HubText, StdlibText, TextFiles
from holotrain.data.text.sources import text_files

__all__ = ["HubText", "StdlibText", "TextDataModule", "TextFiles", "text_files"]
