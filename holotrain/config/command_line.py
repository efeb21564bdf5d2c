"""From the words of a command line, or of a call in Python, and the checkpoint that they name, to a checked configuration; and
``--help``.

The checkpoint's configuration, as plain data, is the primary configuration that Hydra composes with. Nothing in it becomes an
argument, an override, the name of a group or an interpolation, and it does not decide where files are written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from holotrain.config import option_groups as groups
from holotrain.config.command_options import COMMANDS, RunConfig, options_of
from holotrain.config.composition import composed, key_of, option_names, primary_config, register
from holotrain.config.signatures import explaining, literal, literally, to_plain
from holotrain.config.structured import checked, nodes_of, with_defaults, without_replaced_options
from holotrain.errors import UserError, check_choice
from holotrain.folders import LAST_CHECKPOINT, checkpoint_path, refuse_links, relative_to_cwd, run_folder
from holotrain.targets import TARGET

HELP = {"--help", "-h"}


@dataclass
class Arguments:
    """A command line, split.

    Args:
        words: the overrides as given.
        parsed: the same as Hydra reads them.
        flags: those for Hydra.
        shows: the configuration is only printed.
        primary: name of the primary configuration: that of the command, or that of a checkpoint.
        before, chosen_before: the configuration of the checkpoint, and its option of each group.
    """

    command: str
    words: list[str]
    parsed: list[Override]
    flags: list[str]
    help: bool
    multirun: bool
    config_dir: str | None
    shows: bool
    primary: str
    before: dict[str, Any] = field(default_factory=dict)
    chosen_before: dict[str, str] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """With paths and texts escaped for Hydra."""
        return [str(each.input_line) for each in self.parsed]

    @property
    def fixed(self) -> list[str]:
        """The keys of overrides that are the same for all jobs of a sweep."""
        return [str(each.key_or_group) for each in self.parsed if not each.is_sweep_override()]

    @property
    def resume(self) -> bool:
        return (self.value("resume") or "").lower() == "true"

    def value(self, key: str) -> str | None:
        """The value of the last override of ``key``, unquoted; None if there is none."""
        found = [word.partition("=")[2] for word in self.words if "=" in word and key_of(word) == key]
        return found[-1].strip("'\"") if found else None


class _Flags(argparse.ArgumentParser):
    """Those of Hydra that a training needs. ``--experimental-rerun`` would unpickle a file."""

    def __init__(self) -> None:
        super().__init__(usage="holotrain COMMAND [flags, group=option, key=value]", add_help=False, allow_abbrev=False)
        self.add_argument("overrides", nargs="*", help=argparse.SUPPRESS)
        self.add_argument("--help", "-h", action="store_true")
        self.add_argument("--multirun", "-m", action="store_true", help="run each combination: optimizer.lr=1e-3,1e-4")
        self.add_argument("--resolve", action="store_true", help="with --cfg: replace interpolations")
        self.add_argument("--config-dir", "-cd", help="also look for options in this folder")
        self.add_argument("--cfg", "-c", choices=("job",), help="print the configuration and exit")

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; options are written key=value, such as trainer.max_epochs=3")


def parse(argv: list[str]) -> Arguments:
    """Splits the command line. Raises a UserError if a flag or an override is not well-formed."""
    command, *rest = argv
    check_choice("the command", command, [*COMMANDS, "init"])
    found = _Flags().parse_intermixed_args(rest)
    if found.config_dir and not Path(found.config_dir).is_dir():
        raise UserError(f"--config-dir: there is no folder {found.config_dir}")
    flags = ["--multirun"] * found.multirun + ["--resolve"] * found.resolve
    flags += [f"--config-dir={found.config_dir}"] if found.config_dir else []
    with explaining():
        parsed = [_override(command, word) for word in found.overrides]
    multirun = found.multirun or "hydra.mode=MULTIRUN" in found.overrides
    if "sweep" in map(key_of, found.overrides) and not (multirun or found.cfg or found.help):
        raise UserError("sweep: add -m to run one")
    return Arguments(command, found.overrides, parsed, flags, found.help, multirun, found.config_dir, bool(found.cfg), command)


def _override(command: str, word: str) -> Override:
    """A word as Hydra reads it. A value that is none in Hydra's grammar, and every prompt, is taken literally."""
    key, equals, value = word.partition("=")
    name, parser = key_of(word), OverridesParser.create()
    if not name or not (equals or word.startswith("~")):
        raise UserError(f"{word!r} is not an override; write group=option or key=value, without spaces around =")
    options = {*options_of(COMMANDS[command]), "experiment", "sweep", "hydra"}
    if re.split(r"[./@]", name)[0] not in options and not word.startswith(("+", "~")):
        key = f"++{key}"  # `with_defaults` refuses it, where all options are there
    if name == "backward" and ":" in value:  # compiled:0.3, whose budget no name of the group has
        key = "backward.kind"
    value = str(Path(value).expanduser()) if value.startswith("~/") else value
    if name != "prompt":
        with suppress(OverrideParseException):
            return parser.parse_overrides([f"{key}{equals}{value}"])[0]
    return parser.parse_overrides([f"{key}={quoted(value)}"])[0]


