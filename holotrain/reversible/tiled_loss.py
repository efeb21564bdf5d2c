"""The loss of a language model, a tile of tokens at a time: its logits, the largest tensors of a step, are never whole.

In training the head of a model returns :class:`PendingLogits`. They know the hidden states and what is to be done to each
logit: a scale, a soft-cap, a cast, a bias. Shifts and reshapes of tokens act on the hidden states. Torch's ``cross_entropy``
takes them in tiles. Whatever else reads them gets logits that are computed whole, as without tiles. So nothing has to be known
of the model around them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from holotrain.reversible import loss_ops
from holotrain.reversible.context import has_no_data
from holotrain.reversible.pending import PendingLogits
from holotrain.reversible.reads import is_sharded
from holotrain.reversible.replaced_forward import ReplacedForward, replaced
from holotrain.reversible.settings import put_back, states_of
from holotrain.reversible.tiled_cross_entropy import Head, Unreadable
from holotrain.reversible.tokenwise import mixes_tokens

IGNORED = -100
"""The label of a token to ignore."""


def tile_loss(model: nn.Module, most_logits: int | None = None) -> nn.Module:
    """Makes the loss of a language model of transformers tile by tile, in place: ``model(input_ids, labels=labels).loss``.

    Where the loss is torch's ``cross_entropy`` of the logits, each maybe scaled, soft-capped or cast, it is computed in tiles,
    and ``logits`` is None in training with labels. Where anything else reads the logits, they are computed whole, with one
    warning.

    Args:
        model: the model, or one that holds it, as those of peft do.
        most_logits: numbers in the logits of a tile, at most; None: by the device.

    Returns:
        the language model.

    Raises:
        ValueError: there is no such model.
    """
    found = language_model(model)
    if found is None:
        raise ValueError(f"{type(model).__name__} is no language model of transformers, with a head for words")
    untile_loss(found)
    TiledLoss(found).most_logits = most_logits
    return found


def untile_loss(model: nn.Module) -> None:
    """Takes back what :func:`tile_loss` did."""
    TiledLoss.remove_all(model)
    for each in model.modules():
        _whole.discard(each)


def language_model(model: nn.Module) -> Any:
    """The part of a model that has a head for words, as transformers names it; None: there is none."""
    return next((each for each in model.modules() if _head_of(each) is not None), None)


def _head_of(model: nn.Module) -> nn.Module | None:
    get = getattr(type(model), "get_output_embeddings", None)
    return None if get is None else get(model)


class ModelsLoss(ReplacedForward):
    """The forward of a language model, which makes the model's own loss in another way in training with labels.

    Trainers of TRL make the loss themselves, of the model's base and the weight of its head: then it is theirs as a whole,
    which is said once.
    """

    NOT_DONE: ClassVar[str]

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        base = getattr(module, "base_model", module)
        self._runs, self._watch = False, None if base is module else base.register_forward_pre_hook(self._say_whose)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        self._runs = "fused_lm_head" not in keywords
        try:
            return super().__call__(*arguments, **keywords)
        finally:
            self._runs = False

    def remove(self) -> None:
        super().remove()
        if self._watch is not None:
            self._watch.remove()

    def _say_whose(self, base: nn.Module, arguments: tuple) -> None:
        if self._watch is not None and not self._runs and base.training and torch.is_grad_enabled():
            self._watch.remove()
            self._watch = None
            warnings.warn(
                f"{type(self.module).__name__}: {self.NOT_DONE}, since something else calls its {type(base).__name__}, as "
                "trainers of TRL do for a loss of their own. For SFT, a subclass of SFTTrainer with "
                "compute_loss = Trainer.compute_loss takes the model's loss",
                stacklevel=3,
            )


class TiledLoss(ModelsLoss):
    """The forward of a language model, which makes its loss tile by tile in training with labels."""

    KEY, WHAT = "_tiled_loss", "model"
    NOT_DONE = "its head and loss are not taken in holotrain's tiles (its MLPs are)"
    most_logits: int | None

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        if keywords.get("labels") is None or not self._runs:
            return self.pass_on(arguments, keywords)
        if not self.module.training:  # an evaluation looks at the logits
            return self.pass_on_in_eval(arguments, keywords)
        return loss_in_tiles(self.module, partial(self.own(), *arguments, **keywords), self.most_logits)


def loss_in_tiles(model: nn.Module, compute: Callable[[], Any], most_logits: int | None = None) -> Any:
    """What a function returns that calls a model and computes a loss of its logits, in tiles if it can be.

    If something needs the numbers of the logits and cannot be given them, the function is called again, and the loss of this
    model is taken whole from then on, with a warning.

    Args:
        model, most_logits: as :func:`tile_loss` takes them.
    """
    if model in _whole:
        return compute()
    device = next(iter(model.parameters())).device
    states = states_of(device)
    try:
        with pending_logits(model, most_logits):
            return _without_pending(compute())
    except Unreadable as error:
        _whole.add(model)
        warnings.warn(f"the loss of {type(model).__name__} is taken whole: {error}", stacklevel=4)
        put_back(states)
        return compute()


_whole: WeakSet[nn.Module] = WeakSet()
"""Models whose logits reached something that cannot take them as pending."""


def _without_pending(result: Any) -> Any:
    """What a model returns, with None for logits that nobody has computed."""
    if isinstance(result, dict):
        for name, value in [*result.items()]:
            result[name] = value.whole if isinstance(value, PendingLogits) else _without_pending(value)
        return result
    return tree_map_only(PendingLogits, lambda logits: logits.value(), result)


@contextmanager
def pending_logits(model: nn.Module, most_logits: int | None = None) -> Generator[None]:
    """Inside, the head of a language model returns :class:`PendingLogits`.

    Args:
        model: as :func:`tile_loss` takes it; one without a head for words stays as it is.
        most_logits: numbers in the logits of a tile, at most; None: by the device.
    """
    found = language_model(model)
    head: Any = None if found is None else _head_of(found)
    if head is None or is_sharded(type(head)) or torch.compiler.is_compiling():  # sharded: it would be gathered for each tile
        yield
        return
    own, is_linear, looking = head.forward, _is_linear(head), False

    def forward(hidden: Tensor) -> Tensor:
        nonlocal looking
        if looking or hidden.ndim < 2:
            return own(hidden)
        looking = True
        weights = (head.weight, head.bias) if is_linear else None  # of this call: functional_call may have put others there
        reason = None if weights else mixes_tokens(head, hidden.reshape(1, -1, hidden.shape[-1]), {})
        looking = False
        if reason:
            return own(hidden)
        return PendingLogits.of_head(Head.called_now(own, weights, head, hidden.device), hidden, most_logits)

    with replaced(head, "forward", forward):
        yield


def _is_linear(head: nn.Module) -> bool:
    """Whether a head is one linear layer and nothing else."""
    if type(head) is not nn.Linear or "forward" in vars(head):
        return False
    return type(head.weight) is nn.Parameter or has_no_data(head.weight)  # not such as a DTensor


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    most_logits: int | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of ``hidden @ weight.T + bias`` against ``targets``; the mean is NaN if all targets are ignored.

    Under autocast, products are computed in its precision, softmax and sums in fp32. Second derivatives are not supported.

    Args:
        hidden: (N, C).
        weight, bias: (V, C), (V,).
        targets: (N,) of class indices; -100 is ignored.
        most_logits: numbers in the logits of a tile, at most; None: by the device.
        reduction: ``"mean"`` or ``"sum"``.
    """
    head = Head.called_now(partial(F.linear, weight=weight, bias=bias), (weight, bias), None, hidden.device)
    logits = PendingLogits.of_head(head, hidden, most_logits)
    return F.cross_entropy(logits.float() if logits.dtype in loss_ops.HALF else logits, targets, reduction=reduction)
