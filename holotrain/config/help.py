"""``holotrain --help`` and ``holotrain COMMAND --help``, built from the schemas and the configuration folder."""

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator

from omegaconf import OmegaConf

from holotrain.config.arguments import Arguments
from holotrain.config.checkpointed import completed
from holotrain.config.composition import composed, option_names
from holotrain.config.schema import COMMANDS, NAMED, OPEN, WORD_COMMANDS
from holotrain.config.signatures import Option, signature
from holotrain.targets import TARGET

FLAGS = """\
Flags, in any position:
  -m, --multirun            run every combination of comma-separated values: optimizer.lr=1e-3,1e-4
  --config-dir DIR          also look for options in this folder
  --cfg job [--resolve]     print the configuration and exit
  --info=defaults           print which files the configuration is composed from, and exit"""


def overview() -> str:
    """The commands, one per line."""
    lines = [f"  {name:<10}{schema.__doc__}" for name, schema in (COMMANDS | WORD_COMMANDS).items()]
    return "\n".join(
        [
            "holotrain trains transformers whose activations do not fit in memory.",
            "",
            "Usage: holotrain COMMAND [group=option ...] [key=value ...]",
            "",
            *lines,
            "",
            "holotrain COMMAND --help lists the options of a command.",
        ]
    )


def command_help(arguments: Arguments) -> str:
    """The groups and options of a command, with the values under the given overrides."""
    overrides = [word for word in arguments.overrides if not word.startswith("hydra.")]
    config = composed(arguments.command, overrides, arguments.config_dir)
    lines = [
        f"holotrain {arguments.command}: {COMMANDS[arguments.command].__doc__}",
        "",
        f"Usage: holotrain {arguments.command} [group=option ...] [key=value ...]",
        "",
        "Groups:",
    ]
    for group, options in option_names(arguments.config_dir).items():
        lines += textwrap.wrap(" ".join(options), 100, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16)
    lines += ["", "Options:"]
    config = completed(arguments.command, OmegaConf.to_container(config))
    for key, value, meaning in _options(COMMANDS[arguments.command], OmegaConf.to_container(config), ""):
        lines.append(f"  {f'{key}={value}':<45} {meaning}".rstrip())
    return "\n".join([*lines, "", FLAGS])


def word_command_help(command: str) -> str:
    """The help of a command in ``WORD_COMMANDS``."""
    schema = WORD_COMMANDS[command]
    meanings = _meanings(schema)
    given, *options = dataclasses.fields(schema)
    word = given.metadata["word"]
    usage = [f"holotrain {command} {word}{'' if given.type is str else '...'}", *(f"[{option.name}=...]" for option in options)]
    return "\n".join(
        [
            f"holotrain {command}: {schema.__doc__}",
            "",
            f"Usage: {' '.join(usage)}",
            "",
            f"  {word:<45} {meanings[given.name]}",
            *(f"  {f'{option.name}={option.default}':<45} {meanings[option.name]}" for option in options),
        ]
    )


def _options(schema: type, values: dict, prefix: str) -> Iterator[tuple[str, str, str]]:
    meanings = _meanings(schema)
    for name, value in values.items():
        if name in ("kind", TARGET) and prefix:
            continue
        key = f"{prefix}{name}"
        if name in OPEN and value is None:
            continue
        if name in NAMED:
            for member, given in value.items():
                yield f"{key}.{member}.{TARGET}", given[TARGET], signature(given[TARGET]).meaning.replace("``", "").rstrip(".")
                yield from _arguments(f"{key}.{member}", given, NAMED[name].options(given[TARGET]))
        elif name in OPEN:
            yield from _arguments(key, value, OPEN[name].options(value[TARGET]))
        elif isinstance(value, dict):
            yield from _options(schema.__dataclass_fields__[name].type, value, f"{key}.")
        else:
            yield key, _shown(value), meanings.get(name, "")


def _arguments(key: str, given: dict, described: dict[str, Option]) -> Iterator[tuple[str, str, str]]:
    for option, value in given.items():
        if option != TARGET:
            yield f"{key}.{option}", _shown(value), _first_sentence(described, option)


def _first_sentence(options: dict[str, Option], name: str) -> str:
    meaning = options[name].meaning if name in options else ""
    return meaning.split(". ")[0].replace("``", "").rstrip(".")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def _meanings(schema: type) -> dict[str, str]:
    """The string below each field of a dataclass and its base classes."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                found[field.target.id] = below.value.value
    return found
