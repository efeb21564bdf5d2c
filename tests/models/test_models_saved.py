"""Saved models come back as they were, from files that hold no program."""

import json
import struct

import pytest
import torch
from compared import assert_equal
from covering import paired
from small_models import CELLS, FAMILIES, IMAGE, TRANSFORMERS, example
from torch import nn

import holotrain
from holotrain.models.quantised import bits_of, quantise
from holotrain.models.saved import build, load, read_config, save


def model_of(name, **options):
    torch.manual_seed(0)
    arguments = (FAMILIES | {"ImageErrorDiffusion": CELLS})[name.removeprefix("Rev")] | options
    model = build(f"holotrain.models.{name}", arguments).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model, arguments


def saved_in(folder, name, **options):
    """A model, saved."""
    model, arguments = model_of(name, **options)
    save(folder, f"holotrain.models.{name}", arguments, model)
    return model


@torch.no_grad()
@pytest.mark.parametrize(("name", "bits"), [*paired(TRANSFORMERS, (None, 8, 4)), ("ImageErrorDiffusion", None)])
def test_every_model_comes_back_bit_for_bit(tmp_path, name, bits):
    model, arguments = model_of(name)
    if bits:
        quantise(model.requires_grad_(False), bits)
    save(tmp_path / "a" / "b", f"holotrain.models.{name}", arguments, model)
    other = holotrain.load(tmp_path / "a" / "b")
    assert type(other).__name__ == name and not other.training and bits_of(other) == bits
    assert_equal(other(example(name)), model(example(name)))


@torch.no_grad()
@pytest.mark.parametrize("frozen", [None, "blocks.blocks.0", ""])
def test_what_was_done_to_a_model_comes_back(tmp_path, frozen):
    """An exact grid, a schedule, few bits in a part or in the whole."""
    model, arguments = model_of("RevViT", exact=12, backward="pareprop", store=1)
    if frozen is not None:
        model.get_submodule(frozen).requires_grad_(False)
        quantise(model)
    save(tmp_path, "holotrain.models.RevViT", arguments, model)
    other = load(tmp_path)
    assert (other.blocks.backward, other.blocks.store, other.blocks.exact) == ("pareprop", 1, 12)
    assert_equal(other(example("RevViT")), model(example("RevViT")))


def test_files_hold_plain_numbers_and_texts(tmp_path):
    """The whole of the file: a length, a header in JSON that names numbers, and as many bytes of them."""
    model, arguments = model_of("RevGPT")
    quantise(model.requires_grad_(False))
    save(tmp_path, "holotrain.models.RevGPT", arguments, model, {"license": "mine"}, tokenizer='{"words": "ä"}')
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    content = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert {tensor["dtype"] for tensor in header.values()} == {"F32", "I8"}
    assert 8 + length + max(tensor["data_offsets"][1] for tensor in header.values()) == len(content)
    assert (tmp_path / "tokenizer.json").read_text(encoding="utf-8") == '{"words": "ä"}'
    assert read_config(tmp_path) == {
        "license": "mine", "format": 3, "target": "holotrain.models.RevGPT", "arguments": arguments,
        "quantised": 8,
    }  # fmt: skip


def test_a_model_takes_the_place_of_another_whole_or_not_at_all(tmp_path, monkeypatch):
    model, arguments = model_of("GPT")
    save(tmp_path, "holotrain.models.GPT", arguments, model, tokenizer="{}")
    model = saved_in(tmp_path, "ViT")
    with pytest.raises(TypeError, match="not JSON serializable"):
        save(tmp_path, "GPT", {"vocab": object()}, model_of("GPT")[0])
    monkeypatch.setattr("pathlib.Path.write_text", lambda *given, **options: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, "holotrain.models.GPT", FAMILIES["GPT"], model_of("GPT")[0])
    assert_equal(load(tmp_path).head.weight, model.head.weight)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def changed_config(**changes):
    def change(folder):
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


INSIDE = "holotrain.models.RevViT.forward.__globals__.update"  # an attribute of a class that is trusted


def cut(name, length):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:length])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no saved model: there is no config.json in it"),
        (lambda folder: (folder / "model.safetensors").unlink(), "there is no file .*model.safetensors"),
        (cut("model.safetensors", 5000), "model.safetensors is not a readable safetensors file; it is damaged"),
        (lambda folder: (folder / "config.json").write_text('{"format": 3}'), "damaged, or of another program"),
        (changed_config(arguments=[3]), "damaged, or of another program: arguments is missing or of another type"),
        (changed_config(format=1), "is of format 1; this version of holotrain reads format 3"),
        (changed_config(target="cnn.Net"), "describes no model that can be built: cnn.Net is needed, .* no package 'cnn' here"),
        (changed_config(target="os.system"), "describes no model that can be built: os.system is not a model of holotrain"),
        (changed_config(target=INSIDE, arguments={}), f"describes no model that can be built: .*{INSIDE}"),
        (changed_config(arguments={"depht": 3}), "describes no model that can be built: .*depht"),
        (
            changed_config(arguments=IMAGE | {"dim": 8}),
            r"different models: embedding.position is \(1, 16, 16\), not \(1, 16, 8\)",
        ),
        (changed_config(arguments=IMAGE | {"dim": 10**6}), r"one of its sizes is 1000000, and it has \d{4} weights"),
        (changed_config(arguments=IMAGE | {"depth": 10**9}), "can be built: one of its sizes is 1000000000, and it has"),
        (changed_config(arguments=IMAGE | {"depth": 3}), r"different models: blocks.blocks.2.f.norm.weight is missing, not"),
        (changed_config(quantised=8), "different models: this RevViT has no frozen Linear layer or embedding to quantise"),
        (changed_config(quantised=3), "different models: bits must be 8 or 4, not 3"),
    ],
)
def test_damage_is_refused_in_one_line(tmp_path, change, message):
    saved_in(tmp_path, "RevViT")
    change(tmp_path)
    with pytest.raises(ValueError, match=message) as refusal:
        load(tmp_path)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)
