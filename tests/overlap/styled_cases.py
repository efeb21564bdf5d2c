"""Small models with the overlapped styles, compared with torch's styles or one process. Run by two_processes.py."""

import copy
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from holotrain.overlap import OverlappedColwise, OverlappedRowwise, Tuner
from holotrain.reversible import ReversibleBlock, ReversibleSequence

WIDTH, HIDDEN = 6, 10


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def devices() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def mlp(seed: int = 0) -> MLP:
    torch.manual_seed(seed)
    return MLP().double()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


LAYOUTS = {
    "replicated": {},
    "sequence": {"input": Shard(1), "output": Shard(1)},
    "sequence, counted from the end": {"input": Shard(-2), "output": Shard(-2)},
    "gathered input": {"input": Shard(0), "output": Replicate()},
    "features at either end": {"input": Shard(-1), "output": Shard(-1)},
}
PLAIN = {"up": ColwiseParallel, "down": RowwiseParallel}
OVERLAPPED = {"up": OverlappedColwise, "down": OverlappedRowwise}


def parallel(net: nn.Module, mesh: DeviceMesh, styles: dict, layouts: dict, prefix: str = "", **options) -> nn.Module:
    local = layouts.get("local", True)
    plan = {
        f"{prefix}up": styles["up"](input_layouts=layouts.get("input"), **options),
        f"{prefix}down": styles["down"](output_layouts=layouts.get("output"), use_local_output=local, **options),
    }
    return parallelize_module(net, mesh, plan)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def errors_of(net: nn.Module, reference: nn.Module) -> float:
    pairs = zip(net.named_parameters(), reference.named_parameters(), strict=True)
    return max((whole(p.grad) - whole(q.grad)).abs().max().item() for (_, p), (_, q) in pairs)


def styled(mesh: DeviceMesh, everywhere) -> dict[str, dict]:
    """Compares parameters, output and gradients with torch's styles, for plain tensors and DTensors of odd length."""
    found = {}
    for name, layouts in LAYOUTS.items():
        for groups in (1, 3):
            ours = parallel(mlp(), mesh, OVERLAPPED, layouts, groups=groups)
            torchs = parallel(mlp(), mesh, PLAIN, layouts)
            x = tokens(4, 6)
            if "input" in layouts:
                x = x.chunk(2, layouts["input"].dim)[mesh.get_rank()]
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            outputs = [net(x) for net, x in zip((ours, torchs), inputs, strict=True)]
            weights = torch.randn(outputs[0].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
            for output in outputs:
                (output * weights).sum().backward()
            error = max((outputs[0] - outputs[1]).abs().max().item(), (inputs[0].grad - inputs[1].grad).abs().max().item())
            same = all(p.placements == q.placements for p, q in zip(ours.parameters(), torchs.parameters(), strict=True))
            torchs.load_state_dict(ours.state_dict())
            found[f"{name}, groups {groups}"] = {
                "error": everywhere(max(error, errors_of(ours, torchs))),
                "placements": same,
            }
    return found


def mixed(mesh: DeviceMesh, everywhere) -> dict[str, float]:
    """DTensors of odd length as input and output, compared with one process."""
    found = {}
    for dim, place in ((1, Shard(1)), (0, Shard(0)), (2, Shard(2)), (None, Replicate())):
        reference, x = mlp(), tokens(3, 5).requires_grad_()
        out = reference(x)
        (out * out).sum().backward()
        net = parallel(mlp(), mesh, OVERLAPPED, {"output": place, "local": False})
        theirs = x.detach().clone().requires_grad_()
        distributed = torch.distributed.tensor.distribute_tensor(theirs.detach(), mesh, [place]).requires_grad_()
        y = net(distributed)
        (y * y).sum().backward()
        error = (whole(y) - out).abs().max().item()
        error = max(error, (whole(distributed.grad) - x.grad).abs().max().item(), errors_of(net, reference))
        found[f"along {dim}"] = everywhere(error) if y.placements == (place,) else float("inf")
    copied = copy.deepcopy(net)  # as for an average of weights
    found["copied"] = everywhere((whole(copied(distributed)) - out).abs().max().item())
    return found


def checkpointed(mesh: DeviceMesh) -> float:
    reference, x = mlp(), tokens(3, 5)
    reference(x).square().sum().backward()
    net = parallel(mlp(), mesh, OVERLAPPED, {})
    checkpoint(net, x.requires_grad_(), use_reentrant=False).square().sum().backward()
    return errors_of(net, reference)


def stack(backward: str) -> ReversibleSequence:
    return ReversibleSequence([ReversibleBlock(mlp(2 * i), mlp(2 * i + 1)) for i in range(3)], backward)


def reversible(mesh: DeviceMesh, backward: str, everywhere) -> dict[str, float]:
    """Three blocks with replicated or sequence-sharded tokens between them, compared with autograd in one process."""
    found = {}
    reference, x = stack("autograd"), tokens(3, 6)
    sum((y * y).sum() for y in reference(x, x.tanh())).backward()
    for name in ("replicated", "sequence"):
        net, mine = stack(backward), x
        for block in net.blocks:
            for branch in (block.f, block.g):
                parallel(branch, mesh, OVERLAPPED, LAYOUTS[name], groups=3)
        if name == "sequence":
            mine = x.chunk(2, 1)[mesh.get_rank()]
        sum((y * y).sum() for y in net(mine.clone().requires_grad_(), mine.tanh())).backward()
        found[name] = everywhere(errors_of(net, reference))
    return found


def sharded(everywhere) -> float:
    """With fully_shard over the other mesh dimension, which has one rank here."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    reference, x = mlp(), tokens(3, 5)
    reference(x).square().sum().backward()
    net = parallel(mlp(), mesh["tp"], OVERLAPPED, {})
    fully_shard(net, mesh=mesh["dp"])
    net(x).square().sum().backward()
    return everywhere(errors_of(net, reference))


def tuned(mesh: DeviceMesh, everywhere) -> dict[str, float]:
    """Groups that are measured during training, also in the backward."""
    found = {}
    reference, x = mlp(), tokens(4, 6)
    reference(x).square().sum().backward()
    for name in ("replicated", "sequence"):
        mine = x.chunk(2, 1)[mesh.get_rank()] if name == "sequence" else x
        with TemporaryDirectory() as folder:
            tuner = Tuner(Path(folder))
            net = parallel(mlp(), mesh, OVERLAPPED, LAYOUTS[name], groups=tuner)
            net(mine.clone().requires_grad_()).square().sum().backward()
        met = {(job.collective, job.covered) for job, _ in tuner.tuned}
        found[name] = everywhere(errors_of(net, reference)) if met == MET[name] else float("inf")
    return found


MET = {
    "replicated": {("all_reduce", False), ("all_reduce", True)},
    "sequence": {("all_gather", False), ("reduce_scatter", False), ("reduce_scatter", True)},
}
