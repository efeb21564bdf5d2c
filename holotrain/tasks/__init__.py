"""What is learned: one LightningModule a task, and the optimizers and schedules that tasks share.

image_classification, sequence_classification   ImageClassifier, SequenceClassifier
causal_lm, masked_lm   CausalLM, MaskedLM
task             what every task is
error_diffusion  ErrorDiffusionClassifier: classes of images, learnt without a backward pass
classification   what all classifications share
language_modelling   what causal and masked modelling share
masking          which words are masked, and what is shown in their place
padding          which tokens of a batch are real
optimizers       AdamW, SGD and Muon over parameters that decay and parameters that do not
combined         several optimizers that step as one
sharded_muon     Muon for matrices that are shared out among processes
schedules        cosine, multi-step and constant, after a warm-up
"""

from holotrain.tasks.causal_lm import CausalLM
from holotrain.tasks.error_diffusion import ErrorDiffusionClassifier
from holotrain.tasks.image_classification import ImageClassifier
from holotrain.tasks.masked_lm import MaskedLM
from holotrain.tasks.sequence_classification import SequenceClassifier
from holotrain.tasks.task import Task

__all__ = ["CausalLM", "ErrorDiffusionClassifier", "ImageClassifier", "MaskedLM", "SequenceClassifier", "Task"]
