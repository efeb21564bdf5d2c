"""Text files in their true formats, the documents in them, which are held out, and what cannot be read."""

import json
import shutil
import warnings
from collections import Counter
from itertools import chain
from pathlib import Path

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from data_files import documents_of

from holotrain.data import TextFiles, hub
from holotrain.data.text.sources import TextFile, held_out_files, matches, rows_of
from holotrain.data.text.tokenise import DocumentRules
from holotrain.errors import UserError


def texts_of(path, **options) -> list:
    """Text and label of each document of a file."""
    rules = DocumentRules(**options)
    (rows,) = rows_of([TextFile(path, path.name, "train")], rules, path.parent / "cache")
    with hub.library_errors("the text"):
        return [found for batch in rows.dataset.iter(7) for found in rows.rules.documents(batch, "train")]


def module(tmp_path, files, **options) -> TextFiles:
    data = TextFiles(files, **{"cache_dir": str(tmp_path / "cache"), **options})
    data.setup()
    return data


def one_line(call, match) -> str:
    with pytest.raises(UserError, match=match) as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_units_of_a_text(tmp_path):
    path = tmp_path / "a[1] *?.txt"  # its name is no pattern
    path.write_bytes("\ufeffone\r\ntwo\n \t\n\n  three é\nfour".encode())
    assert texts_of(path) == [("one\ntwo\n \t\n\n  three é\nfour", None)]
    assert [text for text, _ in texts_of(path, unit="paragraph")] == ["one\ntwo", "  three é\nfour"]
    assert [text for text, _ in texts_of(path, unit="line")] == ["one", "two", "  three é", "four"]


def test_rows_of_files(tmp_path):
    rows = [
        {"text": "first\n\nsecond", "kind": "x", "n": 1},
        {"text": " ", "kind": "y", "n": 2},
        {"text": "é", "kind": "y", "n": 3},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=1)
    pyarrow.csv.write_csv(table, tmp_path / "a.csv")
    pyarrow.csv.write_csv(table, tmp_path / "a.tsv", pyarrow.csv.WriteOptions(delimiter="\t"))
    shutil.copy(tmp_path / "a.jsonl", tmp_path / "B.JSONL")
    shutil.copy(tmp_path / "a.csv", tmp_path / "B.Csv")
    for name in ("a.jsonl", "a.parquet", "a.csv", "a.tsv", "B.JSONL", "B.Csv"):
        assert texts_of(tmp_path / name) == [("first\n\nsecond", None), ("é", None)]
        found = texts_of(tmp_path / name, unit="paragraph", label="n")
        assert found == [("first", "1"), ("second", "1"), ("é", "3")]


def test_a_field_of_a_csv_file_is_text_as_it_is_written(tmp_path):
    path = Path(write(tmp_path, "a.csv", b"text,flag,n\nNA,True,007\nnull,False,-1\n1.50,True,10\nnan,False,9\n"))
    assert texts_of(path, label="flag") == [("NA", "True"), ("null", "False"), ("1.50", "True"), ("nan", "False")]
    assert [label for _, label in texts_of(path, label="n")] == ["007", "-1", "10", "9"]
    assert texts_of(path, text="flag", label="text")[1] == ("False", "null")
    assert hub.in_order(["007", "-1", "10", "9"]) == ["-1", "007", "9", "10"]
    rows = "\n".join(json.dumps({"text": f"row {n}", "k": n % 2 == 0}) for n in range(2))
    assert texts_of(Path(write(tmp_path, "a.jsonl", rows.encode())), label="k") == [("row 0", "True"), ("row 1", "False")]


def write(tmp_path, name, content) -> str:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', {}, r"cannot read .*a\.jsonl .*row 1"),
        ("a.txt", b"ab\xff", {}, r"cannot read .*a\.txt .* 0xff in position 2"),
        ("a.parquet", b"PAR1 no", {}, r"cannot read .*a\.parquet "),
        ("a.jsonl", b'{"text": "a", "n": %s1%s}\n' % (b"[" * 200, b"]" * 200), {}, r"cannot read .*a\.jsonl "),
        ("a.jsonl", b'{"txt": "a", "n": 1}\n', {}, r"data\.text: .* no column 'text'; they have txt, n"),
        ("a.jsonl", b'{"text": 5}\n', {}, r"data\.text: column 'text' holds no text, but"),
        ("a.jsonl", b'{"text": "a", "k": {"n": 1}}\n', {"label": "k"}, r"data\.label: column 'k' holds no labels, but"),
        ("a.jsonl", b'{"text": "a", "k": 1.5}\n', {"label": "k"}, r"data\.label: .* in 'k' are numbers with fractions"),
        (
            "a.jsonl",
            b'{"text": "a", "k": -100}\n',
            {"label": "k"},
            r"row 1 of .* has the label -100 in 'k', which stands for none",
        ),
        ("a.jsonl", b"\n\n", {}, r"data: there are no rows in \S*a\.jsonl"),
        ("a.csv", b"text,label\r\n", {}, r"data: there are no rows in \S*a\.csv"),
        ("a.csv", b"text,label\ncaf\xe9,b\n", {}, r"cannot read \S*a\.csv .*; .* give data\.encoding, such as latin-1"),
        ("a.jsonl", b'{"text": "a"}\n{"n": 1}\n', {}, r"data: row 2 of \S*a\.jsonl has nothing in 'text'; data\.on_error=skip"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path, name, content, options, message):
    path = Path(write(tmp_path, name, content))
    one_line(lambda: texts_of(path, **options), message)


