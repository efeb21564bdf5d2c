"""Errors of small models with the overlapped styles against torch's styles or one process, in two gloo processes."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from layer_cases import INPUTS, leaf, random, share, worst
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from holotrain.overlap.styles import OverlappedColwise, OverlappedRowwise
from holotrain.overlap.tuner import Tuner
from holotrain.reversible import ReversibleBlock, ReversibleSequence

LAYOUTS = {
    "replicated": {},
    "sequence": {"input": Shard(1), "output": Shard(1)},
    "sequence, counted from the end": {"input": Shard(-2), "output": Shard(-2)},
    "gathered input": {"input": Shard(0), "output": Replicate()},
    "features at either end": {"input": Shard(-1), "output": Shard(-1)},
}
PLAIN = ColwiseParallel, RowwiseParallel
OVERLAPPED = OverlappedColwise, OverlappedRowwise


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 10), nn.Tanh(), nn.Linear(10, INPUTS)).double()


def parallel(net: nn.Module, layouts: dict, styles=OVERLAPPED, mesh: DeviceMesh | None = None, **options) -> nn.Module:
    column, row = styles
    plan = {
        "0": column(input_layouts=layouts.get("input"), **options),
        "2": row(output_layouts=layouts.get("output"), use_local_output=layouts.get("local", True), **options),
    }
    return parallelize_module(net, mesh or init_device_mesh("cpu", (2,)), plan)


def squared(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum(output.square().sum() for output in outputs)


def gradients(net: nn.Module, reference: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(p.grad, q.grad) for p, q in zip(net.parameters(), reference.parameters(), strict=True)]


def styled() -> dict[str, float]:
    """Parameters, output and gradients against torch's styles."""
    found = {}
    for name, layouts in LAYOUTS.items():
        for groups in (1, 3):
            ours, torchs = parallel(mlp(), layouts, groups=groups), parallel(mlp(), layouts, PLAIN)
            x = random(4, 6, INPUTS, seed=1)
            x = share(x, layouts["input"].dim) if "input" in layouts else x
            inputs = leaf(x), leaf(x)
            outputs = ours(inputs[0]), torchs(inputs[1])
            for output in outputs:
                (output * random(*output.shape, seed=2)).sum().backward()
            assert all(p.placements == q.placements for p, q in zip(ours.parameters(), torchs.parameters(), strict=True))
            torchs.load_state_dict(ours.state_dict())
            found[f"{name}, groups {groups}"] = worst([outputs, [x.grad for x in inputs], *gradients(ours, torchs)])
    return found


def mixed() -> dict[str, float]:
    """DTensors of odd length as input and output, against one process."""
    found, mesh = {}, init_device_mesh("cpu", (2,))
    for place in (Shard(1), Shard(0), Shard(2), Replicate()):
        reference, x = mlp(), leaf(random(3, 5, INPUTS, seed=1))
        out = reference(x)
        squared([out]).backward()
        net = parallel(mlp(), {"output": place, "local": False})
        distributed = distribute_tensor(x.detach(), mesh, [place]).requires_grad_()
        y = net(distributed)
        squared([y]).backward()
        assert y.placements == (place,)
        found[str(place)] = worst([(y, out), (distributed.grad, x.grad), *gradients(net, reference)])
    copied = copy.deepcopy(net)  # as for an average of weights
    return found | {"copied": worst([(copied(distributed), out)])}


def wrapped() -> dict[str, float]:
    """Within a checkpoint, and under fully_shard over another mesh dimension, which has one rank here."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    reference, x = mlp(), leaf(random(3, 5, INPUTS, seed=1))
    squared([reference(x)]).backward()
    repeated, sharded = parallel(mlp(), {}), parallel(mlp(), {}, mesh=mesh["tp"])
    fully_shard(sharded, mesh=mesh["dp"])
    squared([checkpoint(repeated, x, use_reentrant=False)]).backward()
    squared([sharded(x)]).backward()
    return {"checkpoint": worst(gradients(repeated, reference)), "fsdp": worst(gradients(sharded, reference))}


def stack(backward: str) -> ReversibleSequence:
    return ReversibleSequence([ReversibleBlock(mlp(2 * i), mlp(2 * i + 1)) for i in range(3)], backward)


def reversible() -> dict[str, float]:
    """Three blocks with replicated or sequence-sharded tokens between them, against autograd in one process."""
    found = {}
    reference, x = stack("autograd"), random(3, 6, INPUTS, seed=1)
    squared(reference(x, x.tanh())).backward()
    for backward in ("reversible", "pareprop"):
        for name, mine in (("replicated", x), ("sequence", share(x, 1))):
            net = stack(backward)
            for block in net.blocks:
                for branch in (block.f, block.g):
                    parallel(branch, LAYOUTS[name], groups=3)
            squared(net(leaf(mine), mine.tanh())).backward()
            found[f"{backward}, {name}"] = worst(gradients(net, reference))
    return found


MET = {
    "replicated": {("all_reduce", False), ("all_reduce", True)},
    "sequence": {("all_gather", False), ("reduce_scatter", False), ("reduce_scatter", True)},
}


def tuned() -> dict[str, float]:
    """Groups that are measured during training, also in the backward."""
    found = {}
    reference, x = mlp(), random(4, 6, INPUTS, seed=1)
    squared([reference(x)]).backward()
    for name, mine in (("replicated", x), ("sequence", share(x, 1))):
        with TemporaryDirectory() as folder:
            tuner = Tuner(Path(folder))
            net = parallel(mlp(), LAYOUTS[name], groups=tuner)
            squared([net(leaf(mine))]).backward()
        assert {(job.collective, job.covered) for job, _ in tuner.tuned} == MET[name]
        found[name] = worst(gradients(net, reference))
    return found


STYLED = {"styles": styled, "mixed": mixed, "wrapped": wrapped, "reversible": reversible, "tuned": tuned}
