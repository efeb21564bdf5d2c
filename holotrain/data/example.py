"""Batches of zeros in the shape that a data set gives, to estimate what a step costs without reading data."""

from typing import Any

import lightning.pytorch as pl
import torch

from holotrain.data.text import TextDataModule


def example_batch(data: pl.LightningDataModule, size: int) -> Any:
    """A training batch of zeros, at least as large as the largest that ``data`` can give. ``data`` must be set up.

    Args:
        size: number of images, packed blocks or documents; of tokens, if documents are batched by ``max_tokens``.
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
    """The smallest sensible increment of that size."""
    return data.longest if isinstance(data, TextDataModule) and data.layout == "documents" and data.max_tokens else 1
