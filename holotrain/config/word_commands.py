"""Commands that take words instead of a composed configuration."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holotrain.config.command_options import options_of
from holotrain.errors import UserError, did_you_mean

HELP = {"--help", "-h"}


@dataclass
class ReportConfig:
    """Compare runs on one HTML page: curves, differing options and results."""

    WORD, NEEDED = "RUN", "the folder of a run or sweep; for example holotrain report runs/fit/sweeps/..."

    runs: list[str]
    """folder of a run, a sweep or several runs, or a glob: 'runs/fit/2026-*'"""

    to: str = "report.html"
    """file to write"""


@dataclass
class InitConfig:
    """Write a small working project with a model, data and a callback of your own."""

    WORD, NEEDED = "NAME", "a name; for example holotrain init my_project"

    name: str
    """name of the project and of its Python package; a path: the folder to write, whose last part is the name"""


WORD_COMMANDS = {"report": ReportConfig, "init": InitConfig}
"""The first option of each gets the words, one or a list."""


def require_text(words: list[str]) -> None:
    """Refuses bytes that are no text in UTF-8 (which Python passes on as lone surrogates), and null characters."""
    for word in words:
        if re.search("[\0\ud800-\udfff]", word):
            raise UserError(f"{word!a} is not text in UTF-8")


def parse_words(command: str, words: list[str]) -> Any:
    """The configuration of a command of ``WORD_COMMANDS``; None if it asks for help.

    Raises:
        UserError: no word, too many words, an unknown flag or option, an option without a value.
    """
    require_text(words)
    if HELP & set(words):
        return None
    schema = WORD_COMMANDS[command]
    described = options_of(schema)
    main, *options = described
    single = described[main].type == "str"
    values_of_main: list[str] = []
    values: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            raise UserError(f"{name!r} is not a flag of {command}.{did_you_mean(name, HELP)}")
        if name in options and equals:
            if not value:
                raise UserError(f"{name}: a value is needed")
            values[name] = str(Path(value).expanduser())
        elif equals and name.isidentifier() and not Path(word).exists():
            known = f"which takes {', '.join(options) or 'none'}.{did_you_mean(name, options)}"
            raise UserError(f"{name!r} is not an option of {command}, {known}")
        else:
            values_of_main.append(word)
    if not values_of_main:
        raise UserError(f"{command} needs {schema.NEEDED}")
    if single and len(values_of_main) > 1:
        raise UserError(f"{command} takes one {main}, not {len(values_of_main)}: {' '.join(values_of_main)}")
    values[main] = values_of_main[0] if single else values_of_main
    return schema(**values)


def word_command_help(command: str) -> str:
    """The help of a command in ``WORD_COMMANDS``."""
    schema = WORD_COMMANDS[command]
    (_, main), *options = options_of(schema).items()
    usage = [f"{schema.WORD}{'' if main.type == 'str' else '...'}", *(f"[{name}=...]" for name, _ in options)]
    lines = [(schema.WORD, main.meaning), *((f"{name}={option.default}", option.meaning) for name, option in options)]
    described = "\n".join(f"  {key:<45} {meaning}" for key, meaning in lines)
    return f"""\
holotrain {command}: {schema.__doc__}

Usage: holotrain {command} {" ".join(usage)}

{described}"""
