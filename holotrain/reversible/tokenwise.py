"""Which modules work token by token, so that a sequence can be taken in tiles.

What they return for a token depends on that token alone. This is not guessed from numbers: the module runs on tensors without
data, of several lengths, and every operator that it calls must be known to keep tokens apart. These are pointwise operators,
products with weights, and reductions, norms and softmax over other dimensions. Any other operator, a computation with the
number of tokens, or something that the call leaves behind means no.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from holotrain.reversible.context import recomputing
from holotrain.reversible.reads import is_compiled, is_plain, is_tensor_parallel, parts_of
from holotrain.reversible.token_rules import MixesTokens, Tokens, TokenWatch


def require_tile(tile: int | None) -> None:
    """Raises a ValueError for what is neither None nor a number of tokens."""
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
        raise ValueError(f"tile must be a number of tokens or None, not {tile!r}")


def tiles_of(x: Tensor, tile: int) -> list[slice]:
    """The tiles of x (B, T, ...), along T."""
    return [slice(start, min(start + tile, x.shape[1])) for start in range(0, x.shape[1], tile)]


def why_whole(module: nn.Module, tile: int, x: Tensor, keywords: dict[str, Any], trusted: bool = False) -> str | None:
    """Why a module takes x whole, in words that end a sentence; None: it takes it in tiles.

    Args:
        trusted: it is known to keep tokens apart.
    """
    if x.ndim != 3 or x.shape[1] <= tile:
        return "its input has no more tokens than a tile" if x.ndim == 3 else "its input is not (B, T, C)"
    if torch.compiler.is_compiling():
        return "it is being compiled"
    parts = parts_of(module)
    if x.shape[1] % tile and any(map(is_compiled, parts)):
        # A last tile of another length would have the code of the others compiled anew, before they are recomputed.
        return "it is compiled, and its tokens are no multiple of a tile"
    if has_hooks(parts):
        return "it has hooks, which would see tiles"
    for leaf in tree_leaves(keywords):
        if isinstance(leaf, Tensor):
            return "it reads tensors besides its input"
        if not isinstance(leaf, bool | int | float | str | torch.dtype | None):
            return f"it gets a {type(leaf).__name__}, which its forward may change"  # such as a cache of keys and values
    return None if trusted else mixes_tokens(module, x, keywords, (tile,))


def has_hooks(parts: Iterable[nn.Module]) -> bool:
    return any(vars(part)[name] for part in parts for name in _HOOKS)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class _Verdicts:
    """What was found of a module, by what decides what it does: its input, and the attributes of its parts."""

    def __init__(self) -> None:
        self.calls, self.next_look = 0, 1
        self.reasons: dict[tuple[Any, ...], str | None] = {}


_verdicts: WeakKeyDictionary[nn.Module, _Verdicts] = WeakKeyDictionary()


def mixes_tokens(module: nn.Module, x: Tensor, keywords: dict[str, Any], lengths: tuple[int, ...] = ()) -> str | None:
    """Why a module may not keep the tokens of x (B, T, ...) apart, in words that end a sentence; None: it does.

    Its operators are looked at in its calls 1, 8, 64 ..., where another batch size or twice as many tokens come, and where
    keywords, or the classes, modes or plain attributes of its parts have changed.

    Args:
        keywords: of its forward; no tensors.
        lengths: numbers of tokens at which it must do the same, besides 1 and one of at least T.
    """
    plain = getattr(module, "_orig_mod", module)
    parts, verdicts = parts_of(plain), _verdicts.setdefault(module, _Verdicts())
    if not recomputing():  # which must do what the forward did
        verdicts.calls += 1
        if verdicts.calls == verdicts.next_look:  # a look takes some 50 ms
            verdicts.next_look *= 8
            verdicts.reasons.clear()
    lengths = (1, *lengths, 2 ** (x.shape[1] - 1).bit_length())
    shape = (x.shape[0], *x.shape[2:], x.dtype, x.device.type, torch.is_autocast_enabled(x.device.type))
    key = (lengths, shape, repr(keywords), *map(_settings_of, parts))
    if key not in verdicts.reasons:
        verdicts.reasons[key] = _reason(plain, parts, x, keywords, lengths)
    return verdicts.reasons[key]


def _settings_of(part: nn.Module) -> tuple[Any, ...]:
    forward = vars(part).get("forward")
    plain = (value if not isinstance(value, list | tuple) else repr(value) for value in vars(part).values() if is_plain(value))
    return type(part), getattr(forward, "__code__", forward), *(value for value in plain if not isinstance(value, dict))


def _reason(
    module: nn.Module, parts: list[nn.Module], x: Tensor, keywords: dict[str, Any], lengths: tuple[int, ...]
) -> str | None:
    if is_tensor_parallel(module):
        return "its weights are divided among processes"
    primes = _primes_without_multiples(parts, x)
    before, random_before = attributes_of(parts), random.getstate()
    try:
        with torch.enable_grad(), _without_data(x), _no_cached_casts(), _eager(parts), _no_gradients_of_its_own():
            calls = [_operators_of(module.forward, x, keywords, length) for length in primes]
            others = [_calls_at(module.forward, x, keywords, length) for length in lengths]
        same = calls[0] == calls[1] and all(map(partial(_are_the_same, calls[0]), others, lengths))
        reason = None if same else "it computes with the number of tokens"
    except MixesTokens as found:
        reason = str(found)
    except Exception as error:  # of a module that takes no other length, or reads values: of many kinds
        reason = f"it does not run on a tensor without data ({type(error).__name__})"
    if put_back_attributes(before) or random.getstate() != random_before:
        random.setstate(random_before)
        reason = "its forward changes attributes or draws numbers outside of torch"
    return reason


def _primes_without_multiples(parts: Iterable[nn.Module], x: Tensor) -> tuple[int, int]:
    """Two lengths of which no size is a multiple, so that a dimension with a multiple of them is that of the tokens."""
    sizes = {size for part in parts for each in part._parameters.values() if each is not None for size in each.shape}
    sizes |= {*x.shape} - {x.shape[1]}
    good = [prime for prime in (1009, 1013, 1019, 1021, 1031, 1033, 1039) if all(size % prime for size in sizes)]
    return good[0], good[1]


@contextmanager
def _without_data(x: Tensor):
    """New tensors have no data, and whatever counts operators or memory, as a plan does, does not see them."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # of operators that do not suit the shapes
    disabled, log.disabled = log.disabled, True
    try:
        with _disable_current_modes(), mode:
            yield
    finally:
        log.disabled = disabled


