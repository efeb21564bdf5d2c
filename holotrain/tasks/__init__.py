"""Tasks: one LightningModule for each, and the optimizers and schedules that tasks share.

image_classification, sequence_classification   ImageClassifier, SequenceClassifier
causal_lm, masked_lm   CausalLM, MaskedLM
task             the base class of all tasks
error_diffusion  ErrorDiffusionClassifier: classifies images, trained without a backward pass
classification   what all classification tasks share
language_modelling   what causal and masked modelling share
masking          which tokens are masked, and what replaces them
padding          which tokens of a batch are real
optimizers       AdamW, SGD, Muon and others over parameters with and without weight decay
sharded_adafactor, sharded_muon   Adafactor and Muon for parameters that are sharded among processes
in_backward      what an optimizer that steps in the backward needs of a trainer
schedules        cosine, multi-step and constant, after a warm-up
"""

from holotrain.tasks.causal_lm import CausalLM
from holotrain.tasks.error_diffusion import ErrorDiffusionClassifier
from holotrain.tasks.image_classification import ImageClassifier
from holotrain.tasks.masked_lm import MaskedLM
from holotrain.tasks.sequence_classification import SequenceClassifier
from holotrain.tasks.task import Task

__all__ = ["CausalLM", "ErrorDiffusionClassifier", "ImageClassifier", "MaskedLM", "SequenceClassifier", "Task"]