def test_separators_and_encodings_are_found_or_given(tmp_path):
    rows = [("é; a, b", "x"), ("c|d", "y")]
    for separator in ",;\t|":
        text = "\n".join(separator.join(f'"{field}"' for field in row) for row in [("text", "k"), *rows])
        for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
            path = Path(write(tmp_path, f"{ord(separator)}{encoding}.csv", text.encode(encoding)))
            assert texts_of(path, label="k") == rows
    given = {"separator": "tab", "encoding": "cp1252", "label": "k", "layout": "documents", "unit": "file"}
    content = "a,b\ttext\tk\n" + "".join(f"n\t\x80 {n}\tx{n % 2}\n" for n in range(40)).replace("\x80", "€")
    data = module(
        tmp_path, write(tmp_path, "given.csv", content.encode("cp1252")), val_fraction=0.2, test_fraction=0.2, **given
    )
    assert documents_of(data, "train")[0].startswith("€ ")
    write(tmp_path, "plain.txt", "é a".encode("utf-16"))
    assert texts_of(tmp_path / "plain.txt") == [("é a", None)]


def test_a_file_without_rows_is_left_out_and_a_list_of_objects_is_one_of_rows(tmp_path):
    listed = json.dumps([{"text": f"row {number}"} for number in range(30)], indent=1)
    write(tmp_path, "a.json", f"\ufeff{listed}".encode())
    write(tmp_path, "b.jsonl", b"")
    write(tmp_path, "c.tsv", b"text\n\n")
    write(tmp_path, "d.json", b'["of settings"]')
    with pytest.warns(UserWarning, match=r"data: left out 2 files without rows: \S*b\.jsonl, \S*c\.tsv"):
        data = module(tmp_path, str(tmp_path / "*.*"), val_fraction=0.2, test_fraction=0.2)
    assert sum(counts["documents"] for counts in data.counts.values()) == 31


def test_columns_are_not_taken_for_those_of_other_programs(tmp_path):
    row = {"id": "1", "source": "s", "model": "m", "system_prompt": "p", "messages": [{"role": "user"}, {"n": 1}], "text": "a"}
    assert texts_of(Path(write(tmp_path, "a.jsonl", json.dumps(row).encode()))) == [("a", None)]


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_left_out_is_said(tmp_path, streaming):
    rows = [{"text": f"row {number}"} if number % 300 else {"n": number} for number in range(1200)]
    write(tmp_path, "a.jsonl", b"\n".join(json.dumps(row).encode() for row in rows))
    write(tmp_path, "b.csv", b"n,text\n1,first\n2,\n3,third\n")
    write(tmp_path, "c.txt", b"caf\xe9")
    options = {"on_error": "skip", "val_fraction": 0.3, "test_fraction": 0.3, "streaming": streaming}
    left = [] if streaming else [("4 rows", "a.jsonl"), ("1 row", "b.csv")]
    for _ in range(2):
        with warnings.catch_warnings(record=True, action="always") as caught:
            data = module(tmp_path, str(tmp_path / "*.*"), **options)
        assert [str(warning.message) for warning in caught] == [
            f"data: left out {rows} of {tmp_path / name} without text, class or answer" for rows, name in left
        ]
    if not streaming:
        documents = [document for part in ("train", "val", "test") for document in documents_of(data, part)]
        assert sorted(documents) == sorted(["first", "third", "caf\ufffd", *(row["text"] for row in rows if "text" in row)])


def test_held_out_files_do_not_depend_on_order_and_no_part_is_left_without_one():
    names = [f"{number % 3}/{number}.txt" for number in range(60)]
    parts = held_out_files(names, 0.1, 0.1)
    assert parts == held_out_files(names[::-1], 0.1, 0.1)
    assert Counter(parts.values()) == {"train": 48, "val": 6, "test": 6}
    after = held_out_files([*names, "new"], 0.1, 0.1)
    assert sum(after[name] != part for name, part in parts.items()) <= 2
    for count in (3, 5, 20, 41):
        assert {*held_out_files(names[:count], 0.05, 0.05).values()} == {"train", "val", "test"}