def quoted(text: str) -> str:
    """A text as the value of an override: Hydra's grammar reads quotes, and OmegaConf interpolations."""
    return QuotedString(literal(text), Quote.single).with_quotes()


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
    lines = [f"holotrain {command}: {COMMANDS[command].__doc__}", "", _Flags().format_help(), "Groups:"]
    for group, options in option_names(arguments.config_dir).items():
        lines.append(textwrap.fill(" ".join(options), 100, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16))
    lines += ["", "Options:"]
    own = {name: value for name, value in plain.items() if name not in groups.GROUPS}
    for where, values in ({"": own, "backward": plain["backward"]} | nodes_of(plain)).items():
        schema = groups.BackwardConfig if where == "backward" else COMMANDS[command]
        options = groups.schema_of(where).options(values[TARGET]) if TARGET in values else options_of(schema)
        for name, value in values.items():
            shown = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            option = f"{where}.{name}=".lstrip(".") + ("..." if shown == MISSING else shown)
            meaning = options[name].meaning.split(". ")[0].rstrip(".") if name in options else ""
            lines.append(f"  {option:<45} {meaning}".rstrip())
    return "\n".join(lines)


LOCAL_LOGGERS = ("tensorboard", "csv", "none")
"""Options of the group ``logger`` that a resumed run takes over. Others send data out, so the command line must name them."""


def start_checkpoint(arguments: Arguments) -> dict[str, Any] | None:
    """What the checkpoint that ``ckpt_path=`` or ``resume=true`` name holds of its run; None: they name none.

    A sweep of trainings has none: each job composes its own configuration and continues in its own folder. Other sweeps may
    vary everything but the checkpoint. Raises a UserError if it is none, or names a class that is not trusted.
    """
    named, root = arguments.value("ckpt_path") or "null", arguments.value("output_dir") or "runs"
    if arguments.multirun and arguments.command == "fit":
        return None
    if arguments.resume:
        folder = Path(arguments.value("hydra.run.dir") or run_folder(arguments.command, root, True)).expanduser()
        path = folder / LAST_CHECKPOINT
        later = max((each for each in folder.parent.glob("[0-9]*") if each.name > folder.name), default=None)
        if later and not (later / LAST_CHECKPOINT).exists() and not arguments.value("hydra.run.dir"):
            print(f"holotrain: resume=true: continuing {folder}; {later} is later, but has no checkpoint", file=sys.stderr)
        if not path.exists():
            raise UserError(f"resume=true: {folder} has no checkpoint; to start it from the beginning, leave out resume=true")
    elif named != "null":
        path = checkpoint_path(named, arguments.command, root)
    else:
        return None
    from holotrain.config.checkpointed import KEY, load, require_trusted  # imports torch

    start = load(path)[KEY]
    packages = re.findall(r"[\w.]+", arguments.value("trust") or "")
    require_trusted(start["config"], path, packages, arguments.words, arguments.config_dir)
    return start


def primary(arguments: Arguments, start: dict[str, Any]) -> str:
    """Registers the primary configuration of a command that starts from a checkpoint, and returns its name.

    The values of the checkpoint stand in it as plain data, after the defaults of the command. Every group is an empty entry of
    its defaults list, so that the command line can choose an option from it.
    """
    keys = {*map(key_of, arguments.overrides)}
    if "data.download" in keys and not {"data.root", "data"} & keys:
        raise UserError("data.root: data.download=true writes into it, so a checkpoint cannot name it; give data.root=...")
    plain = dict(start["config"])
    if arguments.command != "fit" or "trainer" in keys:  # the number of processes may change; the other options stay
        plain["trainer"] = {name: value for name, value in plain["trainer"].items() if name not in groups.PROCESS_OPTIONS}
    if "model.name" in keys and plain["model"]:  # the configuration of another network
        plain["model"] = {name: value for name, value in plain["model"].items() if name != "config"}
    for group in ({*groups.OBJECT_GROUPS, "callbacks"} - {"trainer"}) & keys:  # the option replaces what the checkpoint has
        del plain[group]
    if "processor" in (data := start["config"].get("data") or {}) and "data" in keys:  # other images, normalised as before
        plain["data"] = {"processor": data["processor"]}
    before = start["choices"].get("logger") if arguments.resume else None  # a file does not decide what is sent where
    logger = before if before in LOCAL_LOGGERS else LOCAL_LOGGERS[0]
    order = [group for group in groups.GROUPS if group not in ("task", "trainer")]
    order += ["task", "experiment", "sweep"]  # last, since these may change the option of another group
    chosen = [{group: logger if group == "logger" else None} for group in order]
    node = primary_config(arguments.command, [{"trainer": "default"}, "_self_", *chosen])
    node.merge_with(literally(plain))
    ConfigStore.instance().store(name="_checkpoint", node=node)
    return "_checkpoint"


