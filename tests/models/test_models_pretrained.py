"""Files of weights, and what models take over of them, fit, leave out and refuse; a classifier that is trained alone."""

import json
import os

import pytest
import torch
from compared import assert_equal
from safetensors.torch import save_file
from small_models import FAMILIES, IMAGE, TEXT, example

from holotrain import models
from holotrain.models import GPT, RevGPT, RevViT, Swin, ViT
from holotrain.models.adapters import freeze, train_head_alone
from holotrain.models.checkpoint_files import read_weights
from holotrain.models.layers.patches import resized_positions
from holotrain.models.pretrained import load_pretrained


@pytest.mark.parametrize("family", FAMILIES)
def test_reversible_models_take_over_f_and_g(family):
    plain, model = getattr(models, family)(**FAMILIES[family]), getattr(models, f"Rev{family}")(**FAMILIES[family])
    loaded, own = load_pretrained(model, plain.state_dict()), model.state_dict()
    branches = {name for name in own if ".f." in name or ".g." in name}
    assert branches <= set(loaded.loaded) and len(branches) >= 24
    assert_equal({name: own[name] for name in loaded.loaded}, {name: plain.state_dict()[name] for name in loaded.loaded})
    rest = {name for name, _ in model.named_parameters()} - set(loaded.loaded)
    assert set(loaded.missing) == {name for name in rest if "fusion" in name}
    assert set(loaded.head) == rest - set(loaded.missing) == ({"head.weight", "head.bias"} if rest else set())
    assert set(loaded.unexpected) == ({"norm.weight", "norm.bias"} if rest else set())  # the plain model's last


@pytest.mark.parametrize("size", [(6, 6), (2, 2)])
def test_positions_of_images_are_resized_as_timm_does(size):
    timm = pytest.importorskip("timm")
    given, wanted = torch.randn(1, 1 + 16, 8), torch.zeros(1, 1 + size[0] * size[1], 8)
    assert_equal(resized_positions(given, wanted, True, True), timm.layers.resample_abs_pos_embed(given, size))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_our_own_weights_come_from_checkpoints(prefix):
    """Of an exact model, whose grid is not taken over, for images of another size."""
    trained = RevViT(**IMAGE, exact=12)
    model = RevViT(**IMAGE | {"image_size": 12})
    loaded = load_pretrained(model, {prefix + name: x for name, x in trained.state_dict().items()})
    assert (loaded.missing, loaded.unexpected, loaded.head) == ((), (), ()) and loaded.resized == ("embedding.position",)
    assert_equal(model.fusion.norm.weight, trained.fusion.norm.weight)
    assert_equal(model.blocks.blocks[1].g.widen.weight, trained.blocks.blocks[1].g.widen.weight)


def of_another_type():
    weights = ViT(**IMAGE).state_dict()
    return weights | {"head.weight": weights["head.weight"].bool()}


OTHER = "their embedding is not that of a {}; model=timm and model=huggingface take weights of other libraries"


@pytest.mark.parametrize(
    ("model", "weights", "message"),
    [
        (lambda: RevGPT(**TEXT), lambda: ViT(**IMAGE).state_dict(), OTHER.format("RevGPT")),
        (lambda: GPT(**TEXT), lambda: GPT(**TEXT, positions="learned").state_dict(), OTHER.format("GPT")),
        (lambda: Swin(**FAMILIES["Swin"]), lambda: {"patch_embed.proj.weight": torch.zeros(8, 1, 2, 2)}, OTHER.format("Swin")),
        (lambda: ViT(**IMAGE | {"depth": 9}), lambda: ViT(**IMAGE | {"depth": 3}).state_dict(), "fit: they have 43 of the 115"),
        (lambda: GPT(**TEXT | {"vocab": 39}), lambda: GPT(**TEXT).state_dict(), r"weight is \(40, 16\) there and \(39, 16\)"),
        (lambda: ViT(**IMAGE), of_another_type, "head.weight is torch.bool, not a floating-point type$"),
        (lambda: ViT(**IMAGE), lambda: ViT(**IMAGE).state_dict() | {"norm.weight": torch.ones(())}, "do not fit"),
        (
            lambda: GPT(**TEXT),
            lambda: GPT(**TEXT).state_dict() | {"head.numbers": torch.zeros(2)},
            "these weights are in few bits",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_change_nothing(model, weights, message):
    model = model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        load_pretrained(model, weights())
    assert_equal(model.state_dict(), before)


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


@pytest.mark.parametrize("name", ["RevViT", "Swin", "RoBERTa"])
def test_what_is_frozen_has_no_gradient_and_stays(name):
    model = getattr(models, name)(**FAMILIES[name.removeprefix("Rev")] | ({"classes": 3} if name == "RoBERTa" else {}))
    train_head_alone(model)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(example(name, 4)).square().sum().backward()
    optimizer.step()
    for key, parameter in model.named_parameters():
        assert (parameter.grad is not None) == key.startswith("head."), key
        assert torch.equal(parameter, before[key]) != key.startswith("head."), key


def test_a_head_that_is_the_embedding_is_not_trained_alone():
    model = models.RevGPT(**FAMILIES["GPT"])
    with pytest.raises(ValueError, match="a RevGPT has no separate head to train: its head is tied to the embedding"):
        train_head_alone(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_parameters_are_frozen_by_patterns_of_their_names():
    model = ViT(**IMAGE)
    freeze(model, ["embedding.*", "*.0.g.*"])
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("embedding.") or ".0.g." in name} != set()
    with pytest.raises(ValueError, match="^freeze: no parameter is named 'heads.*'; there are embedding.position"):
        freeze(model, ["heads.*"])
    with pytest.raises(ValueError, match="^freeze: nothing is left"):
        freeze(model, ["*"])
