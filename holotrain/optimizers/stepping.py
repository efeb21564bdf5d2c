"""How optimizers step: several as one, each parameter in the backward, or other tensors than the parameters."""

from __future__ import annotations

import copy
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.utils import clip_grad_value_
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary


def loss_of(closure: Callable[[], float] | None) -> float | None:
    """What the closure of an optimizer's step returns, called with gradients, if there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


class CombinedOptimizer(Optimizer):
    """Behaves as one optimizer for training loops, schedules, gradient scalers and checkpoints.

    Args:
        parts: the optimizers, over different parameters. This optimizer has their parameter groups, one after another.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Uses the parts' own groups, so that a learning rate changed here changes there."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of all parts. Entries added here are lost; changes to existing entries are kept."""
        return {parameter: kept for part in self.parts for parameter, kept in part.state.items()}

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:  # ty: ignore[incompatible-property-override]
        """Ignored, because the parts hold the state; Optimizer's constructor assigns an empty one."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # ty: ignore[incompatible-method-override]
        loss = loss_of(closure)
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, kept in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(kept)
        self._share()


_hooked: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""The handle of a parameter's hook: a parameter is stepped by the InBackward that was made last."""


class InBackward(Optimizer):
    """Steps each parameter of an optimizer within the backward, so that the gradients are never all there at once.

        optimizer = InBackward(torch.optim.AdamW(model.parameters()))
        loss.backward()   # steps every parameter when its gradient is complete, and frees the gradient
        optimizer.step()  # ends the step

    The weights become what they would be without it, to the bit. The loop stays the same: ``step`` after every backward, then
    the learning rate schedule, which may be made for this optimizer or for the one inside. It has the parameter groups, the
    state and the ``state_dict`` of the optimizer inside, so a training can be resumed with or without it.

    Args:
        optimizer: steps each parameter by itself (SGD, Adam, Muon and most others do), or a :class:`CombinedOptimizer` of such.
        clip_value: the largest magnitude of an entry of a gradient; larger ones are clipped before the step. None: no clipping.

    After the backward ``.grad`` is None; :meth:`observe` shows each gradient before its step. Gradients that come in another
    way (``parameter.grad = ...``) are used by ``step``, as usual. It acts on its parameters until :meth:`remove`, or until
    another InBackward is made for them.

    Raises:
        ValueError: the optimizer steps all parameters together, parameters are sharded, or several processes train together
            (DDP averages gradients after these steps).
        RuntimeError: in the backward: a second gradient of a parameter before ``step`` (accumulation), or the optimizer turns
            out to keep a state of all parameters, or a CUDA graph is captured; in ``GradScaler.step``: gradients were scaled.
    """

    def __init__(self, optimizer: Optimizer, clip_value: float | None = None) -> None:
        if isinstance(optimizer, LBFGS):
            raise ValueError("LBFGS steps all parameters together, so it cannot step them one by one in the backward")
        if any(hasattr(parameter, "device_mesh") for group in optimizer.param_groups for parameter in group["params"]):
            raise ValueError("sharded parameters (FSDP2, tensor parallel) cannot be stepped in the backward")
        if clip_value is not None and clip_value <= 0:
            raise ValueError(f"clip_value {clip_value} is out of range; it must be above 0")
        _require_one_process()
        self.optimizer, self.clip_value = optimizer, clip_value
        self._owners: dict[Tensor, tuple[Optimizer, dict[str, Any]]] = {}
        self._stepped: set[Tensor] = set()
        self._observers: OrderedDict[int, Callable[[Tensor], object]] = OrderedDict()  # a plain dict takes no weak reference
        self._lock = Lock()  # the backward has a thread for each device
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._share()

    def _share(self) -> None:
        """Uses the optimizer's own groups, so that a learning rate changed here changes there; watches their parameters."""
        self.param_groups = self.optimizer.param_groups
        parts = self.optimizer.parts if isinstance(self.optimizer, CombinedOptimizer) else [self.optimizer]
        known = self._owners.keys()
        self._owners = {p: (part, group) for part in parts for group in part.param_groups for p in group["params"]}
        for parameter in self._owners.keys() - known:
            if parameter.requires_grad:  # a frozen one that is trained later is stepped by ``step``
                if parameter in _hooked:
                    _hooked[parameter].remove()
                hook = partial(_step, weakref.ref(self))  # a deleted optimizer steps no more
                _hooked[parameter] = parameter.register_post_accumulate_grad_hook(hook)

    @classmethod
    def among(cls, optimizers: Iterable[Any]) -> InBackward | None:
        """The first of this class."""
        return next((optimizer for optimizer in optimizers if isinstance(optimizer, cls)), None)

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of the optimizer inside."""
        return self.optimizer.state

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:  # ty: ignore[incompatible-property-override]
        """Ignored, because the optimizer inside holds the state; Optimizer's constructor assigns an empty one."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What a GradScaler asks before it steps an optimizer."""
        raise RuntimeError("an optimizer in the backward steps before a GradScaler can unscale the gradients; use bf16")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self.param_groups is self.optimizer.param_groups:  # not in the constructor
            self._share()

    def observe(self, observer: Callable[[Tensor], object]) -> RemovableHandle:
        """Has ``observer(parameter)`` called before each step of a parameter, when ``parameter.grad`` is complete.

        Returns:
            A handle whose ``remove()`` ends it.
        """
        handle = RemovableHandle(self._observers)
        self._observers[handle.id] = observer
        return handle

    def remove(self) -> None:
        """Steps in the backward no more: from now on gradients stay until ``step``, which uses them all."""
        for parameter in self._owners:
            if parameter in _hooked:
                _hooked.pop(parameter).remove()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # ty: ignore[incompatible-method-override]
        """Ends a step: the next backward is that of another one. Uses gradients that are still there."""
        loss = loss_of(closure)
        for parameter in self._owners:
            if parameter.grad is not None:
                self._step_of(parameter)
        self._stepped.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer inside."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)
        self._share()

    def _step_in_backward(self, parameter: Tensor) -> None:
        if not self._stepped:
            _require_one_process()
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("a CUDA graph would repeat this step with its learning rate; capture without InBackward")
        if parameter in self._stepped:
            raise RuntimeError(
                "a parameter got a second gradient before optimizer.step(), and an optimizer that steps in the backward has "
                "used the first one: it cannot accumulate gradients; call step() after every backward"
            )
        self._stepped.add(parameter)
        self._step_of(parameter)

    def _step_of(self, parameter: Tensor) -> None:
        for observer in [*self._observers.values()]:
            observer(parameter)
        if self.clip_value is not None:
            clip_grad_value_([parameter], self.clip_value)
        optimizer, group = self._owners[parameter]
        alone, version = group | {"params": [parameter]}, parameter._version
        with self._lock:
            groups, optimizer.param_groups = optimizer.param_groups, [alone]
            try:
                optimizer.step()
            finally:
                optimizer.param_groups = groups
        if alone.keys() != group.keys() or any(alone[name] is not group[name] for name in group if name != "params"):
            raise RuntimeError(
                f"{type(optimizer).__name__} keeps a state of all parameters together, so it cannot step them one by one in "
                "the backward"
            )
        if parameter._version == version:  # fused optimizers do not count their changes
            increment_version(parameter)  # so that a backward that still needs the old weight is refused
        parameter.grad = None


