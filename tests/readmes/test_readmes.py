"""What stands in a README is run: every Python block as it is, every command with a small model and a few batches."""

import argparse
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
import yaml
from covering import long, slow
from foreign_models import write_tokenizer
from forked import COMMAND_LINE, Forked
from made_once import made_once
from readme_commands import (
    BENCHES,
    ROOT,
    Line,
    Small,
    anchors,
    blocks,
    commands,
    lay_out,
    links,
    made_small,
    ours,
    readmes,
    write_texts,
)
from small_run import SMALL, run_in

import holotrain

READMES = [str(path.relative_to(ROOT)) for path in readmes()]
KINDS = ("python", "bash", "text", "console", "yaml")
"""Kinds of blocks: code and commands are run, text and console are what a program prints."""

LINES: dict[str, Line] = {}
"""What stands in several READMEs is run once, as the first of them has it."""

for readme in readmes():
    for block in blocks(readme, "bash"):
        for line in commands(block):
            LINES.setdefault(str(line), line)

OURS = {words: line for words, line in LINES.items() if ours(line) is not None}
OTHERS = {words: line for words, line in LINES.items() if ours(line) is None}
ELSEWHERE = {words: line for words, line in OURS.items() if made_small(line).composed_only}
TOGETHER = {words: line for words, line in OURS.items() if made_small(line).processes and words not in ELSEWHERE}
ALONE = {words: line for words, line in OURS.items() if words not in ELSEWHERE | TOGETHER}


def named(lines: Iterable[Line], slowly: Collection[Line] | None = None, default: bool = True) -> list:
    """As pytest's parameters: those of the first README are run by default, others are slow (None: all) or long."""
    found = []
    for line in lines:
        by_default = default and line.readme == "README.md"
        kind = pytest.param if by_default else slow if slowly is None or line in slowly else long
        found.append(kind(line, id=f"{line.where} {line}"))
    return found


def first_of(lines: Iterable[Line], count: int, key: Callable[[Line], str]) -> list[Line]:
    """The first lines of each key."""
    found: dict[str, list[Line]] = {}
    for line in lines:
        found.setdefault(key(line), []).append(line)
    return [line for each in found.values() for line in each[:count]]


# Pages


@pytest.mark.parametrize("readme", READMES)
def test_links_lead_somewhere_and_blocks_say_what_they_are(readme):
    page = ROOT / readme
    for block in blocks(page):
        assert block.kind in KINDS, block.where
        assert block.kind != "yaml" or isinstance(yaml.safe_load(block.text), dict), block.where
    missing = []
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


def test_promises_name_tests_that_are_there():
    text = (ROOT / "SECURITY.md").read_text()
    files = dict(re.findall(r"^\[(\d+)\]: (\S+)$", text, re.MULTILINE))
    tests = re.findall(r"\[`?(\w+)`?\]\[(\d+)\]", text)
    assert len(tests) > 20
    for name, number in tests:
        content = (ROOT / files[number]).read_text()
        assert f"def {name}(" in content if name.startswith("test_") else files[number].endswith(f"_{name}.py")


def test_each_technique_names_what_computes_and_what_checks_it():
    page = ROOT / "scripts/results/methods.md"
    rows = [line.split(" | ") for line in page.read_text().splitlines() if line.startswith("| ") and "|---" not in line]
    rows = [row for row in rows if row[0] != "| statement"]
    assert len(rows) > 50
    for statement, *cells in rows:
        for kind, cell in zip(("where", "checked by"), cells, strict=True):
            named = re.findall(r"\[(\w+)(?:\.py)?\]\((\S+)\)", cell)
            assert named or cell.startswith("replaced by"), (statement, kind)
            for name, path in named:
                content = (page.parent / path).read_text()
                assert Path(path).stem == name or re.search(rf"(def|class) {name}\b", content), (statement, name)


# Python

PRINTED = re.compile(r"```\s+It prints (\d.*)")
"""The numbers after a block that prints the same on every machine."""


