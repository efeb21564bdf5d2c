"""Options of the tasks, and which models and data each task supports."""

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
    """label smoothing, 0 to 1"""

    def __post_init__(self) -> None:
        within("task.label_smoothing", self.label_smoothing, 0, 1)


@dataclass
class ErrorDiffusionTaskConfig(ClassificationConfig):
    kind: str = "error_diffusion"

    clamp_signs: bool = False
    """after each step, set weights to 0 whose sign does not match their cells"""


@dataclass
class CausalLMConfig(TaskConfig):
    kind: str = "causal_lm"


@dataclass
class MaskedLMConfig(TaskConfig):
    kind: str = "masked_lm"

    mask_probability: float = 0.15
    """probability that a word is selected; of those, 80% are masked, 10% replaced and 10% unchanged"""

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
"""The model families of each task."""

LEARNED_FROM: dict[str, type[DataConfig]] = {
    "image_classification": ImageDataConfig,
    "sequence_classification": TextDataConfig,
    "error_diffusion": ImageDataConfig,
    "causal_lm": TextDataConfig,
    "masked_lm": TextDataConfig,
}
"""The class of data of each task."""


def of_images(task: str) -> bool:
    """Whether this task uses images."""
    return LEARNED_FROM[task] is ImageDataConfig


def tells_classes(task: str) -> bool:
    """Whether this task is a classification."""
    return issubclass(TASKS[task], ClassificationConfig)
