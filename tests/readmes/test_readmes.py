"""Links of READMEs lead somewhere, Python blocks run, command lines are composed, and those of the first page are run."""

import importlib
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch
import yaml
from covering import slow
from data_files import write_cifar, write_folder
from foreign_models import write_tokenizer
from made_once import made_once
from markdown_it import MarkdownIt
from markdown_it.token import Token
from small_run import SMALL, fit_in

import holotrain

ROOT = Path(__file__).parents[2]
KINDS = ("python", "bash", "text", "console", "yaml")
"""Kinds of blocks: code and commands are run, text and console are what a program prints."""


def readmes() -> list[Path]:
    """Every README.md that belongs to the project; in a source tree without git, every one outside of hidden folders.

    Those of ``holotrain/templates/project`` belong to the user's projects: tests of ``holotrain init`` run what stands in them.
    """
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*README.md"]
    asked = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if asked.returncode == 0 and asked.stdout:
        found = {ROOT / name for name in asked.stdout.splitlines() if Path(name).name == "README.md"}
    else:
        found = {path for path in ROOT.rglob("README.md") if not any(part[0] in "._" for part in path.relative_to(ROOT).parts)}
    return sorted(path for path in found if not path.is_relative_to(ROOT / "holotrain/templates/project"))


@cache
def parsed(readme: Path) -> list[Token]:
    return MarkdownIt("gfm-like", {"linkify": False}).parse(readme.read_text())


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: of its first line of content, from 1.
        kind: the word after the opening fence; empty if there is none.
        file: the file whose content this is: one that the line before the fence names in backticks, if it ends with a colon.
    """

    line: int
    kind: str
    text: str
    file: str | None = None


def blocks(readme: Path, kind: str | None = None) -> list[Block]:
    """The fenced blocks of a README, of one kind or of all."""
    found, said = [], ""
    for token in parsed(readme):
        if token.type == "fence":
            file = re.search(r"`([\w./-]+\.\w+)`:$", said)
            found.append(Block(token.map[0] + 2, token.info, token.content, file and file[1]))
        said = token.content if token.type in ("inline", "fence") else said
    return [block for block in found if kind in (None, block.kind)]


def commands(readme: Path) -> dict[str, list[str]]:
    """The words of each command of the bash blocks, without environment and comment, by where it stands."""
    found = {}
    for block in blocks(readme, "bash"):
        for number, text in enumerate(block.text.splitlines(), block.line):
            assert not text.endswith("\\"), f"{readme}:{number}: a command is one line"
            for part in text.split(" && "):
                words = [word for word in shlex.split(part, comments=True) if not re.match(r"[A-Z_]+=", word)]
                if words:
                    found[f"{readme.relative_to(ROOT)}:{number} {shlex.join(words)}"] = words
    return found


COMMANDS = {where: words for readme in readmes() for where, words in commands(readme).items()}
OURS = {where: words[words.index("holotrain") + 1 :] for where, words in COMMANDS.items() if "holotrain" in words}
OURS = {where: words for where, words in OURS.items() if COMMANDS[where][0] in ("holotrain", "python", "torchrun")}
OTHERS = {where: words for where, words in COMMANDS.items() if where not in OURS}
FIRST = {where: words for where, words in OURS.items() if where.startswith("README.md")}


def links(readme: Path) -> list[str]:
    """Where the links and images of a README point to."""
    inner = [child for token in parsed(readme) for child in token.children or ()]
    return [str(child.attrs[name]) for child in inner for name in ("href", "src") if name in child.attrs]


def anchors(readme: Path) -> set[str]:
    """The names that GitHub gives the headings of a README."""
    headings = [inner.children for token, inner in pairwise(parsed(readme)) if token.type == "heading_open"]
    texts = ["".join(child.content for child in children) for children in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", readmes(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_blocks_say_what_they_are(page):
    for block in blocks(page):
        assert block.kind in KINDS, block.line
        assert block.kind != "yaml" or isinstance(yaml.safe_load(block.text), dict), block.line
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


@pytest.fixture
def break_statements(monkeypatch):
    """The script that breaks the statements of methods.md; it also reads that page."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return importlib.import_module("break_statements")


def test_each_technique_names_what_computes_and_what_checks_it(break_statements):
    rows = break_statements.rows()
    assert len(rows) > 50
    for statement, cells in rows.items():
        for kind, cell in zip(("where", "checked by"), cells, strict=True):
            named = break_statements.links(cell)
            assert named or cell.startswith("not "), (statement, kind)
            for name, path in named:
                assert path.stem == name or re.search(rf"(def|class) {name}\b", path.read_text()), (statement, name)


def test_each_technique_has_a_breakage_that_can_be_applied(break_statements):
    breakages = break_statements.breakages()
    for breakage in breakages:
        text = (ROOT / breakage["file"]).read_text()
        assert break_statements.broken(breakage, text) != text
    broken = set(map(break_statements.statement_of, breakages))
    rows = break_statements.rows().items()
    assert not [row for row, (where, _) in rows if break_statements.links(where) and row not in broken]


