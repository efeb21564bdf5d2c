"""The text of ``--help``."""

import json
import textwrap
from collections.abc import Iterator

from omegaconf import MISSING, DictConfig

from holotrain.config.annotations import to_plain
from holotrain.config.command_line import Arguments
from holotrain.config.command_options import COMMANDS, options_of
from holotrain.config.composition import composed, option_names
from holotrain.config.option_groups import GROUPS, NAMED_GROUPS, OBJECT_GROUPS, BackwardConfig, schema_of
from holotrain.config.structured import with_defaults
from holotrain.targets import TARGET

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
