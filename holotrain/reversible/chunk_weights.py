"""The weights of a model that runs chunk after chunk, and the sums of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.chunked_call import ChunkedCall
from holotrain.reversible.reads import is_sharded
from holotrain.reversible.settings import Call
from holotrain.reversible.tiled_cross_entropy import Unreadable, leaves_of, require_leaves


def weights_of(model: nn.Module, own: Callable, sequence: ChunkedCall) -> Weights:
    """Those of a model, whose forward is ``own``.

    Raises:
        ValueError: FSDP2 has parts of the model, but not the model as a whole, or processes have sequences of other lengths.
    """
    if not any(is_sharded(type(part)) for part in model.modules()):
        return Weights(model, own)
    if not is_sharded(type(model)):
        raise ValueError(
            f"chunks take FSDP2 of the whole model alone: apply fully_shard to this {type(model).__name__}, too, with nothing "
            "around it, or call undo(model)"
        )
    return ShardedWeights(model, own, sequence)


class Weights(nn.Module):
    """A model on leaves that share the memory of its parameters. Their gradients are summed over chunks, in fp32 at least.

    So hooks of the parameters see one gradient, and an outer backward gives it to them.

    Attributes:
        divisor: of each loss before its backward.
    """

    divisor: Tensor | None = None

    def __init__(self, model: nn.Module, own: Callable) -> None:
        super().__init__()
        self.model, self._own = model, own
        self._parameters_of = {name: each for name, each in self.named_parameters() if each.requires_grad}
        self._leaves: dict[str, Tensor] = {name: nn.Parameter(each.detach()) for name, each in self._parameters_of.items()}
        self._sums: dict[str, Tensor] = {}
        self._hooks = []
        for name, leaf in self._leaves.items():
            self._hooks.append(leaf.register_post_accumulate_grad_hook(partial(self._add, name)))

    def _add(self, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def forward(self, arguments: dict[str, Any]) -> Any:
        return self._own(**arguments)

    def _run(self, arguments: dict[str, Any]) -> Any:
        return torch.func.functional_call(self, self._leaves, (arguments,))

    def differentiate(self, sequence: ChunkedCall, start: int, stop: int) -> tuple[Any, Tensor]:
        """Runs a chunk with its graph, and adds its gradients; returns what the model returned, and the sum of the losses."""
        sequence.keys.begin(start)
        with torch.enable_grad():
            result = self._run(sequence.arguments(start, stop))
        if getattr(result, "aux_loss", None) is not None:
            raise ValueError(
                "the loss of this mixture of experts is no sum over tokens, so it takes no chunks; set "
                "output_router_logits=False in its configuration, or call undo(model)"
            )
        loss = result if isinstance(result, Tensor) else result.loss
        if stop == sequence.labels.shape[1]:
            self._require_own_leaves(loss)
        with torch.autocast(loss.device.type, enabled=False):
            (loss if self.divisor is None else loss / self.divisor).backward()
        return result, loss.detach()

    def around(self) -> AbstractContextManager[None]:
        """Inside, the model runs."""
        return nullcontext()

    def _require_own_leaves(self, loss: Tensor) -> None:
        try:
            require_leaves(loss, self._own_leaves(loss))
        except Unreadable as error:
            raise ValueError(
                f"{type(self.model).__name__} reads a tensor with a gradient that is none of its parameters, as by a hook, "
                "so it takes no chunks: call undo(model)"
            ) from error

    def _own_leaves(self, loss: Tensor) -> list[Tensor]:
        return [*self._leaves.values()]

    def gradients(self) -> dict[Tensor, Tensor]:
        """The parameters that have a gradient, with it."""
        return {self._parameters_of[name]: total for name, total in self._sums.items()}

    def release(self) -> None:
        """Lets go of leaves, whose hooks hold this, in a circle that Python does not see."""
        for hook in self._hooks:
            hook.remove()
        self._leaves, self._sums, self._hooks = {}, {}, []


class ShardedWeights(Weights):
    """Those of a model under FSDP2, which gathers them for each chunk, and adds its gradients over processes to ``.grad``.

    Processes may count different numbers of labels, and each owns parts of all gradients, so losses are divided before they are
    differentiated. By what the loss is multiplied outside must be the same in all of them.
    """

    def __init__(self, model: Any, own: Callable, sequence: ChunkedCall) -> None:
        from torch.distributed.tensor import DTensor  # importing it takes time

        nn.Module.__init__(self)
        self.model: Any = model
        self._own, self.divisor = own, sequence.divisor().clamp(min=1)
        self._settings = Call(sequence.labels.device).settings
        _require_equal_lengths(sequence.labels)
        for part in model.modules():
            if is_sharded(type(part)):
                part.reshard()
        # The optimizer knows parts of parameters. The root keeps its own whole in its forward, unless this says otherwise.
        if not all(isinstance(each, DTensor) for each in model.parameters()):
            model.set_reshard_after_forward(True, recurse=False)
            model.reshard()
            model.set_reshard_after_forward(False, recurse=False)
        self._before = {each: each.grad for each in model.parameters() if each.requires_grad}
        for each in self._before:
            each.grad = None
        model.set_requires_gradient_sync(True)  # also of a batch whose gradients others will be added to
        model.unshard()

    def _run(self, arguments: dict[str, Any]) -> Any:
        self.model.unshard()  # the backward of another chunk has let go of the root's
        return self._own(**arguments)

    def around(self) -> AbstractContextManager[None]:
        """Weights that autocast has cast would be those of an earlier chunk, which FSDP2 has let go of."""
        return self._settings.reinstated(cached=False)

    def _own_leaves(self, loss: Tensor) -> list[Tensor]:
        """Whole parameters, some of which FSDP2 has let go of until the backward: their memory is empty."""
        empty = [leaf for leaf in leaves_of(loss) if not leaf.untyped_storage().size()]
        return [*self.model.parameters(), *empty]

    def gradients(self) -> dict[Tensor, Tensor]:
        return {each: each.grad for each in self._before if each.grad is not None}

    def release(self) -> None:
        for each, gradient in self._before.items():
            each.grad = gradient


def _require_equal_lengths(labels: Tensor) -> None:
    """Raises a ValueError in all processes if they would take different numbers of chunks, each of which they gather for."""
    length = labels.shape[1]
    ends = torch.tensor([length, -length], device=labels.device)
    torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
    most, least = ends[0].item(), -ends[1].item()
    if most != least:
        raise ValueError(
            f"processes got sequences of {least} to {most} tokens; under FSDP2 chunks take sequences of one length: pad all "
            "rows to it, or call undo(model)"
        )
