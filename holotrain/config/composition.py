"""Finds the configuration folder, and composes configurations for help, suggestions and checkpoints."""

from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

import holotrain


def config_folder() -> str:
    """The folder ``conf``: inside the package in a wheel, next to it in a checkout."""
    package = Path(holotrain.__file__).parent
    return str(next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()))


def composed(primary: str, overrides: list[str], config_dir: str | None = None) -> DictConfig:
    """A primary configuration under some overrides, unresolved; inside a Hydra job, with the search path of that job."""
    if GlobalHydra.instance().is_initialized():
        return compose(primary, overrides)
    with initialize_config_dir(config_folder(), version_base="1.3"):
        if config_dir:
            overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
        return compose(primary, overrides)


def option_names(config_dir: str | None = None) -> dict[str, list[str]]:
    """The options of every group, from ``conf`` and the user's folder."""
    groups: dict[str, set[str]] = {}
    for folder in filter(None, (config_folder(), config_dir)):
        for path in Path(folder).glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(groups.items())}
