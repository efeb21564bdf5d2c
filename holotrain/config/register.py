"""Registers with Hydra what is not a file under ``conf``: the options of each command, and resolvers for folders and sweeps."""

from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from holotrain.config.direction import recommended
from holotrain.config.folders import run_folder, sweep_folder
from holotrain.config.schema import COMMANDS, GROUPS


def register(resume: bool = False) -> None:
    """Fills the ConfigStore; ``resume``: use the folder of the latest run or sweep instead of a new one."""
    for command in COMMANDS:
        ConfigStore.instance().store(name=command, node=options(command, ["_self_", "_common"]))
    # Cached like Hydra's ${now:}, because every use within one launch must give the same folder.
    for name, resolver in (("run_folder", run_folder), ("sweep_folder", sweep_folder)):
        OmegaConf.register_new_resolver(
            name, lambda command, root, make=resolver: make(command, root, resume), replace=True, use_cache=True
        )
    OmegaConf.register_new_resolver("direction", recommended, replace=True)


def options(command: str, parts: list[Any]) -> DictConfig:
    """The primary configuration of a command: its options with their defaults, and its groups.

    Hydra composes a group from any keys; :func:`~holotrain.config.checkpointed.typed` checks them.

    Args:
        parts: the defaults list.
    """
    own = OmegaConf.to_container(OmegaConf.structured(COMMANDS[command]))
    groups = {group: DictConfig({}, flags={"struct": False}) for group in GROUPS}
    return DictConfig(own | groups | {"defaults": parts, "hydra": {"job": {"name": command}}})
