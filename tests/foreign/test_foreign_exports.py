"""Exports of models of timm and transformers come back: to holotrain, by every command, and to their own library."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from compared import assert_equal
from data_files import write_folder
from foreign_models import KINDS, NETWORKS, example, trained_once, write_texts
from left_by_runs import summary
from PIL import Image

import holotrain as package
from holotrain.data import ImageFolder
from holotrain.models import HuggingFace, Timm, saved

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

DATA = {
    "causal_lm": {"vocab": 270, "context": 16},
    "masked_lm": {"vocab": 270, "context": 16},
    "sequence_classification": {"classes": 2, "vocab": 270, "pad_id": 256},
    "image_classification": {"classes": 3, "image_size": 8, "channels": 1},
}
IMAGES = {"name": "vit_tiny_patch16_224", "classes": 3, "image_size": 8, "channels": 1}
SIZES = {"depth": 2, "embed_dim": 32, "num_heads": 2, "patch_size": 4}


def exported(folder: Path, kind: str, head: str, **changed):
    """A model with random weights, in the folder that an export leaves."""
    arguments = IMAGES | {"arguments": SIZES} if kind == "timm" else {"name": "gone", "head": head, **DATA[head]}
    if kind != "timm":
        arguments["config"] = {"model_type": kind, **NETWORKS[kind]}
    cls = Timm if kind == "timm" else HuggingFace
    model = cls(**(arguments | changed)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    saved.save_external(folder, f"holotrain.models.{cls.__name__}", arguments | changed, model)
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("gpt2", "causal_lm"),  # its head is its embedding, which a file holds once
        ("llama", "causal_lm"),
        ("bert", "masked_lm"),
        ("llama", "sequence_classification"),
        ("vit", "image_classification"),
        ("timm", "image_classification"),
    ],
)
def test_every_head_comes_back_bit_for_bit(tmp_path, contacts_nobody, kind, head):
    model = exported(tmp_path, kind, head)
    config = tmp_path / "holotrain.json"  # as an older version wrote it
    described = json.loads(config.read_text())
    described["arguments"] |= {"reversible": "4bit", "blocks": None}
    config.write_text(json.dumps(described))
    back, given = package.load(tmp_path), example(head)
    assert type(back) is type(model) and not back.training
    assert_equal(back(given), model(given))


def changed(**entries):
    def change(folder: Path) -> None:
        path = folder / "holotrain.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return change


def without_weight(folder: Path) -> None:
    weights = saved.read_weights(folder)
    del weights["transformer.h.1.mlp.c_fc.weight"]
    saved.save_tensors(weights, folder / "model.safetensors")


def another(**entries):
    config = {"model_type": "gpt2", **NETWORKS["gpt2"], **entries}
    return changed(arguments={"name": "gone", "head": "causal_lm", "config": config})


GPT = {"vocab": 260, "context": 8, "dim": 8, "depth": 1, "heads": 1}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_weight, "are of different models: transformer.h.1.mlp.c_fc.weight is missing"),
        (another(n_layer=1), "are of different models: transformer.h.1.attn.c_attn.weight is unknown"),
        (another(n_embd=16), "are of different models: transformer.h.0.attn.c_attn.bias is of another shape"),
        (another(auto_map={"AutoConfig": "evil.Config"}, _attn_implementation="a/kernel"), "'a/kernel' is not one of eager"),
        (changed(target="holotrain.models.GPT", arguments=GPT), "are of different models: a GPT is of no other library"),
        (changed(target="os.system"), "holotrain.json describes no model that can be built: os.system is not a model of"),
        (changed(quantised="no"), "holotrain.json is damaged, or of another program: quantised is missing or of another type"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds none of model.safetensors"),
        (lambda folder: (folder / "holotrain.json").unlink(), "is of transformers, and not an export; use it as model=hugg"),
    ],
)
def test_damage_is_refused_in_one_line(tmp_path, contacts_nobody, change, said):
    exported(tmp_path, "gpt2", "causal_lm", vocab=None)
    change(tmp_path)
    with pytest.raises(package.UserError, match=said) as refusal:
        package.load(tmp_path)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


@pytest.fixture
def trained(tmp_path_factory):
    return partial(trained_once, tmp_path_factory)


THEIRS = {
    "causal_lm": "AutoModelForCausalLM",
    "masked_lm": "AutoModelForMaskedLM",
    "sequence_classification": "AutoModelForSequenceClassification",
}


@pytest.mark.parametrize(("kind", "task"), KINDS)
def test_a_checkpoint_and_its_export_need_no_other_file(holotrain, trained, tmp_path, kind, task):
    """An export gives what the checkpoint gives that it was made of, which it names."""
    run = trained(kind, task)
    write_texts(tmp_path)
    out = holotrain.done("export", f"ckpt_path={run}", "to=tuned")
    assert f"modelof{run}/checkpoints/best-" in "".join(out.split())  # whose lines are broken anywhere
    holotrain.done("test", "ckpt_path=tuned", "hydra.run.dir=test")
    assert summary(Path("test"))["metrics"]["test/loss"] == pytest.approx(summary(run)["metrics"]["test/loss"], rel=1e-6)
    model, back, given = package.load(run), package.load("tuned"), example(task)
    assert_equal(back(given), model(given))
    if kind == "timm":
        assert_equal(timm.create_model("local-dir:tuned", pretrained=True).eval()(given), model(given))
    else:
        assert_equal(getattr(transformers, THEIRS[task]).from_pretrained("tuned").eval()(given).logits, model(given))
    if task == "causal_lm":
        assert "start from them with model.pretrained=tuned" in holotrain.refused("fit", "ckpt_path=tuned")


@pytest.mark.parametrize(("pixels", "interpolation"), [(48, "bicubic"), (112, "bilinear")])
@pytest.mark.parametrize("kind", ["timm", "vit"])
def test_its_own_library_prepares_images_as_the_evaluation_did(tmp_path, kind, pixels, interpolation):
    write_folder(tmp_path / "photos", each=2)
    photos = sorted((tmp_path / "photos/val").rglob("*.*"))
    for photo in photos:  # square: of odd margins the libraries cut the centre a pixel apart
        Image.open(photo).convert("RGB").resize((6, 6)).resize((130, 130), Image.Resampling.BICUBIC).save(photo)
    data = ImageFolder(root=str(tmp_path / "photos"), image_size=pixels, interpolation=interpolation, batch_size=1)
    data.setup("test")
    described = {name: getattr(data, name) for name in ("statistics", "interpolation", "crop_pct")}
    if kind == "timm":
        model = Timm(**IMAGES | {"image_size": pixels, "channels": 3}, arguments=SIZES)
    else:
        shape = DATA["image_classification"] | {"image_size": pixels, "channels": 3}
        model = HuggingFace("gone", "image_classification", config={"model_type": "vit", **NETWORKS["vit"]}, **shape)
    model.save(tmp_path, described)
    for photo, (image, _) in zip(photos, data.test_dataloader(), strict=True):
        raw = Image.open(photo).convert("RGB")
        if kind == "timm":
            settings = json.loads((tmp_path / "config.json").read_text())["pretrained_cfg"]
            theirs = timm.data.create_transform(**timm.data.resolve_data_config(settings))(raw)
        else:
            theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)(raw, return_tensors="pt")["pixel_values"][0]
        assert theirs.shape == image[0].shape
        assert (theirs - image[0]).abs().mean() < 1e-3  # Pillow rounds to bytes


RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8], "depths": [1]}  # it says no size of images


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("config", [{"model_type": "vit", **NETWORKS["vit"]}, RESNET], ids=lambda config: config["model_type"])
def test_images_of_one_size_are_only_normalised(tmp_path, config, channels):
    """As those of CIFAR, of which no crop is known."""
    shape = DATA["image_classification"] | {"channels": channels}
    HuggingFace("gone", "image_classification", config=config, **shape).save(tmp_path, {"statistics": [[0.5] * channels] * 2})
    raw = torch.randint(256, (8, 8, channels), dtype=torch.uint8).squeeze(-1).numpy()
    theirs = transformers.AutoImageProcessor.from_pretrained(tmp_path)(Image.fromarray(raw), return_tensors="pt")[
        "pixel_values"
    ]
    torch.testing.assert_close(theirs[0], torch.from_numpy(raw).view(8, 8, channels).permute(2, 0, 1) / 127.5 - 1)
