"""Batches of zeros in the shape that a data set gives, to estimate what a step costs without reading data."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from holotrain.data.images import ImageDataModule
from holotrain.data.text.module import TextDataModule
from holotrain.data.text.tokenise import Batch
from holotrain.errors import UserError


def first_batch(data: pl.LightningDataModule) -> Any:
    """The first training batch of data of others; None for holotrain's, whose shapes are known without it."""
    if isinstance(data, ImageDataModule | TextDataModule):
        return None
    with torch.random.fork_rng(devices=[]):  # an epoch is shuffled as if nobody had looked at its first batch
        first = next(iter(data.train_dataloader()), None)
    if first is None:
        raise UserError("data: the training loader gives no batch")
    return first


def example_batch(data: pl.LightningDataModule, size: int, first: Any = None) -> Any:
    """A training batch of zeros, at least as large as the largest that ``data`` can give. ``data`` must be set up.

    Args:
        size: number of images, packed blocks or documents; of tokens, if documents are batched by ``max_tokens``.
        first: from :func:`first_batch`; other batches differ from it in their first dimension only.
    """
    if isinstance(data, ImageDataModule):
        labels = torch.zeros(size, data.num_classes) if any(data.alphas) else torch.zeros(size, dtype=torch.int64)
        return torch.zeros(size, *data.image_shape), labels
    if isinstance(data, TextDataModule):
        return _text_batch(data, size)
    length = samples_in(first)

    def zeros(tensor: Tensor) -> Tensor:
        shape = (size, *tensor.shape[1:]) if tensor.ndim and len(tensor) == length else tensor.shape
        return torch.zeros(shape, dtype=tensor.dtype)

    return tree_map_only(Tensor, zeros, first)


def _text_batch(data: TextDataModule, size: int) -> Batch:
    if data.layout == "packed":
        return {"tokens": torch.zeros(size, data.context + 1, dtype=torch.int64)}
    documents = -(-size // data.longest) if data.max_tokens else size
    lengths = torch.full((documents,), data.longest)
    lengths[1:] = max(data.longest - 1, 1)  # some padding, without which a model may leave out its mask
    batch = {"tokens": torch.zeros(documents, data.longest, dtype=torch.int64), "lengths": lengths}
    return batch | {"labels": torch.zeros_like(lengths)} if data.num_classes else batch


def samples_in(batch: Any) -> int:
    """The first dimension of the first tensor in a batch."""
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim), 1)


def batch_unit(data: pl.LightningDataModule) -> int:
    """The smallest sensible increment of that size."""
    return data.longest if isinstance(data, TextDataModule) and data.max_tokens else 1
