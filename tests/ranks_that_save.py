"""One of two or four gloo processes: saves sharded models and optimizers, whole and in parts, and loads them sharded otherwise.

    python ranks_that_save.py RANK STORE RESULTS

Not a test by itself: test_checkpoints_distributed.py starts it.
"""

import copy
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them
from safetensors import safe_open
from small_models import IMAGE, TEXT
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

from holotrain.checkpoints.distributed import CheckpointFiles, ShardedCheckpoints
from holotrain.models.checkpoint_files import numbered, read
from holotrain.models.gpt import RevGPT
from holotrain.models.vit import RevViT
from holotrain.parallel.strategies import shard, tensor_parallel
from holotrain.tasks.optimizer_functions import adamw, muon

MODELS = {"vit": lambda: RevViT(**IMAGE), "gpt": lambda: RevGPT(**TEXT | {"heads": 4, "dim": 24})}
OPTIMIZERS = {"vit": adamw, "gpt": muon}
SHAPES = {2: [(2, 1), (1, 2)], 4: [(2, 2), (4, 1)]}
"""Data parallel and tensor parallel processes, by the number of processes."""
SKIPPED = "blocks.blocks.0.f.norm.bias"
"""A parameter of which the optimizer has no state."""


class Trained(pl.LightningModule):
    """A model with an optimizer, sharded over data parallel and tensor parallel processes; 1, 1: not at all."""

    def __init__(self, kind: str, data: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = MODELS[kind]().double()
        if data * layers > 1:
            mesh = init_device_mesh("cpu", (data, layers), mesh_dim_names=("data", "layers"))
            if layers > 1:
                tensor_parallel(self.model, mesh["layers"])
            if data > 1:
                shard(self.model, mesh["data"])
        self.optimizer = OPTIMIZERS[kind](self.model, lr=0.1)
        for group in self.optimizer.param_groups:
            group["foreach"] = False
        self.generator = torch.Generator().manual_seed(1)

    def step(self, count: int, skipped: str | None = None) -> None:
        """Steps with gradients from a seed, independent of how the model is sharded; one parameter may get none."""
        for _ in range(count):
            for name, parameter in self.model.named_parameters():
                grad = torch.randn(parameter.shape, generator=self.generator, dtype=torch.float64)
                parameter.grad = None if name == skipped else part_like(grad, parameter)
            self.optimizer.step()
        self.optimizer.zero_grad()


def part_like(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)


def strategy(module: Trained, sharded: bool) -> ShardedCheckpoints:
    """Lightning's strategy for a module that is sharded already."""
    found = ShardedCheckpoints.__new__(ShardedCheckpoints)
    found._lightning_module, found.optimizers, found._checkpoint_io = module, [module.optimizer], CheckpointFiles()
    found.sharded_checkpoints, found.accelerator = sharded, SimpleNamespace()
    return found


def save(module: Trained, path: Path, sharded: bool) -> dict:
    by = strategy(module, sharded)
    weights, states = by.lightning_module_state_dict(), [by.optimizer_state(module.optimizer)]
    checkpoint = {"state_dict": weights, "optimizer_states": states, "step": torch.tensor(2)}
    if sharded:
        by.save_checkpoint(checkpoint, path)
    elif dist.get_rank() == 0:
        CheckpointFiles().save_checkpoint(checkpoint, path)
    dist.barrier()
    return checkpoint


def load(module: Trained, path: Path) -> None:
    by = strategy(module, False)
    checkpoint = by.load_checkpoint(path)
    by.load_model_state_dict(checkpoint)
    by.load_optimizer_state_dict(checkpoint)


def assert_same(found: dict, expected: dict) -> None:
    """Up to rounding: with 53 bits, or by the 8 bits with which Muon orthogonalises."""
    found, expected = (dict(tree_leaves_with_path(each)) for each in (found, expected))
    assert found.keys() == expected.keys()
    for keys, value in expected.items():
        one, other = (x.full_tensor() if isinstance(x, DTensor) else x for x in (found[keys], value))
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        else:
            assert one == other, keys


def without_foreach(state: dict) -> dict:
    """Of an optimizer; the strategies set it."""
    state = copy.deepcopy(state)
    for part in state.get("parts", [state]):
        for group in part["param_groups"]:
            group.pop("foreach", None)
    return state


def state(module: Trained) -> dict:
    return {"weights": module.state_dict(), "optimizer": without_foreach(module.optimizer.state_dict())}


def saved_and_loaded(kind: str, folder: Path) -> int:
    """Saves under each sharding, loads each checkpoint in the folder under each, and does two more steps."""
    alone = Trained(kind, 1, 1)
    alone.step(2, skipped=SKIPPED)
    saved, position = copy.deepcopy(state(alone)), alone.generator.get_state()
    alone.step(2)
    for data, layers in SHAPES[dist.get_world_size()]:
        module = Trained(kind, data, layers)
        module.step(2, skipped=SKIPPED)
        for sharded in (False, True):
            path = folder / f"{kind}-{data}-{layers}-{'parts' if sharded else 'whole'}.ckpt"
            checkpoint = save(module, path, sharded)
            if sharded:
                assert_written_once(path, checkpoint)
    paths = sorted(folder.glob(f"{kind}-*.ckpt"))
    for path in paths:
        kept = read(path)
        assert_same({"weights": kept["state_dict"], "optimizer": without_foreach(kept["optimizer_states"][0])}, saved)
        for there in [*SHAPES[dist.get_world_size()], (1, 1)]:
            other = Trained(kind, *there)
            other.step(1)  # another state
            load(other, path)
            assert_same(state(other), saved)
            other.generator.set_state(position)
            other.step(2)
            assert_same(state(other), state(alone))
    return len(paths)


def assert_written_once(path: Path, checkpoint: dict) -> None:
    """Each number is written once, and every process writes its part."""
    (folder,) = numbered(path).values()
    files = [safe_open(file, "pt") for file in sorted(folder.iterdir())]
    counts = [sum(file.get_tensor(name).numel() for name in file.keys()) for file in files]  # noqa: SIM118
    leaves = tree_leaves((checkpoint["state_dict"], checkpoint["optimizer_states"]))
    expected = sum(x.numel() for x in leaves if isinstance(x, torch.Tensor) and x.ndim)
    assert sum(counts) == expected and len(counts) == dist.get_world_size() and min(counts) > expected / 8


def find(rank: int) -> dict:
    return {kind: saved_and_loaded(kind, Path(sys.argv[3]).parents[1]) for kind in MODELS}  # of several numbers of processes


if __name__ == "__main__":
    find_as_one_of_them(find)