@pytest.mark.parametrize(
    "readme", [name if name == "README.md" else slow(name) for name in READMES if blocks(ROOT / name, "python")]
)
def test_python_blocks_run_one_after_another(readme, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads, page = torch.get_num_threads(), (ROOT / readme).read_text()
    if '"my_gpt2"' in page:
        write_a_gpt2(tmp_path / "my_gpt2")
    namespace = {"__name__": "__main__"}
    try:
        for block in blocks(ROOT / readme, "python"):
            capsys.readouterr()
            # Blank lines before it: a traceback then names the line of the README.
            exec(compile("\n" * (block.line - 1) + block.text, ROOT / readme, "exec"), namespace)
            if said := PRINTED.match(page.partition(block.text)[2]):
                printed = capsys.readouterr().out
                assert re.findall(r"\d+", said[1]) == re.findall(r"\d+", printed), printed
    finally:
        torch.set_num_threads(threads)


def write_a_gpt2(folder: Path) -> None:
    """What the READMEs call ``my_gpt2``, in Hugging Face's format."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 258, "bos_token_id": 1, "eos_token_id": 1}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    write_tokenizer(folder)


# The command line


TRAINED = {
    "image": SMALL,
    "text": [
        *SMALL, "task=causal_lm", "data=text_files", "data.files=texts/*.txt", "data.context=32", "data.batch_size=4",
        "trainer.max_steps=2",
    ],
}  # fmt: skip


@pytest.fixture
def trained(tmp_path_factory) -> Callable[[str], Path]:
    """The folder of a finished run of a kind, with an export in it: a classifier of digits, a language model on a few words."""

    def of(kind: str) -> Path:
        def make(folder: Path) -> None:
            write_texts(folder, "texts/*.txt", None)
            run_in(folder, "fit", *TRAINED[kind], "hydra.run.dir=run", "test=false")
            run_in(folder, "export", "ckpt_path=run/checkpoints/last.ckpt", "to=run/exported")

        return made_once(tmp_path_factory, f"readme_{kind}", make) / "run"

    return of


def write_configuration(line: Line, folder: Path) -> None:
    """The YAML files that the line's README shows."""
    for block in blocks(ROOT / line.readme, "yaml"):
        if block.file and "--config-dir" in line.words:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text)


@pytest.fixture
def prepared(trained, small_library, tmp_path, monkeypatch):
    """A line made small, in a folder with the files that it names; the training that must come before it is done."""

    def prepare(line: Line, run) -> Small:
        small = made_small(line)
        for name, value in line.environment:
            monkeypatch.setenv(name, value)
        if not small.shows:
            lay_out(small, tmp_path, trained, monkeypatch)
            write_configuration(line, tmp_path)
            for earlier in small.before:
                run(earlier)
            if (weights := small.value("model.pretrained")) and (tmp_path / "others/exported").exists():
                made = tmp_path / "others/exported"
                shutil.copy(made / "model.safetensors", weights) if Path(weights).suffix else shutil.copytree(made, weights)
        return small

    return prepare


def fails(small: Small, status: int, out: str, err: str) -> str | None:
    if status == 0 and "Traceback" not in err:
        return None
    return f"holotrain {' '.join(small.words)}\nstatus {status}\n{out[-2000:]}\n{err[-4000:]}"


@pytest.fixture
def run(holotrain):
    def run(small: Small) -> None:
        status, out, err = holotrain(*small.words)
        assert not (failure := fails(small, status, out, err)), failure

    return run


@pytest.mark.parametrize("line", named(ELSEWHERE.values()))
def test_commands_that_are_not_run_here_are_composed_and_checked(line):
    """The first job, where there are several, without what is Hydra's own."""
    command, *words = made_small(line).words
    holotrain.compose(command, [word.partition(",")[0] for word in words if word != "-m" and not word.startswith("hydra")])


