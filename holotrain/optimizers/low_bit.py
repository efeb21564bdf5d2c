"""torchao's optimizers with averages of few bits, for any device, for shards and for checkpoints.

torchao keeps averages as tensors of 8 or 4 bits: codes, a scale for each block of entries, and the values that codes stand for.
A checkpoint is data, so it holds these parts as plain tensors. The state is rebuilt from them when it is loaded, with no bit
changed. Of a parameter that FSDP2 shards, the optimizer holds the state of its share. In a checkpoint parts are sharded as the
parameter is, so that it is the same for any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from holotrain.optimizers.shards import is_sharded, local
from holotrain.optimizers.stepping import loss_of, swapped_parameters

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TensorWithFlatten

LEAST = 4096
"""torchao keeps the averages of parameters with fewer entries in full precision."""


def low_bit(name: str, params: Any, **options: Any) -> Optimizer:
    """An optimizer of torchao, such as AdamW8bit, whose ``state_dict`` holds plain tensors.

    On the CPU its step is not compiled, which would take longer than hundreds of steps. Of a parameter that FSDP2 shards, the
    averages have few bits if the share of each process consists of whole blocks (of 128 or 256 entries, as in one process).

    Args:
        name: of the class in ``torchao.optim``.
        params: the parameters or parameter groups.
        options: of the class.

    Raises:
        ValueError: torchao is not installed.
        UnfitState: in ``load_state_dict``: a part of a state is missing, or differs from a fresh one in shape or dtype.
    """
    try:
        import torchao.optim
    except ImportError as error:
        raise ValueError(f"{name} needs torchao: pip install 'holotrain[torchao]'") from error
    optimizer = _adapted(getattr(torchao.optim, name))(params, **options)
    optimizer.register_state_dict_post_hook(partial(_with_each, _plain))
    optimizer.register_load_state_dict_pre_hook(partial(_with_each, partial(_rebuilt, optimizer)))
    return optimizer


@cache
def _adapted(base: Any) -> type[Optimizer]:
    with _disable_current_modes(), torch.device("cpu"):  # torchao computes once what codes stand for; not from fake tensors
        for signed in (True, False):
            base._subclass_zeros(torch.empty(LEAST), signed, LEAST)

    def new_buffer(self: Any, share: Tensor, signed: bool) -> Tensor:
        parameter = self.of_shares[share]
        if is_sharded(parameter) and not whole_blocks(parameter, self.block_size):
            return torch.zeros_like(share)  # torchao asks the share alone, so those of one parameter could differ
        return base._new_buffer(self, share, signed)

    def fresh_state(self: Any, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """What torchao makes before the first step of a parameter, or of its share."""
        share = local(parameter)
        self.of_shares = {share: parameter}
        made = {
            "step": torch.tensor(0.0),
            "exp_avg": self._new_buffer(share, True),
            "exp_avg_sq": self._new_buffer(share, False),
        }
        if group["amsgrad"]:
            made["max_exp_avg_sq"] = self._new_buffer(share, False)
        self.of_shares = {}
        return made

    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        """Steps the shares of parameters (which torchao, 0.18, does only in fp32)."""
        loss = loss_of(closure)
        groups = [(group, {p: local(p) for p in group["params"] if p.grad is not None}) for group in self.param_groups]
        self.of_shares = {share: parameter for _, shares in groups for parameter, share in shares.items()}
        for share, parameter in self.of_shares.items():
            share.grad = local(parameter.grad)
        on_cpu = all(share.device.type == "cpu" for share in self.of_shares)
        try:
            with swapped_parameters(self, groups), torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                base.step(self)
        finally:
            for share, parameter in self.of_shares.items():
                if share is not parameter:
                    share.grad = None  # zero_grad frees that of the parameter alone
            self.of_shares = {}
        return loss

    changed = {"_new_buffer": new_buffer, "fresh_state": fresh_state, "step": step}
    return type(base.__name__, (base,), changed | {"__module__": __name__})


CLASS = "tensor_class"
"""Key of a tensor's class, beside its parts."""

UNDIVIDED = ("qmap",)
"""Parts that are the same for every share of a tensor. The others belong to blocks of its entries."""