_looking: ContextVar[bool] = ContextVar("looking at operators", default=False)


@contextmanager
def _no_gradients_of_its_own():
    """Inside, this thread may call no Function and register no hook: what they do to gradients cannot be looked at."""
    function, tensor = torch.autograd.Function, Tensor
    apply, register_hook = vars(function)["apply"], tensor.register_hook

    def apply_known(kind, *arguments, **keywords):
        if _looking.get() and not getattr(kind, "keeps_tokens_apart", False):
            raise MixesTokens(f"it calls {kind.__name__}, whose backward is its own")
        return apply.__get__(None, kind)(*arguments, **keywords)

    def refuse_hook(self, hook):
        if _looking.get():
            raise MixesTokens("it registers a hook, which would see the gradients of tiles")
        return register_hook(self, hook)

    token, function.apply, tensor.register_hook = _looking.set(True), classmethod(apply_known), refuse_hook
    try:
        # No hooks of a recomputation around it, and nothing is kept for a backward that never comes.
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
            yield
    finally:
        _looking.reset(token)
        function.apply, tensor.register_hook = apply, register_hook


@contextmanager
def _no_cached_casts():
    """A weight without data must not stay in the cache of autocast."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _eager(parts: Iterable[nn.Module]) -> AbstractContextManager:
    return torch.compiler.set_stance("force_eager") if any(map(is_compiled, parts)) else nullcontext()


def _contents(part: nn.Module) -> list[tuple[Any, Any]]:
    """The lists, dicts and sets that a module holds, and what is in them."""
    held = [value for value in vars(part).values() if isinstance(value, list | dict | set)]
    return [(each, each.copy()) for each in held]


def attributes_of(parts: Iterable[nn.Module]) -> list:
    """What :func:`put_back_attributes` needs."""
    return [(part, dict(vars(part)), _contents(part)) for part in parts]


def put_back_attributes(before: list) -> bool:
    """Gives modules their attributes back; whether they had others."""
    changed = False
    for part, attributes, contents in before:
        if vars(part).keys() != attributes.keys() or any(vars(part)[key] is not value for key, value in attributes.items()):
            changed = True
            vars(part).clear()
            vars(part).update(attributes)
        for container, held in contents:
            if len(container) != len(held) or container != held:
                changed = True
                container.clear()
                container.extend(held) if isinstance(container, list) else container.update(held)
    return changed


def _operators_of(forward: Callable, x: Tensor, keywords: dict[str, Any], length: int) -> list[Any]:
    """The operators of a call on tensors of some length, with their plain arguments in terms of the length."""
    stream = x.new_empty(x.shape[0], length, *x.shape[2:]).requires_grad_(x.is_floating_point())
    with TokenWatch(length, stream) as watch:
        result = forward(stream, **keywords)
    if not isinstance(result, Tensor) or result is stream or result.ndim < 3 or watch.tokens_of(result) != Tokens(1, 1):
        raise MixesTokens("it does not return one new tensor with the tokens in their place")
    made, watch.alive = [ref(each) for each in watch.alive], []
    del result, stream
    if any(each() is not None for each in made):
        gc.collect()
    left = [tensor for each in made if (tensor := each()) is not None]
    if left:
        _remove_from_containers(left)
        raise MixesTokens("its forward leaves a tensor behind, in an attribute or a list")
    return watch.calls


class _Calls(TorchDispatchMode):
    """Lists the operators of a call, with their plain arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        if func.namespace != "prim":
            plain = [each for each in tree_leaves((args, kwargs or {})) if not isinstance(each, Tensor)]
            self.calls.append((str(func), plain))
        return func(*args, **(kwargs or {}))


def _calls_at(forward: Callable, x: Tensor, keywords: dict[str, Any], length: int) -> list[tuple[str, list[Any]]]:
    stream = x.new_empty(x.shape[0], length, *x.shape[2:]).requires_grad_(x.is_floating_point())
    with _Calls() as listed:
        forward(stream, **keywords)
    return listed.calls


def _are_the_same(known: list[Any], calls: list[tuple[str, list[Any]]], length: int) -> bool:
    """Whether operators are those of :func:`_operators_of`, at another length."""
    if [name for name, _ in known] != [name for name, _ in calls]:
        return False
    pairs = [pair for (_, mine), (_, theirs) in zip(known, calls, strict=True) for pair in zip(mine, theirs, strict=True)]
    return all(each == mine * length if isinstance(mine, int) else str(each) == mine for mine, each in pairs)


def _remove_from_containers(tensors: list[Tensor]) -> None:
    """Tensors without data must not stay in a list or dict of somebody's."""
    for tensor in tensors:
        for holder in gc.get_referrers(tensor):
            if isinstance(holder, list) and holder is not tensors:
                holder[:] = [each for each in holder if each is not tensor]
            elif isinstance(holder, dict):
                for key in [key for key, each in holder.items() if each is tensor]:
                    del holder[key]
