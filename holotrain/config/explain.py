"""Turns errors of Hydra and OmegaConf into one line: what is wrong, where, and the nearest valid name."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from holotrain.checks import did_you_mean
from holotrain.config.arguments import Arguments, key_of
from holotrain.config.composition import composed, option_names, register
from holotrain.config.typed import completed
from holotrain.errors import UserError
from holotrain.targets import first_line

CONFIGURATION_ERRORS = (HydraException, OmegaConfBaseException)

REFUSALS = (ValueError, TypeError, AssertionError)
"""What Hydra raises besides for ``group=null``, ``group=3``, and values of its own options that it cannot use."""

PLUGINS = {"optuna": "optuna", "joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit"}
"""The extra that installs each plugin of Hydra, by the plugin's name."""


def explained(error: Exception, arguments: Arguments) -> UserError:
    """Turns one of ``CONFIGURATION_ERRORS``, raised while composing ``arguments``, into a UserError."""
    cause = error.__cause__ or error
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(cause, MissingMandatoryValue):
        return UserError(f"{cause.full_key}: a value is needed; give {cause.full_key}=...")
    if isinstance(error, OverrideParseException):
        return UserError(f"{error.override}: {first_line(error)}")
    if "Ambiguous value" in str(error):
        return UserError(f"{first_line(error)}; to run a sweep over several values, add -m")
    unknown = re.search(r"Could not (?:override|delete from config\.) '([\w./@-]+)'", str(error))
    if unknown:
        return _unknown_key(unknown[1], arguments)
    key, text = getattr(cause, "full_key", None) or "", first_line(cause)
    if resolving := re.fullmatch(r"(\w+) raised while resolving interpolation: (.*)", text):
        kind, text = resolving.groups()
        key = "" if kind == UserError.__name__ else key
    return UserError(f"{key}: {text}" if key and key not in text else text)


def refused(error: Exception, arguments: Arguments) -> UserError:
    """Turns one of ``REFUSALS``, raised by Hydra, into a UserError that names the override."""
    groups, words = option_names(arguments.config_dir), arguments.overrides
    parsed = zip(words, OverridesParser.create().parse_overrides(words), strict=True)
    chosen = [word for word, each in parsed if each.key_or_group in groups and not isinstance(each.value(), str | list)]
    named = [*chosen, *(word for word in words if key_of(word).startswith("hydra"))]
    return UserError(f"{named[0]}: {first_line(error)}" if named else first_line(error))


@contextmanager
def explaining(arguments: Arguments) -> Iterator[None]:
    """
    Raises:
        UserError: Hydra or OmegaConf do not accept ``arguments``, which are composed inside.
    """
    try:
        yield
    except CONFIGURATION_ERRORS as error:
        raise explained(error, arguments) from error
    except REFUSALS as error:
        raise refused(error, arguments) from error


def option_of_flag(flag: str, arguments: Arguments) -> str | None:
    """The option that a flag of other programs, such as ``--lr`` or ``--max-epochs``, stands for; None: there is none."""
    register()
    name, keys = flag.lstrip("-").replace("-", "_"), _keys_beside("", "", arguments)
    return name if name in keys else _of_this_name(name, keys)


def _of_this_name(name: str, keys: list[str]) -> str | None:
    """The first key whose last part is this; ``epochs`` is ``trainer.max_epochs``."""
    return next((key for key in keys if key.rpartition(".")[2] in (name, f"max_{name}")), None)


def _missing_option(error: MissingConfigException) -> UserError:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if extra := PLUGINS.get(option if group in ("hydra/sweeper", "hydra/launcher") else ""):
        return UserError(f"{group}={option}: the package is not installed; pip install 'holotrain[{extra}]'")
    options = [name for name in error.options or () if not name.startswith("_")]
    if not group or not options:
        return UserError(first_line(error))
    return UserError(f"{group}={option}: not found; {group} is one of {', '.join(options)}."
                     f"{did_you_mean(option, options)}")  # fmt: skip


def _unknown_key(key: str, arguments: Arguments) -> UserError:
    """The nearest valid key is one beside it, under the other group choices of the command line; at the top also an option of a
    group: ``lr`` is ``optimizer.lr``."""
    parent, _, name = key.rpartition(".")
    valid, first = _keys_beside(parent, key, arguments), key.partition(".")[0]
    if parent and not valid and first not in _keys_beside("", first, arguments):
        return _unknown_key(first, arguments)
    where = f"in {parent}" if parent else "among the options"
    below = _of_this_name(name, valid)
    near = f" Did you mean {below!r}?" if below and name not in valid else did_you_mean(name, valid)
    return UserError(f"{key}: there is no {name!r} {where}.{near}")


def _keys_beside(parent: str, key: str, arguments: Arguments) -> list[str]:
    """The valid keys in ``parent``, under the other group choices of the command line; at the top also the keys of groups."""
    groups = option_names(arguments.config_dir)
    choices = [word for word in arguments.overrides if word.partition("=")[0] in groups.keys() - {key} and "," not in word]
    try:
        plain = OmegaConf.to_container(composed(arguments.primary, choices, arguments.config_dir))
        config = completed(arguments.command, plain)
    except (*CONFIGURATION_ERRORS, UserError):
        config = {}
    nodes = {group: node for group, node in config.items() if isinstance(node, dict)}
    if parent:
        return [*nodes.get(parent, {})]
    return [*config, *groups, *(f"{group}.{each}" for group, node in nodes.items() for each in node)]
