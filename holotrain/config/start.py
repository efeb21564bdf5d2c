"""From the words of a command line, or of a call in Python, and the checkpoint that they name, to a checked configuration.

The checkpoint's configuration, as plain data, is the primary configuration that Hydra composes with. Nothing in it becomes an
argument, an override, the name of a group or an interpolation, and it does not decide where files are written.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf, open_dict

from holotrain.config import option_groups as groups
from holotrain.config import structured as hydra
from holotrain.config.command_line import Arguments, explaining, parse
from holotrain.config.command_options import RunConfig
from holotrain.config.option_groups import default_backward
from holotrain.config.signatures import literally, read_fields, to_plain
from holotrain.config.structured import checked, composed, key_of, with_defaults, without_replaced_options
from holotrain.errors import UserError, did_you_mean
from holotrain.files import write_json
from holotrain.folders import LAST_CHECKPOINT, checkpoint_path, refuse_links, relative_to_cwd, run_folder
from holotrain.schedules import AUTO
from holotrain.targets import TARGET

LOCAL_LOGGERS = ("tensorboard", "csv", "none")
"""Options of the group ``logger`` that a resumed run takes over. Others send data out, so the command line must name them."""


def start_checkpoint(arguments: Arguments) -> dict[str, Any] | None:
    """What the checkpoint that ``ckpt_path=`` or ``resume=true`` name holds of its run; None: they name none.

    A sweep of trainings has none: each job composes its own configuration and continues in its own folder. Other sweeps may
    vary everything but the checkpoint.

    Raises:
        UserError: there is no such file, it is not a checkpoint of holotrain, or it names a class that is not trusted.
    """
    named = arguments.value("ckpt_path") or ""
    if arguments.multirun and arguments.command == "fit":
        return None
    if arguments.resume and named:
        raise UserError("resume=true continues from the last checkpoint of its run; leave out ckpt_path=")
    if arguments.multirun and "," in named:
        raise UserError(f"ckpt_path: a sweep of {arguments.command} starts from one checkpoint; run the command once for each")
    if arguments.resume:
        path = _last_checkpoint(arguments)
    elif named and named != "null":
        path = checkpoint_path(named, arguments.command, arguments.value("output_dir") or "runs")
    else:
        return None
    from holotrain.config.checkpointed import KEY, load, require_trusted  # imports torch

    start = load(path)[KEY]
    packages = [package.strip() for package in (arguments.value("trust") or "").strip("[]").split(",") if package.strip()]
    require_trusted(start["config"], path, packages, arguments.words, arguments.config_dir)
    return start


def _last_checkpoint(arguments: Arguments) -> Path:
    """The checkpoint that ``resume=true`` continues from."""
    named = arguments.value("hydra.run.dir")
    folder = Path(named or run_folder(arguments.command, arguments.value("output_dir") or "runs", True)).expanduser()
    if named is None:
        others = (other for other in folder.parent.glob("[0-9]*") if other.name > folder.name)
        if later := max((other for other in others if not (other / LAST_CHECKPOINT).exists()), default=None):
            print(f"holotrain: resume=true: continuing {folder}; {later} is later, but has no checkpoint", file=sys.stderr)
    if not (folder / LAST_CHECKPOINT).exists():
        why = f"{folder} has no checkpoint" if folder.is_dir() else f"there is no folder {folder}"
        raise UserError(f"resume=true: {why}; to start it from the beginning, leave out resume=true")
    return folder / LAST_CHECKPOINT


def primary(arguments: Arguments, start: dict[str, Any]) -> str:
    """Registers the primary configuration of a command that starts from a checkpoint, and returns its name.

    The values of the checkpoint stand in it as plain data, after the defaults of the command. Every group is an empty entry of
    its defaults list, so that the command line can choose an option from it.
    """
    keys = {*map(key_of, arguments.overrides)}
    if "data.download" in keys and not {"data.root", "data"} & keys:
        raise UserError("data.root: data.download=true writes into it, so a checkpoint cannot name it; give data.root=...")
    plain = dict(start["config"])
    if arguments.command != "fit" or "trainer" in keys:  # the number of processes may change; the other options stay
        plain["trainer"] = {name: value for name, value in plain["trainer"].items() if name not in groups.PROCESS_OPTIONS}
    if "model.name" in keys and plain["model"]:  # the configuration of another network
        plain["model"] = {name: value for name, value in plain["model"].items() if name != "config"}
    for group in ({*groups.OBJECT_GROUPS, "callbacks"} - {"trainer"}) & keys:  # the option replaces what the checkpoint has
        del plain[group]
    logger = "tensorboard"  # a file does not decide what is sent where
    if arguments.resume and start["choices"].get("logger") in LOCAL_LOGGERS:
        logger = start["choices"]["logger"]
    order = [group for group in groups.GROUPS if group not in ("task", "trainer")]
    order += ["task", "experiment", "debug", "sweep"]  # last, since these may change the option of another group
    chosen = [{group: logger if group == "logger" else None} for group in order]
    node = hydra.options(arguments.command, [{"trainer": "default"}, "_self_", *chosen])
    node.merge_with(literally(plain))
    name = "_checkpoint"
    ConfigStore.instance().store(name=name, node=node)
    return name


class Start:
    """What a run starts from: the words of a command line, whose primary configuration is set, and the checkpoint that they
    name."""

    def __init__(self, arguments: Arguments) -> None:
        if arguments.config_dir:
            hydra.require_new_names(arguments.config_dir)
        start = start_checkpoint(arguments)
        if start is not None:
            arguments.primary = primary(arguments, start)
        self.arguments = arguments
        self.before: dict[str, Any] = {} if start is None else start["config"]
        self.chosen_before: dict[str, str] = {} if start is None else start["choices"]

    def with_defaults(self, config: DictConfig, overrides: list[str]) -> DictConfig:
        """What Hydra composed, as a structured config with all options, whose names and types are checked."""
        plain = without_replaced_options(to_plain(config), overrides, self.before)
        for group in groups.NAMED_GROUPS:
            known = {*hydra.member_names(group, self.arguments.config_dir), *self.before.get(group, {})}
            for name in [name for name, value in plain[group].items() if value is None and name not in known]:
                raise UserError(f"{group}.{name}: there is no {name!r} in {group}.{did_you_mean(name, known)}")
        if self.before and plain["backward"] == self.before["backward"]:
            usual = [default_backward((each["model"] or {}).get(TARGET)) for each in (plain, self.before)]
            if usual[0] != usual[1]:
                plain["backward"] = {}  # that of the other model
        return with_defaults(self.arguments.command, OmegaConf.create(plain), overrides)

    def structured(self, config: DictConfig, overrides: list[str], chosen: Mapping[str, str | None] | None = None) -> RunConfig:
        """What Hydra composed, as dataclasses. Checks the options, but not what only their classes know.

        Args:
            chosen: Hydra's choice of each group.

        Raises:
            UserError: a mistake in the configuration.
        """
        typed = checked(self.arguments.command, self.with_defaults(config, overrides))
        if typed.ckpt_path is not None:
            if self.arguments.command != "fit" and self.arguments.value("ckpt_path") is None:
                raise UserError("ckpt_path: a file in --config-dir cannot name it; give it on the command line")
            typed.ckpt_path = str(checkpoint_path(typed.ckpt_path, self.arguments.command, typed.output_dir))
        options = {group: option for group, option in (chosen or {}).items() if option and "/" not in group}
        typed.choices = {"backward": typed.backward.name} | self.chosen_before | options
        for key in map(key_of, overrides):
            if key.endswith(f".{TARGET}"):  # its class is none of the options
                typed.choices.pop(key.removesuffix(f".{TARGET}"), None)
        if typed.optimizer is not None and typed.choices.get("optimizer") == AUTO:
            typed.choices["optimizer"] = typed.optimizer.name
        typed.overrides = overrides
        return typed


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


def prepare_sweep(arguments: Arguments) -> Path:
    """The folder of a sweep that is about to start."""
    named = [word for word in arguments.single if re.match(r"[+]*(hydra|output_dir|sweep)\b", word)]
    with explaining(arguments):
        hydra_config = composed(arguments.primary, named, arguments.config_dir, with_hydra=True).hydra
        folder = relative_to_cwd(Path(str(hydra_config.sweep.dir)))
    refuse_links(folder, ["multirun.yaml", *(path.name for path in folder.glob("*") if path.name.isdigit())])
    return folder


def compose(command: str = "fit", overrides: Collection[str] = (), config_dir: str | Path | None = None) -> RunConfig:
    """The checked configuration that the command line ``holotrain COMMAND OVERRIDES`` would run.

    Args:
        command: fit, validate, test, predict, generate, export or plan.
        overrides: as on the command line, such as ``["model=rev_vit_small", "optimizer.lr=1e-3"]``.
        config_dir: folder of YAML files of your own, as ``--config-dir``.

    Returns:
        The options as attributes, such as ``config.optimizer.lr``.

    Raises:
        UserError: a mistake; one line that says what is wrong, where, and the nearest valid choice.
    """
    if flags := [word for word in overrides if word.startswith("-")]:
        raise UserError(f"{flags[0]!r} is a flag of the command line; compose takes overrides, written key=value")
    arguments = parse([command, *(["--config-dir", str(config_dir)] if config_dir else []), *overrides])
    hydra.register(arguments.resume)
    with hydra.own_hydra():
        start = Start(arguments)
        with explaining(arguments):
            composition = hydra.composed(arguments.primary, arguments.overrides, arguments.config_dir, with_hydra=True)
        words = to_plain(composition.hydra.overrides.task)  # unresolved: interpolations mean other options
        chosen = to_plain(composition.hydra.runtime.choices)
        with open_dict(composition):
            del composition["hydra"]
        config = start.structured(composition, words, chosen)
    config.folder = arguments.value("hydra.run.dir")
    if config.folder is None and arguments.resume:
        config.folder = run_folder(command, config.output_dir, True)
    return config
