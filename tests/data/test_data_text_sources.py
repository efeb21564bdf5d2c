"""Text files in their true formats, the documents in them, which are held out, and what cannot be read."""

import json
import sys
from itertools import chain, pairwise

import pyarrow
import pyarrow.parquet
import pytest

from holotrain.data import TextFiles
from holotrain.data.text import readers
from holotrain.data.text.parts import held_out_files
from holotrain.data.text.readers import Reader
from holotrain.data.text.sources import Globbed, SourceFile, StandardLibrary
from holotrain.errors import UserError


def texts_of(path, **options) -> list:
    return list(Reader(**options).documents(path))


def module(tmp_path, files, **options) -> TextFiles:
    data = TextFiles(files, **{"cache_dir": str(tmp_path / "cache"), **options})
    data.setup()
    return data


def documents(data, part) -> list[str]:
    corpus = data.part(part)
    bounds = corpus.offsets.tolist()
    return [data.tokenizer.decode(corpus.tokens[a:b]) for a, b in pairwise(bounds)]


def one_line(call, match) -> str:
    with pytest.raises(UserError, match=match) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_units_of_a_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffone\r\ntwo\n \t\n\n  three é\nfour".encode())
    assert texts_of(path) == [("one\r\ntwo\n \t\n\n  three é\nfour", None)]
    assert [text for text, _ in texts_of(path, unit="paragraph")] == ["one\r\ntwo", "  three é\nfour"]
    assert [text for text, _ in texts_of(path, unit="line")] == ["one", "two", "  three é", "four"]


@pytest.mark.parametrize("block", [1, 7, 64])
def test_a_text_read_in_blocks_is_the_same(tmp_path, monkeypatch, block):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {number} é\n" + "\n" * (number % 3) for number in range(40)), encoding="utf-8")
    whole = {unit: texts_of(path, unit=unit) for unit in readers.UNITS}
    assert len(whole["line"]) == 40 and len(whole["paragraph"]) == 27
    monkeypatch.setattr(readers, "BLOCK", block)
    assert {unit: texts_of(path, unit=unit) for unit in readers.UNITS} == whole
    path.write_bytes(path.read_bytes() + b"bad: \xe9.")
    place = path.stat().st_size - 2
    one_line(lambda: texts_of(path), f"a.txt is not UTF-8: byte {place} is 0xe9; data.on_error=skip")


def test_rows_of_jsonl_and_parquet(tmp_path):
    rows = [
        {"text": "first\n\nsecond", "kind": "x", "n": 1},
        {"text": " ", "kind": "y", "n": 2},
        {"text": "é", "kind": "y", "n": 3},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=1)
    for name in ("a.jsonl", "a.parquet"):
        assert texts_of(tmp_path / name) == [("first\n\nsecond", None), ("é", None)]
        found = texts_of(tmp_path / name, unit="paragraph", label="n")
        assert found == [("first", "1"), ("second", "1"), ("é", "3")]


