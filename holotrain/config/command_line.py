"""The command line: a command, flags and overrides, in any order, and ``--help``."""

import argparse
import json
import re
import textwrap
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import MISSING, OmegaConf

from holotrain.config.command_options import COMMANDS, options_of
from holotrain.config.option_groups import GROUPS, NAMED_GROUPS, BackwardConfig, schema_of
from holotrain.config.signatures import CONFIGURATION_ERRORS, explained, literal, require_not_gone, to_plain
from holotrain.config.structured import composed, key_of, option_names, with_defaults
from holotrain.errors import UserError, did_you_mean
from holotrain.targets import TARGET, first_line

HELP = {"--help", "-h"}

VERBATIM = {
    *("ckpt_path", "images", "texts", "prompt", "prompts", "to", "output_dir", "hydra.run.dir", "hydra.sweep.dir"),
    *("data.root", "data.name", "data.files", "data.val_files", "data.test_files", "data.cache_dir", "data.tokenizer"),
    "model.pretrained",
}
"""Overrides whose values are paths or text. They may contain characters that have a meaning in Hydra's grammar."""

ESCAPES = r"\\+(?='|\$\{|\Z)"
"""Backslashes before a quote, an interpolation or the end of a quoted text, half of which are the text's own."""


@dataclass
class Arguments:
    """A command line, split."""

    command: str
    words: list[str] = field(default_factory=list)
    """the overrides as given"""

    overrides: list[str] = field(default_factory=list)
    """the same with paths and texts escaped for Hydra"""

    parsed: list[Override] = field(default_factory=list)
    """the overrides as Hydra reads them"""

    flags: list[str] = field(default_factory=list)
    """those for Hydra"""

    help: bool = False
    multirun: bool = False
    config_dir: str | None = None
    shows: str | None = None
    """``job``, or another part of the configuration that is only printed"""

    primary: str = ""
    """name of the primary configuration: that of the command, or that of a checkpoint"""

    @property
    def single(self) -> list[str]:
        """The overrides with one value, which are no part of a sweep."""
        return [word for word, each in zip(self.overrides, self.parsed, strict=True) if not each.is_sweep_override()]

    @property
    def resume(self) -> bool:
        return (self.value("resume") or "").lower() == "true"

    def value(self, key: str) -> str | None:
        """The value of the last override of ``key``, unquoted and resolved; None if there is none."""
        for word in reversed(self.words):
            name, equals, value = word.lstrip("+").partition("=")
            if equals and name == key:
                if "${" not in value:
                    return value.strip("'\"")
                with explaining(self):
                    return str(OmegaConf.select(composed(self.command, self.single, self.config_dir, with_hydra=True), key))
        return None


class _Flags(argparse.ArgumentParser):
    """Those of Hydra that a training needs. ``--experimental-rerun`` would unpickle a file."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*")
        self.add_argument("--help", "-h", action="store_true")
        self.add_argument("--multirun", "-m", action="store_true")
        self.add_argument("--resolve", action="store_true")
        self.add_argument("--config-dir", "-cd")
        self.add_argument("--cfg", "-c", choices=("job", "hydra", "all"))
        self.add_argument("--info", "-i", choices=("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"))

    def error(self, message: str) -> NoReturn:
        if message.startswith(said := "unrecognized arguments"):
            hint = "options are written key=value, such as trainer.max_epochs=3"
            message = f"there is no flag{message.removeprefix(said)}; {hint}"
        raise UserError(message)


def parse(argv: list[str]) -> Arguments:
    """Splits the command line. Raises a UserError if a flag or an override is not well-formed."""
    require_text(argv)
    command, *rest = argv
    if command not in COMMANDS:
        require_not_gone(command)
        commands = [*COMMANDS, "init"]
        raise UserError(f"{command!r} is not a command; use one of {', '.join(commands)}.{did_you_mean(command, commands)}")
    found = _Flags().parse_intermixed_args(rest)
    if found.config_dir and not Path(found.config_dir).is_dir():
        raise UserError(f"--config-dir: there is no folder {found.config_dir}")
    flags = ["--multirun"] * found.multirun + ["--resolve"] * found.resolve
    flags += [f"--{name}={value}" for name in ("cfg", "info") if (value := getattr(found, name))]
    flags += [f"--config-dir={found.config_dir}"] if found.config_dir else []
    overrides = [_override(command, word) for word in found.overrides]
    arguments = Arguments(command, found.overrides, overrides, flags=flags, help=found.help, primary=command)
    arguments.multirun = found.multirun or "hydra.mode=MULTIRUN" in overrides
    arguments.config_dir, arguments.shows = found.config_dir, found.cfg or found.info
    with explaining(arguments):
        arguments.parsed = OverridesParser.create().parse_overrides(overrides)
    if not (arguments.multirun or arguments.help or arguments.shows):
        for word in found.overrides:
            if re.match(r"[+]*(sweep=|hydra[./](sweep|sweeper|launcher)\b)", word) and not word.endswith("=null"):
                raise UserError(f"{word}: it is about a sweep; add -m to run one")
    return arguments


def _override(command: str, word: str) -> str:
    """A word as Hydra takes it."""
    key = key_of(word)
    if not key or ("=" not in word and not word.startswith("~")):
        near = did_you_mean(word, ("resume=true", "test=false", "compile=true"))
        raise UserError(f"{word!r} is not an override; write group=option or key=value, without spaces around =.{near}")
    require_not_gone(key)
    options = {*options_of(COMMANDS[command]), "experiment", "debug", "sweep", "hydra"}
    unknown = re.split(r"[./@]", key)[0] not in options and not word.startswith(("+", "~"))
    return f"{'++' * unknown}{_verbatim(word)}"  # `with_defaults` refuses it, where all options are there


def _verbatim(override: str) -> str:
    """A path or a text is quoted, unless the user has quoted it. Commas and brackets of paths keep their meaning."""
    key, _, value = override.partition("=")
    name = key_of(override)
    if name not in VERBATIM or key.startswith("~"):
        return override
    if name != "prompt":
        if value in ("", "''", '""'):  # as of a shell's variable that is not set
            raise UserError(f"{name}: the value is empty; give one, or leave {name}= out")
        if value == "~" or value.startswith("~/"):
            value = str(Path(value).expanduser())
        is_list = name.endswith("files") and value[0] == "["
        if re.fullmatch(r"[\w./,*+@-]*", value, re.ASCII) or value[0] in "'\"$" or is_list:
            return f"{key}={value}"
    return f"{key}={quoted(value)}"


def quoted(text: str) -> str:
    """A text as the value of an override. Hydra's grammar reads quotes and the backslashes before them; OmegaConf reads
    interpolations."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), text)
    return f"'{literal(escaped)}'"


