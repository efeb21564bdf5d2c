"""Tasks: one LightningModule for each, and the optimizers and schedules that tasks share.

task                 the base class of all tasks, and what commands ask of any LightningModule
classification       ImageClassifier, SequenceClassifier; ErrorDiffusionClassifier, which is trained without a backward pass
language             CausalLM, MaskedLM; which tokens are masked, and which are padding
optimizer_functions  AdamW, SGD, Muon and others over parameters with and without weight decay, also sharded ones
schedules            cosine, multi-step and constant, after a warm-up
"""

from holotrain.tasks.classification import ErrorDiffusionClassifier, ImageClassifier, SequenceClassifier
from holotrain.tasks.language import CausalLM, MaskedLM
from holotrain.tasks.task import Task

__all__ = ["CausalLM", "ErrorDiffusionClassifier", "ImageClassifier", "MaskedLM", "SequenceClassifier", "Task"]
