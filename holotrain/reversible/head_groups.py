"""Attention in the blocks of any model, some heads at a time, so that the queries, keys and values of all heads, and what
leads to them, are never there together.

The attention's own code runs once for each group of heads, with the rows of the weights of queries, keys and values, and the
columns of that of its output, which belong to the group. The sum of what the groups return is its output. A group is recomputed
in the backward, by itself, but for the result of scaled_dot_product_attention, which is kept.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from holotrain.reversible.context import has_no_data, is_captured, may_wait, recomputing
from holotrain.reversible.lists_of_blocks import is_list_of_blocks, outermost
from holotrain.reversible.reads import is_compiled, is_sharded, parts_of
from holotrain.reversible.recording import Recorded
from holotrain.reversible.replaced_forward import InParts, call_of, differ, is_cache
from holotrain.reversible.schedule import from_stored
from holotrain.reversible.settings import Call, generators_unmoved
from holotrain.reversible.tokenwise import attributes_of, has_hooks, put_back_attributes

_LOGGER = logging.getLogger(__name__)


class _Names(NamedTuple):
    """Of an attention's linear layers: ``projections`` make queries, keys and values; ``parts``: those of one layer."""

    projections: tuple[str, ...]
    output: str
    parts: int = 1


_KNOWN = [_Names(("q_proj", "k_proj", "v_proj"), output) for output in ("o_proj", "out_proj", "dense", "proj")]
_KNOWN += [_Names(("qkv",), "proj", 3), _Names(("c_attn",), "c_proj", 3)]
_OF_ALL_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "embed_dim", "attn_dim", "split_size", "nf")
"""Attributes that count what all heads have. While a group runs they count what it has."""
_FEW = 256
"""Tokens for which the groups are compared with the whole."""


def take_heads(model: nn.Module, heads: int) -> None:
    """Takes the attentions in a model's blocks some heads at a time in training, in place. A second call replaces the first.

    Args:
        heads: of keys and values that are taken at a time, with the heads of queries that read them. An attention whose layers
            are not known, or that does something else in groups, is taken whole; the reason is logged.

    Raises:
        ValueError: a wrong number of heads.
    """
    if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1:
        raise ValueError(f"heads must be a number of heads or None, not {heads!r}")
    HeadGroups.remove_all(model)
    said: set[str] = set()
    found = {part: None for _, blocks in outermost(model, is_list_of_blocks) for part in blocks.modules() if _names_of(part)}
    for module in found:
        groups = HeadGroups(module)
        groups.heads, groups.said = heads, said


def _names_of(module: nn.Module) -> _Names | None:
    return next((names for names in _KNOWN if {*names.projections, names.output} <= module._modules.keys()), None)


