"""Batches of the shape that a data set gives, without reading it: for whoever asks what a step costs."""

from typing import Any

import lightning.pytorch as pl
import torch

from holotrain.data.text import TextDataModule


def example_batch(data: pl.LightningDataModule, size: int) -> Any:
    """A training batch of zeros, no smaller than the largest that ``data``, which is set up, can give.

    Args:
        size: images, packed blocks or documents; tokens, where documents are batched by ``max_tokens``.
    """
    if not isinstance(data, TextDataModule):
        mixed = any(data.alphas)
        labels = torch.zeros(size, data.num_classes) if mixed else torch.zeros(size, dtype=torch.int64)
        return torch.zeros(size, *data.image_shape), labels
    if data.layout == "packed":
        return {"tokens": torch.zeros(size, data.context + 1, dtype=torch.int64)}
    longest = data.longest
    documents = -(-size // longest) if data.max_tokens else size
    batch = {
        "tokens": torch.zeros(documents, longest, dtype=torch.int64),
        "lengths": torch.full((documents,), longest, dtype=torch.int64),
    }
    return batch | {"labels": torch.zeros(documents, dtype=torch.int64)} if data.num_classes else batch


def batch_unit(data: pl.LightningDataModule) -> int:
    """By how much such a size can sensibly grow."""
    return data.longest if isinstance(data, TextDataModule) and data.layout == "documents" and data.max_tokens else 1
