"""Weights in int8, for inference: a quarter of the memory and of the file size.

torchao stores each row of a matrix as int8 with one scale in fp32 (symmetric, weights only); inputs and outputs of layers do
not change. Linear layers and word embeddings are quantised; norms, biases, positions and the convolution of patches, which
are small, are not.
"""

from typing import Any

import torch
from torch import Tensor, nn

from holotrain.targets import needed

TORCHAO = ("torchao.quantization", "int8 needs torchao", "torchao")

SCALE = "_scale"
"""Suffix for the name of a tensor's scales in a file."""


def quantise(model: nn.Module) -> None:
    """Quantises a model in place for evaluation, prediction and generation. It cannot be trained afterwards.

    A head that is tied to the embedding uses the same int8 table.

    Raises:
        ValueError: torchao is not installed, or the model is int8 already or has no layer to quantise.
    """
    torchao = needed(*TORCHAO)
    if is_quantised(model):
        raise ValueError(f"this {type(model).__name__} is already int8")
    if not any(isinstance(module, nn.Linear | nn.Embedding) for module in model.modules()):
        raise ValueError(f"this {type(model).__name__} has neither Linear layers nor embeddings to quantise")
    # torchao would otherwise change the compiler's settings for the whole process.
    config = torchao.Int8WeightOnlyConfig(set_inductor_config=False)
    torchao.quantize_(model, config, filter_fn=lambda module, name: isinstance(module, nn.Linear | nn.Embedding))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Embedding):
                setattr(module, name, Int8Embedding.from_pretrained(child.weight))
    model.requires_grad_(False)


class Int8Embedding(nn.Embedding):
    """An embedding in int8; only the rows that are looked up are converted to floating point."""

    def forward(self, input: Tensor) -> Tensor:
        table: Any = self.weight
        return table.qdata[input].to(table.dtype) * table.scale[input].to(table.dtype)


def is_quantised(model: nn.Module) -> bool:
    """Whether any weight is int8."""
    return any(_is_int8(parameter) for parameter in model.parameters())


def storage_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers (those of its state_dict), including the scales of int8 weights."""
    parts = []
    for tensor in model.state_dict().values():
        parts += [tensor.qdata, tensor.scale, tensor.zero_point] if _is_int8(tensor) else [tensor]
    return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}.values())


def unpacked(weights: dict[str, Any]) -> dict[str, Tensor]:
    """A state_dict of plain tensors only: an int8 weight becomes its int8 numbers, and its scales under a separate name."""
    plain = {}
    for name, tensor in weights.items():
        if _is_int8(tensor):
            plain |= {name: tensor.qdata, name + SCALE: tensor.scale}
        else:
            plain[name] = tensor
    return plain


def packed(plain: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`unpacked`, for a model in fp32.

    Raises:
        ValueError: torchao is not installed.
    """
    weights = {name: tensor for name, tensor in plain.items() if not name.endswith(SCALE)}
    for name in weights.keys() & {name.removesuffix(SCALE) for name in plain.keys() - weights.keys()}:
        numbers, scale = plain[name], plain[name + SCALE]
        rows = [1, numbers.shape[1]]  # each row has its own scale
        zero = torch.zeros_like(scale, dtype=torch.int8)
        weights[name] = needed(*TORCHAO).Int8Tensor(numbers, scale, rows, torch.float32, zero_point=zero)
    return weights


def _is_int8(tensor: Tensor) -> bool:
    return hasattr(tensor, "qdata")
