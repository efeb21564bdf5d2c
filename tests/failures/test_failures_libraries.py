"""Models, tokenizers and tables at which a library would fail in its own way, or never end: each is refused in one line."""

import json
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from holotrain.data.hub import WIDEST, read_files
from holotrain.data.text.learned import chat_to_answer, chat_writer
from holotrain.data.tokenizers import tokenizer_from_json, with_chat
from holotrain.errors import UserError
from holotrain.models import HuggingFace, Timm, checkpoint_files
from holotrain.targets import blaming

GPT = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 260, "n_positions": 32}
MODELS = [{"n_head": 0}, {"vocab_size": 0}, {"n_embd": -16}, {"activation_function": "none"}]
MODELS += [{"text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}]


@pytest.mark.parametrize("entries", MODELS, ids=str)
def test_a_network_that_cannot_be_built_is_named(entries):
    with pytest.raises(ValueError, match=r"^(config: |the network of a/model cannot be built: )[^\n]+$"):
        HuggingFace("a/model", "causal_lm", config=GPT | entries)


@pytest.mark.parametrize("entries", [{"num_heads": 0}, {"act_layer": "none"}], ids=str)
def test_a_model_of_timm_that_cannot_be_built_is_named(entries):
    with pytest.raises(ValueError, match=r"^timm: [^\n]+$"):
        Timm("vit_tiny_patch16_224", 3, 8, 1, {"depth": 1, "embed_dim": 32, "num_heads": 2, "patch_size": 4} | entries)


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "[UNK]": 1}, "unk_token": "[UNK]"}
HONEST = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
HONEST |= {"pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None, "model": WORDS}
ENDLESS = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a " * 100}
PIECES = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##"}
TOKENIZERS = {
    "a regular expression without end": ({"pre_tokenizer": ENDLESS}, "cannot encode a text: .*retry-limit"),
    "pieces of no characters": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "cannot encode a text: chunk size"),
    "no unknown token": ({"model": PIECES | {"max_input_chars_per_word": 9}}, "cannot encode a text: .*Missing .UNK. token"),
    "a normaliser that panics": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "is not a tokenizer"),
    "an id without end": ({"model": WORDS | {"vocab": {"a": 4_000_000_000, "[UNK]": 1}}}, "an id is 4000000000, and it has"),
    "a longer text": ({"normalizer": LONGER}, "it makes 4001 tokens of 41 bytes"),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_that_fails_is_named(case):
    entries, said = TOKENIZERS[case]
    with pytest.raises(UserError, match=rf"^data.tokenizer: a.json [^\n]*{said}[^\n]*$"):
        tokenizer_from_json(json.dumps(HONEST | entries), "a.json").encode("a" * 40 + "b")


TEMPLATES = {"{{ 'x' * 2000000 }}": "it makes 2000000 characters", "{% for": "cannot write", "{{ 1 // 0 }}": "cannot write"}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_fails_or_writes_too_much_is_refused(template):
    tokenizer = tokenizer_from_json(with_chat(json.dumps(HONEST), {"template": template, "tokens": {}}))
    with pytest.raises(UserError, match=rf"^generate: the chat template of the tokenizer [^\n]*{TEMPLATES[template]}"):
        chat_to_answer([{"role": "user", "content": "Hi"}], tokenizer, chat_writer(tokenizer))


def test_a_signal_and_the_end_of_a_program_blame_no_file():
    for ending in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(ending), blaming("a.json"):
            raise ending


def write_row(path: Path, names: list[str]) -> None:
    if path.suffix == ".parquet":
        pq.write_table(pa.table({name: ["a"] for name in names}), path)
    else:
        commas = ",".join(names) + "\n" + ",".join("a" for _ in names)
        path.write_text(commas if path.suffix == ".csv" else json.dumps(dict.fromkeys(names, "a")))


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_table_of_too_many_columns_is_refused(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    write_row(path, [f"c{number}" for number in range(WIDEST + 1)])
    with pytest.raises(UserError, match=f"a.{suffix} has {WIDEST + 1} columns; at most {WIDEST} are read"):
        read_files("json" if suffix == "jsonl" else suffix, {"a": [path]}, tmp_path / "cache")


def test_a_list_of_several_lines_with_many_colons_is_read(tmp_path):
    rows = [{"text": "a: " * (WIDEST + 1)}] * 2
    (tmp_path / "a.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]")
    assert [*read_files("json", {"a": [tmp_path / "a.json"]}, tmp_path / "cache")["a"]] == rows


def test_a_checkpoint_of_too_many_tensors_is_refused_before_it_is_read(tmp_path, monkeypatch):
    torch.save({"a": torch.zeros(1), "b": torch.zeros(1)}, tmp_path / "a.ckpt")
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it is read"))
    monkeypatch.setattr("safetensors.torch.load_file", lambda *_: pytest.fail("it is read"))
    with zipfile.ZipFile(tmp_path / "a.ckpt") as container:
        monkeypatch.setattr(checkpoint_files, "MOST_RECORDS", len(container.infolist()) - 1)
    monkeypatch.setattr(checkpoint_files, "MOST_HEADER", 8)
    with pytest.raises(ValueError, match=r"a\.ckpt is not a readable checkpoint"):
        checkpoint_files.load(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="it has more than 8 bytes of names"):
        checkpoint_files.read_weights(tmp_path / "a.safetensors")
