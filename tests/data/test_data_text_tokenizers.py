"""Tokenizers: text comes back, special tokens are never text, and all of it travels as a string."""

import json
import multiprocessing
import os
import random

import numpy as np
import pytest
from tokenizers import Tokenizer as Encoder
from tokenizers import models, pre_tokenizers

from holotrain.data.tokenizers import ByteTokenizer, SubwordTokenizer, tokenizer_from_json, tokenizer_named
from holotrain.errors import UserError

SAMPLES = [
    "",
    "a",
    "def f(x):\n    return x\n",
    "naïve café — 日本語 🧪\r\n\t",
    "<s></s><pad><mask> &amp;",
    "\x00\x7f\ufeff",
    " " * 9,
]


def texts() -> list[str]:
    """Samples, and random text of every plane of Unicode."""
    rng = random.Random(0)
    planes = [(0x20, 0x7F), (0x80, 0x800), (0x800, 0xD800), (0x10000, 0x11000)]
    drawn = ["".join(chr(rng.randrange(*rng.choice(planes))) for _ in range(rng.randrange(40))) for _ in range(50)]
    return SAMPLES + drawn


@pytest.fixture(scope="module")
def bpe() -> SubwordTokenizer:
    return SubwordTokenizer.trained(["the quick brown fox <s> jumps\n" * 3, "def f(x):\n    return the fox\n"] * 5, 300)


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request, bpe):
    return ByteTokenizer() if request.param == "bytes" else bpe


def test_text_comes_back_without_special_tokens(tokenizer):
    specials = set(tokenizer.specials.values())
    assert len(specials) == 4 and max(specials) < tokenizer.vocab_size
    assert specials == {tokenizer.pad_id, tokenizer.start_id, tokenizer.end_id, tokenizer.mask_id}
    for text in texts():
        ids = tokenizer.encode(text)
        assert ids.dtype == tokenizer.dtype == np.uint16
        assert not specials & set(ids.tolist())
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([tokenizer.start_id, *ids.tolist(), tokenizer.end_id, tokenizer.pad_id]) == text
        assert np.array_equal(tokenizer.encode(text.encode()), ids)
        assert tokenizer.byte_lengths[ids].sum() == len(text.encode())
    assert not tokenizer.byte_lengths[[*specials]].any()
    ids, lengths = tokenizer.encode_batch(texts())
    parts = np.split(ids, np.cumsum(lengths)[:-1])
    assert [part.tolist() for part in parts] == [tokenizer.encode(text).tolist() for text in texts()]


def test_tokenizers_travel_as_text(tokenizer):
    copy = tokenizer_from_json(tokenizer.to_json())
    assert type(copy) is type(tokenizer)
    for name in ("vocab_size", "specials", "fingerprint"):
        assert getattr(copy, name) == getattr(tokenizer, name)
    assert copy.encode("the fox 🧪").tolist() == tokenizer.encode("the fox 🧪").tolist()


def test_training_is_a_function_of_the_texts(bpe):
    with pytest.raises(ValueError, match="vocab_size must be at least"):
        SubwordTokenizer.trained(SAMPLES, ByteTokenizer.vocab_size - 1)
    assert SubwordTokenizer.trained(SAMPLES, ByteTokenizer.vocab_size).vocab_size == ByteTokenizer.vocab_size
    lines = [f"word{number % 7} other{number % 3} the end\n" for number in range(50)]
    one, other = SubwordTokenizer.trained(lines, 320), SubwordTokenizer.trained(lines[::-1], 320)
    assert one.to_json() == other.to_json()
    assert one.fingerprint != bpe.fingerprint != ByteTokenizer().fingerprint
    assert one.vocab_size <= 320 and len(one.encode("the end")) < len("the end")


def word_level(path, special=(), ordinary=()):
    words = ["the", "fox", "[UNK]", *ordinary]
    encoder = Encoder(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    encoder.pre_tokenizer = pre_tokenizers.Whitespace()
    encoder.add_special_tokens(list(special))
    encoder.enable_truncation(1)
    path.write_text(encoder.to_str())
    return path


def test_a_file_keeps_its_own_special_tokens_and_gets_what_it_lacks(tmp_path):
    tokenizer = tokenizer_named(str(word_level(tmp_path / "t.json", ["[CLS]", "[PAD]"])))
    tokenizer.add_mask()
    assert (tokenizer.start_id, tokenizer.pad_id) == (3, 4)
    assert {tokenizer.end_id, tokenizer.mask_id} == {5, 6} and tokenizer.vocab_size == 7
    assert tokenizer.encode("the fox the").tolist() == [0, 1, 0]  # not cut short, as the file would
    assert tokenizer_from_json(tokenizer.to_json()).specials == tokenizer.specials


def test_the_vocabulary_of_a_causal_model_stays_as_it_is(tmp_path):
    """Its end token stands for padding and start, as transformers are told to do; the settings of its model name others."""
    tokenizer = tokenizer_named(str(word_level(tmp_path / "tokenizer.json", ["<|endoftext|>", "<|turn|>"])))
    assert tokenizer.vocab_size == 5 and tokenizer.specials == {"pad": 3, "start": 3, "end": 3}
    with pytest.raises(UserError, match="it has no mask token"):
        _ = tokenizer.mask_id
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|turn|>"}))
    tokenizer = tokenizer_named(str(tmp_path / "tokenizer.json"))
    assert tokenizer.vocab_size == 5 and tokenizer.specials == {"pad": 4, "start": 3, "end": 3} and tokenizer.chat is None
    assert tokenizer_from_json(tokenizer.to_json()).specials == tokenizer.specials


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bite", None, "'bite' is not one of byte, bpe, "),
        ("gone.json", None, r"cannot read .*gone\.json \(No such file"),
        ("t.json", b"{", r"t\.json is not a tokenizer\.json"),
        ("t.json", b"\xff", r"cannot read t\.json \(.* byte 0xff in position 0"),
    ],
)
def test_what_is_no_tokenizer_is_refused_in_one_line(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        tokenizer_named(name)
    assert "\n" not in str(error.value)


def test_a_forked_process_reads_on_by_itself():
    """The threads of the library are not there, and it would wait for them."""
    tokenizer, texts = SubwordTokenizer.trained(["some words"] * 9, 300), ["some words"] * 99
    expected, _ = tokenizer.encode_batch(texts)

    def read():
        os._exit(0 if (tokenizer.encode_batch(texts)[0] == expected).all() else 1)

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    process.join(60)
    status = process.exitcode
    process.kill()
    assert status is not None, "it waits for threads"
    assert status == 0