class HeadGroups(InParts):
    """The forward of an attention, which is taken some heads at a time in training.

    Attributes:
        heads: of keys and values in a group.
    """

    KEY, WHAT, PARTS = "_head_groups", "attention", "groups of heads"
    heads: int

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._names: Any = _names_of(module)
        self._reasons = {}

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        reason = self._why_whole(arguments, keywords)
        if reason is None:
            x, run, rest = call_of(self.own(), arguments, keywords)
            reason = self._why_apart(x, run, rest)
        if reason is not None:
            self.say(reason, _LOGGER.info)
            return self.pass_on(arguments, keywords)
        call, kept = Call(x.device), ("attention",)
        recorded = (
            Recorded("heads", self.module, rest, call, kept, partial(self._run_group, run, group)) for group in self._groups()
        )
        return _sum(from_stored(each, x) for each in recorded)

    def _layers(self) -> tuple[list[Any], Any]:
        """The projections, and the layer of the output."""
        return [getattr(self.module, name) for name in self._names.projections], getattr(self.module, self._names.output)

    def _heads(self) -> int:
        """The number of heads of keys and values; 0: it is not known."""
        layers, width = self._layers()[0], getattr(self.module, "head_dim", None)
        keys = layers[len(layers) // 2]
        return keys.weight.shape[_of_outputs(keys)] // (self._names.parts * width) if isinstance(width, int) else 0

    def _why_whole(self, arguments: tuple, keywords: dict[str, Any]) -> str | None:
        """Why a call is taken whole, in words that end a sentence; None: nothing is known against groups."""
        module, parts = self.module, parts_of(self.module)
        inputs, output = self._layers()
        if torch.compiler.is_compiling() or any(map(is_compiled, parts)):
            return "it is compiled"
        if None in map(_of_outputs, (*inputs, output)) or any(is_sharded(type(part)) for part in parts):
            return "its projections are no plain linear layers, but have adapters, few bits or processes that share them"
        if any(parameter is not None for parameter in module._parameters.values()):
            return "it has parameters besides its layers, maybe one for each head"
        if has_hooks(parts[1:]):
            return "its layers have hooks, which would see groups"
        drops = (
            name for name, part in module.named_children() if isinstance(part, nn.Dropout) and part.training and part.p > 0
        )
        if not all(name.startswith("att") for name in drops):
            return "it drops numbers of its output"
        if any(map(is_cache, (*arguments, *keywords.values()))):
            return "it gets a cache of keys and values"
        if self._heads() <= self.heads:
            return "it has no more heads than a group, or it does not tell their width"
        return None

    def _groups(self) -> Iterator[list[tuple[dict, str, Any, int | None]]]:
        """What each group has in place of what all have: an owner, a name, and the value, or a part of a weight, which is to be
        flattened from a dimension on."""
        (inputs, output), (*_, parts), heads = self._layers(), self._names, self._heads()
        weights = [
            (each, name, _of_outputs(each) if name == "weight" else 0, parts) for each in inputs for name in ("weight", "bias")
        ]
        weights.append((output, "weight", 1 - _of_outputs(output), 1))
        cut = [
            (
                layer._parameters,
                name,
                dim,
                layer._parameters[name].unflatten(dim, (count, heads, -1)).split(self.heads, dim + 1),
            )
            for layer, name, dim, count in weights
            if layer._parameters[name] is not None
        ]
        counts = [(vars(each), name) for each in (self.module, *inputs) for name in _OF_ALL_HEADS if name in vars(each)]
        for number, first in enumerate(range(0, heads, self.heads)):
            size = min(self.heads, heads - first)
            group = [(owner, name, pieces[number], dim) for owner, name, dim, pieces in cut]
            group += [(owner, name, owner[name] * size // heads, None) for owner, name in counts]
            if output.bias is not None and number > 0:
                group.append((output._parameters, "bias", torch.zeros_like(output.bias), None))
            yield group

    def _run_group(self, run: Callable, group: list[tuple[dict, str, Any, int | None]], x: Tensor, **rest: Any) -> Any:
        values = [(owner, name, value if dim is None else value.flatten(dim, dim + 2)) for owner, name, value, dim in group]
        with _having(values):
            return run(x, **rest)

    def _why_apart(self, x: Any, run: Callable, rest: dict[str, Any]) -> str | None:
        """Why groups would do something else than the whole, in words that end a sentence; None: they do the same.

        They are compared for a few tokens in the calls 1, 2, 4, 8 ..., and where other arguments come.
        """
        if not isinstance(x, Tensor) or x.ndim != 3:
            return "its input is not (B, T, C)"
        leaves = [_kind_of(leaf, x.shape[1]) for leaf in tree_leaves(rest)]
        key = (*leaves, *rest.get("named", ()), x.dtype, self.heads, torch.is_autocast_enabled(x.device.type))
        if not recomputing() and not is_captured(x.device):
            is_due = self.is_compared()
            if key not in self._reasons or (self._reasons[key] is None and is_due):
                with may_wait(x.device):
                    self._reasons[key] = self._found_apart(x, run, rest)
        return self._reasons.get(key)

    @torch.no_grad()
    def _found_apart(self, x: Tensor, run: Callable, rest: dict[str, Any]) -> str | None:
        parts, source = parts_of(self.module), x[:, :_FEW]
        rest = tree_map_only(Tensor, partial(_first_tokens, x.shape[1]), rest)
        attributes = attributes_of(parts)
        try:
            with generators_unmoved(x.device, ()), _having([(vars(part), "training", False) for part in parts]):  # no dropout
                true = _output_of(run(source, **rest))
                if true is None:
                    return "it returns more than its output, such as attention weights"
                found = _output_of(_sum(self._run_group(run, group, source, **rest) for group in self._groups()))
        except Exception as error:  # of a module that needs all heads, or all tokens: of many kinds
            return f"it does not run on a part of its heads ({type(error).__name__})"
        finally:
            put_back_attributes(attributes)
        assert found is not None
        if has_no_data(x) or not differ(found, true):
            return None
        warnings.warn(f"{type(self.module).__name__} is taken whole, not in groups of heads: {_DIFFERENT}", stacklevel=6)
        return _DIFFERENT


_DIFFERENT = "its groups have other results together"


def _of_outputs(layer: Any) -> Any:
    """The dimension of a weight that makes outputs; None: the layer is no plain linear layer, or transformers' Conv1D."""
    kinds = {nn.Linear: 0} | ({type(layer): 1} if type(layer).__name__ == "Conv1D" else {})
    if type(layer) not in kinds or "forward" in vars(layer):
        return None
    return kinds[type(layer)] if type(layer.weight) is nn.Parameter or has_no_data(layer.weight) else None


def _kind_of(leaf: Any, tokens: int) -> Any:
    return (leaf.dtype, *(size for size in leaf.shape if size != tokens)) if isinstance(leaf, Tensor) else repr(leaf)


def _first_tokens(tokens: int, leaf: Tensor) -> Tensor:
    for dim in [dim for dim, size in enumerate(leaf.shape) if size == tokens]:
        leaf = leaf.narrow(dim, 0, min(tokens, _FEW))
    return leaf


@contextmanager
def _having(values: list[tuple[dict, str, Any]]) -> Generator[None]:
    """Inside, some names of dicts have other values."""
    before = [(owner, name, owner[name]) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            owner[name] = value
        yield
    finally:
        for owner, name, value in before:
            owner[name] = value


def _output_of(result: Any) -> Tensor | None:
    """The one tensor that an attention returns, by itself or with None; None: it returns more."""
    output, *others = result if isinstance(result, tuple) else (result,)
    return output if isinstance(output, Tensor) and all(each is None for each in others) else None


def _sum(results: Iterator[Any]) -> Any:
    """What the whole returns, of what groups return. Numbers of 16 bits are added up in fp32."""
    total, others, dtype = None, None, torch.float32
    for result in results:
        output = _output_of(result)
        if output is None:
            raise RuntimeError("an attention in groups of heads returns more than its output; call undo(model)")
        others, dtype = result[1:] if isinstance(result, tuple) else None, output.dtype
        if total is None:
            total = output.new_zeros(output.shape, dtype=torch.promote_types(dtype, torch.float32))
        total = _Added.apply(total, output)
        del result, output  # before the next group runs
    assert total is not None
    return total.to(dtype) if others is None else (total.to(dtype), *others)


class _Added(torch.autograd.Function):
    """Adds to a sum in place, so that no two sums are there."""

    @staticmethod
    def forward(ctx, total: Tensor, output: Tensor) -> Tensor:
        ctx.mark_dirty(total)
        ctx.dtype = output.dtype
        return total.add_(output)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:  # ty: ignore[incompatible-method-override]
        return gradient, gradient.to(ctx.dtype)
