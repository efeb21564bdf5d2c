"""The READMEs of this repository: taken apart, and their command lines made small.

What stands in them is run, on tiny models, a few batches and files made for it. A line that nothing here knows is an error.
"""

import json
import random
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from data_files import write_cifar, write_folder, write_mnist
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]


def readmes() -> list[Path]:
    """Every README.md that belongs to the project; in a source tree without git, every one outside of hidden folders.

    Those of ``holotrain/templates/project`` belong to the user's projects: tests of ``holotrain init`` run what stands in them.
    """
    asked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*README.md"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
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
        readme: its file, relative to the repository.
        line: of its first line of content, from 1.
        kind: the word after the opening fence; empty if there is none.
        file: the file whose content this is: one that the line before the fence names in backticks, if it ends with a colon.
    """

    readme: str
    line: int
    kind: str
    text: str
    file: str | None = None

    @property
    def where(self) -> str:
        return f"{self.readme}:{self.line}"


def blocks(readme: Path, kind: str | None = None) -> list[Block]:
    """The fenced blocks of a README, of one kind or of all."""
    found, said = [], ""
    for token in parsed(readme):
        if token.type == "fence":
            file = re.search(r"`([\w./-]+\.\w+)`:$", said)
            found.append(Block(str(readme.relative_to(ROOT)), token.map[0] + 2, token.info, token.content, file and file[1]))
        said = token.content if token.type in ("inline", "fence") else said
    return [block for block in found if kind in (None, block.kind)]


@dataclass(frozen=True)
class Line:
    """One command of a bash block, without environment and comment.

    Attributes:
        where: file and line, for the test's name.
        words: as a shell would split them.
        environment: variables set in front of it.
    """

    where: str
    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def readme(self) -> str:
        return self.where.partition(":")[0]

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands(block: Block) -> list[Line]:
    """The commands of a bash block, one a line; those that ``&&`` joins are two."""
    found = []
    for number, text in enumerate(block.text.splitlines(), block.line):
        assert not text.endswith("\\"), f"{block.readme}:{number}: a command is one line"
        for part in text.split(" && "):
            words = shlex.split(part, comments=True)
            count = next((place for place, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), 0)
            if words:
                environment = tuple(tuple(word.split("=", 1)) for word in words[:count])
                found.append(Line(f"{block.readme}:{number}", tuple(words[count:]), environment))
    return found


def links(readme: Path) -> list[str]:
    """Where the links and images of a README point to."""
    inner = [child for token in parsed(readme) for child in token.children or ()]
    return [str(child.attrs[name]) for child in inner for name in ("href", "src") if name in child.attrs]


def anchors(readme: Path) -> set[str]:
    """The names that GitHub gives the headings of a README."""
    headings = [inner.children for token, inner in pairwise(parsed(readme)) if token.type == "heading_open"]
    texts = ["".join(child.content for child in children) for children in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


SHOWS = {"--help", "--version", "--cfg"}
TASKS = {
    "causal_lm": ("gpt", "text_stdlib"),
    "masked_lm": ("roberta", "text_stdlib"),
    "sequence_classification": ("roberta", "text_stdlib"),
    "error_diffusion": ("error_diffusion", "digits"),
}
"""The family of models and the data that a task brings along, where they are not the default."""

EXPERIMENTS = {
    "imagenet_rev_vit_small": ("vit", "imagefolder"),
    "mine": ("swin", "cifar10"),  # of conf/README.md
}
"""Recipes with a model or data of their own."""

MODELS = {
    **{name: ["model.dim=16", "model.depth=2", "model.heads=2"] for name in ("vit", "gpt", "roberta")},
    "swin": ["model.dim=8", "model.depths=[1,1]", "model.heads=[1,2]", "model.window=4"],
    "mvit": ["model.dim=8", "model.depths=[1,1]", "model.heads=1"],
    "error_diffusion": ["model.width=4", "model.depth=2"],
    "timm": ["model.arguments={depth: 1, embed_dim: 32, num_heads: 2}"],
    "huggingface": [],
}
TEXT_FILES = ["data.context=32", "data.batch_size=4", "data.val_fraction=0.2", "data.test_fraction=0.2"]
DATA = {
    "digits": ["data.batch_size=8"],
    **{name: ["data.batch_size=8", "data.download=false"] for name in ("cifar10", "cifar100")},
    "mnist": ["data.batch_size=8", "data.download=false", "data.val_fraction=0.5"],
    "fake": ["data.image_size=32", "data.num_classes=4", "data.train_size=16", "data.val_size=8", "data.batch_size=4"],
    "imagefolder": ["data.image_size=32", "data.batch_size=4", "data.num_workers=0"],
    "text_stdlib": ["data.context=32", "data.batch_size=4", "data.max_tokens=1024"],
    "text_files": [*TEXT_FILES, "data.max_tokens=1024"],
    "hub": TEXT_FILES,
}
"""Options that make a model or data set small. Where the line has a value of its own, it keeps it."""

NETWORK = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "vocab_size": 260, "max_position_embeddings": 128,
}  # fmt: skip
"""The config.json of a Hugging Face model."""

LIMITS = {
    "fit": {"trainer.max_epochs": "1", "trainer.max_steps": "2", "trainer.limit_train_batches": "2"},
    "generate": {"max_tokens": "8"},
}
EVALUATED = {"trainer.limit_val_batches": "1", "trainer.limit_test_batches": "1", "trainer.accelerator": "cpu"}
"""Options that end a command early, in the place of the line's own."""

