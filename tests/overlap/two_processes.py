"""One of two gloo processes: overlapped linear layers compared with plain layers on the full data, in fp64.

    python two_processes.py RANK STORE RESULTS

Not a test by itself: test_overlap_distributed.py starts it twice and reads what rank 0 wrote.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them
from styled_cases import checkpointed, devices, mixed, reversible, sharded, styled
from styled_cases import tuned as tuned_models
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from holotrain.overlap import Columns, Tuner, column_parallel_linear, row_parallel_linear

INPUTS, OUTPUTS = 6, 10
RUNS = {"row": row_parallel_linear, "column": column_parallel_linear}
SHAPES = {"even": (8, INPUTS), "odd": (7, INPUTS), "one row": (1, INPUTS), "batches": (3, 5, INPUTS), "four": (2, 3, 2, INPUTS)}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def share(tensor: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """Splits like torch.chunk and DTensor's Shard."""
    chunks = tensor.chunk(dist.get_world_size(), dim)
    return chunks[rank] if rank < len(chunks) else tensor.narrow(dim, 0, 0)


def worst(pairs) -> float:
    """The largest difference; infinite if shapes differ."""
    return max(float("inf") if a.shape != b.shape else (a - b).abs().max().item() if a.numel() else 0.0 for a, b in pairs)


def everywhere(error: float) -> float:
    """The maximum over all ranks."""
    errors = torch.tensor([error], dtype=torch.float64)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    return errors.item()


def uneven(job, collectives) -> list[int]:
    return [job.rows] if job.rows < 3 else [1, job.rows - 2, 1]


def uneven_columns(job, collectives) -> list[int] | Columns:
    return Columns([1, job.outputs - 2, 1]) if job.summed and job.outputs > 2 else uneven(job, collectives)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def linear_error(kind: str, shape: tuple[int, ...], groups, bias: bool, sequence_dim: int | None, rank: int) -> float:
    x, weight, b = leaf(random(*shape)), leaf(random(OUTPUTS, INPUTS, seed=1)), leaf(random(OUTPUTS, seed=2))
    y = linear(x, weight, b if bias else None)
    grad = random(*y.shape, seed=3)
    y.backward(grad)
    row = kind == "row"
    x_dim = x.dim() - 1 if row else sequence_dim
    y_dim = sequence_dim if row else x.dim() - 1
    ours_x = leaf(x.detach() if x_dim is None else share(x.detach(), x_dim, rank))
    ours_w = leaf(share(weight.detach(), 1 if row else 0, rank))
    ours_b = leaf(b.detach() if row else share(b.detach(), 0, rank))
    keywords = {"group": dist.group.WORLD, "groups": groups, "sequence_dim": sequence_dim}
    if not row and sequence_dim is not None:
        keywords["length"] = shape[sequence_dim]
    ours = RUNS[kind](ours_x, ours_w, ours_b if bias else None, **keywords)
    cut = (lambda t: t) if y_dim is None else (lambda t: share(t, y_dim, rank))
    ours.backward(cut(grad))
    pairs = [(ours, cut(y)), (ours_x.grad, x.grad if x_dim is None else share(x.grad, x_dim, rank))]
    pairs.append((ours_w.grad, share(weight.grad, 1 if row else 0, rank)))
    if bias:
        pairs.append((ours_b.grad, b.grad if row else share(b.grad, 0, rank)))
    return everywhere(worst(pairs))


def linear_errors(rank: int) -> dict[str, float]:
    errors = {}
    for kind in RUNS:
        for name, shape in SHAPES.items():
            for dim in (None, *range(len(shape) - 1)):
                for groups in (*range(1, 9), uneven, Columns(3), uneven_columns):
                    error = max(linear_error(kind, shape, groups, bias, dim, rank) for bias in (False, True))
                    errors[f"{kind}, {name}, sequence {dim}, groups {getattr(groups, '__name__', groups)}"] = error
    return errors


