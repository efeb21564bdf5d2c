"""What is learned, and from what by what."""

from dataclasses import dataclass

from omegaconf import MISSING

from holotrain.checks import within
from holotrain.config.schema.data import DataConfig, ImageDataConfig, TextDataConfig


@dataclass
class TaskConfig:
    kind: str = MISSING


@dataclass
class ClassificationConfig(TaskConfig):
    kind: str = MISSING

    label_smoothing: float = 0.0
    """share of each target's probability that is spread over all classes"""

    def __post_init__(self) -> None:
        within("task.label_smoothing", self.label_smoothing, 0, 1)


@dataclass
class ErrorDiffusionTaskConfig(ClassificationConfig):
    kind: str = "error_diffusion"

    clamp_signs: bool = False
    """after every step, set weights to 0 that have lost the sign of their cells"""


@dataclass
class CausalLMConfig(TaskConfig):
    kind: str = "causal_lm"


@dataclass
class MaskedLMConfig(TaskConfig):
    kind: str = "masked_lm"

    mask_probability: float = 0.15
    """of choosing a word: of ten chosen ones eight are masked, one is replaced, one stays"""

    def __post_init__(self) -> None:
        within("task.mask_probability", self.mask_probability, 0.001, 1)


TASKS: dict[str, type[TaskConfig]] = {
    "image_classification": ClassificationConfig,
    "sequence_classification": ClassificationConfig,
    "error_diffusion": ErrorDiffusionTaskConfig,
    "causal_lm": CausalLMConfig,
    "masked_lm": MaskedLMConfig,
}

FAMILIES = {
    "image_classification": ("vit", "swin", "mvit"),
    "sequence_classification": ("roberta",),
    "error_diffusion": ("error_diffusion",),
    "causal_lm": ("gpt",),
    "masked_lm": ("roberta",),
}
"""The families of models that each task trains."""

LEARNED_FROM: dict[str, type[DataConfig]] = {
    "image_classification": ImageDataConfig,
    "sequence_classification": TextDataConfig,
    "error_diffusion": ImageDataConfig,
    "causal_lm": TextDataConfig,
    "masked_lm": TextDataConfig,
}
"""The data of each task."""


def of_images(task: str) -> bool:
    """Whether that task learns from images."""
    return LEARNED_FROM[task] is ImageDataConfig


def tells_classes(task: str) -> bool:
    """Whether that task tells classes apart."""
    return issubclass(TASKS[task], ClassificationConfig)
