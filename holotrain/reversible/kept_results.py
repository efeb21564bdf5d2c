"""Results that a recomputed block keeps, because they are slow to recompute and cheap to store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from holotrain.reversible.block_inputs import SavedTensors


def _operators_of(*names: str) -> tuple[OpOverload, ...]:
    return tuple(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


_ATTENTION = _operators_of(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

KEEPABLE = {"attention": _ATTENTION, "matmul": (*_operators_of("mm", "addmm", "bmm", "baddbmm"), *_ATTENTION)}
"""Short names of what can be kept: ``attention`` is the output of scaled_dot_product_attention, as large as one stream.
``matmul`` adds the outputs of linear layers and batched products; what is recomputed is then cheap."""


def _operators(word: str) -> tuple[OpOverload, ...]:
    if word in KEEPABLE:
        return KEEPABLE[word]
    found = torch.ops
    for name in word.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, OpOverload):
        raise ValueError(f"keep takes {', '.join(KEEPABLE)} or operators such as aten.mm.default, not {word!r}")
    # Private: torch has no public way to ask whether an operator is made of others.
    if torch._C._dispatch_has_kernel_for_dispatch_key(found.name(), "CompositeImplicitAutograd"):
        raise ValueError(f"keep takes operators that are not made of others, such as aten.mm.default; {word} is")
    if found._schema.is_mutable or any(result.alias_info for result in found._schema.returns):
        raise ValueError(f"keep takes operators that compute a new tensor; {word} changes or returns its input")
    if torch.Tag.nondeterministic_seeded in found.tags and _place_of_dropout(found) is None:
        raise ValueError(f"keep takes operators that draw no random numbers; all that follows {word} would draw others")
    if found is torch.ops.aten._to_copy.default:
        raise ValueError(f"keep does not take {word}, since autocast does not cast a weight again that it has in its cache")
    return (found,)


_TENSOR = object()
"""Stands for a tensor among what an operator returned. Attention returns None, too."""


@dataclass
class _Result:
    """What an operator returned. ``read``: shape, dtype and storage of each tensor that it was called with."""

    operator: OpOverload
    read: list[tuple[torch.Size, torch.dtype, int]]
    value: Any

    def __post_init__(self) -> None:
        self._versions, self._saved = _versions(self.value), None

    def save(self) -> None:
        """After the run: saves the value as autograd would, so that an outer recomputation, in which this run is, makes it
        again. One that was changed in place since goes: it is computed again."""
        leaves, self._spec = tree_flatten(self.value)
        if _versions(self.value) == self._versions:
            self._saved = SavedTensors(*(leaf for leaf in leaves if isinstance(leaf, Tensor)))
            self._others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.value = None

    def fetch(self, again: bool) -> None:
        """Before a recomputation: the value is there again, for one use."""
        if self._saved is not None:
            try:
                tensors = iter(self._saved.tensors())
            except RuntimeError:  # changed in place since
                self._saved = None
                return
            self.value = tree_unflatten([next(tensors) if each is _TENSOR else each for each in self._others], self._spec)
        self._saved = self._saved if again else None

    def forget(self) -> None:
        self.value = self._saved = None

    def is_of(self, operator: OpOverload, read: list[tuple[torch.Size, torch.dtype, int]], weights: Collection[int]) -> bool:
        """Whether this call was the same as far as can be told; ``weights`` are storages that are the same in each run."""
        kinds = [each[:2] for each in self.read] == [each[:2] for each in read]
        same = (a[2] == b[2] for a, b in zip(self.read, read, strict=False) if a[2] in weights or b[2] in weights)
        return operator is self.operator and kinds and all(same)


class KeptResults:
    """The results that one run of a branch keeps for its recomputations, in the order in which they were computed.

    Raises:
        ValueError: an unknown name, or an operator whose result cannot stand for its call.
    """

    def __init__(self, results: Iterable[str]) -> None:
        self._operators = frozenset(operator for name in results for operator in _operators(name))
        self._results: list[_Result] = []

    def keeping(self) -> AbstractContextManager:
        """The context of the forward."""
        return _Interposed(self._operators, self._keep)

    def settle(self, needed: bool) -> None:
        """After the forward: lets go of what cannot be reused, or of all, if the backward needs nothing."""
        for result in self._results:
            result.save()
        if not needed:
            self.release()

    def reusing(self, weights: Collection[int], again: bool) -> AbstractContextManager:
        """The context of a recomputation; without ``again`` each value goes as it is used."""
        for result in self._results:
            result.fetch(again)
        return _Interposed(self._operators, partial(self._reuse, iter(self._results), weights))

    def release(self) -> None:
        for result in self._results:
            result.forget()

    def _keep(self, compute: Callable[[], Any], operator: OpOverload, read: list) -> Any:
        value = compute()
        self._results.append(_Result(operator, read, tree_map_only(Tensor, _alias, value)))
        return value

    def _reuse(self, results: Iterator, weights: Collection[int], compute: Callable, operator: OpOverload, read: list):
        result = next(results, None)
        if result is None or not result.is_of(operator, read, weights):
            raise RuntimeError(
                f"the recomputation of a branch calls {operator} where its forward did not, or with other inputs, so it did "
                "something else; its forward must do the same whenever it runs on the same input"
            )
        value, result.value = result.value, None
        return compute() if value is None else tree_map_only(Tensor, _alias, value)


class Casts:
    """Weights that autocast has cast in one recomputation, for those of other tiles, which read the same weights."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Tensor] = {}

    def shared(self, weights: Collection[int]) -> AbstractContextManager:
        """The context of a recomputation."""
        return _Interposed((torch.ops.aten._to_copy.default,), partial(self._once, weights))

    def release(self) -> None:
        self._known.clear()

    def _once(self, weights: Collection[int], compute: Callable[[], Any], operator: OpOverload, read: list) -> Any:
        (shape, dtype, storage), call = read[0], cast(partial, compute)
        if storage not in weights:
            return compute()
        key = storage, call.args[0].storage_offset(), shape, call.args[0].stride(), dtype, str(call.keywords)
        if key not in self._known:
            self._known[key] = _alias(compute())
        return _alias(self._known[key])


class _Interposed(TorchDispatchMode):
    """Calls something instead of some operators, with what would compute their result, the operator, and what it reads."""

    supports_higher_order_operators = True

    def __init__(
        self, operators: Collection[OpOverload], instead: Callable[[Callable[[], Any], OpOverload, list], Any]
    ) -> None:
        super().__init__()
        self._operators, self._instead = operators, instead

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Functions that are compiled stay so in the context."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        compute = partial(func, *args, **(kwargs or {}))
        if func not in self._operators or _drops(func, args, kwargs or {}):
            return compute()
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return self._instead(compute, func, [(each.shape, each.dtype, each.untyped_storage()._cdata) for each in tensors])


def _alias(result: Tensor) -> Tensor:
    """The same memory and the same count of versions, without the graph, which would hold itself."""
    # Private: detach() in a dispatch mode has a count of versions of its own, unless this key is active, as in a forward.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return result.detach()


def _versions(result: Any) -> list[int]:
    return [leaf._version for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _place_of_dropout(operator: OpOverload) -> int | None:
    """The position of the probability with which an operator drops; None: it drops nothing."""
    return next((place for place, each in enumerate(operator._schema.arguments) if each.name == "dropout_p"), None)


def _drops(operator: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether the call draws a dropout mask: skipping it would shift the random numbers of all that follows."""
    place = _place_of_dropout(operator)
    return place is not None and (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) > 0
