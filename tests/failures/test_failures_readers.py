"""Whatever stands in a file, its reader returns or says in one line which file it cannot read."""

import copy
import io
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import IMAGE
from small_run import SMALL

from holotrain.config import checkpointed
from holotrain.config.command_line import compose
from holotrain.data.tokenizers import SubwordTokenizer, tokenizer_named
from holotrain.errors import UserError
from holotrain.models.huggingface_files import network_of
from holotrain.models.saved import build, load, save

VIT = "holotrain.models.ViT"
SIZES = IMAGE | {"dim": 4, "depth": 1}


def export(folder: Path) -> Path:
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


def tokenizer(folder: Path) -> Path:
    path = folder / "tokenizer.json"
    path.write_text(SubwordTokenizer.trained(["once upon a time"] * 3, 270).to_json())
    return path


def network(folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "hidden_size": 8, "attn_implementation": "sdpa", "sub": {"a": [1]}}))
    return path


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_json(value: Any) -> bytes:
    return json.dumps(value).encode()


READERS = {
    "config.json of an export": (export, lambda path: load(path.parent), json.loads, in_json),
    "checkpoint": (checkpoint, checkpointed.load, lambda content: torch.load(io.BytesIO(content)), saved),
    "tokenizer.json": (tokenizer, lambda path: tokenizer_named(str(path)), json.loads, in_json),
    "config.json of transformers": (network, lambda path: network_of(str(path.parent)), json.loads, in_json),
}
"""What writes an honest file, what reads it, and what takes its content apart and puts it together."""


def nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


PLAIN = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.integers(2**63, 2**80), st.floats(), st.text(max_size=5), st.just([])),
    st.sampled_from(["${oc.env:HOME}", "os.system", "\ud800", "../..", "a\nb", "[/red]", "x" * 5000, "1e999", 10**30, 1e308]),
    st.sampled_from([{}, {"_target_": "os.system"}, {"_target_": [1]}, [[[[]]]], nested(101, list), nested(900, dict)]),
)


def places(value: Any, before: tuple = ()) -> list[tuple]:
    """Where values stand."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [before, *(place for key, each in inner for place in places(each, (*before, key)))]


@st.composite
def changed_values(draw: Callable, value: Any) -> Any:
    """With one of its values replaced or taken away."""
    value = copy.deepcopy(value)
    *way, name = draw(st.sampled_from(places(value)[1:]))
    node = value
    for key in way:
        node = node[key]
    if draw(st.integers(0, 3)):
        node[name] = draw(PLAIN)
    else:
        del node[name]
    return value


@st.composite
def changed_bytes(draw: Callable, content: bytes) -> bytes:
    """Cut off, or with a bit flipped or a piece put in."""
    place = draw(st.integers(0, len(content) - 1))
    how = draw(st.sampled_from(["flip", "cut", "insert"]))
    if how == "flip":
        return content[:place] + bytes([content[place] ^ 1 << draw(st.integers(0, 7))]) + content[place + 1 :]
    piece = draw(st.sampled_from([b"[" * 5000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b"9" * 5000, b"\xff\xfe", b"\x00"]))
    return content[:place] + (piece + content[place:] if how == "insert" else b"")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_a_reader_returns_or_names_the_file(name, tmp_path):
    make, read, loads, dumps = READERS[name]
    path = make(tmp_path)
    read(path)
    honest = path.read_bytes()

    def written(value: Any) -> bytes:
        """What the format cannot hold becomes an empty file."""
        with suppress(UnicodeError, RecursionError, OverflowError):
            return dumps(value)
        return b""

    @settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(st.one_of(changed_bytes(honest), changed_values(loads(honest)).map(written)))
    def check(content):
        path.write_bytes(content)
        try:
            read(path)
        except (UserError, ValueError) as error:
            assert "\n" not in str(error), error
            message = str(UserError(error))  # as a command prints it
            assert path.name in message or str(path.parent) in message, message

    left = sorted(tmp_path.rglob("*"))
    check()
    assert sorted(tmp_path.rglob("*")) == left
