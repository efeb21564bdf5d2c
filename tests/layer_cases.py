"""What processes compare: tensors of all ranks, and the order of products, collectives and waits."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from holotrain.overlap.groups import COLLECTIVES, Collectives, Columns, Work

INPUTS = 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def share(tensor: Tensor, dim: int) -> Tensor:
    """This rank's, split like torch.chunk and DTensor's Shard."""
    chunks, rank = tensor.chunk(dist.get_world_size(), dim), dist.get_rank()
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The largest difference on any rank; infinite if shapes differ or there is NaN."""
    pairs = [(whole(a), whole(b)) for a, b in pairs]
    error = torch.tensor(float("inf"), dtype=torch.float64)
    if all(a.shape == b.shape for a, b in pairs):
        error = torch.cat([torch.zeros(1), *((a - b).abs().flatten() for a, b in pairs)]).max().nan_to_num(nan=float("inf"))
    dist.all_reduce(error, dist.ReduceOp.MAX)
    return error.item()


def uneven(job, collectives) -> list[int]:
    return [job.rows] if job.rows < 3 else [1, job.rows - 2, 1]


def uneven_columns(job, collectives) -> list[int] | Columns:
    return Columns([1, job.outputs - 2, 1]) if job.summed and job.outputs > 2 else uneven(job, collectives)


KINDS = dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), "product")
KINDS |= {"allreduce_": "all-reduce", "_reduce_scatter_base_": "reduce-scatter"}
KINDS |= dict.fromkeys(("_allgather_base_", "allgather_"), "all-gather")
KINDS |= dict.fromkeys(("alltoall_", "alltoall_base_"), "all-to-all")
KINDS |= dict.fromkeys(("clone", "copy_", "cat"), "copy") | {"wait": "wait"}


class Log(TorchDispatchMode):
    """Names of operations in launch order; ``order``: products, collectives, copies and waits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))

    @property
    def order(self) -> list[str]:
        return [KINDS[name] for name in self.names if name in KINDS]


class Noted:
    """A collective that notes in a log when it is waited for."""

    def __init__(self, work: Work, log: Log) -> None:
        self.work, self.log = work, log

    def wait(self) -> None:
        names = [*self.log.names, "wait"]
        self.work.wait()
        self.log.names = names  # without what gloo copies here


def collectives_noted_in(log: Log) -> Collectives:
    """Those of all processes."""

    def noted(launch: Callable[..., Work]) -> Callable[..., Noted]:
        return lambda *given: Noted(launch(*given), log)

    link = Collectives(dist.group.WORLD)
    for name in COLLECTIVES:
        setattr(link, name, noted(getattr(link, name)))
    return link


def order_of(run: Callable[..., Tensor], **options) -> dict[str, list[str]]:
    """Of the forward, of the backward, and of the backward where a single gradient is needed."""
    tensors = {"x": random(9, INPUTS), "weight": random(9, INPUTS), "bias": random(9)}
    orders = {}
    for needed in ("x", "weight", "bias", "backward"):
        given = {name: leaf(tensor) if needed in (name, "backward") else tensor for name, tensor in tensors.items()}
        log = Log()
        with log:
            y = run(**given, group=collectives_noted_in(log), **options)
        forward, log.names = log.order, []
        with log:
            y.backward(torch.ones_like(y))
        assert all(tensor.grad is None or tensor.grad.shape == tensor.shape for tensor in given.values())
        orders |= {"forward": forward, needed: log.order}
    return orders