OF_ROOMS = [line for line in ALONE.values() if line.readme != "scripts/results/README.md"]


@pytest.mark.parametrize("line", named(ALONE.values(), first_of(OF_ROOMS, 1, lambda line: line.readme)))
def test_commands_run(line, prepared, run):
    run(prepared(line, run))


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "holotrain")
ONE = first_of(TOGETHER.values(), 1, lambda line: line.readme)[:1]


@pytest.mark.parametrize("line", named(TOGETHER.values(), ONE, default=False))
def test_commands_in_two_processes(line, prepared, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = tmp_path / "said"

    def run(small: Small) -> None:
        if small.torchrun:
            torchrun = [sys.executable, *TORCHRUN]
            with said.open("w") as file:
                started = subprocess.run([*torchrun, *small.words], cwd=tmp_path, env=environment, stderr=file, timeout=300)
            status = started.returncode
        else:
            status = Forked(COMMAND_LINE, *small.words, folder=tmp_path, env=environment, errors=said).wait(timeout=300)
        assert not (failure := fails(small, status, "", said.read_text())), failure

    run(prepared(line, run))


# Other programs


class Read(Exception):
    """A script has read its arguments."""


def read_by_a_script(words: list[str], monkeypatch) -> None:
    """The script's own parser takes the arguments; nothing else of it runs."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser, *args):
        parse(parser, *args)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.setattr(sys, "argv", words[1:])
    monkeypatch.syspath_prepend(ROOT / "scripts")
    with pytest.raises(Read):
        runpy.run_path(str(ROOT / words[1]), run_name="__main__")


def is_script(line: Line) -> bool:
    return line.words[0] == "python" and len(line.words) > 1 and line.words[1].startswith("scripts/")


@pytest.mark.parametrize("line", named(OTHERS.values()))
def test_commands_of_other_programs_are_read(line, monkeypatch):
    words = list(line.words)
    if is_script(line):
        read_by_a_script(words, monkeypatch)
    elif words[0] == "pip":
        assert words[1] == "install" and len(words) > 2
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in words[2:]:
            name, extras = re.fullmatch(r"(-e|\.|[\w-]+)(?:\[([\w,-]+)\])?", word).groups()
            if name in (".", "holotrain"):
                assert set(extras.split(",") if extras else ()) <= project["optional-dependencies"].keys(), word
    else:
        assert words[0] in ("pytest", "tensorboard"), f"{line.where}: no test knows how to run {line}"


def bench_lines() -> list[Line]:
    """Of each bench one line for every set of options, since their sizes are replaced."""
    found = {}
    for line in filter(is_script, OTHERS.values()):
        options = (word for word in line.words if word.startswith("--"))
        if Path(line.words[1]).name in BENCHES and "swin_tiny" not in line.words:  # which runs what the others run
            found.setdefault((line.words[1], *sorted(options)), line)
    return list(found.values())


BENCH_LINES = bench_lines()
HEAVY = [
    f"scripts/bench_{name}.py" for name in ("overlap", "backward", "whole_step", "synthesis", "ways", "frontier", "recompute")
]
QUICK = [line for line in BENCH_LINES if "--measured" not in line.words and line.words[1] not in HEAVY]
SMALLEST = first_of(QUICK, 1, lambda line: line.words[1])


@pytest.mark.parametrize("line", named(BENCH_LINES, SMALLEST, default=False))
def test_benches_run_at_their_smallest(line, tmp_path):
    words = list(line.words[2:])
    for option in ("--minrev", "--picture"):  # a checkout and a library that tests do without
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    if "--measured" in words:  # which it reads
        place = words.index("--measured") + 1
        words[place] = str(ROOT / words[place])
    script = ROOT / line.words[1]
    ended = Forked(script, *words, *BENCHES[script.name].split(), folder=tmp_path, errors=tmp_path / "errors")
    assert ended.wait() == 0, (tmp_path / "errors").read_text()[-4000:]