PRINTED = re.compile(r"```\s+It prints (\d.*)")
"""The numbers after a block that prints the same on every machine."""
WITH_PYTHON = [page for page in readmes() if blocks(page, "python")]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run_one_after_another(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    threads, text = torch.get_num_threads(), page.read_text()
    if '"my_gpt2"' in text:
        write_a_gpt2(tmp_path / "my_gpt2")
    namespace = {"__name__": "__main__"}
    try:
        for block in blocks(page, "python"):
            capsys.readouterr()
            # Blank lines before it: a traceback then names the line of the README.
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), namespace)
            if said := PRINTED.match(text.partition(block.text)[2]):
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


LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 260, "max_position_embeddings": 512,
}  # fmt: skip
"""The config.json of a Hugging Face model."""
TEXTS = ["data.context=32", "data.batch_size=4", "data.val_fraction=0.2", "data.test_fraction=0.2"]


@pytest.fixture
def laid_out(tmp_path, tmp_path_factory, small_library, image_run, monkeypatch):
    """The reader's folder with models and data that the READMEs name; gives the folder of a training of texts, or of images."""
    monkeypatch.chdir(tmp_path)
    for name in ("my_llama", "gpt2"):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(LLAMA))
    chats = [[{"role": "user", "content": f"which {n}?"}, {"role": "assistant", "content": "fig"}] for n in range(40)]
    write_folder(Path("photos"), parts=("",))
    Path("chat.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    words = ["task=causal_lm", *SMALL, "data.context=32", "trainer.max_steps=2", "test=false", "hydra.run.dir=run"]

    def run(of_text: bool) -> Path:
        return (
            made_once(tmp_path_factory, "readme_text", lambda folder: fit_in(folder, *words)) / "run" if of_text else image_run
        )

    return run


def composed(words: list[str], run: Callable[[bool], Path]) -> list[str]:
    """A command line with a checkpoint that is there, of the first job if there are several, without what is Hydra's own."""
    left_out = ("-m", "hydra", "sweep=", "resume=", "--config-dir", "my_conf")
    kept = [word for word in words if not (word.startswith(left_out) or re.match(r"[\w.]+=\w+\(", word))]  # interval(1, 2)
    of_text = words[0] == "generate" or any("text" in word for word in words)
    kept = [f"ckpt_path={run(of_text)}/checkpoints/last.ckpt" if word.startswith("ckpt_path=") else word for word in kept]
    return [re.sub(r"^([\w.]+=[^\[{,]+),.*", r"\1", word) for word in kept]


@pytest.mark.parametrize("where", [where if where in FIRST else slow(where) for where in OURS])
def test_command_lines_are_composed_and_checked(where, laid_out):
    words = OURS[where]
    if not words or words[0] == "init" or {"--help", "--version", "--cfg"} & {*words}:
        return
    for block in blocks(ROOT / where.partition(":")[0], "yaml"):
        if block.file and "--config-dir" in words:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
    mine = "my_conf" if "--config-dir" in words else None
    command, *rest = composed(words, laid_out)
    holotrain.compose(command, rest, config_dir=mine)


def made_small(words: list[str]) -> list[str]:
    """What comes last counts."""
    if words[0] == "init":
        return words
    timm = ["model.name=test_vit", "model.pretrained=null", "data.image_size=160", "data.batch_size=4", "data.val_fraction=0.5"]
    sizes = {
        "huggingface": TEXTS,
        "timm": timm,
        "fake": ["data.image_size=32", "data.train_size=16", "data.batch_size=4"],
        "plan": [],
    }
    named = [each for name, each in sizes.items() if any(name in word for word in words)]
    small = [word for word in SMALL if words[0] == "fit" or ("limit" not in word and "epochs" not in word)]
    if named or any(word.startswith(("resume", "ckpt_path")) for word in words):
        small = [word for word in small if not word.startswith("model.") or "plan" in words]
    return [*words, *(word for each in named for word in each), *small]


@pytest.mark.parametrize("where", [where if "holotrain test" in where else slow(where) for where in FIRST])
def test_commands_of_the_first_page_run_with_a_small_model_and_a_few_batches(where, laid_out, holotrain, tmp_path, monkeypatch):
    words = FIRST[where]
    write_cifar(tmp_path / "data", 10, monkeypatch)
    if "resume=true" in words:
        assert holotrain("fit", *SMALL)[0] == 0
    shutil.copytree(laid_out(False) / "checkpoints", "best/checkpoints")
    status, out, err = holotrain(*made_small(words))
    assert status == 0 and "Traceback" not in err, (out[-2000:], err[-4000:])


@pytest.mark.parametrize("where", OTHERS)
def test_commands_of_other_programs_name_what_is_there(where):
    words = OTHERS[where]
    if words[0] == "python" and words[1].startswith("scripts/"):
        assert (ROOT / words[1]).is_file()
    elif words[0] == "pip":
        assert words[1] == "install" and len(words) > 2
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for word in words[2:]:
            name, extras = re.fullmatch(r"(-e|\.|[\w-]+)(?:\[([\w,-]+)\])?", word).groups()
            if name in (".", "holotrain"):
                assert set(extras.split(",") if extras else ()) <= project["optional-dependencies"].keys(), word
    else:
        assert words[0] in ("pytest", "tensorboard"), f"{where}: no test knows how to run it"