def test_patterns_name_and_hold_out_files(tmp_path):
    for name in ("a/1", "a/2", "b/1", "b/2", "a[1]", "a1"):
        write(tmp_path, f"{name}.txt", name.encode())
    held = {"val_files": str(tmp_path / "a/2.txt"), "test_files": [str(tmp_path / "b/2*")]}
    data = module(tmp_path, str(tmp_path / "*/*.txt"), **held)
    assert [documents_of(data, part) for part in ("train", "val", "test")] == [["a/1", "b/1"], ["a/2"], ["b/2"]]
    for pattern, name in {"**/1.txt": "a/1.txt", "a/1*": "1.txt", "a/1.txt": "1.txt", "?/1.txt": "a/1.txt"}.items():
        assert min(file.name for file in matches("files", str(tmp_path / pattern))) == name
    for pattern, name in {"a[1].txt": "a[1].txt", "a[12].txt": "a1.txt"}.items():  # a name of a file goes before a pattern
        assert [file.name for file in matches("files", str(tmp_path / pattern))] == [name]


def test_few_files_are_held_out_by_document_and_equal_ones_never_on_both_sides(tmp_path):
    lines = [f"line {number % 150}" for number in range(300)]
    pattern = write(tmp_path, "a.txt", "\n".join(lines).encode())
    data = module(tmp_path, pattern, unit="line", val_fraction=0.2, test_fraction=0.2)
    train, *held = [documents_of(data, part) for part in ("train", "val", "test")]
    assert sorted(chain(train, *held)) == sorted(lines) and not {*train} & {*chain(*held)}
    assert all(len({*part}) > 10 for part in (train, *held))


def test_labels_of_folders_and_fields(tmp_path):
    for number in range(12):
        write(tmp_path, f"{'dog' if number % 3 else 'cat'}/{number}.txt", b"text %d" % number)
    options = {"val_fraction": 0.2, "test_fraction": 0.2, "layout": "documents"}
    data = module(tmp_path, str(tmp_path / "*/*.txt"), label="folder", **options)
    assert data.class_names == ["cat", "dog"] and data.num_classes == 2
    labels = {text: int(label) for text, label in zip(documents_of(data, "train"), data.part("train").labels, strict=True)}
    assert labels and labels == {text: int(int(text.split()[1]) % 3 > 0) for text in labels}
    rows = [json.dumps({"text": f"row {number}", "k": ["10", "9", "2"][number % 3]}) for number in range(90)]
    data = module(tmp_path, write(tmp_path, "a.jsonl", "\n".join(rows).encode()), label="k", **options)
    assert data.class_names == ["2", "9", "10"]
    rows = "".join(f"row {number},{['neg', 'pos ', ' neg'][number % 3]}\n" for number in range(90))
    with pytest.warns(UserWarning, match=r"data\.label: blanks around ' neg' and 1 more are not part of the class"):
        data = module(tmp_path, write(tmp_path, "a.csv", f"text,k\n{rows}".encode()), label="k", **options)
    assert data.class_names == ["neg", "pos"] and set(data.part("train").labels.tolist()) == {0, 1}
    rows = "".join(f"row {number},{number / 8}\n" for number in range(90))
    path = write(tmp_path, "b.csv", f"text,k\n{rows}".encode())
    one_line(
        lambda: module(tmp_path, path, label="k", **options), "data.label: 90 labels such as 0.0 are numbers with fractions"
    )


FILES = {f"{name}.jsonl": json.dumps({"text": name, "k": "y" if name == "b" else "x"}).encode() for name in "abcd"}
FILES |= {"a.txt": b"text", "blank.txt": b" \n\n"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"files": "gone/*.txt"}, r"data\.files: no file matches 'gone/\*\.txt'"),
        ({"files": "."}, r"data\.files: \. is a folder; its files are \*\*/\*\.txt"),
        ({"files": "blank.txt"}, "data: there is no text"),
        ({"files": "a.txt"}, r"no text is left for (val|test|train) \(documents: 1\)"),
        ({"files": "a.txt", "tokenizer_json": "{}"}, "tokenizer_json is not a tokenizer.json"),
        ({"files": "a.txt", "cache_dir": "a.txt"}, r"data\.cache_dir: cannot write a\.txt"),
        ({"files": "a.jsonl", "label": "k", "val_files": "b.jsonl", "test_files": "c.jsonl"}, "class 'y' is held out, but"),
        ({"files": "a.jsonl", "label": "k", "val_files": "d.jsonl", "test_files": "c.jsonl"}, "only one class, 'x'"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        write(tmp_path, name, content)
    one_line(lambda: module(tmp_path, **options), message)
