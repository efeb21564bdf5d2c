"""What holotrain asks of Hydra: the folder of options, those of each command, resolvers, and composed configurations."""

import os
import re
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import Container, DictConfig, OmegaConf

from holotrain.config.command_options import COMMANDS, options_of
from holotrain.config.option_groups import GROUPS
from holotrain.config.signatures import defaults_of
from holotrain.errors import UserError
from holotrain.files import read_json
from holotrain.numeric import counted


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
    OmegaConf.register_new_resolver("direction", recommended, replace=True)


@cache
def _store_options() -> None:
    for command in COMMANDS:
        ConfigStore.instance().store(name=command, node=options(command, ["_self_", "_common"]))


def options(command: str, parts: list[Any]) -> DictConfig:
    """The primary configuration of a command: its options with their defaults, and its groups.

    Hydra composes a group from any keys; ``structured`` checks them.

    Args:
        parts: the defaults list.
    """
    groups = {group: DictConfig({}, flags={"struct": False}) for group in GROUPS}
    own = defaults_of(options_of(COMMANDS[command]))
    hydra = {
        "job": {"name": command},
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


def to_plain(node: Container, resolve: bool = False) -> Any:
    """What Hydra composed, or a part of it, in plain containers.

    Args:
        resolve: replace interpolations, and raise OmegaConf's error if a value is missing.
    """
    return OmegaConf.to_container(node, resolve=resolve, throw_on_missing=resolve)


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


MODES = {"max": "maximize", "min": "minimize"}
"""Directions of Optuna, by the mode of a ModelCheckpoint."""


def recommended(task: str, monitor: str | None, mode: str | None) -> str:
    """``maximize`` or ``minimize``; the resolver ``direction`` of ``conf/sweep``.

    Args:
        task: the chosen option of the group.
        monitor: the metric that selects the best checkpoint; None: the first of the task.
        mode: ``max`` or ``min``; None: that of the metric.
    """
    if mode is not None:
        return MODES.get(mode, "minimize")  # the run refuses other modes
    if monitor is None:
        return "minimize" if task.endswith("_lm") else "maximize"
    return "maximize" if "accuracy" in monitor else "minimize"


def direction(hydra: DictConfig) -> str | None:
    """The direction of the sweeper in Hydra's configuration; None: it has none, or several."""
    found = OmegaConf.select(hydra, "sweeper.direction")
    return found if found is None or isinstance(found, str) else getattr(found, "name", None)


LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"


def run_folder(kind: str, root: str, resume: bool) -> str:
    """A new folder; to resume, that of the latest run or sweep with a checkpoint.

    Args:
        kind: the command; for a sweep, whose jobs have numbered folders in its folder, ``<command>/sweeps``.
    """
    parent = Path(root, kind)
    # Of a sweep a folder of a job: one that was refused before has none.
    evidence = ("*/", "sweep that has begun") if parent.name == "sweeps" else (str(LAST_CHECKPOINT), "run with a checkpoint")
    return str(_latest(parent, *evidence) if resume else _fresh(parent))


def checkpoint_path(path: str, command: str, root: str) -> Path:
    """The checkpoint that an option ``ckpt_path`` stands for.

    Args:
        path: a file, a folder that an export or a sharded checkpoint is in, the folder of a run (its best checkpoint; to train
            on, its last), or ``best`` or ``last``: of the latest training.
        root: folder of all runs.

    Raises:
        UserError: there is no such training, or it is a folder of several.
    """
    if path in ("best", "last") and not Path(path).exists():
        folder = _latest(Path(root) / "fit", str(LAST_CHECKPOINT), "run with a checkpoint", f"ckpt_path={path}")
    else:
        folder = Path(path).expanduser()
    last = folder / LAST_CHECKPOINT
    if not last.exists():
        below = ("*", "*/*", "sweeps/*/*", "fit/sweeps/*/*")  # of a sweep, of all sweeps, of all trainings, of all runs
        runs = [found.parent.parent for level in below for found in folder.glob(f"{level}/{LAST_CHECKPOINT}")]
        if runs and not (folder / "config.json").exists():
            latest = max(runs, key=lambda run: (run / LAST_CHECKPOINT).stat().st_mtime)
            advice = "give" if len(runs) == 1 else "choose one, such as"
            raise UserError(f"ckpt_path={path}: this folder holds {counted(len(runs), 'run')}; {advice} ckpt_path={latest}")
        return folder
    best = None if path == "last" or (command == "fit" and path != "best") else _best(folder)
    return best or last


def _best(folder: Path) -> Path | None:
    """The checkpoint that the run's summary names, else the newest of the best; None: there is none."""
    found = sorted((folder / LAST_CHECKPOINT.parent).glob("best-*"), key=lambda path: path.stat().st_mtime)
    try:
        named = Path(read_json(folder / "summary.json")["checkpoint"]).name
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    return next((path for path in found if path.name == named), found[-1] if found else None)


def relative_to_cwd(path: Path) -> Path:
    """The path relative to the current folder, if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuses the folder of a run in which something that is read or written may be somewhere else.

    Args:
        names: of the files and folders in it; whole folders are looked through.

    Raises:
        UserError: one of them, or something in one, is a link or no regular file.
    """
    places = [folder / name for name in names if os.path.lexists(folder / name)]
    while places:
        path = places.pop()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            places.extend(path.iterdir())
        elif not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "no regular file"
            raise UserError(f"{path} is {kind}; the folder of a run has nothing but files and folders of its own")


def _fresh(parent: Path) -> Path:
    """Makes the folder, so that of two runs that start in the same second each has its own."""
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, count = parent / time, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not folder.exists():
                raise UserError(f"cannot write to {error.filename or parent}: {error.strerror or error}") from error
        count += 1
        folder = parent / f"{time}-{count}"


def _latest(parent: Path, evidence: str, noun: str, option: str = "resume=true") -> Path:
    """The latest of the folders in which there is something of the pattern ``evidence``."""
    found = [folder for folder in parent.glob("*") if any(folder.glob(evidence))]
    if not found:
        hint = "; to start one, leave out resume=true" if option == "resume=true" else ""
        raise UserError(f"{option}: there is no {noun} in {parent}{hint}")
    return max(found, key=lambda folder: max(path.stat().st_mtime for path in folder.glob(evidence)))


def key_of(override: str) -> str:
    """The option or group that an override is about."""
    return override.lstrip("+~").partition("=")[0]


def as_word(folder: Path | str) -> str:
    """A path as an override gives it. One that begins with a dollar or a quote would be an interpolation or a quoted text."""
    return f"./{folder}" if str(folder).startswith(("'", '"', "$")) else str(folder)


def literal(text: str) -> str:
    """Escapes interpolations, so that OmegaConf resolves the result to ``text``."""
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)
