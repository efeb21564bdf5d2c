"""The READMEs of this repository, taken apart: fenced blocks, command lines, links."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

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
