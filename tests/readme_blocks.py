"""The READMEs of this repository, taken apart: fenced blocks, command lines, links."""

import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

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
    found, opened, start, content, said = [], None, 0, [], ""
    for number, line in enumerate(readme.read_text().splitlines(), 1):
        fence = re.match(r"\s*(```+)\s*(\S*)", line)
        if opened is None and fence:
            opened, start, content = fence, number + 1, []
        elif opened is not None and fence and fence[1] == opened[1] and not fence[2]:
            text = "\n".join(line.removeprefix(opened[0][: opened.start(1)]) for line in content)
            file = re.search(r"`([\w./-]+\.\w+)`:\s*$", said)
            found.append(Block(str(readme.relative_to(ROOT)), start, opened[2], text + "\n", file and file[1]))
            opened, said = None, ""
        else:
            content.append(line)
            said = line if opened is None and line.strip() else said
    if opened is not None:
        raise ValueError(f"{readme}:{start - 1}: this block does not end")
    return [block for block in found if kind in (None, block.kind)]


@dataclass(frozen=True)
class Line:
    """One command of a bash block, without environment, comment and continuation.

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
    found: list[Line] = []
    text = ""
    for number, line in enumerate(block.text.splitlines(), block.line):
        if not text:
            start = number
        text += line
        if text.endswith("\\"):
            text = text[:-1] + " "
            continue
        part: list[str] = []
        for word in [*_words(text), "&&"]:
            if word != "&&":
                part.append(word)
            elif part:
                found.append(_line(f"{block.readme}:{start}", part))
                part = []
        text = ""
    return found


WORD = re.compile(r"""\s*((?:'[^']*'|"(?:[^"\\]|\\.)*"|\\.|[^\s'"\\])+)""")


def _words(text: str) -> list[str]:
    """Words as bash has them, up to a comment, whose apostrophes are no quotes."""
    words, place = [], 0
    while (found := WORD.match(text, place)) and not found[1].startswith("#"):
        words += shlex.split(found[1])
        place = found.end()
    if text[place:].strip() and not found:
        raise ValueError(f"a quotation does not end: {text}")
    return words


def _line(where: str, words: list[str]) -> Line:
    count = next(i for i, word in enumerate([*words, ""]) if not re.match(r"[A-Za-z_]\w*=", word))
    count = 0 if count == len(words) else count
    return Line(where, tuple(words[count:]), tuple(tuple(word.split("=", 1)) for word in words[:count]))


def links(readme: Path) -> list[str]:
    """Where the links and images of a README point to, outside of its fenced blocks and code."""
    text = re.sub(r"(?ms)^\s*(```+).*?^\s*\1\s*$", "", readme.read_text())
    text = re.sub(r"`[^`]*`", "", text)
    inline = re.findall(r"\]\(\s*<?([^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)
    return inline + re.findall(r"(?m)^\s*\[[^\]]+\]:\s*(\S+)", text) + re.findall(r"(?:src|href)=\"([^\"]+)\"", text)


def anchors(readme: Path) -> set[str]:
    """The names that GitHub gives the headings of a README."""
    text = re.sub(r"(?ms)^\s*(```+).*?^\s*\1\s*$", "", readme.read_text())
    names, seen = set(), {}
    for heading in re.findall(r"(?m)^#{1,6}\s+(.*?)\s*#*\s*$", text):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        names.add(f"{name}-{seen[name]}" if name in seen else name)
        seen[name] = seen.get(name, 0) + 1
    return names
