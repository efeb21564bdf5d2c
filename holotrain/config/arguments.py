"""Splits the command line into a command, flags of Hydra and overrides. Flags may stand anywhere; Hydra needs them first."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from holotrain.checks import did_you_mean, one_of
from holotrain.config.schema.commands import COMMANDS, WORD_COMMANDS
from holotrain.errors import UserError

# Flags of Hydra, with and without a value. --experimental-rerun is missing on purpose: it unpickles a file.
VALUED = {"--config-dir", "-cd", "--config-name", "-cn", "--config-path", "-cp", "--cfg", "-c", "--info", "-i"}
BARE = {"--multirun", "-m", "--run", "-r", "--resolve", "--hydra-help", "--shell-completion", "-sc"}
HELP = {"--help", "-h"}

CHOICES = {
    ("--cfg", "-c"): ("job", "hydra", "all"),
    ("--info", "-i"): ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath"),
}
"""The values of those flags that do not take any."""

VERBATIM = {
    *("ckpt_path", "images", "texts", "prompt", "prompts", "to", "output_dir", "hydra.run.dir", "hydra.sweep.dir"),
    *("data.root", "data.name", "data.files", "data.val_files", "data.test_files", "data.cache_dir", "data.tokenizer"),
    "model.pretrained",
}
"""Overrides whose values are paths or text. They may contain characters that have a meaning in Hydra's grammar."""

LISTS = {"data.files", "data.val_files", "data.test_files"}
"""Those of them that may be lists."""


@dataclass
class Arguments:
    command: str
    flags: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    """the overrides as given, before paths and texts are escaped for Hydra"""

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
        """The value of the last override of ``key``, unquoted; None if there is none."""
        for word in reversed(self.words):
            name, equals, value = word.lstrip("+").partition("=")
            if equals and name == key:
                return value.strip("'\"")
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
    # Hydra's grammar reads quotes and the backslashes before them; OmegaConf reads interpolations.
    escaped = re.sub(r"(\\*)('|$)", lambda found: 2 * found[1] + ("\\'" if found[2] else ""), value)
    return f"{key}='{literal(escaped)}'"


def _require_text(words: list[str]) -> None:
    """
    Raises:
        UserError: bytes that are no text in UTF-8 (which Python passes on as lone surrogates), or a null character.
    """
    for word in words:
        if any(letter == "\0" or "\ud800" <= letter <= "\udfff" for letter in word):
            raise UserError(f"{word!a} is not text in UTF-8")


def key_of(override: str) -> str:
    """The option or group that an override is about."""
    return override.lstrip("+~").partition("=")[0]


def literal(text: str) -> str:
    """Escapes interpolations, so that OmegaConf resolves the result to ``text``."""
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)


def parse(argv: list[str]) -> Arguments:
    """Splits the command line.

    Raises:
        UserError: an unknown command or flag, a flag without its value, a word that is no override.
    """
    _require_text(argv)
    command, *rest = argv
    if command not in COMMANDS:
        commands = [*COMMANDS, *WORD_COMMANDS]
        raise UserError(f"{command!r} is not a command; use one of {', '.join(commands)}.{did_you_mean(command, commands)}")
    arguments = Arguments(command)
    words = iter(rest)
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
            from holotrain.config.explain import option_of_flag  # which imports this module

            if option := option_of_flag(flag, arguments):
                value = word.partition("=")[2] or next(words, "")
                value = "..." if not value or value.startswith("-") or "=" in value else value
                raise UserError(f"{word!r} is not a flag; options are written key=value. Did you mean '{option}={value}'?")
            near = did_you_mean(flag, VALUED | BARE | HELP)
            raise UserError(f"{word!r} is not a flag; options are written key=value, such as trainer.max_epochs=3.{near}")
        elif not key_of(word) or ("=" not in word and not word.startswith("~")):
            raise UserError(f"{word!r} is not an override; write group=option or key=value")
        else:
            arguments.words.append(word)
            arguments.overrides.append(_verbatim(word))
    for names, choices in CHOICES.items():
        if (value := arguments.flag(*names)) is not None:
            one_of(names[0], value, choices)
    if arguments.config_dir and not Path(arguments.config_dir).is_dir():
        raise UserError(f"--config-dir: there is no folder {arguments.config_dir}")
    return arguments


def parse_words(command: str, words: list[str]) -> Any:
    """The configuration of a command of ``WORD_COMMANDS``; None if it asks for help.

    Raises:
        UserError: no word, too many words, an unknown flag or option, an option without a value.
    """
    _require_text(words)
    if HELP & set(words):
        return None
    schema = WORD_COMMANDS[command]
    given, *others = fields(schema)
    options = [option.name for option in others]
    plain, values = [], {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("-"):
            raise UserError(f"{name!r} is not a flag of {command}.{did_you_mean(name, HELP)}")
        if name in options and equals:
            if not value:
                raise UserError(f"{name}: a value is needed")
            values[name] = str(Path(value).expanduser())
        elif equals and name.isidentifier() and not Path(word).exists():
            raise UserError(
                f"{name!r} is not an option of {command}, which takes {', '.join(options) or 'none'}."
                f"{did_you_mean(name, options)}"
            )
        else:
            plain.append(word)
    if not plain:
        raise UserError(f"{command} needs {given.metadata['needs']}")
    if given.type is str and len(plain) > 1:
        raise UserError(f"{command} takes one {given.name}, not {len(plain)}: {' '.join(plain)}")
    return schema(**{given.name: plain[0] if given.type is str else plain}, **values)
