"""Whatever stands in a file, its reader returns or says in one line which file it cannot read."""

import copy
import io
import json
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import IMAGE
from small_run import SMALL
from torch.utils.tensorboard import SummaryWriter

from holotrain.config import checkpointed
from holotrain.config.start import compose
from holotrain.data.tokenizers import SubwordTokenizer, known_tokenizer
from holotrain.errors import UserError
from holotrain.models.building import build
from holotrain.models.huggingface_files import network_of
from holotrain.models.saved import load, save
from holotrain.overlap import tuner
from holotrain.overlap.groups import Job as Product

VIT = "holotrain.models.ViT"
SIZES = IMAGE | {"dim": 4, "depth": 1}


def report(path: Path) -> str:
    """The page of the run that this file belongs to."""
    from holotrain.commands.report import _read, runs_at
    from holotrain.dashboard.page import page

    (run,) = runs_at(str(next(parent for parent in path.parents if parent.name == "run")))
    return page([_read(run), _read(run)]).encode()


def config_of_export(folder: Path) -> Path:
    save(folder, VIT, SIZES, build(VIT, SIZES))
    return folder / "config.json"


def checkpoint(folder: Path) -> Path:
    config = compose("fit", [*SMALL, "optimizer=sgd", "logger=none"])
    described = {"target": config.model.target, "arguments": {"dim": 16}, "facts": {"classes": 10}}
    described |= {"statistics": [[0.5], [0.25]], "class_names": [*"0123456789"]}
    held = {"state_dict": {"model.head.weight": torch.ones(2, 2)}, "callbacks": {}, "epoch": 1, "global_step": 3}
    held |= {"pytorch-lightning_version": "2.6.0", "optimizer_states": [{"state": {}}]}
    path = folder / "last.ckpt"
    torch.save(held | {checkpointed.KEY: checkpointed.run_metadata(config, {"model": "vit_tiny"}, described)}, path)
    return path


SUMMARY = {
    **{"command": "fit", "status": "completed", "overrides": ["model=vit_tiny", "seed=3"], "device": "cpu", "precision": "32"},
    **{"backward": "autograd", "synthesis": "none", "parameters": 9, "seconds": 1.5, "monitor": "val/loss", "mode": "min"},
    **{"metrics": {"val/loss": 0.5, "best/val/loss": None}, "epochs": 1, "steps": 2, "peak_memory_bytes": 2**20},
}


def summary_of_run(folder: Path) -> Path:
    path = folder / "run" / "summary.json"
    path.parent.mkdir()
    path.write_text(json.dumps(SUMMARY))
    return path


def config_of_run(folder: Path) -> Path:
    path = summary_of_run(folder).with_name("config.yaml")
    path.write_text(yaml.safe_dump({"model": {"dim": 3, "x": [1, {"a": None}]}, "seed": 3, "data": {"size": 0.5, "a": True}}))
    return path


def events_of_run(folder: Path) -> Path:
    with SummaryWriter(folder / "run" / "tensorboard") as writer:
        for step in range(3):
            writer.add_scalar("train/loss", 0.5, step)
        writer.add_text("samples", "once")
        writer.add_image("predictions", torch.zeros(3, 2, 2))
    return next((folder / "run" / "tensorboard").iterdir())


PRODUCT = Product(8, 4, 4, "all_gather", 2, torch.float32, torch.device("cpu"))


def groups(folder: Path) -> Path:
    path = tuner.path_of(folder, PRODUCT, "nvlink")
    tuner.write(path, PRODUCT, "nvlink", tuner.Tuned([4, 4], 0.5, 0.25, 0.75))
    return path


def tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(SubwordTokenizer.trained(["once upon a time"] * 3, 270).to_json())
    return path


def network(folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "hidden_size": 8, "attn_implementation": "sdpa", "sub": {"a": [1]}}))
    return path


