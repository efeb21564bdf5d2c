"""Finds the configuration folder, and composes configurations for help, suggestions and checkpoints."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from holotrain.errors import UserError


def config_folder() -> str:
    """The folder ``conf``: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parents[1]
    return str(next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()))


@contextmanager
def own_hydra() -> Iterator[None]:
    """Composes apart from what somebody else's Hydra in this process has initialised, and leaves that as it was."""
    theirs, base = GlobalHydra.instance(), VersionBase.instance().getbase()
    GlobalHydra.set_instance(GlobalHydra.__new__(GlobalHydra))
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.set_instance(theirs)
        VersionBase.instance().version_base = base


def composed(primary: str, overrides: list[str], config_dir: str | None = None, with_hydra: bool = False) -> DictConfig:
    """A primary configuration under some overrides, unresolved; inside a Hydra job, with the search path of that job.

    Args:
        with_hydra: with the node ``hydra``.
    """
    if GlobalHydra.instance().is_initialized():
        return compose(primary, overrides, with_hydra)
    with initialize_config_dir(config_folder(), version_base="1.3"):
        if config_dir:
            overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
        return compose(primary, overrides, with_hydra)


def member_names(group: str, config_dir: str | None = None) -> set[str]:
    """The names in the files of a group whose options are mappings, such as ``callbacks``."""
    names: set[str] = set()
    for folder in filter(None, (config_folder(), config_dir)):
        for path in Path(folder, group).glob("*.yaml"):
            names |= {*map(str, OmegaConf.load(path))} - {"defaults"}
    return names


def option_names(config_dir: str | None = None) -> dict[str, list[str]]:
    """The options of every group, from ``conf`` and the user's folder."""
    groups: dict[str, set[str]] = {}
    for folder in filter(None, (config_folder(), config_dir)):
        for path in Path(folder).glob("*/*.yaml"):
            groups.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(groups.items())}


def require_new_names(config_dir: str) -> None:
    """
    Raises:
        UserError: an option in the user's folder has the name of one of ours, which Hydra would choose without a word.
    """
    ours = option_names()
    for path in sorted(Path(config_dir).glob("*/*.yaml")):
        if path.stem in ours.get(path.parent.name, ()):
            raise UserError(f"--config-dir: {path} has the name of an option that holotrain has; give it another name")
