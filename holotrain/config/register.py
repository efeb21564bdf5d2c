"""Registers the schemas and the resolvers for run folders and sweeps with Hydra."""

from functools import cache

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from holotrain.config.direction import recommended
from holotrain.config.folders import run_folder, sweep_folder
from holotrain.config.schema import COMMANDS, KINDS, PLAIN


def register(resume: bool = False) -> None:
    """Fills the ConfigStore; ``resume``: use the folder of the latest run or sweep instead of a new one."""
    _store_schemas()
    # Cached like Hydra's ${now:}, because every use within one launch must give the same folder.
    for name, resolver in (("run_folder", run_folder), ("sweep_folder", sweep_folder)):
        OmegaConf.register_new_resolver(
            name, lambda command, root, make=resolver: make(command, root, resume), replace=True, use_cache=True
        )
    OmegaConf.register_new_resolver("direction", recommended, replace=True)


@cache
def _store_schemas() -> None:
    store = ConfigStore.instance()
    for command, schema in COMMANDS.items():
        store.store(group="schema/command", name=command, node=schema)
    for group, schemas in KINDS.items():
        for kind, schema in schemas.items():
            store.store(group=f"schema/{group}", name=kind, node=schema)
    for group, schema in PLAIN.items():
        store.store(group="schema", name=group, node=schema)
