"""Turns errors of Hydra and OmegaConf into one line: what is wrong, where, and the nearest valid name."""

import re

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from holotrain.checks import did_you_mean
from holotrain.config.arguments import Arguments
from holotrain.config.checkpointed import completed
from holotrain.config.composition import composed, option_names
from holotrain.config.register import register
from holotrain.errors import UserError

CONFIGURATION_ERRORS = (HydraException, OmegaConfBaseException)

PLUGINS = {"optuna": "optuna", "joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit"}
"""The extra that installs each plugin of Hydra, by the plugin's name."""

NOUNS = {"Float": "a number", "Integer": "a whole number", "Boolean": "true or false"}


def explained(error: Exception, arguments: Arguments) -> UserError:
    """Turns one of ``CONFIGURATION_ERRORS``, raised while composing ``arguments``, into a UserError."""
    cause = error.__cause__ or error
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(cause, MissingMandatoryValue):
        return UserError(f"{cause.full_key}: a value is needed; give {cause.full_key}=...")
    if isinstance(error, OverrideParseException):
        return UserError(f"{error.override}: {_first_line(error)}")
    if "Ambiguous value" in str(error):
        return UserError(f"{_first_line(error)}; to run a sweep over several values, add -m")
    unknown = re.search(r"Could not (?:override|append to config|append|delete from config\.) '?([\w./@-]+)'?", str(error))
    if unknown:
        return _unknown_key(unknown[1], arguments)
    not_in_schema = re.search(r"Key '(\w+)' not in '\w+'", str(cause))
    key = getattr(cause, "full_key", None) or ""
    if not_in_schema:
        return _unknown_key(key or not_in_schema[1], arguments)
    text = _first_line(cause)
    if unconverted := re.match(r"Value (.*) of type .* could not be converted to (\w+)", text):
        text = f"{unconverted[1]} is not {NOUNS.get(unconverted[2], unconverted[2])}"
    return UserError(f"{key}: {text}" if key and key not in text else text)


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
        return UserError(_first_line(error))
    return UserError(f"{group}={option}: not found; {group} is one of {', '.join(options)}."
                     f"{did_you_mean(option, options)}")  # fmt: skip


def _unknown_key(key: str, arguments: Arguments) -> UserError:
    parent, _, name = key.rpartition(".")
    valid = _keys_beside(parent, key, arguments)
    where = f"in {parent}" if parent else "among the options"
    below = _of_this_name(name, valid)  # lr is optimizer.lr
    near = f" Did you mean {below!r}?" if below and name not in valid else did_you_mean(name, valid)
    return UserError(f"{key}: there is no {name!r} {where}.{near}")


def _keys_beside(parent: str, key: str, arguments: Arguments) -> list[str]:
    """The valid keys in ``parent``, under the other group choices of the command line; at the top also the keys of groups."""
    groups = option_names(arguments.config_dir)
    choices = [word for word in arguments.overrides if word.partition("=")[0] in groups and "," not in word]
    try:
        config = composed(arguments.primary, [word for word in choices if word.partition("=")[0] != key], arguments.config_dir)
        config = completed(arguments.command, OmegaConf.to_container(config))
    except (*CONFIGURATION_ERRORS, UserError):
        return []
    node = OmegaConf.select(config, parent) if parent else config
    keys = [str(name) for name in node] if isinstance(node, DictConfig) else []
    if parent:
        return keys
    of_groups = [f"{group}.{name}" for group in keys if isinstance(node._get_node(group), DictConfig) for name in node[group]]
    return [*keys, *groups, *of_groups]


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
