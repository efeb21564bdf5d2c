"""Damaged and crafted files of checkpoints and weights are refused in one line before anything looks at their values."""

import json
import random
import zipfile
from pathlib import Path

import pytest
import torch
from compared import assert_equal
from covering import slow
from safetensors.torch import save_file
from torch import nn

from holotrain.models.checkpoint_files import CHECKPOINT, TENSORS, load, read, read_weights
from holotrain.models.plain_tensors import DTYPES, require_plain

HELD = {
    "state_dict": {"weight": torch.arange(600.0).view(20, 30), "bias": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}],
    "loops": {"epoch": 3, "name": "some text", "none": None},
}
WHOLE = torch.arange(12.0).view(3, 4)


def flipped(file: Path, bit: int, to: Path) -> Path:
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    to.write_bytes(content)
    return to


def refused(path: Path) -> bool:
    """Else it holds what it held."""
    try:
        found = read(path)
    except ValueError as refusal:
        assert "damaged" in str(refusal) and "\n" not in str(refusal)
        return True
    assert_equal(found["state_dict"], HELD["state_dict"])
    assert found | {"state_dict": {}} == HELD | {"state_dict": {}}
    return False


@pytest.mark.parametrize("count", [300, slow(5000)])
def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path, count):
    """Anywhere in a file: in what it holds it is always refused, in the zip around that it may not matter."""
    torch.save(HELD, tmp_path / "sound.ckpt")
    with zipfile.ZipFile(tmp_path / "sound.ckpt") as held:
        within = {record.filename: range(*_span(tmp_path / "sound.ckpt", record)) for record in held.infolist()}
    draw, size = random.Random(0), (tmp_path / "sound.ckpt").stat().st_size
    for number in range(count):
        bit = draw.randrange(8 * size)
        path = flipped(tmp_path / "sound.ckpt", bit, tmp_path / f"{number}.ckpt")
        assert refused(path) or not any(bit // 8 in span for span in within.values()), bit
    for name, span in within.items():
        for byte in {span[0], span[-1], *draw.choices(span, k=count // 10)}:
            assert refused(flipped(tmp_path / "sound.ckpt", 8 * byte + draw.randrange(8), tmp_path / f"{byte}.ckpt")), name


def _span(file: Path, record: zipfile.ZipInfo) -> tuple[int, int]:
    """The bytes of a record in its file."""
    header = file.read_bytes()[record.header_offset + 26 : record.header_offset + 30]
    begin = record.header_offset + 30 + int.from_bytes(header[:2], "little") + int.from_bytes(header[2:], "little")
    return begin, begin + record.file_size


def test_a_file_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(HELD, tmp_path / "x.ckpt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert not refused(tmp_path / "x.ckpt")


def test_a_file_that_says_it_holds_more_than_its_size_is_not_unpacked(tmp_path):
    with zipfile.ZipFile(tmp_path / "x.ckpt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", bytes(10**7))
    with pytest.raises(ValueError, match=r"x.ckpt is damaged \(it claims to hold more than its size\)$"):
        read(tmp_path / "x.ckpt")


def test_weights_to_begin_with_are_refused_too(tmp_path):
    torch.save(HELD["state_dict"], tmp_path / "sound.bin")
    assert_equal(read_weights(tmp_path / "sound.bin"), HELD["state_dict"])
    at = (tmp_path / "sound.bin").read_bytes().index(HELD["state_dict"]["weight"].numpy().tobytes())
    with pytest.raises(ValueError, match="damaged"):
        read_weights(flipped(tmp_path / "sound.bin", 8 * at + 99, tmp_path / "flipped.bin"))


@pytest.fixture
def folder(tmp_path):
    """As several processes write it, without them: 60 numbers."""
    path = tmp_path / "sound.ckpt"
    (path / "tensors-1").mkdir(parents=True)
    header = {"format": "pt", "DCP_SHARDING_INFO": '{"state_dict.w": {"saved_offsets": [0]}}'}
    save_file({"state_dict.w": torch.arange(60.0)}, path / "tensors-1" / "1.safetensors", header)
    torch.save({TENSORS: "tensors-1", "state_dict": {"w": torch.empty(60, device="meta")}}, path / CHECKPOINT)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({TENSORS: "../sound.ckpt/tensors-1"}, "which is missing"),
        ({TENSORS: [1]}, "which is missing"),
        ({TENSORS: torch.ones(2, 2)}, "which is missing"),
        ({TENSORS: None}, "which is missing"),
        ({"state_dict": {"w": torch.empty(10**13, device="meta")}}, "they claim 40000000000000 bytes of 416"),
        ({"state_dict": {"w": torch.empty(60, device="meta"), "v": torch.empty(60, device="meta")}}, "they claim 480 bytes"),
    ],
    ids=["another folder", "list", "tensor", "none", "10^13 numbers", "twice as many"],
)
def test_a_crafted_folder_is_refused(folder, changes, message):
    assert read(folder)["state_dict"]["w"].tolist() == [*range(60)]
    torch.save(torch.load(folder / CHECKPOINT, weights_only=True) | changes, folder / CHECKPOINT)
    with pytest.raises(ValueError, match=rf"^[^\n]*{message}[^\n]*$"):
        load(folder)


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


def test_a_sharded_torch_file_is_read_by_its_index(tmp_path):
    for name in "ab":
        torch.save({name: WHOLE}, tmp_path / f"{name}.bin")
    index = {"weight_map": {"a": "a.bin", "b": "b.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert [*read_weights(tmp_path)] == ["a", "b"]
