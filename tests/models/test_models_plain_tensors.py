"""Tensors that no honest file holds are refused before anything looks at their values; all others are read."""

import json

import pytest
import torch
from safetensors.torch import save_file
from small_models import FAMILIES
from torch import nn

from holotrain.models import load_pretrained
from holotrain.models.building import build
from holotrain.models.checkpoint_files import CHECKPOINT, CHECKSUMS, TENSORS, checksum, load, read_weights
from holotrain.models.plain_tensors import DTYPES, require_plain
from holotrain.models.pretrained import take_over

WHOLE = torch.arange(12.0).view(3, 4)

HONEST = {
    "a transposed one": WHOLE.t(),
    "a part of another": WHOLE[1:, 2:],
    "every other number": WHOLE.flatten()[::2],
    "a parameter": nn.Parameter(WHOLE),
    "a number": torch.tensor(3.0),
    "none at all": torch.empty(0, 10**15),
    "a copy of one number": torch.ones(1).expand(1, 1, 1),
} | {str(dtype): torch.zeros(3).to(dtype) for dtype in DTYPES}

CRAFTED = {
    "claims 40000000000000 bytes and has 4": torch.zeros(1).expand(10**13),
    "claims 24 bytes and has 16": torch.ones(4).as_strided((3, 2), (1, 1)),
    "is of layout torch.sparse_coo": WHOLE.to_sparse(),
    "is of layout torch.sparse_csr": WHOLE.to_sparse_csr(),
    "is of dtype torch.qint8": torch.quantize_per_tensor(WHOLE, 0.1, 0, torch.qint8),
    "is of dtype torch.bits8": torch.empty(3, dtype=torch.bits8),
    "is of dtype torch.float4_e2m1fn_x2": torch.empty(3, dtype=torch.float4_e2m1fn_x2),
    "is nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "is a NestedTensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "has no values": torch.empty(3, device="meta"),
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_tensors_are_read(tmp_path, kind):
    torch.save({"first": HONEST[kind], "second": [HONEST[kind]]}, tmp_path / "x.ckpt")
    found = load(tmp_path / "x.ckpt")
    assert found["first"].untyped_storage().data_ptr() == found["second"][0].untyped_storage().data_ptr()
    for tensor in (found["first"], read_weights(tmp_path / "x.ckpt")["first"]):
        assert tensor.dtype == HONEST[kind].dtype and tensor.shape == HONEST[kind].shape


@pytest.mark.parametrize("words", CRAFTED)
def test_crafted_tensors_are_refused(tmp_path, words):
    path = tmp_path / "x.pt"
    torch.save({"w": CRAFTED[words]}, path)
    with pytest.raises(ValueError, match=f"x.pt is damaged, or of another program: the tensor 'w' {words}$"):
        read_weights(path)
    torch.save({"state_dict": {}, "list": [1, (2, {"w": CRAFTED[words]})]}, path)
    said = "needs the folder" if CRAFTED[words].is_meta else f"the tensor 'list.1.1.w' {words}$"
    with pytest.raises(ValueError, match=said):
        load(path)


def test_more_numbers_than_are_counted_in_64_bits_are_refused():
    with pytest.raises(ValueError, match=f"claims {2**64} bytes and has 8"):
        require_plain([torch.zeros(1, dtype=torch.float64).expand(2**61)], "x")


def test_the_name_of_a_tensor_does_not_write_to_the_terminal():
    with pytest.raises(ValueError, match=r"the tensor 'a\\nb' has no values$"):
        require_plain({"a\nb": CRAFTED["has no values"]}, "x")


def folder_of(path, *claimed):
    """A checkpoint of several processes, with a file of 60 numbers."""
    (path / "tensors-1").mkdir(parents=True)
    part = path / "tensors-1/1.safetensors"
    save_file({"state_dict.w": torch.arange(60.0)}, part)
    state = {str(number): torch.empty(shape, device="meta") for number, shape in enumerate(claimed)}
    torch.save({TENSORS: "tensors-1", CHECKSUMS: {part.name: checksum(part)}, "state_dict": state}, path / CHECKPOINT)
    return path


def test_a_folder_claims_no_more_than_its_files_hold(tmp_path):
    load(folder_of(tmp_path / "sound", 60))
    for number, claimed in enumerate(((10**13,), (60, 60))):
        with pytest.raises(ValueError, match=r"checkpoint.pt is damaged: its tensors claim \d+ bytes and have 3\d\d$"):
            load(folder_of(tmp_path / str(number), *claimed))


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.int64])
def test_weights_of_other_numbers_are_not_converted(dtype):
    model = build("holotrain.models.RevViT", FAMILIES["ViT"])
    weights = model.state_dict()
    name = "head.weight"
    with pytest.raises(ValueError, match=f"head.weight is {dtype}, not a floating-point type$"):
        load_pretrained(model, weights | {name: weights[name].to(dtype)})
    with pytest.raises(ValueError, match=f"w is {dtype}, not a floating-point type$"):
        take_over({"w": torch.ones(3)}, {"w": torch.ones(3).to(dtype)}, "x")
    counts = {"count": torch.zeros((), dtype=dtype)}
    take_over(counts, {"count": torch.ones((), dtype=torch.int64)}, "x")
    assert counts["count"] == 1


def test_a_folder_of_transformers_is_read_as_others(tmp_path):
    transformers = pytest.importorskip("transformers")
    from holotrain.models.huggingface import HuggingFace

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path)
    model = HuggingFace(str(tmp_path), "causal_lm")
    assert "new" not in model.start_from(None)
    weights = read_weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    name = next(name for name in weights if name.endswith("ln_f.weight"))
    for other, words in (
        (torch.ones(1).expand(8), "claims 32 bytes and has 4"),
        (torch.ones(8, dtype=torch.bool), "ln_f.weight is torch.bool"),
        (torch.ones(8, dtype=torch.complex64), "ln_f.weight is torch.complex64"),
    ):
        torch.save(weights | {name: other}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=words):
            model.start_from(None)


def test_a_sharded_torch_file_is_read_by_its_index(tmp_path):
    for name in "ab":
        torch.save({name: WHOLE}, tmp_path / f"{name}.bin")
    index = {"weight_map": {"a": "a.bin", "b": "b.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert [*read_weights(tmp_path)] == ["a", "b"]
