"""Models of other libraries, with the inputs and outputs that the tasks expect.

adapter       what both adapters share: the blocks made reversible, weights taken over
timm          image classifiers of timm
huggingface   models of transformers, with the head of a task
network       the configuration and the files of a Hugging Face model, read as data

The libraries are imported when a model is made.
"""

from holotrain.models.foreign.adapter import Foreign
from holotrain.models.foreign.huggingface import HuggingFace
from holotrain.models.foreign.timm import Timm

__all__ = ["Foreign", "HuggingFace", "Timm"]