class UnfitState(ValueError):
    """A state is not one of this optimizer and these parameters."""


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the memory of a tensor: its parts, or itself."""
    return (
        [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        if is_traceable_wrapper_subclass(tensor)
        else [tensor]
    )


def whole_blocks(parameter: DTensor, block: int) -> bool:
    """Whether each process has at least ``LEAST`` entries, in whole blocks, so that parts can be sharded like the parameter."""
    mesh, placements = parameter.device_mesh, parameter.placements
    if mesh.ndim > 1 or not placements[0].is_shard(0):
        return False
    rows, row = parameter.shape[0], prod(parameter.shape[1:])
    most = -(-rows // mesh.size())
    shares = [min(most, max(rows - most * rank, 0)) * row for rank in range(mesh.size())]
    even = len({*shares}) == 1
    return (even or row % block == 0) and all(share >= LEAST and share % block == 0 for share in shares)


def _with_each(change: Any, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state of which that of each parameter is ``change(state, parameter, group)``."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
    of = dict(zip(numbers, parameters, strict=False))  # load_state_dict reports other lengths
    state = {n: change(entry, *of[n]) if n in of else entry for n, entry in state_dict["state"].items()}
    return state_dict | {"state": state}


def _plain(state: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, value in state.items():
        if is_traceable_wrapper_subclass(value):
            parts = _stored(value).items()
            plain = {part: x if part in UNDIVIDED else _as_sharded(x, parameter) for part, x in parts}
            found[name] = {CLASS: type(value).__name__, **plain}
        else:
            found[name] = _as_sharded(value, parameter) if value.shape == local(parameter).shape else value
    return found


def _stored(tensor: TensorWithFlatten) -> dict[str, Tensor]:
    """The parts of a tensor as a checkpoint has them: 8-bit floats as bytes, which gloo can gather, and by rows."""
    names, _ = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    parts = {name: x.view(torch.uint8) if x.is_floating_point() and x.itemsize == 1 else x for name, x in parts.items()}
    return {name: x if name in UNDIVIDED else _by_rows(x, tensor.shape) for name, x in parts.items()}


def _by_rows(part: Tensor, shape: torch.Size) -> Tensor:
    """A part with a row for each row of the whole, if its blocks do not cross rows: such parts are sharded alike."""
    entries = prod(shape) // part.numel()
    return part if part.shape == shape or prod(shape[1:]) % entries else part.view(shape[0], -1)


def _as_sharded(share: Tensor, parameter: Tensor) -> Tensor:
    """A DTensor of what belongs to the shares of a parameter: to each row, or to equally many entries of each process."""
    if not is_sharded(parameter):
        return share
    by_rows = len(share) == len(local(parameter))
    rows = len(parameter) if by_rows else len(share) * parameter.device_mesh.size()
    shape = torch.Size((rows, *share.shape[1:]))
    stride = torch.empty(shape, device="meta").stride()
    mesh, placements = parameter.device_mesh, parameter.placements
    return type(parameter).from_local(share, mesh, placements, run_check=False, shape=shape, stride=stride)


def _rebuilt(optimizer: Any, state: Any, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    fresh = optimizer.fresh_state(parameter, group)
    if not isinstance(state, dict) or state.keys() != fresh.keys():
        raise UnfitState(f"the optimizer's state of a parameter must hold {', '.join(fresh)}, and nothing else")
    found = {}
    for name, value in state.items():
        new = fresh[name]
        if not isinstance(value, dict):
            if isinstance(value, Tensor) and is_sharded(parameter) and value.shape == parameter.shape:
                value = _share_of(value, parameter)
            found[name] = _fitting(name, value, new, any_float=True)
        elif is_traceable_wrapper_subclass(new) or not is_sharded(parameter):
            found[name] = _assembled(name, value, new, parameter)
        else:  # shares are not whole blocks: plain numbers with the same values
            like = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
            whole = {key: x.full_tensor() if is_sharded(x) else x for key, x in value.items()}
            like.copy_(_assembled(name, whole, optimizer.fresh_state(like, group)[name], like))
            found[name] = _share_of(like, parameter)
    return found


def _assembled(name: str, value: dict[str, Any], new: Tensor, parameter: Tensor) -> Tensor:
    """The tensor like ``new`` of a dictionary; of a sharded parameter this process's share."""
    if not is_traceable_wrapper_subclass(new) or value.get(CLASS) != type(new).__name__:
        raise UnfitState(f"the optimizer's state has {name} as {value.get(CLASS)}, and this optimizer as {type(new).__name__}")
    parts = {}
    for key, like in _stored(new).items():
        part = value.get(key)
        if isinstance(part, Tensor) and is_sharded(parameter) and key not in UNDIVIDED and part.ndim:
            part = _share_of(part, parameter)
        part = _fitting(f"{name}.{key}", part, like)
        own = getattr(new, key)
        parts[key] = part.to(own.device).contiguous().view(own.dtype).view(own.shape)
    return type(new).__tensor_unflatten__(parts, new.__tensor_flatten__()[1], new.shape, new.stride())


def _fitting(name: str, part: Any, like: Tensor, any_float: bool = False) -> Tensor:
    """Returns the part, if its shape and dtype are those of ``like``.

    Args:
        any_float: whether floats of another dtype fit, too.
    """
    fits = isinstance(part, Tensor) and part.shape == like.shape and part.layout == like.layout
    if not fits or (part.dtype != like.dtype and not (any_float and part.is_floating_point())):
        actual = "missing" if part is None else described(part) if isinstance(part, Tensor) else "no tensor"
        raise UnfitState(f"the optimizer's state does not fit: {name} is {actual}, not {like.dtype} {tuple(like.shape)}")
    return part


def described(value: Any) -> str:
    """A value in a message: dtype and shape of a tensor."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else f"{value!r:.60}"


def _share_of(tensor: Tensor, parameter: DTensor) -> Tensor:
    """This process's share of a whole or sharded tensor."""
    if not is_sharded(tensor):
        from torch.distributed.tensor import distribute_tensor  # imported here, because one process does without

        tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return tensor.to_local()
