"""What is learned."""

from dataclasses import dataclass

from omegaconf import MISSING

from holotrain.config.checks import within


@dataclass
class TaskConfig:
    kind: str = MISSING


@dataclass
class ImageClassificationConfig(TaskConfig):
    kind: str = "image_classification"

    label_smoothing: float = 0.0
    """share of each target's probability that is spread over all classes"""

    def __post_init__(self) -> None:
        within("task.label_smoothing", self.label_smoothing, 0, 1)


TASKS = {"image_classification": ImageClassificationConfig}