def write(tmp_path, name, content) -> str:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', {}, r"a\.jsonl:2 is not JSON"),
        ("a.jsonl", b'{"text": "\xff"}\n', {}, r"a\.jsonl:1 is not JSON"),
        ("a.jsonl", b"[1]\n", {}, r"a\.jsonl:1 is not a JSON object"),
        ("a.jsonl", b'{"txt": "a", "n": 1}\n', {}, r"a\.jsonl:1 has no field 'text'; it has txt, n\. Did you mean 'txt'"),
        ("a.jsonl", b'{"text": 5}\n', {}, r"a\.jsonl:1: field 'text' is not text: 5"),
        ("a.jsonl", b'{"text": "a", "k": null}\n', {"label": "k"}, r"a\.jsonl:1: field 'k' is not a label: None"),
        ("a.jsonl", b'{"text": "a"}\n', {"label": "k"}, r"a\.jsonl:1 has no field 'k'"),
        ("a.txt", b"ab\xff", {}, r"a\.txt is not UTF-8: byte 2 is 0xff"),
        ("a.parquet", b"PAR1 no", {}, r"cannot read .*a\.parquet"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line_or_counted(tmp_path, name, content, options, message):
    path = tmp_path / name
    path.write_bytes(content)
    one_line(lambda: texts_of(path, **options), message + ".*on_error=skip")
    reader = Reader(on_error="skip", **options)
    assert len(list(reader.documents(path))) == (name == "a.jsonl" and content.count(b"\n") - 1)
    assert reader.skipped == 1


def test_a_column_that_is_missing_is_named_with_the_nearest(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"Text": ["a"], "kind": ["b"]}), tmp_path / "a.parquet")
    one_line(lambda: texts_of(tmp_path / "a.parquet"), "no column 'text'; it has Text, kind. Did you mean 'Text'")
    one_line(lambda: texts_of(tmp_path / "a.parquet", text="Text", label="kinds"), "no column 'kinds'.* Did you mean 'kind'")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = write(tmp_path, "a.parquet", b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    one_line(lambda: module(tmp_path, path), r"a\.parquet needs pyarrow; pip install 'holotrain\[parquet\]'")


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
def test_damaged_files_are_left_out_and_counted_in_the_manifest(tmp_path, tokenizer):
    for number in range(12):
        write(tmp_path, f"{number}.txt", b"good text %d" % number)
    for number in range(4):
        write(tmp_path, f"bad{number}.txt", b"good until here \xff")
    pattern = str(tmp_path / "*.txt")
    one_line(lambda: module(tmp_path, pattern), r"bad\d.txt is not UTF-8: byte 16")
    data = module(tmp_path, pattern, on_error="skip", val_fraction=0.2, test_fraction=0.2, tokenizer=tokenizer)
    assert data.manifest["skipped"] == 4
    assert sum(data.counts[part]["documents"] for part in data.counts) == 12


def files(count, groups=3) -> list[SourceFile]:
    return [SourceFile(None, f"{number % groups}/{number}.txt", str(number % groups)) for number in range(count)]


def test_held_out_files_do_not_depend_on_order_and_come_from_every_group():
    given = files(60)
    parts = dict(zip([file.name for file in given], held_out_files(given, 0.1, 0.1), strict=True))
    turned = given[::-1]
    assert parts == dict(zip([file.name for file in turned], held_out_files(turned, 0.1, 0.1), strict=True))
    for part in ("val", "test"):
        assert [sum(parts[f.name] == part for f in given if f.group == group) for group in "012"] == [2, 2, 2]
    more = [*given, SourceFile(None, "1/new.txt", "1")]
    after = dict(zip([file.name for file in more], held_out_files(more, 0.1, 0.1), strict=True))
    assert sum(after[name] != part for name, part in parts.items()) <= 2


@pytest.mark.parametrize(("count", "groups"), [(3, 1), (3, 3), (5, 5), (20, 20), (41, 7)])
def test_no_part_is_left_without_a_file(count, groups):
    assert set(held_out_files(files(count, groups), 0.05, 0.05)) == {"train", "val", "test"}


def test_files_that_patterns_hold_out(tmp_path):
    for name in ("a/1", "a/2", "b/1", "b/2"):
        write(tmp_path, f"{name}.txt", name.encode())
    data = module(
        tmp_path, str(tmp_path / "**/*.txt"), val_files=str(tmp_path / "a/2.txt"), test_files=[str(tmp_path / "b/2*")]
    )
    assert [documents(data, part) for part in ("train", "val", "test")] == [["a/1", "b/1"], ["a/2"], ["b/2"]]


def test_few_files_are_held_out_by_document_and_equal_ones_never_on_both_sides(tmp_path):
    lines = [f"line {number % 150}" for number in range(300)]
    pattern = write(tmp_path, "a.txt", "\n".join(lines).encode())
    data = module(tmp_path, pattern, unit="line", val_fraction=0.2, test_fraction=0.2)
    parts = {part: documents(data, part) for part in ("train", "val", "test")}
    assert sorted(chain(*parts.values())) == sorted(lines)
    assert all(len(set(part)) > 10 for part in parts.values())
    assert not set(parts["train"]) & set(parts["val"]) and not set(parts["train"]) & set(parts["test"])
    write(tmp_path, "a.txt", "\n".join(lines[::-1]).encode())
    turned = module(tmp_path, pattern, unit="line", val_fraction=0.2, test_fraction=0.2)
    assert {part: sorted(documents(turned, part)) for part in parts} == {part: sorted(found) for part, found in parts.items()}


def test_labels_of_folders_and_fields(tmp_path):
    for number in range(12):
        write(tmp_path, f"{'dog' if number % 3 else 'cat'}/{number}.txt", b"text %d" % number)
    options = {"val_fraction": 0.2, "test_fraction": 0.2, "layout": "documents"}
    data = module(tmp_path, str(tmp_path / "*/*.txt"), label="folder", **options)
    assert data.class_names == ["cat", "dog"] and data.num_classes == 2
    labels = {text: int(label) for text, label in zip(documents(data, "train"), data.part("train").labels, strict=True)}
    assert labels and labels == {text: int(int(text.split()[1]) % 3 > 0) for text in labels}
    rows = [json.dumps({"text": f"row {number}", "k": [10, 9, "2"][number % 3]}) for number in range(90)]
    data = module(tmp_path, write(tmp_path, "a.jsonl", "\n".join(rows).encode()), label="k", **options)
    assert data.class_names == ["2", "9", "10"]


def test_classes_that_cannot_be_learned_are_refused(tmp_path):
    one = write(tmp_path, "a.jsonl", b'{"text": "a", "k": "x"}\n')
    two = write(tmp_path, "b.jsonl", b'{"text": "b", "k": "y"}\n')
    three = write(tmp_path, "c.jsonl", b'{"text": "c", "k": "x"}\n')
    one_line(lambda: module(tmp_path, one, label="k", val_files=two, test_files=three), "class 'y' is held out, but")
    four = write(tmp_path, "d.jsonl", b'{"text": "d", "k": "x"}\n')
    one_line(lambda: module(tmp_path, one, label="k", val_files=four, test_files=three), "only one class, 'x'")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": "gone/*.txt"}, r"data\.files: no file matches 'gone/\*\.txt'"),
        ({"files": "*.txt", "val_files": "gone.txt"}, r"data\.val_files: no file matches 'gone.txt'"),
        ({"files": "."}, r"data\.files: \. is a folder; its files are \*\*/\*\.txt"),
        ({"files": []}, r"data\.files: no pattern is given"),
        ({"files": "blank.txt"}, "no text in any of the 1 files"),
        ({"files": "a.txt"}, r"no text is left for (val|test|train) \(documents: 1, files: 1\)"),
        ({"files": "a.txt", "tokenizer_json": "{}"}, "tokenizer_json is not a tokenizer.json"),
        ({"files": "a.txt", "cache_dir": "a.txt"}, r"data\.cache_dir: cannot write a\.txt"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "a.txt", b"text")
    write(tmp_path, "blank.txt", b" \n\n")
    one_line(lambda: module(tmp_path, **options), message)


def test_the_standard_library_is_python_files_and_its_largest_packages_are_classes():
    source = StandardLibrary(classes=5)
    found = {file.name: file for file in source.files()}
    assert "json/decoder.py" in found and "os.py" in found and not any("site-packages" in name for name in found)
    assert list(found) == sorted(found)
    labelled = {label for file in (found["os.py"], found["asyncio/events.py"]) for _, label in source.documents(file)}
    assert None in labelled and labelled <= {None, *(file.group for file in found.values())}
    one_line(lambda: StandardLibrary(classes=1000).files(), r"data\.classes: 1000 is out of range; the standard library has")


def test_names_begin_where_the_pattern_is_wild(tmp_path):
    write(tmp_path, "x/y/1.txt", b"1")
    for pattern, name in (
        ("x/**/*.txt", "y/1.txt"),
        ("x/y/*.txt", "1.txt"),
        ("x/y/1.txt", "1.txt"),
        ("?/y/1.txt", "x/y/1.txt"),
    ):
        assert [file.name for file in Globbed(str(tmp_path / pattern)).files()] == [name]
