"""What Hydra composes with: the options of groups, the primary configuration of each command, and the folders of jobs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from holotrain.config import option_groups as groups
from holotrain.config.command_options import COMMANDS, options_of
from holotrain.config.signatures import REQUIRED, read_fields
from holotrain.errors import UserError
from holotrain.files import write_json
from holotrain.folders import run_folder
from holotrain.schedules import OPTIONS
from holotrain.targets import TARGET

LOG = "log.txt"
"""What Python's logging has written, in the folder of a run."""

LOGGING = {
    "formatters": {"timed": {"format": "%(asctime)s  %(message)s"}},
    "handlers": {
        "file": {
            **{"class": "logging.FileHandler", "formatter": "timed", "filename": f"${{hydra.runtime.output_dir}}/{LOG}"},
            **{"delay": True, "encoding": "utf-8", "errors": "backslashreplace"},  # a run that is refused leaves no folder
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


def register(resume: bool = False, fixed: Collection[str] = ()) -> None:
    """Fills the ConfigStore.

    Args:
        resume: use the folder of the latest run or sweep instead of a new one.
        fixed: keys of overrides that a sweep does not vary.
    """
    store = ConfigStore.instance().store
    for command in COMMANDS:
        store(name=command, node=primary_config(command, ["_self_", "_common"]))
    for group, nodes in stored().items():
        for name, node in nodes.items():
            store(name=name, node=node, group=group)
    # Cached like Hydra's ${now:}, because every use within one launch must give the same folder.
    resolver = partial(run_folder, resume=resume)
    OmegaConf.register_new_resolver("run_folder", resolver, replace=True, use_cache=True)
    of_job = partial(job_folder, fixed=fixed) if resume else lambda sweep, number, overrides: str(number)
    OmegaConf.register_new_resolver("job_folder", of_job, replace=True)


@cache
def stored() -> dict[str, dict[str, dict[str, Any]]]:
    """The options of groups that have no file of their own, by group and name: those of ``conf/_options.json`` and others."""
    file = json.loads(Path(config_folder(), "_options.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, dict[str, Any]]] = {"backward": {name: {"kind": name} for name in OPTIONS}}
    found["trainer"] = {name: {"defaults": ["default"], "accelerator": name} for name in ("cpu", "gpu")}
    found["trainer"] |= {name: {"defaults": ["default"], "strategy": name, "devices": "auto"} for name in groups.STRATEGIES}
    for group, classes in file["classes"].items():
        found[group] = {name: {TARGET: f"{file['packages'][group]}.{target}"} for name, target in classes.items()}
    for size, arguments in file["sizes"].items():
        found["model"][size.lower()] = {TARGET: f"holotrain.models.{size.partition('_')[0]}", **arguments}
        found["model"][f"rev_{size.lower()}"] = {TARGET: f"holotrain.models.Rev{size.partition('_')[0]}", **arguments}
    return found


def primary_config(command: str, parts: list[Any]) -> DictConfig:
    """The primary configuration of a command: its options with their defaults, and its groups; ``parts``: the defaults list.

    Hydra composes a group from any keys; ``with_defaults`` checks them.
    """
    nodes = {group: DictConfig({}, flags={"struct": False}) for group in groups.GROUPS}
    own = {name: each.default for name, each in options_of(COMMANDS[command]).items() if each.default is not REQUIRED}
    hydra = {
        "job": {"name": command},
        "job_logging": LOGGING,
        "output_subdir": None,  # the run's config.yaml is written by holotrain, resolved and checked
        "run": {"dir": "${run_folder:${hydra.job.name},${output_dir}}"},
        "sweep": {
            "dir": "${run_folder:${hydra.job.name}/sweeps,${output_dir}}",
            "subdir": "${job_folder:${hydra.sweep.dir},${hydra.job.num},${hydra.overrides.task}}",
        },
    }
    quiet = [{f"override hydra/{log}_logging": "none"} for log in ("hydra", "job")]
    return DictConfig(own | nodes | {"defaults": [*parts, *quiet], "hydra": hydra})


def composed(primary: str, overrides: list[str], config_dir: str | None = None, with_hydra: bool = False) -> DictConfig:
    """A primary configuration under some overrides, unresolved."""
    GlobalHydra.instance().clear()  # of somebody else
    with initialize_config_dir(config_folder(), version_base="1.3"):
        if config_dir:
            overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
        return hydra_compose(primary, overrides, with_hydra)


def option_names(config_dir: str | None = None) -> dict[str, list[str]]:
    """The options of every group, from ``conf``, the user's folder, and those without a file."""
    found = {group: {*nodes} for group, nodes in stored().items()}
    for folder in filter(None, (config_folder(), config_dir)):
        for path in Path(folder).glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


def key_of(override: str) -> str:
    """The option or group that an override is about."""
    return override.lstrip("+~").partition("=")[0]


JOB = "job.json"


@dataclass
class Job:
    """What a job leaves as ``job.json``, first when it begins: until it ends, its error is that its process died."""

    number: int
    overrides: list[str]
    exit_status: int = 1
    error: str | None = "its process died"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JOB, vars(self))


def read_jobs(folder: Path, since: float) -> dict[Path, Job]:
    """The jobs that have begun since a time, by their folders, in order. What is not one of our files is left out."""
    kinds = {each.name: str(each.type) for each in fields(Job)}
    jobs = {}
    for path in [path for path in folder.rglob(JOB) if path.stat().st_mtime >= since]:
        with suppress(UserError):
            jobs[path.parent] = Job(**read_fields(path, kinds, "job", ("error",)))
    return dict(sorted(jobs.items(), key=lambda item: item[1].number))


def job_folder(sweep: str, number: int, overrides: Iterable[str], fixed: Collection[str] = ()) -> str:
    """The folder of a job in that of a sweep that is resumed: its number, or, if the sweep has had another job of this number,
    the folder of the job that had the same values of what is varied, or a new one."""

    def varied(words: Iterable[str]) -> list[str]:
        return sorted(word for word in words if key_of(word) not in fixed)

    jobs, here = read_jobs(Path(sweep), 0), varied(overrides)
    same = [folder.name for folder, job in jobs.items() if varied(job.overrides) == here]
    if same:  # a sweeper may give the same values twice
        return str(number) if str(number) in same else same[0]
    numbers = [int(folder.name) for folder in jobs if folder.name.isdigit()]
    return str(max(numbers) + 1 + number if number in numbers else number)
