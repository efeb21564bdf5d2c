"""Optimizers that need little memory under DDP, and Adafactor under FSDP2, with their checkpoints, against one process.

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

SHAPES = {"rows": (64, 256), "more rows on one": (33, 256), "vector": (8192,), "odd": (65, 66), "small": (3, 5)}

OPTIMIZERS = {
    **{f"adamw_{bits}": partial(adamw_low_bit, bits=bits) for bits in ("8bit", "4bit", "fp8")},
    "adafactor": adafactor,
}


class Weights(Trained):
    """Parameters of many shapes, sharded over two processes or whole."""

    def __init__(self, data: int) -> None:
        super(Trained, self).__init__()
        generator = torch.Generator().manual_seed(0)
        self.model = nn.Module()
        for name, shape in SHAPES.items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.model.register_parameter(name, nn.Parameter(weight))
        if data > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (data,), mesh_dim_names=("data",)))
        self.optimizer = adafactor(self.model, lr=0.1)
        self.generator = torch.Generator().manual_seed(1)


def values(module: Weights) -> dict[str, torch.Tensor]:
    """Weights and states as whole tensors."""
    found = {}
    for name, parameter in module.model.named_parameters():
        for key, x in ({"": parameter.detach()} | module.optimizer.state[parameter]).items():
            found[f"{name} {key}"] = (x.full_tensor() if isinstance(x, DTensor) else x).clone()
    return found


def compare_sharded(folder: Path) -> int:
    """Adafactor in one process and in two that share the parameters, then and after the checkpoints of each."""
    early, late = {}, {}
    for count in (1, 2):
        module = Weights(count)
        module.step(2)
        early[count], position = values(module), module.generator.get_state()
        for way in ("whole", "parts")[:count]:
            save(module, folder / f"{count}-{way}.ckpt", way == "parts")
        module.step(2)
        late[count] = values(module)
    torch.testing.assert_close(early[2], early[1], rtol=1e-9, atol=1e-12)
    paths = sorted(folder.glob("*.ckpt"))
    for path in paths:
        saved_by = int(path.name[0])
        assert {*map(type, tree_leaves(read(path)))} <= {torch.Tensor, int, float, str, bool, type(None)}  # no class of its own
        for count in (1, 2):
            other = Weights(count)
            other.step(1)  # another state
            load(other, path)
            torch.testing.assert_close(values(other), early[saved_by], rtol=0, atol=0)
            other.generator.set_state(position)
            other.step(2)
            exact = count == saved_by
            torch.testing.assert_close(values(other), late[saved_by], rtol=0 if exact else 1e-9, atol=0 if exact else 1e-12)
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


def find(rank: int) -> int:
    for kind in OPTIMIZERS:
        compare_ddp(kind)
    return compare_sharded(Path(sys.argv[3]).parent)


@pytest.mark.slow
def test_two_processes_and_each_checkpoint_continue_as_one_process_does(tmp_path):
    """To the bit under DDP; sharded, where sums are rounded, within 1e-9."""
    assert found_by_processes(Path(__file__), tmp_path) == 3


if __name__ == "__main__":
    find_as_one_of_them(find)
