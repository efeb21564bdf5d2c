"""What is learned: one LightningModule a task, and the optimizers and schedules that tasks share.

image_classification   ImageClassifier
optimizers             AdamW and SGD over parameters that decay and parameters that do not
schedules              cosine, multi-step and constant, after a warm-up
"""

from holotrain.tasks.image_classification import ImageClassifier

__all__ = ["ImageClassifier"]