def readable(override: str) -> str:
    """An override as one would say it: a text without the quotes and the escapes that :func:`quoted` gives it."""
    key, _, value = override.partition("=")
    if len(value) < 2 or not (value.startswith("'") and value.endswith("'")):
        return override
    return f"{key}={re.sub(ESCAPES, lambda found: found[0][: len(found[0]) // 2], value[1:-1])}"


def require_text(words: list[str]) -> None:
    """Refuses bytes that are no text in UTF-8 (which Python passes on as lone surrogates), and null characters."""
    for word in words:
        if re.search("[\0\ud800-\udfff]", word):
            raise UserError(f"{word!a} is not text in UTF-8")


@contextmanager
def explaining(arguments: Arguments) -> Generator[None]:
    """Raises a UserError if Hydra or OmegaConf do not accept ``arguments``, which are composed inside."""
    try:
        yield
    except CONFIGURATION_ERRORS as error:
        raise explained(error) from None  # in Python, what follows would be pages of Hydra's frames
    except (ValueError, TypeError, AssertionError) as error:  # of group=null, group=3, and of values of Hydra's own options
        groups, words = option_names(arguments.config_dir), zip(arguments.overrides, arguments.parsed, strict=True)
        chosen = [word for word, each in words if each.key_or_group in groups and not isinstance(each.value(), str | list)]
        named = [*chosen, *(word for word in arguments.overrides if key_of(word).startswith("hydra"))]
        raise UserError(f"{named[0]}: {first_line(error)}" if named else first_line(error)) from None


FLAGS = """\
Flags, in any position:
  -m, --multirun            run every combination of comma-separated values: optimizer.lr=1e-3,1e-4
  --config-dir DIR          also look for options in this folder
  --cfg job [--resolve]     print the configuration and exit
  --info=defaults           print which files the configuration is composed from, and exit"""


def overview() -> str:
    """The commands, one per line."""
    commands = "\n".join(f"  {name:<10}{schema.__doc__}" for name, schema in COMMANDS.items())
    return f"""\
holotrain trains transformers whose activations do not fit in memory.

Usage: holotrain COMMAND [group=option ...] [key=value ...]

{commands}
  init      Write a small working project with a model, data and a callback of your own.

holotrain COMMAND --help lists the options of a command."""


def command_help(arguments: Arguments) -> str:
    """The groups and the options of a command, with their values under the given overrides."""
    command, overrides = arguments.command, [word for word in arguments.overrides if not word.startswith("hydra.")]
    plain = to_plain(with_defaults(command, composed(command, overrides, arguments.config_dir)))
    lines = [f"holotrain {command}: {COMMANDS[command].__doc__}", "", FLAGS, "", "Groups:"]
    for group, options in option_names(arguments.config_dir).items():
        lines.append(textwrap.fill(" ".join(options), 100, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16))
    lines += ["", "Options:"]
    nodes = {"": {name: value for name, value in plain.items() if name not in GROUPS}}
    for group in GROUPS:
        members = {f"{group}.{name}": node for name, node in plain[group].items()} if group in NAMED_GROUPS else {}
        nodes |= members if group in NAMED_GROUPS else {group: plain[group] or {}}
    for where, values in nodes.items():
        schema = BackwardConfig if where == "backward" else COMMANDS[command]
        options = schema_of(where).options(values[TARGET]) if TARGET in values else options_of(schema)
        for name, value in values.items():
            shown = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            option = f"{where}.{name}=".lstrip(".") + ("..." if shown == MISSING else shown)
            meaning = options[name].meaning.split(". ")[0].replace("``", "").rstrip(".") if name in options else ""
            lines.append(f"  {option:<45} {meaning}".rstrip())
    return "\n".join(lines)
