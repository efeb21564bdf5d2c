"""Optimizers that need little memory under DDP and FSDP2, with their checkpoints, against one process.

As a script, this is one of two gloo processes.
"""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compared import assert_equal
from gloo_pair import find_as_one_of_them, found_by_processes

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from ranks_that_save import Trained, load, save
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from holotrain.models.checkpoint_files import read
from holotrain.tasks.optimizer_functions import adafactor, adamw_low_bit

SHAPES = {
    "rows of whole blocks": (64, 256),
    "blocks across rows": (96, 192),
    "more rows on one": (33, 256),
    "vector": (8192,),
    "broken blocks": (65, 66),
    "small": (3, 5),
    "small shares": (50, 128),
}
OTHERWISE = "small shares"
"""Has few bits in one process alone: half of it is less than what torchao shortens."""


OPTIMIZERS = {
    **{f"adamw_{bits}": partial(adamw_low_bit, bits=bits) for bits in ("8bit", "4bit", "fp8")},
    "adafactor": adafactor,
}


class Weights(Trained):
    """Parameters of many shapes, with their optimizer, sharded over two processes or whole."""

    def __init__(self, kind: str, data: int) -> None:
        super(Trained, self).__init__()
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.model.register_parameter(name, nn.Parameter(weight))
        if data > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (data,), mesh_dim_names=("data",)))
        self.optimizer = OPTIMIZERS[kind](self.model, lr=0.1)
        self.generator = torch.Generator().manual_seed(1)


def values(module: Weights) -> dict[str, torch.Tensor]:
    """Weights and states as whole tensors of numbers: those of few bits as the numbers that they stand for."""
    found = {}
    for name, parameter in module.model.named_parameters():
        held = {"": parameter.detach()} | module.optimizer.state[parameter]
        for key, x in held.items():
            if isinstance(parameter, DTensor) and key.startswith("exp") and not isinstance(x, DTensor):  # of a share
                x = torch.empty(x.shape, dtype=torch.float64).copy_(x)
                shape, stride = parameter.shape, parameter.stride()
                x = DTensor.from_local(x, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)
            x = x.full_tensor() if isinstance(x, DTensor) else x
            found[f"{name} {key}"] = torch.empty(x.shape, dtype=torch.float64).copy_(x)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], exact: bool, but: str = "none") -> None:
    found, expected = ({name: x for name, x in each.items() if not name.startswith(but)} for each in (found, expected))
    torch.testing.assert_close(found, expected, rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)


def compare_processes(kind: str, folder: Path) -> int:
    """One process and two that share the parameters, then and after the checkpoints of each."""
    early, late = {}, {}
    exact, otherwise = "adamw" in kind, OTHERWISE if "adamw" in kind else "none"
    for count in (1, 2):
        module = Weights(kind, count)
        module.step(2)
        early[count], position = values(module), module.generator.get_state()
        for way in ("whole", "parts")[:count]:
            save(module, folder / f"{kind}-{count}-{way}.ckpt", way == "parts")
        module.step(2)
        late[count] = values(module)
    assert_same(early[2], early[1], exact, otherwise)
    paths = sorted(folder.glob(f"{kind}-*.ckpt"))
    for path in paths:
        saved_by = int(path.name.split("-")[1])
        assert {*map(type, tree_leaves(read(path)))} <= {torch.Tensor, int, float, str, bool, type(None)}  # no class of its own
        for count in (1, 2):
            other = Weights(kind, count)
            other.step(1)  # another state
            load(other, path)
            assert_same(values(other), early[saved_by], True)
            other.generator.set_state(position)
            other.step(2)
            same = count == saved_by
            assert_same(values(other), late[saved_by], exact or same, "none" if same else otherwise)
    return len(paths)


def compare_ddp(kind: str) -> None:
    """DDP and one process, when both processes have the same batch, so that no sum is rounded."""
    found = []
    for wrap in (DistributedDataParallel, nn.Sequential):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).double()
        net, optimizer = wrap(model), OPTIMIZERS[kind](model, lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(8, 64, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
        found.append(model.state_dict())
    assert_equal(*found)


def find(rank: int) -> dict:
    for kind in OPTIMIZERS:
        compare_ddp(kind)
    return {kind: compare_processes(kind, Path(sys.argv[3]).parent) for kind in OPTIMIZERS}


@pytest.mark.slow
def test_two_processes_and_each_checkpoint_continue_as_one_process_does(tmp_path):
    """To the bit; Adafactor, whose sums are rounded, within 1e-9."""
    assert found_by_processes(Path(__file__), tmp_path) == dict.fromkeys(OPTIMIZERS, 3)


if __name__ == "__main__":
    find_as_one_of_them(find)