def tuned(rank: int) -> dict[str, object]:
    """Each rank has its own folder and rank 1 loses its content: the choice of rank 0 is used."""
    chosen = []
    with TemporaryDirectory() as folder:
        for _ in range(2):
            tuner = Tuner(Path(folder))
            x, weight = random(12, INPUTS), random(OUTPUTS, INPUTS)
            y = row_parallel_linear(x, weight, group=dist.group.WORLD, groups=tuner)
            error = worst([(y, 2 * linear(x, weight))])
            chosen.append([kept.sizes for kept in tuner.tuned.values()])
            files = len(os.listdir(folder))
    everyone: list = [None, None]
    dist.all_gather_object(everyone, [chosen, files])
    return {"error": everywhere(error), "chosen": [choice for choice, _ in everyone], "files": [files for _, files in everyone]}


class Log(TorchDispatchMode):
    """Names of products and collectives in launch order."""

    NAMES = {"mm": "product", "addmm": "product", "bmm": "product", "baddbmm": "product"}
    NAMES |= {"allreduce_": "all-reduce", "_reduce_scatter_base_": "reduce-scatter"}
    NAMES |= {"_allgather_base_": "all-gather", "allgather_": "all-gather"}
    NAMES |= {"alltoall_": "all-to-all", "alltoall_base_": "all-to-all"}

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name.split("::")[1]
        if name in self.NAMES:
            self.order.append(self.NAMES[name])
        return function(*args, **(kwargs or {}))


def order_of(run: Callable[[], torch.Tensor]) -> dict[str, list[str]]:
    with Log() as forward:
        y = run()
    with Log() as backward:
        y.backward(torch.ones_like(y))
    return {"forward": forward.order, "backward": backward.order}


def orders(groups) -> dict[str, dict]:
    found = {}
    for kind, run in RUNS.items():
        for dim in (None, 0):
            x, weight = (leaf(random(n, INPUTS)) for n in (9, OUTPUTS))
            how = {"group": dist.group.WORLD, "groups": groups, "sequence_dim": dim}
            found[f"{kind}, sequence {dim}"] = order_of(partial(run, x, weight, **how))
    return found


def in_part(rank: int) -> dict[str, bool]:
    """Only required gradients are computed, without communication for an input that needs no gradient."""
    found = {}
    for kind, run in RUNS.items():
        for needed in ("x", "weight", "bias"):
            for sequence_dim in (None, 0):
                tensors = {"x": random(4, INPUTS), "weight": random(OUTPUTS, INPUTS), "bias": random(OUTPUTS)}
                tensors[needed].requires_grad_()
                y = run(**tensors, group=dist.group.WORLD, sequence_dim=sequence_dim)
                with Log() as log:
                    y.backward(torch.ones_like(y))
                silent = kind == "column" and needed != "x" and not (needed == "weight" and sequence_dim == 0)
                silent = silent or (kind == "row" and sequence_dim is None)
                right = tensors[needed].grad.shape == tensors[needed].shape
                quiet = not any("-" in name for name in log.order)
                found[f"{kind}, {needed}, sequence {sequence_dim}"] = right and quiet == silent
    return found


def autocast(kind: str) -> dict[str, object]:
    run = RUNS[kind]
    x, weight, bias = (leaf(random(*shape).float()) for shape in ((7, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)))
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x, weight, bias, group=dist.group.WORLD)
        plain = linear(x, weight, bias)
        double = run(x.double(), weight.double(), group=dist.group.WORLD)
    y.sum().backward()
    whole = 2 * linear(x, weight) + bias if kind == "row" else plain
    dtypes = [str(tensor.dtype) for tensor in (y, x.grad, weight.grad, bias.grad, double)]
    return {"dtypes": dtypes, "error": ((y - whole).abs().max() / whole.abs().max()).item()}


def find(rank: int) -> dict:
    mesh = devices()
    return {
        "linear": linear_errors(rank),
        "orders": orders(3),
        "orders by columns": orders(Columns(3)),
        "tuned": tuned(rank),
        "tuned models": tuned_models(mesh, everywhere),
        "in part": in_part(rank),
        "autocast": {kind: autocast(kind) for kind in RUNS},
        "styles": styled(mesh, everywhere),
        "mixed": mixed(mesh, everywhere),
        "checkpoint": everywhere(checkpointed(mesh)),
        "reversible": {backward: reversible(mesh, backward, everywhere) for backward in ("reversible", "pareprop")},
        "fsdp": sharded(everywhere),
    }


if __name__ == "__main__":
    find_as_one_of_them(find)
