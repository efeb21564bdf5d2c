"""Damaged and crafted files of checkpoints and weights are refused in one line before anything looks at their values."""

import json
import random

import pytest
import torch
from compared import assert_equal
from covering import slow
from safetensors.torch import save_file
from torch import nn

from holotrain.models.checkpoint_files import CHECKPOINT, TENSORS, load, load_weights, read, read_weights

HELD = {
    "state_dict": {"weight": torch.arange(600.0).view(20, 30), "bias": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}],
    "loops": {"epoch": 3, "name": "some text", "none": None},
}
WHOLE = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize("count", [300, slow(5000)])
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path, count):
    """Anywhere in a file: in what it holds it is always refused, in the zip around that it may not matter."""
    torch.save(HELD, tmp_path / "sound.ckpt")
    content = (tmp_path / "sound.ckpt").read_bytes()
    weight = content.index(HELD["state_dict"]["weight"].numpy().tobytes())
    draw, path, refused = random.Random(0), tmp_path / "flipped.ckpt", set()
    for bit in [8 * weight + 99, *(draw.randrange(8 * len(content)) for _ in range(count))]:
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.unlink(missing_ok=True)
        path.write_bytes(flipped)
        try:
            found = read(path)
        except ValueError as refusal:
            assert "damaged" in str(refusal) and "\n" not in str(refusal)
            refused.add(bit)
        else:
            assert_equal(found["state_dict"], HELD["state_dict"])
            assert found | {"state_dict": {}} == HELD | {"state_dict": {}}
    assert 8 * weight + 99 in refused


def in_parts(folder, begins=([0, 0], [2, 0]), **changes):
    """A checkpoint as two processes write it, without them: a tensor of (4, 4), half of it each."""
    (folder / "tensors-1").mkdir()
    for number, begin in enumerate(begins):
        header = {"format": "pt", "DCP_SHARDING_INFO": json.dumps({"state_dict.w": {"saved_offsets": begin}})}
        save_file({"state_dict.w": torch.full((2, 4), float(number))}, folder / f"tensors-1/{number}.safetensors", header)
    checkpoint = {TENSORS: "tensors-1", "state_dict": {"w": torch.empty(4, 4, device="meta")}}
    torch.save(checkpoint | changes, folder / CHECKPOINT)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def weight(*shape):
    return {"state_dict": {"w": torch.empty(shape, device="meta")}}


FOLDERS = {
    "another folder": ({TENSORS: "../sound.ckpt/tensors-1"}, "needs the folder '../sound.ckpt/tensors-1'"),
    "a list in place of the folder": ({TENSORS: [1]}, "needs the folder"),
    "none": ({TENSORS: None}, "needs the folder"),
    "10^13 numbers": (weight(10**13), "does not have all tensors"),
    "2^50 rows": (weight(2**50, 4), "or is damaged: .*memory"),
    "more rows": (weight(6, 4), "Size mismatch between saved"),
    "twice the same half": ({"begins": ([0, 0], [0, 0])}, "does not have all tensors"),
    "halves that overlap": ({"begins": ([0, 0], [1, 0])}, "does not have all tensors"),
    "an endless offset": ({"begins": ([0, 0], [float("inf"), 0])}, "does not have all tensors"),
}
DAMAGES = {
    "a part is cut": (lambda folder: cut(folder / "tensors-1/1.safetensors"), "does not have all tensors"),
    "the file is cut": (lambda folder: cut(folder / CHECKPOINT), "is not a readable checkpoint"),
    "no file": (lambda folder: (folder / CHECKPOINT).unlink(), "is no file, so the checkpoint is incomplete"),
}


@pytest.mark.parametrize("case", [*FOLDERS, *DAMAGES])
def test_a_crafted_or_damaged_folder_is_refused(tmp_path, case):
    """Memory that nobody has written is not read, and none is taken that was not saved."""
    changes, words = FOLDERS.get(case, ({}, ""))
    in_parts(tmp_path, **changes)
    if case in DAMAGES:
        assert read(tmp_path)["state_dict"]["w"][:, 0].tolist() == [0, 0, 1, 1]
        damage, words = DAMAGES[case]
        damage(tmp_path)
    with pytest.raises(ValueError, match=rf"^[^\n]*{words}[^\n]*$"):
        read(tmp_path)


DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int8, torch.uint16, torch.bool]

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
    "one number 10^13 times": torch.zeros(1).expand(10**13),
    "one number 2^61 times": torch.zeros(1, dtype=torch.float64).expand(2**61),
    "numbers used twice": torch.ones(4).as_strided((3, 2), (1, 1)),
    "sparse": WHOLE.to_sparse(),
    "sparse rows": WHOLE.to_sparse_csr(),
    "quantised": torch.quantize_per_tensor(WHOLE, 0.1, 0, torch.qint8),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", HONEST)
def test_honest_tensors_are_read(tmp_path, kind):
    torch.save({"first": HONEST[kind], "second": [HONEST[kind]]}, tmp_path / "x.ckpt")
    found = load(tmp_path / "x.ckpt")
    assert found["first"].untyped_storage().data_ptr() == found["second"][0].untyped_storage().data_ptr()
    for tensor in (found["first"], read_weights(tmp_path / "x.ckpt")["first"]):
        assert tensor.dtype == HONEST[kind].dtype and tensor.shape == HONEST[kind].shape


@pytest.mark.parametrize("kind", CRAFTED)
def test_crafted_tensors_are_refused(tmp_path, kind):
    torch.save({"state_dict": {}, "list": [1, (2, {"w": CRAFTED[kind]})]}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="x.pt is damaged, or of another program: a tensor in it is not dense$"):
        read_weights(tmp_path / "x.pt")


@pytest.mark.parametrize("dtype", [torch.bits8, torch.float4_e2m1fn_x2])
def test_numbers_that_torch_cannot_convert_are_refused(dtype):
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        load_weights(nn.Linear(2, 2), {"weight": torch.empty(2, 2, dtype=dtype), "bias": torch.ones(2)}, "x")
