"""Modules that work token by token, so that a sequence can be taken in tiles: what they return for a token depends on it alone.

They are found by their structure, and tried once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from holotrain.reversible.backward_schedules import noting_mixtures
from holotrain.reversible.context import has_no_data
from holotrain.reversible.random_state import PYTHON_AND_NUMPY, generators_among, generators_unmoved, have_drawn
from holotrain.reversible.reads import is_compiled, is_tensor_parallel, parts_of
from holotrain.reversible.settings import Call

PROBED = 8
"""Tokens of each part on which is tried, once, whether a module works token by token."""

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
NOT_TOKENWISE = (nn.modules.conv._ConvNd, *_NORMS, nn.Embedding, nn.EmbeddingBag, nn.RNNBase)

WHOLE_SAMPLES = ("DropPath", "StochasticDepth", "Dropout1d", "Dropout2d", "Dropout3d", "FeatureAlphaDropout")
"""Ends of the names of classes that draw one random number for all tokens of a sample."""


def require_tile(tile: int | None) -> None:
    if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
        raise ValueError(f"tile must be a number of tokens or None, not {tile!r}")


def may_be_tokenwise(module: nn.Module) -> bool:
    """Whether a module has at least two linear layers, and else only norms, activations and dropout."""
    leaves = [part for part in module.modules() if not any(part.children())]
    products = sum(any(weight.ndim == 2 for weight in leaf.parameters(False)) for leaf in leaves)
    return products >= 2 and not any(isinstance(leaf, NOT_TOKENWISE) for leaf in leaves)


def _same_in_pieces(module: nn.Module, run: Callable[[Tensor], list[Tensor]], x: Tensor) -> bool:
    """Whether two short pieces of x (B, T, ...) give together what they give one by one, without dropout."""
    size = min(PROBED, max(x.shape[1] // 2, 1))
    pieces = [piece.contiguous() for piece in x.detach()[:, : 2 * size].split(size, 1)]
    with without_dropout(module), torch.no_grad():
        apart, together = [run(piece) for piece in pieces], run(torch.cat(pieces, 1))
    for one, *each in zip(together, *apart, strict=True):
        error = (torch.cat(each, 1).float() - one.float()).abs().amax()
        if not has_no_data(one) and not error <= 0.01 * one.float().abs().amax():
            return False
    return True


@contextmanager
def without_dropout(module: nn.Module) -> Generator[None]:
    """Inside, the module and its parts are in evaluation mode."""
    training = [part for part in module.modules() if part.training]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


_works: WeakKeyDictionary[nn.Module, dict[tuple[Any, ...], bool]] = WeakKeyDictionary()
"""What was found of a branch, by the classes of its parts, so that it is tried again where some are replaced."""


def tiles_of(branch: nn.Module, tile: int | None, x: Tensor, keywords: dict[str, Any]) -> list[slice]:
    """The tiles in which a branch may be taken; none: it is taken whole.

    It is taken whole if it does not work token by token, reads tensors besides the stream, changes a buffer, draws random
    numbers of Python or NumPy, is tensor parallel, or has hooks, which would see tiles instead of the stream. The same holds if
    it drops single elements beside whole samples, or is compiled and the last tile would be shorter.
    """
    if tile is None or x.ndim != 3 or x.shape[1] <= tile or any(isinstance(leaf, Tensor) for leaf in tree_leaves(keywords)):
        return []
    parts = parts_of(branch)
    if x.shape[1] % tile and any(map(is_compiled, parts)):
        return []  # a last tile of another length would have the code of the others compiled anew, before they are recomputed
    if any(map(_is_hooked, parts)) or (any(map(_drops_samples, parts)) and any(map(_drops_elements, parts))):
        return []
    found, kinds = _works.setdefault(branch, {}), (has_no_data(x), branch.training, *map(type, parts))
    if kinds not in found:
        plain = getattr(branch, "_orig_mod", branch)
        found[kinds] = may_be_tokenwise(plain) and not is_tensor_parallel(plain) and _works_on(plain, x, keywords)
    return [slice(start, min(start + tile, x.shape[1])) for start in range(0, x.shape[1], tile)] if found[kinds] else []


def _is_hooked(part: nn.Module) -> bool:
    return bool(part._forward_pre_hooks or part._forward_hooks or part._backward_hooks or part._backward_pre_hooks)


def drops_samples(branch: nn.Module) -> bool:
    """Whether it draws random numbers that all tokens of a sample share, so that each of its tiles must draw the same."""
    return any(map(_drops_samples, parts_of(branch)))


def _drops_samples(part: nn.Module) -> bool:
    if not part.training or not type(part).__name__.endswith(WHOLE_SAMPLES):
        return False
    rates = (getattr(part, name, None) for name in ("probability", "drop_prob", "p"))
    return next((rate for rate in rates if rate is not None), 1) != 0


def _drops_elements(part: nn.Module) -> bool:
    return isinstance(part, nn.Dropout | nn.AlphaDropout) and part.training and part.p != 0


def _works_on(branch: nn.Module, x: Tensor, keywords: dict[str, Any]) -> bool:
    """Tries a branch on one sample. All that its layers read is compared, since the last layer may begin with zeros."""
    attributes = [value for part in branch.modules() for value in vars(part).values()]
    call, mixes, generators = Call(x.device), [], generators_among([*attributes, *tree_leaves(keywords)])
    before = [(buffer, buffer._version, buffer.clone()) for buffer in branch.buffers()]

    def run(piece: Tensor) -> list[Tensor]:
        read: list[Tensor] = []
        layers = [part for part in branch.modules() if part._parameters]
        hooks = [part.register_forward_pre_hook(lambda _, inputs: read.extend(inputs)) for part in layers]
        try:
            with noting_mixtures(mixes) if has_no_data(piece) else nullcontext():
                output = branch.forward(piece, **keywords)
        finally:
            for hook in hooks:
                hook.remove()
        return [each.reshape(1, piece.shape[1], -1) for each in (output, *read)]

    try:
        # A weight that is cast without a gradient must not stay in the cache of autocast.
        with generators_unmoved(x.device, generators), call.settings.reinstated(cached=False):
            drawn = [source.read() for source in PYTHON_AND_NUMPY]
            states = call.states()
            works = _same_in_pieces(branch, run, x[:1]) and not have_drawn(states)
            with torch.no_grad():
                run(x[:1, :PROBED].contiguous())  # which may change buffers, in training
            works = works and not have_drawn(drawn)
    except Exception:  # it cannot take a short piece
        return False
    changed = [(buffer, kept) for buffer, version, kept in before if buffer._version != version]
    for buffer, kept in changed:
        with torch.no_grad():
            buffer.copy_(kept)
    return works and not (mixes or changed)