PROCESSES = {"trainer.devices": "2", "trainer.accelerator": "cpu", "trainer.timeout": "100"}
"""Where several processes train on this machine."""

BENCHES = {
    "bench_backward.py": "--dim 16 --heads 2 --depth 2 --tokens 8 --batch 1 --rounds 1 --engines checkpoint reversible",
    "bench_error_diffusion.py": "--depths 2 4 --width 4 --batch 4 --deep 2 --rounds 1",
    "bench_frontier.py": "--depth 2 --batch 1 --pixels 32 --tokens 16 --budgets 2 --rounds 1",
    "bench_generation.py": "--tokens 8 --rounds 1",
    "bench_recompute.py": "--depths 1 2 --tokens 8 --batch 1 --rounds 1",
    "bench_optimizers.py": "--tasks causal --methods AdamW associative --steps 2 --seeds 1 --rounds 1",
    "bench_overlap.py": "--groups 1 2 --rounds 1 --tries 1",
    "bench_tiles.py": "--depth 1 --dim 16 --heads 2 --tokens 16 --tiles 8 --rounds 1",
    "bench_padding.py": "--batch 4 --tokens 8 --rounds 1",
    "bench_plan.py": "--models vit_tiny --precisions fp32 --backwards reversible --batch 1",
    "bench_whole_step.py": "--shapes gpt2 --methods checkpoint --tokens 64",
    "bench_ways.py": "--models stack --rounds 1 --depth 2 --begin 2 --steps 2 --seeds 1 --kinds fp32 --context 8 --batch 2 "
    "--windows 2 --folder .",
    "bench_synthesis.py": "--models tiny --batch 1 --shortest 4 --longest 6 --rounds 1",
}
"""Benches whose sizes are options, and the smallest that they take. The others measure one thing for minutes."""

MULTIPLE = re.compile(r"trainer=(ddp|fsdp|tp)")
NOT_HERE = re.compile(r"cuda_graph=true|trainer\.signals=true|trainer\.accelerator=(gpu|cuda)$|hydra/launcher=")
"""Words that ask for several processes; words that ask for a GPU or a launcher of jobs. Launchers have tests of their own."""


@dataclass(frozen=True)
class Small:
    """A command line of ours, made small.

    Attributes:
        words: after ``holotrain``.
        torchrun: it starts the processes.
        processes: several train together.
        composed_only: needs a GPU, a cluster or a launcher of jobs; it is only composed and checked.
    """

    words: tuple[str, ...]
    torchrun: bool = False
    processes: bool = False
    composed_only: bool = False

    def value(self, key: str) -> str | None:
        found = [word.partition("=")[2] for word in self.words if word.partition("=")[0] == key]
        return found[-1] if found else None

    @property
    def shows(self) -> bool:
        """Whether it trains nothing help, versions, configurations, new projects."""
        return self.words[:1] in ((), ("init",)) or bool(SHOWS & set(self.words))

    @property
    def before(self) -> list["Small"]:
        """What must have been run for this one to begin: what ``resume`` resumes, what wrote the ``pretrained`` weights."""
        if self.value("resume") == "true":
            return [Small(tuple(word for word in self.words if not word.startswith("resume=")))]
        if self.value("model.pretrained"):
            words = [word for word in self.words[1:] if not word.startswith(("model.pretrained=", "model.trained="))]
            if self.words[0] != "fit":  # it evaluates them
                words += [f"{key}={value}" for key, value in LIMITS["fit"].items()]
            return [
                Small(("fit", *words, "hydra.run.dir=others", "test=false")),
                Small(("export", "ckpt_path=others/checkpoints/last.ckpt", "to=others/exported")),
            ]
        return []


def ours(line: Line) -> list[str] | None:
    """The words after ``holotrain``, whichever way it is started; None: it is another program."""
    words = list(line.words)
    known = words[0] in ("holotrain", "python", "torchrun") and "holotrain" in words
    return words[words.index("holotrain") + 1 :] if known else None


