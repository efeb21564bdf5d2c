"""Builds the callbacks that show what a training does: gradients and updates, images, confusion matrices, texts."""

import lightning.pytorch as pl

from holotrain.callbacks import ConfusionMatrix, Histograms, OptimizationMonitor, Predictions, Samples
from holotrain.config.schema import RunConfig
from holotrain.tasks import CausalLM, ImageClassifier, Task
from holotrain.tasks.classification import Classifier


def build_shown(config: RunConfig, task: Task, data: pl.LightningDataModule) -> list[pl.Callback]:
    """Those that apply to the task. They belong before a synthesis, which rewrites gradients, and before an average of the
    weights, which leaves when its validation ends."""
    settings = config.callbacks
    callbacks: list[pl.Callback] = []
    if settings.optimization:
        callbacks.append(OptimizationMonitor())
    if settings.histograms:
        callbacks.append(Histograms())
    if settings.predictions and isinstance(task, ImageClassifier):
        callbacks.append(Predictions(probabilities=task.probabilities))
    callbacks += build_matrix(config, task, data)
    if settings.samples and isinstance(task, CausalLM) and config.trainer.strategy not in ("fsdp", "tp"):
        callbacks.append(Samples())
    return callbacks


def build_matrix(config: RunConfig, task: Task, data: pl.LightningDataModule) -> list[ConfusionMatrix]:
    """The confusion matrix of a classification, if it is not switched off and can show that many classes."""
    if not (config.callbacks.confusion_matrix and isinstance(task, Classifier)):
        return []
    matrix = ConfusionMatrix(probabilities=task.probabilities)
    return [matrix] if data.num_classes <= matrix.max_classes else []
