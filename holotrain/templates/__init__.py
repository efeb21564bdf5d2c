"""``holotrain init``: writes a project of the user's own, a copy of ``project`` under another name."""

import sys
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from shlex import quote

from holotrain.config.command_line import HELP
from holotrain.errors import UserError

TEMPLATE, NAME = Path(__file__).parent / "project", "my_project"


USAGE = """\
Usage: holotrain init NAME

NAME is that of the project and of its Python package. Of a path the last part is the name; the project is written there."""


def init(words: list[str]) -> int:
    """Writes the folder that the command line names and returns 0. Raises a UserError if that is no name of a new package, or
    the folder is not empty or cannot be written."""
    if HELP & {*words}:
        print(USAGE)
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise UserError(f"init needs one name, not {' '.join(words) or 'none'}; for example holotrain init my_project")
    folder = Path(words[0]).expanduser()
    name = folder.name
    if not name.isidentifier() or iskeyword(name):
        raise UserError(f"init: {name!r} cannot be the name of a Python package; give letters, digits and _, such as {NAME}")
    try:
        if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
            raise UserError(f"init: {folder} exists already; give another name, or remove it")
        spec = None if name in sys.modules else find_spec(name)
        # A folder without Python files can be imported too, but has no origin.
        if name in ("conf", "tests") or name in sys.modules or (spec is not None and spec.origin is not None):
            raise UserError(f"init: Python knows another {name!r}; give another name, such as my_{name}")
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{folder}: a new project")
        for source in sorted(TEMPLATE.rglob("*")):
            within = source.relative_to(TEMPLATE)
            if not source.is_file() or any(part[0] in "._" for part in within.parent.parts):  # left by Python and tools
                continue
            path = folder / str(within).replace(NAME, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(source.read_text(encoding="utf-8").replace(NAME, name))
            print(f"  {path.relative_to(folder)}")
    except OSError as error:
        raise UserError(f"init: cannot write {error.filename or folder}: {error.strerror or error}") from error
    print(f"Train: cd {quote(str(folder))} && python -m holotrain fit --config-dir conf experiment=my_experiment")
    return 0