def begin(arguments: Arguments) -> None:
    """Makes the checkpoint that the words name, if any, what the command starts from."""
    start = start_checkpoint(arguments)
    if start is not None:
        # The task of the checkpoint, named again, would bring its own default model and data in place of the checkpoint's.
        again = ("task", start["choices"].get("task"))
        arguments.parsed = [each for each in arguments.parsed if (each.key_or_group, each.value()) != again]
        arguments.primary = primary(arguments, start)
        arguments.before, arguments.chosen_before = start["config"], start["choices"]


def completed(arguments: Arguments, config: DictConfig, overrides: list[str]) -> DictConfig:
    """What Hydra composed, as a structured config with all options, whose names and types are checked."""
    plain = without_replaced_options(to_plain(config), overrides, arguments.before)
    return with_defaults(arguments.command, OmegaConf.create(plain))


def typed(arguments: Arguments, config: DictConfig, overrides: list[str], chosen: Mapping[str, str | None]) -> RunConfig:
    """What Hydra composed, as dataclasses; ``chosen``: its choice of each group. Raises a UserError if there is a mistake, but
    for what only the classes know."""
    found = checked(arguments.command, completed(arguments, config, overrides))
    if found.ckpt_path is not None:
        if arguments.command != "fit" and arguments.value("ckpt_path") is None:
            raise UserError("ckpt_path: a file in --config-dir cannot name it; give it on the command line")
        found.ckpt_path = str(checkpoint_path(found.ckpt_path, arguments.command, found.output_dir))
    pretrained = str(getattr(found.model, "pretrained", None) or "")
    if found.model and pretrained and (Path(pretrained).expanduser() / LAST_CHECKPOINT).exists():  # the folder of a run
        best = checkpoint_path(pretrained, "load", found.output_dir)
        found.model = found.model.with_arguments(pretrained=str(best))
    options = {group: option for group, option in chosen.items() if option and "/" not in group}
    replaced = {key.removesuffix(f".{TARGET}") for key in map(key_of, overrides) if key.endswith(f".{TARGET}")}
    options = {"backward": found.backward.name} | arguments.chosen_before | options
    found.choices = {group: option for group, option in options.items() if group not in replaced}  # a class is no option
    found.overrides = overrides
    return found


def prepare_sweep(arguments: Arguments) -> Path:
    """The folder of a sweep that is about to start."""
    single = [str(each.input_line) for each in arguments.parsed if not each.is_sweep_override()]
    named = [word for word in single if re.match(r"[+]*(hydra|output_dir|sweep)\b", word)]
    with explaining():
        hydra_config = composed(arguments.primary, named, arguments.config_dir, with_hydra=True).hydra
        folder = relative_to_cwd(Path(str(hydra_config.sweep.dir)))
    refuse_links(folder, ["multirun.yaml", *(path.name for path in folder.glob("*") if path.name.isdigit())])
    return folder


def compose(command: str = "fit", overrides: Collection[str] = (), config_dir: str | Path | None = None) -> RunConfig:
    """The checked configuration that the command line ``holotrain COMMAND OVERRIDES`` would run.

    Args:
        command: fit, validate, test, predict, generate, export or plan.
        overrides: as on the command line, such as ``["model=rev_vit_small", "optimizer.lr=1e-3"]``.
        config_dir: folder of YAML files of your own, as ``--config-dir``.

    Returns:
        The options as attributes, such as ``config.optimizer.lr``.

    Raises:
        UserError: a mistake; one line that says what is wrong, where, and the nearest valid choice.
    """
    arguments = parse([command, *(["--config-dir", str(config_dir)] if config_dir else []), *overrides])
    register(arguments.resume, arguments.fixed)
    begin(arguments)
    with explaining():
        composition = composed(arguments.primary, arguments.overrides, arguments.config_dir, with_hydra=True)
    words = to_plain(composition.hydra.overrides.task)  # unresolved: interpolations mean other options
    chosen = to_plain(composition.hydra.runtime.choices)
    with open_dict(composition):
        del composition["hydra"]
    config = typed(arguments, composition, words, chosen)
    config.folder = arguments.value("hydra.run.dir")
    if config.folder is None and arguments.resume:
        config.folder = run_folder(command, config.output_dir, True)
    return config
