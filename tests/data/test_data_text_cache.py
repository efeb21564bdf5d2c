"""The cache of tokens: built once, never half, and anew when anything changes that it depends on."""

import os

import pyarrow as pa
import pytest

from holotrain.data import HubText, TextFiles
from holotrain.data.text import tokenise
from holotrain.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Three files of numbered lines."""
    (tmp_path / "in").mkdir()
    for name in "abc":
        (tmp_path / "in" / f"{name}.txt").write_text("".join(f"{name} line {number}\n" for number in range(200)))
    return tmp_path / "in"


CHOSEN = {"unit": "line", "val_fraction": 0.05, "test_fraction": 0.05}


def prepared(folder, **options) -> TextFiles:
    data = TextFiles(f"{folder}/*.txt", **CHOSEN | {"cache_dir": str(folder.parent / "cache")} | options)
    data.prepare_data()
    return data


def tokens(data) -> dict[str, list[int]]:
    return {part: data.part(part).tokens[:].tolist() for part in ("train", "val", "test")}


@pytest.fixture
def built(monkeypatch):
    """The parts that were tokenised: each once, if nothing was in the cache."""
    made = []
    original = tokenise.DocumentRules.documents

    def documents(self, batch, part, first):
        made.append(part)
        return original(self, batch, part, first)

    monkeypatch.setattr(tokenise.DocumentRules, "documents", documents)
    return made


def test_everything_that_matters_is_built_anew(folder, built):
    def anew(**options) -> bool:
        built.clear()
        prepared(folder, **options)
        return bool(built)

    first = tokens(prepared(folder))
    assert set(built) == {"train", "val", "test"}
    assert not anew(seed=1, context=7, batch_size=3) and tokens(prepared(folder)) == first
    changes = [{"unit": "file"}, {"val_fraction": 0.3}, {"tokenizer": "bpe", "vocab_size": 280}]
    assert all(anew(**options) for options in changes) and not any(anew(**options) for options in changes)
    (folder / "a.txt").write_text((folder / "a.txt").read_text().replace("line 7\n", "line 8\n"))  # of the same size
    assert anew() and not anew()
    (folder / "d.txt").write_text("one more\n")
    assert anew() and not anew()


@pytest.mark.parametrize("named", ["a.txt", "*.txt", "."])
def test_a_change_of_the_time_alone_is_seen(folder, built, named):
    path = folder / "a.txt"
    for changed in (True, False, True):
        HubText(str(folder / named), cache_dir=str(folder.parent / "hub"), **CHOSEN).prepare_data()
        assert bool(built) == changed
        built.clear()
        if not changed:
            stat = path.stat()
            path.write_text(path.read_text().replace("line 7\n", "line 8\n"))
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 10**4))


def test_several_processes_tokenise_the_same(folder):
    assert tokens(prepared(folder)) == tokens(prepared(folder, num_proc=2, cache_dir=str(folder.parent / "two")))


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_offsets_out_of_the_file(path):
    with pa.memory_map(str(path)) as file:
        stored = pa.ipc.open_stream(file).read_all()
    offsets = stored.column("tokens").chunk(0).offsets.to_numpy()[: len(stored) + 1]
    content, found = path.read_bytes(), offsets.astype("<i8").tobytes()
    assert content.count(found) == 1
    path.write_bytes(content.replace(found, (offsets * 2**30).astype("<i8").tobytes()))


@pytest.mark.parametrize(
    ("damage", "files"),
    [(cut, "tokens-*.arrow"), (with_offsets_out_of_the_file, "tokens-*.arrow"), (cut, "generator/**/*.arrow")],
)
def test_a_damaged_cache_is_refused_in_one_line(folder, damage, files):
    options = {"tokenizer": "bpe", "vocab_size": 270}
    prepared(folder, **options)
    for path in (folder.parent / "cache").glob(files):
        damage(path)
    with pytest.raises(UserError, match=r"^data: cannot read the text or its cache; if .*cache is damaged, delete it \(.*\)$"):
        prepared(folder, **options)
