"""The device of a run: its type, its name, and whether it supports the options."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from holotrain.config.chosen import Chosen
from holotrain.config.schema.run import RunConfig
from holotrain.errors import UserError
from holotrain.sizes import counted


def device_kind(accelerator: str) -> str:
    """cuda, mps or cpu: the device that this accelerator option selects on this machine."""
    if accelerator in ("auto", "gpu") and torch.cuda.is_available():
        return "cuda"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def device_name(accelerator: str) -> str:
    """The name of the GPU, or the number of CPU threads."""
    kind = device_kind(accelerator)
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu, {counted(torch.get_num_threads(), 'thread')}" if kind == "cpu" else kind


def autocast_of(config: Chosen, device: str | None = None) -> AbstractContextManager:
    """The autocast context of a run outside a Trainer; ``device`` replaces the type of the accelerator."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(config.precision)
    return torch.autocast(device or device_kind(config.accelerator), dtype) if dtype else nullcontext()


@contextmanager
def float32_products(precision: str) -> Iterator[None]:
    """Inside, products and convolutions of float32 have this precision; torch alone computes convolutions in TF32.

    Args:
        precision: of ``torch.set_float32_matmul_precision``; with ``highest`` nothing is in TF32.
    """
    convolutions = torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    parts = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, *convolutions)
    kept = [part.fp32_precision for part in parts]
    try:
        before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    except RuntimeError:  # after a use of fp32_precision torch refuses to read these
        before = "highest", True  # as torch begins
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = precision != "highest"
    for part in convolutions:  # allow_tf32=False alone leaves them to torch.backends.fp32_precision
        part.fp32_precision = "ieee" if precision == "highest" else "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
        for part, was in zip(parts, kept, strict=True):
            part.fp32_precision = was


def check_device(config: Chosen) -> None:
    """
    Raises:
        UserError: the accelerator is missing or does not support the precision.
    """
    kind = device_kind(config.accelerator)
    if config.accelerator in ("gpu", "mps") and kind == "cpu":
        raise UserError(f"trainer.accelerator={config.accelerator}: this machine has none; use trainer.accelerator=cpu")
    if config.precision == "16-mixed" and kind == "cpu":
        raise UserError("trainer.precision=16-mixed: needs a GPU; on the CPU use bf16-mixed or 32-true")
    if config.precision == "64-true" and kind == "mps":
        raise UserError("trainer.precision=64-true: this GPU does not support float64; use 32-true or trainer.accelerator=cpu")
    if config.precision == "bf16-mixed" and kind == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(f"trainer.precision=bf16-mixed: {torch.cuda.get_device_name()} does not support bfloat16; use 16-mixed")


def check_training_device(config: RunConfig) -> None:
    """
    Raises:
        UserError: the device is missing or does not support the configuration.
    """
    check_device(config.trainer)
    for group in ("backward", "synthesis"):
        if getattr(getattr(config, group), "cuda_graph", False) and device_kind(config.trainer.accelerator) != "cuda":
            raise UserError(f"{group}.cuda_graph: needs an NVIDIA GPU; set it to false")
