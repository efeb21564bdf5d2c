"""Loads published weights.

files                 reads weights from local files
loading               loads them into a model, and reports what was loaded
fitting               adapts weights to another model of the family: sizes of positions, places of norms

One module for each source, which recognises weights by their names and renames them:
timm_vit, timm_swin, timm_mvit, huggingface_roberta, huggingface_gpt2, ours; names: renaming by patterns
"""

from holotrain.models.pretrained.files import read_weights
from holotrain.models.pretrained.fitting import pre_norm
from holotrain.models.pretrained.loading import Loaded, load_pretrained

__all__ = ["Loaded", "load_pretrained", "pre_norm", "read_weights"]
