"""The command line: its words, and its mistakes, each explained in one line.

It is split into a command, flags of Hydra and overrides. Flags may stand anywhere; Hydra needs them first.
"""

import json
import re
import textwrap
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf

from holotrain.config.command_options import COMMANDS, options_of
from holotrain.config.option_groups import GROUPS, NAMED_GROUPS, OBJECT_GROUPS, BackwardConfig, schema_of
from holotrain.config.signatures import CONFIGURATION_ERRORS, explained, literal, require_not_gone, to_plain
from holotrain.config.structured import composed, key_of, option_names, with_defaults
from holotrain.errors import UserError, check_choice, did_you_mean
from holotrain.targets import TARGET, first_line

HELP = {"--help", "-h"}

# Flags of Hydra, with and without a value. --experimental-rerun is missing on purpose: it unpickles a file.
VALUED = {"--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--info", "-i"}
BARE = {"--multirun", "-m", "--run", "-r", "--resolve", "--hydra-help", "--shell-completion", "-sc"}

CHOICES = {
    ("--cfg", "-c"): ("job", "hydra", "all"),
    ("--info", "-i"): ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""The values of those flags that do not take any."""

SHOWS = HELP.union(*CHOICES)
"""Flags under which a command only prints something about itself."""

VERBATIM = {
    *("ckpt_path", "images", "texts", "prompt", "prompts", "to", "output_dir", "hydra.run.dir", "hydra.sweep.dir"),
    *("data.root", "data.name", "data.files", "data.val_files", "data.test_files", "data.cache_dir", "data.tokenizer"),
    "model.pretrained",
}
"""Overrides whose values are paths or text. They may contain characters that have a meaning in Hydra's grammar."""

LISTS = {"data.files", "data.val_files", "data.test_files"}
"""Those of them that may be lists."""

ESCAPES = r"\\+(?='|\$\{|\Z)"
"""Backslashes before a quote, an interpolation or the end of a quoted text, half of which are the text's own."""

SWEEPS = re.compile(r"sweep$|hydra[./](sweep|sweeper|launcher)\b")
"""Overrides that mean nothing without ``-m``."""


@dataclass
class Arguments:
    """A command line, split."""

    command: str
    flags: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """the overrides as given, before paths and texts are escaped for Hydra"""

    parsed: list[Override] = field(default_factory=list)
    """the overrides as Hydra reads them"""

    help: bool = False

    primary: str = ""
    """name of the primary configuration: that of the command, or that of a checkpoint"""

    def __post_init__(self) -> None:
        self.primary = self.primary or self.command

    @property
    def multirun(self) -> bool:
        return bool({"-m", "--multirun"} & set(self.flags)) or "hydra.mode=MULTIRUN" in self.overrides

    @property
    def resume(self) -> bool:
        return (self.value("resume") or "").lower() == "true"

    @property
    def config_dir(self) -> str | None:
        return self.flag("--config-dir", "-cd")

    def flag(self, *names: str) -> str | None:
        """The value of a flag of Hydra's; None if it is not given."""
        for flag, following in zip(self.flags, [*self.flags[1:], ""], strict=False):
            name, equals, value = flag.partition("=")
            if name in names:
                return value if equals else following
        return None

    def value(self, key: str) -> str | None:
        """The value of the last override of ``key``, unquoted and resolved; None if there is none."""
        for word in reversed(self.words):
            name, equals, value = word.lstrip("+").partition("=")
            if equals and name == key:
                if "${" not in value:
                    return value.strip("'\"")
                single = [word for word in self.overrides if "," not in word]
                with explaining(self):
                    return str(OmegaConf.select(composed(self.command, single, self.config_dir, with_hydra=True), key))
        return None


def _verbatim(override: str) -> str:
    key, _, value = override.partition("=")
    name = key_of(override)
    if name not in VERBATIM or key.startswith("~"):
        return override
    if name != "prompt":
        if value in ("", "''", '""'):  # as of a shell's variable that is not set
            raise UserError(f"{name}: the value is empty; give one, or leave {name}= out")
        if value == "~" or value.startswith("~/"):
            value = str(Path(value).expanduser())
        # Commas, brackets, quotes and interpolations keep their meaning: sweeps, lists, and what the user quotes.
        if re.fullmatch(r"[\w./,*+@-]*", value, re.ASCII) or value[0] in "'\"$" or (name in LISTS and value[0] == "["):
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


def parse(argv: list[str]) -> Arguments:
    """Splits the command line. Raises a UserError if a flag or an override is not well-formed."""
    require_text(argv)
    command, *rest = argv
    if command not in COMMANDS:
        require_not_gone(command)
        commands = [*COMMANDS, "init"]
        raise UserError(f"{command!r} is not a command; use one of {', '.join(commands)}.{did_you_mean(command, commands)}")
    arguments = Arguments(command)
    words, known = iter(rest), {*options_of(COMMANDS[command]), "experiment", "debug", "sweep", "hydra"}
    for word in words:
        flag = word.partition("=")[0]
        if word in HELP:
            arguments.help = True
        elif word in BARE or (flag.startswith("--") and flag in VALUED and "=" in word):
            arguments.flags.append(word)
        elif word in VALUED:
            value = next(words, None)
            if value is None:
                raise UserError(f"{word} needs a value")
            arguments.flags += [word, value]
        elif word.startswith("-"):
            raise UserError(f"{word!r} is not a flag; options are written key=value, such as trainer.max_epochs=3")
        elif not key_of(word) or ("=" not in word and not word.startswith("~")):
            near = did_you_mean(word, ("resume=true", "test=false", "compile=true"))
            raise UserError(f"{word!r} is not an override; write group=option or key=value, without spaces around =.{near}")
        else:
            require_not_gone(key_of(word).lstrip("+~"))
            arguments.words.append(word)
            unknown = re.split(r"[./@]", key_of(word))[0] not in known and not word.startswith(("+", "~"))
            arguments.overrides.append(f"{'++' * unknown}{_verbatim(word)}")  # it is refused below, where all options are there
    for names, choices in CHOICES.items():
        if (value := arguments.flag(*names)) is not None:
            check_choice(names[0], value, choices)
    if arguments.config_dir and not Path(arguments.config_dir).is_dir():
        raise UserError(f"--config-dir: there is no folder {arguments.config_dir}")
    with explaining(arguments):
        arguments.parsed = OverridesParser.create().parse_overrides(arguments.overrides)
    _check_overrides(arguments)
    return arguments


def require_text(words: list[str]) -> None:
    """Refuses bytes that are no text in UTF-8 (which Python passes on as lone surrogates), and null characters."""
    for word in words:
        if re.search("[\0\ud800-\udfff]", word):
            raise UserError(f"{word!a} is not text in UTF-8")


def _check_overrides(arguments: Arguments) -> None:
    """Refuses a group that is chosen twice, of which Hydra would take the last, and without ``-m`` what only a sweep uses."""
    groups, shows = option_names(arguments.config_dir), arguments.help or arguments.flag(*SHOWS) is not None
    chosen: set[str] = set()
    for word, override in zip(arguments.words, arguments.parsed, strict=True):
        key, deletes = override.key_or_group, override.is_delete()
        if key in chosen:
            raise UserError(f"{key}: it is given twice; leave one out")
        if key in groups and not deletes:
            chosen.add(key)
        if arguments.multirun:
            continue
        if override.is_sweep_override():
            raise UserError(f"{word}: to run a sweep over several values, add -m; a list has brackets: key=[a,b]")
        if SWEEPS.match(key) and not (shows or deletes or override.value() is None):
            raise UserError(f"{word}: it is about a sweep; add -m to run one")


REFUSALS = (ValueError, TypeError, AssertionError)
"""What Hydra raises besides for ``group=null``, ``group=3``, and values of its own options that it cannot use."""


@contextmanager
def explaining(arguments: Arguments) -> Generator[None]:
    """Raises a UserError if Hydra or OmegaConf do not accept ``arguments``, which are composed inside."""
    try:
        yield
    except CONFIGURATION_ERRORS as error:
        raise explained(error) from None  # in Python, what follows would be pages of Hydra's frames
    except REFUSALS as error:
        groups, words = option_names(arguments.config_dir), arguments.overrides
        parsed = zip(words, arguments.parsed, strict=True)
        chosen = [word for word, each in parsed if each.key_or_group in groups and not isinstance(each.value(), str | list)]
        named = [*chosen, *(word for word in words if key_of(word).startswith("hydra"))]
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
    config = with_defaults(command, composed(command, overrides, arguments.config_dir))
    groups = "\n".join(
        textwrap.fill(" ".join(options), 100, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16)
        for group, options in option_names(arguments.config_dir).items()
    )
    lines = "\n".join(f"  {f'{key}={value}':<45} {meaning}".rstrip() for key, value, meaning in _options(command, config))
    usage = f"holotrain {command}: {COMMANDS[command].__doc__}\n\nUsage: holotrain {command} [group=option ...] [key=value ...]"
    return f"{usage}\n\nGroups:\n{groups}\n\nOptions:\n{lines}\n\n{FLAGS}"


def _options(command: str, config: DictConfig) -> Iterator[tuple[str, str, str]]:
    """The key, the value and the meaning of each option: first those outside of groups."""
    plain = to_plain(config)
    described = {"": options_of(COMMANDS[command]), "backward": options_of(BackwardConfig)}
    nodes = {"": {name: value for name, value in plain.items() if name not in GROUPS}, "backward": plain["backward"]}
    for group in OBJECT_GROUPS:
        nodes |= {group: plain[group]} if plain[group] else {}
    for group in NAMED_GROUPS:
        nodes |= {f"{group}.{name}": node for name, node in plain[group].items()}
    for group, values in nodes.items():
        options = described.get(group) or schema_of(group).options(values[TARGET])
        for name, value in values.items():
            shown = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            meaning = options[name].meaning.split(". ")[0].replace("``", "").rstrip(".") if name in options else ""
            yield f"{group}.{name}".lstrip("."), "..." if shown == MISSING else shown, meaning
