"""Files of published weights: every form is read, and what is none of them is refused."""

import json
import os

import pytest
import torch
from compared import assert_equal
from safetensors.torch import save_file
from small_models import IMAGE

from holotrain.models import ViT
from holotrain.models.checkpoint_files import read_weights
from holotrain.models.huggingface_files import folder_of


def written(folder, weights, form):
    """Files as they are published."""
    if form == "shards":
        halves = [dict(list(weights.items())[part::2]) for part in range(2)]
        for part, half in enumerate(halves):
            save_file(half, folder / f"model-{part}.safetensors")
        index = {name: f"model-{part}.safetensors" for part, half in enumerate(halves) for name in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
        return folder
    if form == "safetensors":
        save_file(weights, folder / "model.safetensors")
        return folder / "model.safetensors"
    name = {"torch": "weights.pth", "checkpoint": "last.ckpt", "folder": "pytorch_model.bin"}[form]
    torch.save({"state_dict": weights, "epoch": 3} if form == "checkpoint" else weights, folder / name)
    return folder if form == "folder" else folder / name


@pytest.mark.parametrize("form", ["shards", "safetensors", "torch", "checkpoint", "folder"])
def test_files_are_read_and_what_is_not_finite_is_named(tmp_path, form):
    weights = ViT(**IMAGE).state_dict()
    assert_equal(read_weights(written(tmp_path, weights, form)), weights)
    for value in (float("nan"), float("-inf")):
        weights["head.bias"][1] = value
        with pytest.warns(UserWarning, match="head.bias holds NaN or infinity"):
            read_weights(written(tmp_path, weights, form))


@pytest.mark.parametrize(
    "shard", ["../model-0.safetensors", "within/../model-0.safetensors", "gone.safetensors", "pipe.safetensors", 3, None]
)
def test_an_index_names_files_of_its_own_folder_only(tmp_path, shard):
    folder = tmp_path / "model"
    (folder / "within").mkdir(parents=True)
    for place in (folder, tmp_path):
        save_file({"a": torch.ones(2)}, place / "model-0.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ValueError, match=f"names {shard!r}, which is not in the same folder"):
        read_weights(folder)


def test_shards_of_a_snapshot_of_the_hub_are_read(tmp_path):
    """They are links into the ``blobs`` beside it."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/1234", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(2)}, blobs / "5678")
    (snapshot / "model-0.safetensors").symlink_to("../../blobs/5678")
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-0.safetensors"}}))
    assert_equal(read_weights(snapshot), {"a": torch.ones(2)})


class Program:
    """What must not run when a file is read."""

    def __reduce__(self):
        return print, ("it ran",)


def test_files_that_cannot_be_read_are_refused(tmp_path, capsys):
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    torch.save({"weights": Program()}, tmp_path / "program.bin")
    torch.save({"epoch": 3}, tmp_path / "empty.pt")
    (tmp_path / "folder").mkdir()
    for name, words in (
        ("nowhere.pt", "there is no file"),
        ("model.safetensors.index.json", "is not an index of weights"),
        ("cut.safetensors", "not a readable safetensors file"),
        ("program.bin", "or holds more than tensors"),
        ("empty.pt", "is not a mapping from names to weights"),
        ("folder", "holds none of model.safetensors"),
    ):
        with pytest.raises(ValueError, match=words):
            read_weights(tmp_path / name)
    assert "it ran" not in capsys.readouterr().out


def test_a_download_that_fails_without_a_word_says_what_kind_of_error_it_is(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *given, **options: (_ for _ in ()).throw(TimeoutError()))
    with pytest.raises(ValueError, match=r"^cannot download some/model \(TimeoutError\)$"):
        folder_of("some/model", download=True)
