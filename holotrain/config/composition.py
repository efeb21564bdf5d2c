"""What holotrain asks of Hydra: the files of options, those of each command, resolvers, and composed configurations."""

import json
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

from holotrain.config.command_options import COMMANDS, options_of
from holotrain.config.option_groups import GROUPS
from holotrain.config.signatures import defaults_of, to_plain
from holotrain.errors import UserError
from holotrain.folders import run_folder
from holotrain.schedules import OPTIONS
from holotrain.targets import TARGET

LOG = "log.txt"
"""What Python's logging has written, in the folder of a run."""

LOGGING = {
    "formatters": {"timed": {"format": "%(asctime)s  %(message)s"}},
    "handlers": {
        "file": {
            "class": "logging.FileHandler",
            "formatter": "timed",
            "filename": "${log_file:}",
            "delay": True,  # a run that is refused leaves no folder
            "encoding": "utf-8",
            "errors": "backslashreplace",
        },
        "console": {"class": "logging.StreamHandler", "level": "WARNING"},
    },
    "root": {"level": "WARNING", "handlers": ["file", "console"]},
    "loggers": {"holotrain": {"level": "INFO"}},
}
"""Hydra's ``job_logging``."""


def config_folder() -> str:
    """The folder ``conf``: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parents[1]
    return str(next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()))


def register(resume: bool = False) -> None:
    """Fills the ConfigStore; ``resume``: use the folder of the latest run or sweep instead of a new one."""
    _store_options()
    # Cached like Hydra's ${now:}, because every use within one launch must give the same folder.
    OmegaConf.register_new_resolver(
        "run_folder", lambda kind, root: run_folder(kind, root, resume), replace=True, use_cache=True
    )
    # Unresolved, because the name of a folder may look like an interpolation.
    OmegaConf.register_new_resolver(
        "log_file", lambda *, _root_: str(Path(to_plain(_root_.hydra.runtime)["output_dir"], LOG)), replace=True
    )
    OmegaConf.register_new_resolver("direction", recommended, replace=True)


@cache
def _store_options() -> None:
    store = ConfigStore.instance().store
    for command in COMMANDS:
        store(name=command, node=options(command, ["_self_", "_common"]))
    for name, node in models().items():
        store(name=name, node=node, group="model")
    for name in OPTIONS:
        store(name=name, node={"kind": name}, group="backward")


@cache
def models() -> dict[str, dict[str, Any]]:
    """The options of the group ``model`` that holotrain has: those of ``conf/_models.json``, by name."""
    file = json.loads(Path(config_folder(), "_models.json").read_text(encoding="utf-8"))
    found = {name: {TARGET: target} for name, target in file["others"].items()}
    for family, sizes in file["families"].items():
        for size, arguments in sizes.items():
            name = f"{family.lower()}_{size}"
            found[name] = {TARGET: f"holotrain.models.{family}", **arguments}
            found[f"rev_{name}"] = {TARGET: f"holotrain.models.Rev{family}", **arguments}
    return found


def options(command: str, parts: list[Any]) -> DictConfig:
    """The primary configuration of a command: its options with their defaults, and its groups; ``parts``: the defaults list.

    Hydra composes a group from any keys; ``structured`` checks them.
    """
    groups = {group: DictConfig({}, flags={"struct": False}) for group in GROUPS}
    own = defaults_of(options_of(COMMANDS[command]))
    hydra = {
        "job": {"name": command},
        "job_logging": LOGGING,
        "output_subdir": None,  # the run's config.yaml is written by holotrain, resolved and checked
        "run": {"dir": "${run_folder:${hydra.job.name},${output_dir}}"},
        "sweep": {"dir": "${run_folder:${hydra.job.name}/sweeps,${output_dir}}", "subdir": "${hydra.job.num}"},
    }
    quiet = [{f"override hydra/{log}_logging": "none"} for log in ("hydra", "job")]
    return DictConfig(own | groups | {"defaults": [*parts, *quiet], "hydra": hydra})


@contextmanager
def own_hydra() -> Generator[None]:
    """Composes apart from what somebody else's Hydra in this process has initialised, and leaves that as it was."""
    other, base = GlobalHydra.instance(), VersionBase.instance().getbase()
    GlobalHydra.set_instance(GlobalHydra.__new__(GlobalHydra))
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.set_instance(other)
        VersionBase.instance().version_base = base


def composed(primary: str, overrides: list[str], config_dir: str | None = None, with_hydra: bool = False) -> DictConfig:
    """A primary configuration under some overrides, unresolved; inside a Hydra job, with the search path of that job."""
    if GlobalHydra.instance().is_initialized():
        return compose(primary, overrides, with_hydra)
    with initialize_config_dir(config_folder(), version_base="1.3"):
        if config_dir:
            overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
        return compose(primary, overrides, with_hydra)


def member_names(group: str, config_dir: str | None = None) -> set[str]:
    """The names in the files of a group whose options are mappings, such as ``callbacks``."""
    return {str(name) for path in _files(f"{group}/*.yaml", config_dir) for name in OmegaConf.load(path)} - {"defaults"}


def option_names(config_dir: str | None = None) -> dict[str, list[str]]:
    """The options of every group, from ``conf`` and the user's folder; models and schedules have no files of their own."""
    groups = {"model": {*models()}, "backward": {*OPTIONS}}
    for path in _files("*/*.yaml", config_dir):
        groups.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(groups.items())}


def _files(pattern: str, config_dir: str | None) -> list[Path]:
    return [path for folder in (config_folder(), config_dir) if folder for path in Path(folder).glob(pattern)]


def require_new_names(config_dir: str) -> None:
    """Refuses an option in the user's folder with the name of one of ours, which Hydra would silently choose."""
    ours = option_names()
    for path in sorted(Path(config_dir).glob("*/*.yaml")):
        if path.stem in ours.get(path.parent.name, ()):
            raise UserError(f"--config-dir: {path} has the name of an option that holotrain has; give it another name")


MODES = {"max": "maximize", "min": "minimize"}  # directions of Optuna, by the mode of a ModelCheckpoint


LOW_IS_BETTER = ("loss", "error", "perplexity", "bits", "seconds", "bytes", "mae", "mse", "distance")
"""Parts of names of metrics."""


def recommended(task: str, monitor: str | None, mode: str | None, objective: str | None = None) -> str:
    """``maximize`` or ``minimize``; the resolver ``direction`` of ``conf/sweep``.

    Args:
        task: the chosen option of the group.
        monitor: the metric that selects the best checkpoint; None: the first of the task.
        mode: ``max`` or ``min``; None: that of the metric.
        objective: what the sweep optimises instead of ``monitor``.
    """
    if objective is None and mode is not None:
        return MODES.get(mode, "minimize")  # the run refuses other modes
    metric = objective or monitor or ("val/loss" if task.endswith("_lm") else "val/accuracy")
    return "minimize" if any(part in metric for part in LOW_IS_BETTER) else "maximize"


def direction(hydra: DictConfig) -> str | None:
    """The direction of the sweeper in Hydra's configuration; None: it has none, or several."""
    found = OmegaConf.select(hydra, "sweeper.direction")
    return found if found is None or isinstance(found, str) else getattr(found, "name", None)


def key_of(override: str) -> str:
    """The option or group that an override is about."""
    return override.lstrip("+~").partition("=")[0]
