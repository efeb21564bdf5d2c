"""Checkpoints in shards: what several gloo processes write (ranks_that_save.py), and what becomes of broken ones."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from compared import assert_equal
from gloo_pair import found_by_processes

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from holotrain.errors import UserError
from holotrain.parallel import checkpoints
from holotrain.parallel.checkpoints import CheckpointFiles, save_in_shards
from holotrain.ranks.shards import CHECKPOINT, OFFSETS, SHARDS, is_folder, load, placeholder, read_all, recover


@pytest.fixture(scope="module", params=[2, 4])
def found(request, tmp_path_factory) -> dict:
    script = Path(__file__).with_name("ranks_that_save.py")
    return found_by_processes(script, tmp_path_factory.mktemp("shards"), request.param)


def test_what_is_read_is_what_was_shared_out(found):
    """Bit by bit, for weights and AdamW's state; each number is written once, and every process writes."""
    for name, of in found.items():
        assert of["unequal"] == [] and of["keys"] > 80, (name, of["unequal"])
        assert sum(of["written"]) == of["numbers"] > 0, name
        assert len(of["written"]) == (4 if "fsdp 2, tp 2" in name else 2) and min(of["written"]) > of["numbers"] / 8, name
        assert of["torch"], name


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


def test_a_save_that_dies_before_it_has_its_name_is_recovered(alone, tmp_path, monkeypatch):
    """In the place of a file, which a folder cannot take at one stroke."""
    path = tmp_path / "last.ckpt"
    torch.save({"whole": True}, path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            save_in_shards(state(alone, 1.0), path)
    assert not path.exists()
    recover(path)
    assert value_of(path) == 1
    recover(path)
    assert value_of(path) == 1


def test_what_killed_saves_left_is_in_nobodys_way(alone, tmp_path, monkeypatch):
    """Of a file, of a folder: each is followed by one of the other kind, which is written beside the same place."""

    def die(*_, **__):
        raise KeyboardInterrupt

    for kind, module, name in (("whole", Path, "unlink"), ("sharded", checkpoints.torch, "save")):
        folder = tmp_path / kind
        folder.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.torch, "save", die)
            patch.setattr(module, name, die)  # as one that is killed, which tidies up nothing
            with pytest.raises(KeyboardInterrupt):
                if kind == "whole":
                    CheckpointFiles().save_checkpoint({"step": 1}, folder / "last.ckpt")
                else:
                    save_in_shards(state(alone, 1.0), folder / "last.ckpt")
        assert [entry.name[0] for entry in folder.iterdir()] == ["."]
    save_in_shards(state(alone, 2.0), tmp_path / "whole" / "last.ckpt")
    assert value_of(tmp_path / "whole" / "last.ckpt") == 2
    CheckpointFiles().save_checkpoint({"step": 3}, tmp_path / "sharded" / "last.ckpt")
    assert load(tmp_path / "sharded" / "last.ckpt") == {"step": 3}


@pytest.mark.parametrize("sharded", [True, False])
def test_what_cannot_be_written_is_told(alone, tmp_path, monkeypatch, sharded):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    path = tmp_path / "last.ckpt"
    CheckpointFiles().save_checkpoint({"step": 1}, path)
    monkeypatch.setattr(dcp.HuggingFaceStorageWriter if sharded else torch, "write_data" if sharded else "save", full)
    with pytest.raises(UserError, match=r"last.ckpt cannot be written: .*No space left"):
        save_in_shards(state(alone, 1.0), path) if sharded else CheckpointFiles().save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}


@pytest.mark.parametrize(
    ("begins", "dtype", "said"),
    [
        ([[0, 0], [2, 0]], "float32", None),
        ([[0, 0], [1, 0]], "float32", "does not contain all"),
        ([[0, 0], [2, 0]], "float64", "does not contain all"),
        ([[0, 0], [2, 2]], "float32", "does not contain all"),
        ([[0, 0], [float("inf"), 0]], "float32", "not a readable shard"),
    ],
)
def test_pieces_must_make_up_the_whole(tmp_path, begins, dtype, said):
    """A forged folder must not have memory read that nobody has written."""
    (tmp_path / "shards-1").mkdir()
    for number, begin in enumerate(begins):
        offsets = json.dumps({"w": {"saved_offsets": begin}})
        piece = {"w": torch.full((2, 4), float(number), dtype=getattr(torch, dtype))}
        save_file(piece, tmp_path / f"shards-1/{number}.safetensors", {OFFSETS: offsets})
    torch.save({SHARDS: "shards-1", "state": placeholder("w", (4, 4), torch.float32, 1)}, tmp_path / CHECKPOINT)
    if said is None:
        assert load(tmp_path)["state"].read()[:, 0].tolist() == [0, 0, 1, 1]
    else:
        with pytest.raises(ValueError, match=said):
            load(tmp_path)