def require_steps_alone(make: Callable[[nn.Module], Optimizer]) -> None:
    """Raises a ValueError if an optimizer does not step each parameter as it would alone. It is tried with a small model.

    Args:
        make: makes the optimizer of a model.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), suppress(RuntimeError):  # InBackward found a common state
        torch.manual_seed(0)
        usual = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        alone = copy.deepcopy(usual)
        optimizers = make(usual), InBackward(make(alone))
        for _ in range(2):
            for size, (one, other) in enumerate(zip(usual.parameters(), alone.parameters(), strict=True), 1):
                one.grad = torch.randn_like(one) * 10.0**size
                other.grad = one.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        if all(map(torch.equal, usual.parameters(), alone.parameters())):
            return
    raise ValueError("this optimizer steps all parameters together, so it cannot step in the backward")


def refuse_in_backward(uses: Mapping[str, bool]) -> None:
    """Refuses what cannot be combined with an optimizer that steps in the backward.

    Args:
        uses: what needs gradients after the backward, and whether it is in use.

    Raises:
        ValueError: one of them is in use.
    """
    for what, used in uses.items():
        if used:
            raise ValueError(f"{what} needs gradients after the backward, and this optimizer steps in it")


def _step(reference: Callable[[], InBackward | None], parameter: Tensor) -> None:
    optimizer = reference()
    if optimizer is not None:
        optimizer._step_in_backward(parameter)


def _require_one_process() -> None:
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError("an optimizer in the backward steps before gradients are averaged over processes; use one process")


@contextmanager
def swapped_parameters(
    optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], Mapping[Tensor, Tensor]]]
) -> Generator[None]:
    """Has an optimizer step other tensors in place of its parameters, such as the local shards of DTensors, with the state of
    the parameters.

    Args:
        groups: parameter groups, each with the parameters to step and the tensor that replaces each. Nothing else is stepped.
    """
    before = optimizer.param_groups
    optimizer.param_groups = [group | {"params": [*others.values()]} for group, others in groups]
    new = {other: p for _, others in groups for p, other in others.items() if other is not p}
    for other, parameter in new.items():
        optimizer.state[other] = optimizer.state[parameter]
    try:
        yield
    finally:
        optimizer.param_groups = before
        for other in new:
            del optimizer.state[other]
