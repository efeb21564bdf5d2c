"""Frozen weights in 8 or 4 bits, for inference and for fine-tuning a part: a quarter or an eighth of fp32's memory.

8 bits: int8, one scale for each row. 4 bits: NF4 of QLoRA (Dettmers et al., arXiv 2305.14314): 16 levels, a scale for each 64
numbers, and the scales themselves in int8. torchao quantises. A quantised layer holds plain buffers and computes its weight at
each use, so it can be saved, moved, copied, compiled and sent to other processes as any other.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.reversible.tiled_loss import language_model
from holotrain.targets import needed

TORCHAO = ("torchao.quantization", "quantised weights need torchao", "torchao")

BLOCK, SCALES = 64, 256
"""Numbers that share a scale, and scales that share theirs (section 3 of the article)."""

ZEROS = 0x77
"""Two numbers of the level 0."""


class Quantised(nn.Module):
    """A layer whose ``weight`` (R, C) is computed from buffers.

    Attributes:
        bits: of each number, without scales.
        PARTS: names of the buffers, ``numbers`` first.
        decoded: the weight of the buffers, in the dtype of their scales.
    """

    bits: ClassVar[int]
    PARTS: ClassVar[tuple[str, ...]]
    decoded: ClassVar[Callable[..., Tensor]]
    numbers: Tensor

    @classmethod
    def take_over(cls, layer: Any) -> None:
        """Makes a layer an instance of this class, in place: what refers to it, and hooks on it, stay."""
        weight = layer.weight.detach()
        del layer.weight
        layer.__class__ = cls
        layer.encode(weight)

    @abstractmethod
    def encode(self, weight: Tensor) -> None:
        """Registers the buffers for a weight."""

    @property
    def weight(self) -> Tensor:
        return self.decoded(*self.parts())

    def parts(self) -> list[Tensor]:
        """The buffers, as :attr:`decoded` takes them."""
        return [getattr(self, name) for name in self.PARTS]


class QuantisedLinear(Quantised, nn.Linear):  # ty: ignore[incompatible-property-override]: it is not set
    """A linear layer; for the backward it keeps the quantised weight alone."""

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled() and input.requires_grad:
            output = _Product.apply(input, self.decoded, *self.parts())
            return output if self.bias is None else output + self.bias.to(output.dtype)
        return F.linear(input, self.weight, self.bias)


class _Product(torch.autograd.Function):
    """``input @ weight.T`` for a weight that is not trained."""

    keeps_tokens_apart = True

    @staticmethod
    def forward(ctx, input: Tensor, decoded: Callable[..., Tensor], *buffers: Tensor) -> Tensor:
        ctx.decoded = decoded
        ctx.save_for_backward(*buffers)
        return F.linear(input, decoded(*buffers))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        buffers = ctx.saved_tensors  # read once: each time a block under recomputation would run again
        return gradient @ ctx.decoded(*buffers).to(gradient.dtype), None, *(None for _ in buffers)


def from_int8(numbers: Tensor, scale: Tensor) -> Tensor:
    """(R, C) in int8 and (R, 1) -> (R, C)."""
    return numbers.to(scale.dtype) * scale


def from_nf4(numbers: Tensor, scales: Tensor, factors: Tensor, mean: Tensor, pairs: Tensor) -> Tensor:
    """The buffers of :class:`NF4Linear` -> (R, C)."""
    scale = (scales.view(len(factors), -1) / factors[:, None]).view(-1, 1) + mean
    levels = F.embedding(numbers.int(), pairs)
    return (levels.view(-1, BLOCK) * scale).view(len(numbers), -1)


class Int8(Quantised):
    """int8 with one scale for each row, symmetric: ``numbers`` (R, C) and ``scale`` (R, 1)."""

    bits = 8
    PARTS = ("numbers", "scale")
    decoded = staticmethod(from_int8)
    scale: Tensor

    def encode(self, weight: Tensor) -> None:
        torchao = needed(*TORCHAO)
        stored = torchao.Int8Tensor.from_hp(weight.float(), granularity=torchao.PerRow())
        self.register_buffer("numbers", stored.qdata)
        self.register_buffer("scale", stored.scale.to(weight.dtype))


class Int8Linear(Int8, QuantisedLinear):
    """A linear layer in int8."""


class Int8Embedding(Int8, nn.Embedding):  # ty: ignore[incompatible-property-override]
    """An embedding in int8; only the rows that are looked up are converted to floating point."""

    def forward(self, input: Tensor) -> Tensor:
        return self.decoded(self.numbers[input], self.scale[input])


class NF4Linear(QuantisedLinear):
    """A linear layer in NF4. Two numbers share a byte of ``numbers`` (R, C / 2); ``pairs`` (256, 2) says which they are.

    The n = R * C / 64 scales are ``scales`` (n) in int8, divided by ``factors`` (at least n / 256), plus ``mean``.
    """

    bits = 4
    PARTS = ("numbers", "scales", "factors", "mean", "pairs")
    decoded = staticmethod(from_nf4)

    @staticmethod
    def suits(weight: Tensor) -> bool:
        """Whether the numbers of a row fill bytes, and all of them blocks."""
        return weight.shape[1] % 2 == 0 and weight.numel() % BLOCK == 0

    def encode(self, weight: Tensor) -> None:
        weight = weight.contiguous()
        blocks = weight.numel() // BLOCK
        stored = needed(*TORCHAO).to_nf4(weight, BLOCK, min(blocks & -blocks, SCALES))  # a power of two that divides the blocks
        is_zero = ~weight.view(-1, BLOCK).any(dim=1, keepdim=True)  # which torchao divides by 0
        numbers = stored.quantized_data.view(blocks, -1).masked_fill(is_zero, ZEROS)
        self.register_buffer("numbers", numbers.view(len(weight), -1))
        self.register_buffer("scales", stored.quantized_scalers)
        self.register_buffer("factors", stored.quantization_factor)
        self.register_buffer("mean", stored.scaler_mean)
        self.register_buffer("pairs", torch.cartesian_prod(stored.nf4, stored.nf4), persistent=False)


def quantise(model: nn.Module, bits: int = 8) -> None:
    """Quantises the frozen Linear layers and embeddings of a model in place.

    With 4 bits embeddings, the head of a language model, and layers that :meth:`NF4Linear.suits` refuses have 8. Norms,
    biases, positions and convolutions stay as they are, and so do weights that two layers share, and subclasses, whose forward
    may do more.

    Args:
        bits: 8 or 4.

    Raises:
        ValueError: torchao is not installed, or the model is quantised already or has no frozen layer to quantise.
    """
    if bits not in (8, 4):
        raise ValueError(f"bits must be 8 or 4, not {bits}")
    needed(*TORCHAO)
    if bits_of(model) is not None:
        raise ValueError(f"this {type(model).__name__} is quantised already, in {bits_of(model)} bits")
    layers = _quantisable(model)
    if not layers:
        raise ValueError(f"this {type(model).__name__} has no frozen Linear layer or embedding to quantise")
    found = language_model(model)
    head = None if found is None else found.get_output_embeddings()
    for layer in layers:
        if type(layer) is nn.Embedding:
            Int8Embedding.take_over(layer)
        elif bits == 4 and layer is not head and NF4Linear.suits(layer.weight):
            NF4Linear.take_over(layer)
        else:
            Int8Linear.take_over(layer)


def _quantisable(model: nn.Module) -> list[Any]:
    uses = Counter(id(each) for module in model.modules() for each in module.parameters(recurse=False))
    found: list[Any] = [module for module in model.modules() if type(module) in (nn.Linear, nn.Embedding)]
    found = [layer for layer in found if uses[id(layer.weight)] == 1 and not layer.weight.requires_grad]
    # An embedding with max_norm writes to its weight.
    return [layer for layer in found if layer.weight.numel() and getattr(layer, "max_norm", None) is None]


def dequantise(model: nn.Module) -> None:
    """Makes quantised layers usual ones again, in place, with the rounded weights as frozen parameters."""
    for module in model.modules():
        if isinstance(module, Quantised):
            weight = nn.Parameter(module.weight, requires_grad=False)
            for name in module.PARTS:
                delattr(module, name)
            module.__class__ = nn.Embedding if isinstance(module, nn.Embedding) else nn.Linear
            module.register_parameter("weight", weight)


def quantised_counts(model: nn.Module) -> dict[int, int]:
    """The number of parameters that are quantised, by their bits."""
    counts: Counter[int] = Counter()
    for module in model.modules():
        if isinstance(module, Quantised):
            counts[module.bits] += module.numbers.numel() * 8 // module.bits
    return dict(sorted(counts.items()))


def bits_of(model: nn.Module) -> int | None:
    """The fewest bits of a quantised layer; None: no layer is quantised."""
    return min(quantised_counts(model), default=None)


def parameter_count(model: nn.Module) -> int:
    """The parameters of a model, those that are quantised among them."""
    return sum(quantised_counts(model).values()) + sum(parameter.numel() for parameter in model.parameters())


def storage_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers (those of its state_dict), including scales."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in model.state_dict().values()}
    return sum(storage.nbytes() for storage in storages.values())