@pytest.mark.parametrize("dies_in", ["dcp.save", "torch.save"])
def test_a_save_that_dies_leaves_the_last_one_readable(alone, tmp_path, monkeypatch, dies_in):
    path = tmp_path / "last.ckpt"
    module, name = dies_in.split(".")
    written = getattr(getattr(checkpoints, module), name)

    def die(*arguments, **options):
        written(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(getattr(checkpoints, module), name, die)
        with pytest.raises(KeyboardInterrupt):
            save_in_shards(state(alone, 1.0), path)
        assert not path.exists()
    save_in_shards(state(alone, 2.0), path)
    assert value_of(path) == 2
    with monkeypatch.context() as patch:
        patch.setattr(getattr(checkpoints, module), name, die)
        with pytest.raises(KeyboardInterrupt):
            save_in_shards(state(alone, 3.0), path)
    assert value_of(path) == 2
    save_in_shards(state(alone, 4.0), path)
    assert value_of(path) == 4
    assert sorted(entry.name.split("-")[0] for entry in path.iterdir()) == ["checkpoint.pt", "shards"]
    assert [entry.name for entry in tmp_path.glob("*.ckpt*")] == ["last.ckpt"]


def test_whole_and_sharded_ones_take_each_others_place(alone, tmp_path):
    path, files = tmp_path / "last.ckpt", CheckpointFiles()
    whole = {"state_dict": {"weight": torch.full((3, 4), 1.0), "count": torch.tensor(1.0)}, "step": 1.0}
    files.save_checkpoint(whole, path)
    assert path.is_file() and value_of(path) == 1
    save_in_shards(state(alone, 2.0), path)
    assert is_folder(path) and value_of(path) == 2
    files.save_checkpoint(whole, path)
    assert is_folder(path) and value_of(path) == 1
    assert [entry.name for entry in path.iterdir()] == ["checkpoint.pt"]
    files.remove_checkpoint(path)
    assert not path.exists()


def test_tensors_that_share_memory_are_written_apart(alone, tmp_path):
    tied = state(alone, 2.0)["state_dict"]["weight"]
    save_in_shards({"one": tied, "other": tied}, tmp_path / "x.ckpt")
    kept = read_all(load(tmp_path / "x.ckpt"))
    assert_equal(kept, {"one": tied.full_tensor(), "other": tied.full_tensor()})


def test_what_is_broken_is_told(alone, tmp_path):
    save_in_shards(state(alone, 1.0), tmp_path / "sound.ckpt")
    shard = Path("shards-1") / "shard-00001-model-00001-of-00001.safetensors"

    def truncate(file: Path) -> None:
        file.write_bytes(file.read_bytes()[:-1])

    def resize(file: Path, shape: list, stacks: int = 1) -> None:
        held = torch.load(file, weights_only=True)
        held["state_dict"]["weight"] |= {"shape": shape, "stacks": stacks}
        torch.save(held, file)

    ways = {
        "does not contain all of state_dict.weight": lambda folder: (folder / shard).unlink(),
        "is not a readable shard": lambda folder: truncate(folder / shard),
        "needs the shards 'shards-1', which are missing": lambda folder: shutil.rmtree(folder / "shards-1"),
        "is not a readable checkpoint": lambda folder: truncate(folder / "checkpoint.pt"),
        "the placeholder of a sharded tensor is not valid": lambda folder: resize(folder / "checkpoint.pt", [-3, 4]),
        "contain all of state_dict.weight": lambda folder: resize(folder / "checkpoint.pt", [6, 4]),
        "all of state_dict.weight": lambda folder: resize(folder / "checkpoint.pt", [3, 4], stacks=3),
    }
    for number, (expected, damage) in enumerate(ways.items()):
        folder = shutil.copytree(tmp_path / "sound.ckpt", tmp_path / f"{number}.ckpt")
        damage(folder)
        with pytest.raises(ValueError, match=expected):
            load(folder)
