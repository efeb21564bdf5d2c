"""Checkpoints of several processes: what they write and read (ranks_that_save.py), and what becomes of broken ones."""

from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from compared import assert_equal
from gloo_pair import found_by_processes

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holotrain.checkpoints import distributed as checkpoints
from holotrain.checkpoints.distributed import CheckpointFiles, save_in_parts
from holotrain.models.checkpoint_files import is_folder, read


@pytest.mark.long
def test_every_checkpoint_continues_under_each_strategy_on_each_number_of_processes(tmp_path):
    """Weights, optimizer states and two more steps, of AdamW and Muon, against one process, within 1e-9."""
    for count, checkpoints_of_each in ((4, 4), (2, 8)):  # two processes also load what the four have saved
        (tmp_path / f"{count}").mkdir()
        found = found_by_processes(Path(__file__).parents[1] / "ranks_that_save.py", tmp_path / f"{count}", count)
        assert found == {"gpt": checkpoints_of_each, "vit": checkpoints_of_each}


@pytest.fixture
def alone(tmp_path):
    """This process as the only one of a group."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    dist.destroy_process_group()


def state(mesh, value: float) -> dict:
    weight = torch.full((3, 4), value)
    return {"state_dict": {"weight": distribute_tensor(weight, mesh, [Shard(0)]), "count": torch.tensor(value)}, "step": value}


def value_of(path: Path) -> float:
    """The value that ``state`` was made of, as Lightning reads it."""
    kept = CheckpointFiles().load_checkpoint(path)
    assert kept.keys() == {"state_dict", "step"}
    torch.testing.assert_close(kept["state_dict"]["weight"], torch.full((3, 4), kept["step"]), rtol=0, atol=0)
    assert kept["state_dict"]["count"] == kept["step"]
    return kept["step"]


@contextmanager
def dying(*places, at=KeyboardInterrupt):
    """Inside, a save is killed where it calls one of these functions of modules and classes, or ``at`` raises."""
    with ExitStack() as stack:
        for module, name in places:
            stack.enter_context(patch.object(module, name, side_effect=at))
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("module", [checkpoints.dcp, checkpoints.torch])
def test_a_save_that_dies_leaves_the_last_one_readable(alone, tmp_path, module):
    path, save = tmp_path / "last.ckpt", module.save

    def die(*arguments, **options):
        save(*arguments, **options)
        raise KeyboardInterrupt

    with dying((module, "save"), at=die):
        save_in_parts(state(alone, 1.0), path)
    assert not path.exists()
    save_in_parts(state(alone, 2.0), path)
    assert value_of(path) == 2
    with dying((module, "save"), at=die):
        save_in_parts(state(alone, 3.0), path)
    assert value_of(path) == 2 and len(list(path.glob("tensors-*"))) == 2
    save_in_parts(state(alone, 4.0), path)
    assert value_of(path) == 4
    assert sorted(entry.name.split("-")[0] for entry in path.iterdir()) == ["checkpoint.pt", "tensors"]
    assert [entry.name for entry in tmp_path.glob("*.ckpt*")] == ["last.ckpt"]


def test_whole_and_sharded_ones_take_each_others_place(alone, tmp_path):
    path, files = tmp_path / "last.ckpt", CheckpointFiles()
    whole = {"state_dict": {"weight": torch.full((3, 4), 1.0), "count": torch.tensor(1.0)}, "step": 1.0}
    files.save_checkpoint(whole, path)
    assert path.is_file() and value_of(path) == 1
    save_in_parts(state(alone, 2.0), path)
    assert is_folder(path) and value_of(path) == 2
    files.save_checkpoint(whole, path)
    assert path.is_file() and value_of(path) == 1
    assert [entry.name for entry in tmp_path.glob("*last*")] == ["last.ckpt"]
    files.remove_checkpoint(path)
    assert not path.exists()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_each_kind_of_value_comes_back(alone, tmp_path, dtype):
    """Tensors of any kind and shape, also if they share memory, in the files of tensors; scalars and plain values beside."""
    matrix = torch.arange(12).view(3, 4).to(dtype)
    weights = {"matrix": matrix, "none": torch.empty(0, 4, dtype=dtype)}
    sharded = {name: distribute_tensor(x, alone, [Shard(0)]) for name, x in weights.items()}
    optimizer = {"state": {0: {"step": torch.tensor(3).to(dtype), "plain": matrix}}, "param_groups": [{"betas": (0.9, 1)}]}
    rest = {"loops": {"epoch": 3, "random": [torch.get_rng_state()], "name": None}}
    checkpoint = {"state_dict": sharded | {"tied": sharded["matrix"]}, "optimizer_states": [optimizer]} | rest
    save_in_parts(checkpoint, tmp_path / "x.ckpt")
    assert_equal(read(tmp_path / "x.ckpt"), checkpoint | {"state_dict": weights | {"tied": matrix}})
