"""The cache of tokens: built once, never half, and anew when anything changes that it depends on."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from holotrain.data import TextFiles
from holotrain.data.text import cache, module, tokenise
from holotrain.data.text.cache import built, lock
from holotrain.data.text.content import ContentHashes

FORK = multiprocessing.get_context("fork")  # as torch's workers: nothing is imported anew
OLD = 1_600_000_000


@pytest.fixture
def folder(tmp_path):
    """Three files of numbered lines."""
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.txt").write_text("".join(f"{name} line {number}\n" for number in range(200)))
        os.utime(tmp_path / "in" / f"{name}.txt", (OLD, OLD))
    return tmp_path / "in"


CHOSEN = {"unit": "line", "val_fraction": 0.05, "test_fraction": 0.05}


def prepared(folder, **options) -> TextFiles:
    data = TextFiles(f"{folder}/*.txt", **CHOSEN | {"cache_dir": str(folder.parent / "cache")} | options)
    data.prepare_data()
    return data


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def builds(monkeypatch):
    """How often something was tokenised."""
    made = []
    original = tokenise.tokenised
    monkeypatch.setattr(module, "tokenised", lambda *args: made.append(args[-1]) or original(*args))
    return made


def test_what_the_folder_holds(folder):
    data = prepared(folder)
    train = data.part("train")
    assert train.tokens.dtype == np.uint16 and train.offsets.dtype == np.int64 and train.labels is None
    assert np.all(train.tokens[train.offsets[1:] - 1] == data.tokenizer.end_id)
    assert (train.tokens == data.tokenizer.end_id).sum() == len(train.offsets) - 1 == data.counts["train"]["documents"]
    assert train.bytes == len(train.tokens) - len(train.offsets) + 1
    names = {"manifest.json", "tokenizer.json", *(f"{p}.{end}" for p in data.counts for end in ("bin", "offsets.npy"))}
    assert set(contents(data._folder)) == names
    assert sum(count["bytes"] for count in data.counts.values()) == sum(len(f.read_bytes()) - 200 for f in folder.iterdir())


def test_nothing_changed_is_not_built_again(folder, builds):
    for _ in range(3):
        prepared(folder)
        prepared(folder, seed=1, context=7, batch_size=3)
    assert len(builds) == 1
    for path in folder.iterdir():
        os.utime(path)  # another time, the same content
    prepared(folder)
    assert len(builds) == 1


def test_everything_that_matters_is_built_anew(folder, builds):
    options = [{}, {"unit": "file"}, {"val_fraction": 0.3}, {"tokenizer": "bpe", "vocab_size": 280}]
    folders = {prepared(folder, **chosen)._folder for chosen in options}
    (folder / "a.txt").write_text((folder / "a.txt").read_text().replace("line 7\n", "line 8\n"))  # of the same size
    folders.add(prepared(folder)._folder)
    (folder / "d.txt").write_text("one more\n")
    folders.add(prepared(folder)._folder)
    assert len(folders) == len(builds) == 6


def test_an_unchanged_source_is_not_read_again(folder, monkeypatch):
    prepared(folder)
    path = folder / "a.txt"
    index = json.loads((folder.parent / "cache" / "index.json").read_text())
    assert set(index) >= {str(path) for path in folder.iterdir()}
    hashes = ContentHashes(folder.parent / "cache" / "index.json")
    before = hashes.of(path)
    path.write_text(path.read_text()[::-1])
    os.utime(path, (OLD, OLD))  # size and time as they were: nothing shows
    assert hashes.of(path) == before
    os.utime(path, (OLD + 1, OLD + 1))
    assert hashes.of(path) != before


def test_a_tokenizer_that_is_given_goes_before_the_one_asked_for(folder):
    trained = prepared(folder, tokenizer="bpe", vocab_size=280)
    given = prepared(folder, tokenizer="byte", tokenizer_json=trained.tokenizer.to_json())
    assert given.tokenizer.fingerprint == trained.tokenizer.fingerprint
    assert contents(given._folder)["train.bin"] == contents(trained._folder)["train.bin"]
    assert given.vocab_size == 280 and TextFiles("x").vocab_size == 260


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-2])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train.bin", "val.offsets.npy", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", [cut_short, flipped, Path.unlink])
def test_what_is_damaged_is_built_again(folder, builds, name, damage):
    made = prepared(folder)._folder
    right = contents(made)
    damage(made / name)
    if name == "manifest.json" and damage is flipped:
        (made / name).write_text("{}")
    again = prepared(folder)
    assert len(builds) == 2 and contents(again._folder) == right


def build(folder, store, stop, report):
    """In another process: builds the cache; with ``stop``, reports and stands still in the middle of tokenising."""
    flush = tokenise.Writer.flush

    def stand_still(writer):
        flush(writer)
        writer._file.flush()
        report.send("written")
        time.sleep(600)

    if stop:
        tokenise.BATCH = 1000
        tokenise.Writer.flush = stand_still
    report.send(str(prepared(folder, cache_dir=str(store))._folder))


def start(folder, store, stop=False):
    """The process, and what it reports."""
    reports, report = FORK.Pipe(duplex=False)
    process = FORK.Process(target=build, args=(folder, store, stop, report), daemon=True)
    process.start()
    report.close()
    return process, reports


def reported(reports) -> str:
    assert reports.poll(100), "the other process does not answer"
    return reports.recv()


def test_killed_while_tokenising_it_leaves_nothing_that_is_used(folder, tmp_path):
    store = tmp_path / "killed"
    process, reports = start(folder, store, stop=True)
    assert reported(reports) == "written"
    os.kill(process.pid, signal.SIGKILL)
    process.join(100)
    assert process.exitcode == -signal.SIGKILL
    left = list(store.glob(".*.building.*"))
    assert len(left) == 1 and sum(path.stat().st_size for path in left[0].iterdir()) > 0
    whole = prepared(folder)
    after = prepared(folder, cache_dir=str(store))
    assert contents(after._folder) == contents(whole._folder)
    assert not left[0].exists()
    assert [path.name for path in store.iterdir() if path.is_dir()] == [after._folder.name]


def test_what_another_killed_build_left_is_cleared_and_one_under_way_is_not(tmp_path):
    store = tmp_path / "cache"
    (store / ".dead.building.x").mkdir(parents=True)
    (store / ".alive.building.x").mkdir()
    with lock(store / ".alive.lock") as held:
        assert held
        built(store, "key", lambda folder: {}, ContentHashes(store / "index.json"))
    assert {path.name for path in store.iterdir() if path.is_dir()} == {"key", ".alive.building.x"}


def test_two_processes_at_once_share_one_build(folder, tmp_path):
    store = tmp_path / "shared"
    started = [start(folder, store) for _ in range(2)]
    found = [reported(reports) for _, reports in started]
    for process, _ in started:
        process.join(100)
    assert [process.exitcode for process, _ in started] == [0, 0]
    assert found == [str(prepared(folder, cache_dir=str(store))._folder)] * 2
    assert contents(Path(found[0])) == contents(prepared(folder)._folder)
    assert not list(store.glob(".*.building.*"))


@pytest.mark.parametrize("locks", [True, False])
def test_builders_that_meet_end_with_one_whole_folder(tmp_path, monkeypatch, locks):
    """With locks the second waits and uses the first's; on a file system without them both build, and one is kept."""
    if not locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    store, together, made = tmp_path / "cache", threading.Barrier(2, timeout=1 if locks else 60), []

    def build(folder):
        made.append(folder)
        (folder / "x.bin").write_bytes(b"x")
        try:
            together.wait()
        except threading.BrokenBarrierError:
            assert locks
        return {"by": "one of us"}

    def run():
        assert built(store, "key", build, ContentHashes(store / "index.json")) == store / "key"

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == (1 if locks else 2)
    assert cache.intact(store / "key", ContentHashes(store / "index.json"))
    assert [path.name for path in store.iterdir() if path.is_dir()] == ["key"]


def test_a_build_that_fails_leaves_nothing(tmp_path):
    def build(folder):
        (folder / "x").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        built(tmp_path, "key", build, ContentHashes(tmp_path / "index.json"))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_a_long_tokenising_says_how_far_it_is(folder, monkeypatch, capsys):
    monkeypatch.setattr("holotrain.data.text.progress.EVERY", -1.0)
    prepared(folder)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all(line.startswith("tokenising: 0 of 0 MB") for line in lines)
    monkeypatch.undo()
    prepared(folder, val_fraction=0.1)
    assert capsys.readouterr().out == ""


def test_who_comes_with_the_trained_tokenizer_finds_its_tokens(folder, builds):
    """As every command does that starts from a checkpoint."""
    trained = prepared(folder, tokenizer="bpe", vocab_size=270)
    again = prepared(folder, tokenizer_json=trained.tokenizer.to_json())
    assert len(builds) == 1 and np.array_equal(again.part("val").tokens, trained.part("val").tokens)
    (folder / "a.txt").write_text("another text\n" * 200)
    changed = prepared(folder, tokenizer_json=trained.tokenizer.to_json())
    assert len(builds) == 2 and len(changed.part("train").tokens) != len(trained.part("train").tokens)
