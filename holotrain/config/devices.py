"""The device that a run is for: which it is, what it is called, and whether it can do what is asked."""

from contextlib import AbstractContextManager, nullcontext

import torch

from holotrain.config.schema import RunConfig
from holotrain.config.schema.running import TrainerConfig
from holotrain.errors import UserError


def device_kind(accelerator: str) -> str:
    """cuda, mps or cpu: what an accelerator of that name comes to on this machine."""
    if accelerator in ("auto", "gpu") and torch.cuda.is_available():
        return "cuda"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def device_name(accelerator: str) -> str:
    """The device in words: a GPU's name, or how many threads the CPU gives us."""
    kind = device_kind(accelerator)
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu, {torch.get_num_threads()} threads" if kind == "cpu" else kind


def autocast_of(config: TrainerConfig, device: str | None = None) -> AbstractContextManager:
    """The precision of a run outside of a Trainer; ``device``: in the place of the accelerator's."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(config.precision)
    return torch.autocast(device or device_kind(config.accelerator), dtype) if dtype else nullcontext()


def check_device(config: TrainerConfig) -> None:
    """
    Raises:
        UserError: the accelerator is not there, or cannot run in that precision.
    """
    kind = device_kind(config.accelerator)
    if config.accelerator in ("gpu", "mps") and kind == "cpu":
        raise UserError(f"trainer.accelerator={config.accelerator}: this machine has none; take trainer.accelerator=cpu")
    if config.precision == "16-mixed" and kind == "cpu":
        raise UserError("trainer.precision=16-mixed scales gradients, which needs a GPU; on the CPU take bf16-mixed or 32-true")
    if config.precision == "64-true" and kind == "mps":
        raise UserError("trainer.precision=64-true: this GPU has no 64-bit floats; take 32-true or trainer.accelerator=cpu")
    if config.precision == "bf16-mixed" and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"trainer.precision=bf16-mixed: {torch.cuda.get_device_name()} has no bfloat16; take 16-mixed")


def check_training_device(config: RunConfig) -> None:
    """
    Raises:
        UserError: the device is not there, or cannot train as configured.
    """
    check_device(config.trainer)
    if config.backward.cuda_graph and device_kind(config.trainer.accelerator) != "cuda":
        raise UserError("backward.cuda_graph: CUDA graphs need an NVIDIA GPU; this run would train without one")
    if getattr(config.synthesis, "cuda_graph", False) and device_kind(config.trainer.accelerator) != "cuda":
        raise UserError("synthesis.cuda_graph: CUDA graphs need an NVIDIA GPU; this run would train without one")
    if getattr(config.synthesis, "offload", False) and device_kind(config.trainer.accelerator) != "cuda":
        raise UserError("synthesis.offload: it takes holograms off an NVIDIA GPU; this run would train without one")
