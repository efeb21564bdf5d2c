"""Detects out-of-memory errors and turns them into a message."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
import torch

from holotrain.commands.advice import advice
from holotrain.commands.run import Run
from holotrain.config.build_trainer import device_kind, device_name
from holotrain.config.commands import RunConfig

SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Parts of the RuntimeErrors of torch's allocators (CUDA, MPS, CPU, Windows) and NVIDIA's libraries."""


class OutOfMemory(Exception):
    """An allocation failed. The message is the requested size, or empty if it is not known."""


@contextmanager
def as_out_of_memory() -> Iterator[None]:
    """
    Raises:
        OutOfMemory: instead of the error that an allocator of torch, NumPy or Python raises inside.
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
    """The message: what happened, how to resume, and which overrides need less memory.

    Args:
        data: set up.
        when: such as ``at step 12``.
        asked_for: the requested size, such as ``20.00 MiB``, or empty.
    """
    option, size = config.batch_option
    asked = f": tried to allocate {asked_for}" if asked_for else ""
    batch = "" if size is None else f" with {option}={size}"  # data of others may have no such option
    lines = [f"holotrain: out of memory {when}{batch} on {device_name(config.trainer.accelerator)}{asked}"]
    if run.last_checkpoint.exists():
        lines.append(
            f"resume from {run.last_checkpoint} with: python -m holotrain fit resume=true hydra.run.dir={run.folder} ..."
        )
    else:
        lines.append("no checkpoint was saved yet; callbacks.checkpoint.every_n_train_steps=... saves during an epoch")
    if overrides := advice(config, data, device_kind(config.trainer.accelerator)):
        lines.append(f"these need less memory: {'; '.join(overrides)}")
    return "\n".join(lines)
