"""Out of memory: told apart from other errors, and put in a user's words."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch

from holotrain.commands.advice import advice
from holotrain.commands.run import Run
from holotrain.config.devices import device_kind, device_name
from holotrain.config.schema import RunConfig

SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""What torch's allocators (CUDA, MPS, CPU, CPU of Windows) and NVIDIA's libraries say in a RuntimeError."""


class OutOfMemory(Exception):
    """An allocator refused. The message says how much was asked for, or nothing where that is not known."""


@contextmanager
def memory_errors_told_apart() -> Iterator[None]:
    """
    Raises:
        OutOfMemory: in the place of what an allocator of torch, NumPy or Python raises within.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in SIGNS):
            raise
        raise OutOfMemory(_asked_for(str(error))) from error


def _asked_for(message: str) -> str:
    bytes_ = re.search(r"tried to allocate (\d+) bytes", message)
    if bytes_:
        return f"{int(bytes_[1]) / 2**20:.1f} MiB"
    words = re.search(r"(?:tried|unable) to allocate ([\d.]+ \w+)", message, re.IGNORECASE)
    return words[1] if words else ""


def explained(config: RunConfig, data: pl.LightningDataModule, run: Run, when: str, asked_for: str) -> str:
    """Lines for a user: what happened, how to go on, what needs less.

    Args:
        data: set up.
        when: such as ``at step 12``.
        asked_for: such as ``20.00 MiB``, or nothing.
    """
    option, size = config.batch_option
    asked = f": tried to allocate {asked_for} more" if asked_for else ""
    lines = [f"holotrain: out of memory {when} with {option}={size} on {device_name(config.trainer.accelerator)}{asked}"]
    if run.last_checkpoint.exists():
        lines.append(
            f"resume from {run.last_checkpoint} with: python -m holotrain fit resume=true hydra.run.dir={run.folder} ..."
        )
    else:
        lines.append("no checkpoint was saved yet; callbacks.checkpoint.every_n_train_steps=... saves within epochs")
    if overrides := advice(config, data, device_kind(config.trainer.accelerator)):
        lines.append(f"with one of these, which need less: {'; '.join(overrides)}")
    return "\n".join(lines)
