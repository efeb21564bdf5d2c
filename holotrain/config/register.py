"""Registers with Hydra what is no file under ``conf``: the options of each command, and resolvers for folders and sweeps."""

from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from holotrain.config.direction import recommended
from holotrain.config.folders import run_folder
from holotrain.config.schema.commands import COMMANDS, options_of
from holotrain.config.schema.run import GROUPS
from holotrain.config.signatures import defaults_of


def register(resume: bool = False) -> None:
    """Fills the ConfigStore; ``resume``: use the folder of the latest run or sweep instead of a new one."""
    for command in COMMANDS:
        ConfigStore.instance().store(name=command, node=options(command, ["_self_", "_common"]))
    # Cached like Hydra's ${now:}, because every use within one launch must give the same folder.
    for name in ("run_folder", "sweep_folder"):
        OmegaConf.register_new_resolver(
            *(name, lambda command, root, sweep=name == "sweep_folder": run_folder(command, root, resume, sweep)),
            replace=True,
            use_cache=True,
        )
    OmegaConf.register_new_resolver("direction", recommended, replace=True)


def options(command: str, parts: list[Any]) -> DictConfig:
    """The primary configuration of a command: its options with their defaults, and its groups.

    Hydra composes a group from any keys; :func:`~holotrain.config.checkpointed.typed` checks them.

    Args:
        parts: the defaults list.
    """
    groups = {group: DictConfig({}, flags={"struct": False}) for group in GROUPS}
    own = defaults_of(options_of(COMMANDS[command]))
    return DictConfig(own | groups | {"defaults": ["_hydra", *parts], "hydra": {"job": {"name": command}}})
