"""The text of ``--help``."""

import json
import textwrap
from collections.abc import Collection, Iterator

from holotrain.config.command_line import Arguments
from holotrain.config.command_options import COMMANDS, RunConfig, options_of
from holotrain.config.composition import composed, key_of, option_names, to_plain
from holotrain.config.option_groups import NAMED_GROUPS, OBJECT_GROUPS, BackwardConfig, schema_of
from holotrain.config.signatures import REQUIRED, Option, signature
from holotrain.config.structured import with_defaults
from holotrain.schedules import OPTIONS
from holotrain.targets import TARGET

NEEDED = "..."

USUAL = (
    *("data.root", "data.files", "data.name", "data.batch_size", "data.context", "data.num_workers"),
    *("model.name", "model.pretrained", "trainer.accelerator", "trainer.precision", "ckpt_path", "output_dir"),
)
"""Options that most runs of any command are given, where they exist."""

OF_TRAINING = (
    *("optimizer.lr", "optimizer.weight_decay", "scheduler.warmup", "trainer.max_epochs", "trainer.accumulate_grad_batches"),
    *("trainer.devices", "callbacks.checkpoint.monitor", "memory", "seed", "name", "tags"),
)
"""And those of a training or of its plan."""

FLAGS = """\
Flags, in any position:
  --help=all                list every option
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

holotrain COMMAND --help lists the usual options of a command, --help=all every one."""


def command_help(arguments: Arguments) -> str:
    """The groups and options of a command, with the values under the given overrides: the usual ones and those that the
    command line is about, or with ``--help=all`` the others too."""
    command, overrides = arguments.command, [word for word in arguments.overrides if not word.startswith("hydra.")]
    values = with_defaults(command, to_plain(composed(command, overrides, arguments.config_dir)))
    groups = "\n".join(
        textwrap.fill(" ".join(options), 100, initial_indent=f"  {group:<14}", subsequent_indent=" " * 16)
        for group, options in option_names(arguments.config_dir).items()
    )
    usual, others = [], []
    for key, value, meaning in _options(command, values):
        is_usual = value == NEEDED or key in _usual(command) or _is_about(overrides, key)
        (usual if is_usual else others).append(f"  {f'{key}={value}':<45} {meaning}".rstrip())
    lines = "\n".join(usual)
    if arguments.help == "all" and others:
        lines += "\n\nOther options:\n" + "\n".join(others)
    elif others:
        lines += f"\n\nholotrain {command} --help=all lists {len(others)} more; GROUP=OPTION --help those of a group."
    return f"""\
holotrain {command}: {COMMANDS[command].__doc__}

Usage: holotrain {command} [group=option ...] [key=value ...]

Groups:
{groups}

Options:
{lines}

{FLAGS}"""


def _usual(command: str) -> set[str]:
    own = options_of(COMMANDS[command]).keys() - options_of(RunConfig).keys()
    return {*USUAL, *own, *(OF_TRAINING if command in ("fit", "plan") else ())}


def _is_about(overrides: list[str], key: str) -> bool:
    """Whether the command line gives this option, or chooses the group that it belongs to."""
    given = map(key_of, overrides)
    return any(key == each or ("." not in each and key.startswith(f"{each}.")) for each in given)


def _options(command: str, values: dict) -> Iterator[tuple[str, str, str]]:
    for name, option in options_of(COMMANDS[command]).items():
        value = values[name]
        if name in NAMED_GROUPS:
            for member, options in value.items():
                yield f"{name}.{member}.{TARGET}", options[TARGET], _first_sentence(signature(options[TARGET]).meaning)
                yield from _arguments(f"{name}.{member}", options, schema_of(name).options(options[TARGET]))
        elif name in OBJECT_GROUPS:
            if value:
                yield from _arguments(name, value, schema_of(name).options(value[TARGET]), schema_of(name).known)
        elif name == "backward":
            del value["kind"]  # which names the option of the group
            yield from ((name, each, meaning) for each, meaning in OPTIONS.items())
            yield from _arguments(name, value, options_of(BackwardConfig))
        else:
            yield name, _shown(value), option.meaning


def _arguments(
    key: str, options: dict, described: dict[str, Option], known: Collection[str] = ()
) -> Iterator[tuple[str, str, str]]:
    for name, option in described.items():
        if option.default is REQUIRED and name not in (*options, *known):
            yield f"{key}.{name}", NEEDED, f"{_first_sentence(option.meaning)} (needed)".strip()
    for option, value in options.items():
        if option != TARGET:
            yield f"{key}.{option}", _shown(value), _first_sentence(described[option].meaning if option in described else "")


def _first_sentence(text: str) -> str:
    return text.split(". ")[0].replace("``", "").rstrip(".")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
