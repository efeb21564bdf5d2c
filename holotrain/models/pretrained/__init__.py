"""Published weights under our names.

files                 weights read from local files
loading               into a model, with an account of what went where
fitting               what differs between two models of one family: sizes of positions, where the norms stand

One recipe a source, each of which recognises its weights by their names and renames them:
timm_vit, timm_swin, timm_mvit, huggingface_roberta, huggingface_gpt2, ours; names: what renames for them
"""

from holotrain.models.pretrained.files import read_weights
from holotrain.models.pretrained.fitting import pre_norm
from holotrain.models.pretrained.loading import Loaded, load_pretrained

__all__ = ["Loaded", "load_pretrained", "pre_norm", "read_weights"]