def made_small(line: Line) -> Small:
    words = ours(line)
    flags = [word for word in words if word.startswith("-") and word != "-m"]
    if not words or words[0] == "init" or (flags and "--config-dir" not in flags):
        return Small(tuple(words))
    command = words[0]
    given = {word.partition("=")[0]: word.partition("=")[2].split(",")[0] for word in words[1:] if "=" in word}
    # A name that nobody knows is for holotrain to refuse.
    family, data = EXPERIMENTS.get(given.get("experiment")) or TASKS.get(given.get("task"), ("vit", "digits"))
    data = given.get("data", data)
    if "model" in given:
        family = next((name for name in MODELS if re.fullmatch(rf"((rev|my)_)?{name}(_\w+)?", given["model"])), None)
    options = [] if "ckpt_path" in given else [*MODELS.get(family, ()), *DATA.get(data, ())]  # a checkpoint brings its own
    always = LIMITS.get(command, {}) | ({} if command in ("plan", "generate", "export") else EVALUATED)
    fast = given.get("trainer.fast_dev_run") == "true"
    if command == "fit" and (fast or ("trainer.max_steps" not in given and data[:4] != "text")):
        always = {key: value for key, value in always.items() if key != "trainer.max_steps"}
    if given.get("resume") == "true":
        always |= {"trainer.max_epochs": "2"}
    if command == "fit" and "ckpt_path" in given:
        always |= {"trainer.max_epochs": "3"}  # the checkpoint has two
    if given.get("sweep") == "optuna":
        always |= {"hydra.sweeper.n_trials": "2"}
    if command == "plan" and "memory" in given:  # else the largest depth that fits is in the thousands
        always |= {"memory": "2MiB"}
    torchrun = line.words[0] == "torchrun"
    several = torchrun or any(MULTIPLE.match(word) for word in words)
    several = several and command in ("fit", "validate", "test") and given.get("trainer.devices") != "1"
    composed_only = any(NOT_HERE.search(word) for word in words)
    if several:
        always |= PROCESSES
    kept = [word for word in words if word.partition("=")[0] not in always]
    small = [option for option in options if option.partition("=")[0] not in given]
    if "backward.blocks" in given:  # one for each block of the model's own depth
        small = [option for option in small if not option.startswith("model.depth")]
    if given.get("sweep") == "error_diffusion":  # 54 jobs
        small += ["hydra.sweeper.params={model.rule:'kaneko,article',model.depth:'1',model.width:'4',seed:'0'}"]
    return Small((*kept, *small, *(f"{key}={value}" for key, value in always.items())), torchrun, several, composed_only)


def is_text(small: Small) -> bool:
    return small.words[0] == "generate" or any(small.value(key) for key in ("texts", "prompts", "prompt"))


def lay_out(small: Small, folder: Path, trained: Callable[[str], Path], monkeypatch) -> None:
    """Makes the files that a line names, in the reader's folder.

    Args:
        trained: the folder of a run to take checkpoints from, by what it was trained on: ``image``, ``text``.
    """
    value = small.value
    if (path := value("ckpt_path")) not in (None, "null"):
        run = trained("text" if is_text(small) else "image")
        if Path(path).suffix == ".ckpt" or set(path) == {"."}:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(run / "checkpoints/last.ckpt", folder / path)
        else:
            shutil.copytree(run / "exported", folder / path)
    if path := value("images"):
        write_folder(folder / "pictures", parts=("a",), classes=("b",), each=2)
        shutil.copytree(folder / "pictures/a/b", folder / path)
    if value("model") == "huggingface":
        (folder / value("model.name")).mkdir()
        (folder / value("model.name") / "config.json").write_text(json.dumps(NETWORK))
    data = value("data") or EXPERIMENTS.get(value("experiment"), ("", ""))[1]
    root = folder / (value("data.root") or "data")
    if data == "imagefolder":
        write_folder(root)
    elif data == "mnist":
        write_mnist(root)
    elif data in ("cifar10", "cifar100"):
        write_cifar(root, int(data[5:]), monkeypatch)
    for key in ("data.name", "data.files", "data.val_files", "data.test_files", "texts", "prompts"):
        for pattern in (value(key) or "").strip("[]").split(","):
            if pattern:
                write_texts(folder, pattern.strip("'\""), value("data.label"))


def write_texts(folder: Path, pattern: str, label: str | None) -> None:
    """Files that the pattern names: forty small texts in two folders, or one file of rows."""
    draw = random.Random(0)
    named = {"fruit": ["apple", "pear", "plum", "fig", "lime"], "metal": ["iron", "zinc", "tin", "lead", "gold"]}
    texts = [(name, " ".join(draw.choices(words, k=12))) for _ in range(20) for name, words in named.items()]
    suffix = Path(pattern).suffix
    if suffix == ".jsonl":
        # Short, so that answers begin within the context.
        chats = [
            [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": name}] for n, (name, _) in enumerate(texts)
        ]
        rows = [
            {"text": text, "review": text, "prompt": text[:8], "completion": name, "messages": chat, label or "label": name}
            for (name, text), chat in zip(texts, chats, strict=True)
        ]
        path = folder / pattern.replace("*", "0")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif "*" not in pattern and suffix:
        (folder / pattern).parent.mkdir(parents=True, exist_ok=True)
        (folder / pattern).write_text("fig\nlime and\n")  # prompts, shorter than the model's context
    else:
        pattern = pattern if "*" in pattern else f"{pattern}/*.txt"
        for number, (name, text) in enumerate(texts):
            path = folder / pattern.replace("**", name).replace("*", str(number))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