@dataclass
class Read:
    """A kind of file.

    Args:
        make: writes an honest one into a folder.
        read: reads what was made.
        loads, dumps: take the content apart, so that values in it are changed too, and put it together; None: only bytes are.
        raises: what the reader says that it raises; it raises nothing else.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    loads: Callable[[bytes], Any] | None = json.loads
    dumps: Callable[[Any], bytes] = lambda value: json.dumps(value).encode()
    raises: type[Exception] | tuple[type[Exception], ...] = UserError


def packed(value: Any) -> bytes:
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


READERS = {
    "config.json of an export": Read(config_of_export, lambda path: load(path.parent), raises=ValueError),
    "checkpoint": Read(checkpoint, checkpointed.load, lambda content: torch.load(io.BytesIO(content)), packed),
    "summary.json": Read(summary_of_run, report),
    "config.yaml": Read(config_of_run, report, yaml.safe_load, lambda value: yaml.safe_dump(value).encode()),
    "events": Read(events_of_run, report, None),
    "groups": Read(groups, lambda path: tuner.read(path, PRODUCT, "nvlink"), raises=()),
    "tokenizer.json": Read(tokenizer, lambda path: known_tokenizer(str(path))),
    "config.json of transformers": Read(network, lambda path: network_of(str(path.parent)), raises=ValueError),
}


def nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


PLAIN = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.integers(2**63, 2**80), st.floats(), st.text(max_size=5)),
    *(st.just([]), st.just({}), st.lists(st.integers(-1, 3), max_size=4), st.dictionaries(st.text(max_size=3), st.none())),
    st.sampled_from(["${oc.env:HOME}", "os.system", "\ud800", "../..", "a\nb", "\x1b[31m", "[/red]", "x" * 5000, "1e999"]),
    st.sampled_from([{"_target_": "os.system"}, {"_target_": [1]}, [[[[]]]], 10**30, -(10**9), 2**31, 1e308]),
    st.builds(nested, st.sampled_from([50, 101, 400, 900]), st.sampled_from([list, dict])),
)


def places(value: Any, before: tuple = ()) -> list[tuple]:
    """Where values stand."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(place for key, each in inner for place in places(each, (*before, key)))]


@st.composite
def changed_values(draw: Callable, value: Any) -> Any:
    """The value with one to three others in it: replaced, taken away or under another name."""
    value = copy.deepcopy(value)
    # The deepest first: what is put in may be nested too deeply to be walked, and is never walked into.
    for place in sorted(draw(st.lists(st.sampled_from(places(value)), min_size=1, max_size=3)), key=len, reverse=True):
        if not place:
            return draw(PLAIN) if draw(st.booleans()) else value
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename"]))
        name, other = draw(st.text(max_size=4)), draw(PLAIN)
        with suppress(KeyError, IndexError, TypeError):  # an earlier change moved the place or took it away
            node = value
            for key in place[:-1]:
                node = node[key]
            if how == "remove":
                del node[place[-1]]
            elif how == "rename" and isinstance(node, dict):
                node[name] = node.pop(place[-1])
            else:
                node[place[-1]] = other
    return value


DEEP = [b"[" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"9" * 5000, b"\xff\xfe", b"\x00"]


@st.composite
def changed_bytes(draw: Callable, content: bytes) -> bytes:
    """The bytes with a bit flipped, a piece taken away, or another put in, one to three times."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(content)))
        how = draw(st.sampled_from(["flip", "cut", "insert", "overwrite", "deep"]))
        piece = draw(st.sampled_from(DEEP)) if how == "deep" else draw(st.binary(max_size=8))
        if how == "flip" and place < len(content):
            piece, rest = bytes([content[place] ^ 1 << draw(st.integers(0, 7))]), place + 1
        else:
            rest = {"cut": len(content) if draw(st.booleans()) else place + 9, "overwrite": place + len(piece)}.get(how, place)
            piece = b"" if how == "cut" else piece
        content = content[:place] + piece + content[rest:]
    return content


def check(reader: Read, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        reader.read(path)
    except reader.raises as error:
        assert "\n" not in str(error), error
        said = str(UserError(error))  # as a command prints it
        assert path.name in said or str(path.parent) in said, said


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_reader_returns_or_names_the_file(name, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    reader = READERS[name]
    path = reader.make(tmp_path / "files")
    honest = path.read_bytes()
    reader.read(path)
    ways = [changed_bytes(honest)]
    if reader.loads:
        value = reader.loads(honest)
        ways.append(changed_values(value).map(partial(written, reader)))
    left = sorted(tmp_path.rglob("*"))

    @settings(max_examples=200, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(st.one_of(*ways))
    def every(content):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check(reader, path, content)

    every()
    assert sorted(tmp_path.rglob("*")) == left


def written(reader: Read, value: Any) -> bytes:
    """As the honest file is; what it cannot hold becomes an empty file."""
    with suppress(UnicodeError, RecursionError, yaml.YAMLError, OverflowError):
        return reader.dumps(value)
    return b""
