"""Flipped bits: a checkpoint in which one has changed is refused, or says what it said before."""

import random
import zipfile
from errno import EIO
from pathlib import Path

import pytest
import torch
from compared import assert_equal
from covering import slow
from safetensors.torch import save_file

from holotrain.models import checkpoint_files
from holotrain.models.checkpoint_files import CHECKPOINT, CHECKSUMS, TENSORS, checksum, copy, load, read, read_weights

HELD = {
    "state_dict": {"weight": torch.arange(600.0).view(20, 30), "bias": torch.ones(3, dtype=torch.bfloat16)},
    "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}],
    "loops": {"epoch": 3, "name": "some text", "none": None},
}


def failing(*given, **options):
    raise OSError(EIO, "Input/output error")


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


@pytest.fixture
def folder(tmp_path):
    """As several processes write it (tests/parallel), without them."""
    path = tmp_path / "sound.ckpt"
    (path / "tensors-1").mkdir(parents=True)
    part = path / "tensors-1" / "1.safetensors"
    save_file(
        {"state_dict.w": torch.arange(60.0)},
        part,
        {"format": "pt", "DCP_SHARDING_INFO": '{"state_dict.w": {"saved_offsets": [0]}}'},
    )
    state = {"w": torch.empty(60, device="meta")}
    torch.save({TENSORS: "tensors-1", CHECKSUMS: {part.name: checksum(part)}, "state_dict": state}, path / CHECKPOINT)
    return path


def test_a_flipped_bit_in_a_file_of_tensors_is_refused(folder, tmp_path):
    assert read(folder)["state_dict"]["w"].tolist() == [*range(60)]
    part = folder / "tensors-1" / "1.safetensors"
    for bit in random.Random(0).sample(range(8 * part.stat().st_size), 50):
        copy(folder, there := tmp_path / f"{bit}.ckpt")
        flipped(part, bit, there / "tensors-1" / part.name)
        for way in (load, read):
            with pytest.raises(ValueError, match=r"1.safetensors is damaged \(its checksum differs\)$"):
                way(there)


def test_a_file_without_checksums_is_read_and_a_folder_is_not(folder, tmp_path):
    held = torch.load(folder / CHECKPOINT, weights_only=True)
    del held[CHECKSUMS]
    torch.save(held, folder / CHECKPOINT)
    with pytest.raises(ValueError, match="holds no checksums of its tensors"):
        read(folder)
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


@pytest.mark.parametrize(
    "changes",
    [
        {TENSORS: "../sound.ckpt/tensors-1"},
        {TENSORS: [1]},
        {TENSORS: torch.ones(2, 2)},
        {TENSORS: None},
        {CHECKSUMS: {"1.safetensors": torch.ones(2)}},
        {CHECKSUMS: {"x" * 300: 0}},
    ],
    ids=["another folder", "list", "tensor", "none", "tensor as a checksum", "long name"],
)
@pytest.mark.parametrize("meta", [True, False])
def test_a_crafted_folder_is_refused(folder, changes, meta):
    held = torch.load(folder / CHECKPOINT, weights_only=True)
    torch.save(held | changes | ({} if meta else {"state_dict": {}}), folder / CHECKPOINT)
    with pytest.raises(ValueError, match=r"^[^\n]*(which is missing|are|File name too long\))$"):
        load(folder)


def test_a_part_that_cannot_be_read_is_refused(folder, tmp_path, monkeypatch):
    torch.save({"state_dict": {}, CHECKSUMS: {}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="x.ckpt needs the folder 'None' of its tensors, which is missing"):
        load(tmp_path / "x.ckpt")
    monkeypatch.setattr(checkpoint_files, "checksum", failing)
    with pytest.raises(ValueError, match=r"cannot read .*tensors-1 \(Input/output error\)"):
        load(folder)


def test_weights_to_begin_with_are_refused_too(tmp_path):
    torch.save(HELD["state_dict"], tmp_path / "sound.bin")
    assert_equal(read_weights(tmp_path / "sound.bin"), HELD["state_dict"])
    at = (tmp_path / "sound.bin").read_bytes().index(HELD["state_dict"]["weight"].numpy().tobytes())
    with pytest.raises(ValueError, match="damaged"):
        read_weights(flipped(tmp_path / "sound.bin", 8 * at + 99, tmp_path / "flipped.bin"))


@pytest.mark.parametrize("replaced", ["file", "folder"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_copy_takes_the_place_of_another(folder, tmp_path, kind, replaced):
    torch.save(HELD, tmp_path / "file.ckpt")
    torch.save({}, there := tmp_path / "last.ckpt")
    if replaced == "folder":
        copy(folder, there)
    of = {"file": tmp_path / "file.ckpt", "folder": folder}
    copy(of[kind], there)
    assert_equal(read(there, ["state_dict"]), read(of[kind], ["state_dict"]))
    assert not [*tmp_path.glob(".*")]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_copy_that_fails_leaves_what_was_there(folder, tmp_path, kind, monkeypatch):
    torch.save(HELD, tmp_path / "file.ckpt")
    copy(tmp_path / "file.ckpt", there := tmp_path / "last.ckpt")

    def full(source, to, **options):
        Path(to).write_bytes(b"some")
        failing()

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(OSError, match="Input/output error"):
        copy(tmp_path / "file.ckpt" if kind == "file" else folder, there)
    assert not refused(there)
    assert not [*tmp_path.glob(".*")]
