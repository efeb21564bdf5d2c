"""The configuration that travels inside a checkpoint, and how a command line changes it.

A checkpoint keeps the resolved configuration of its run and the option chosen from each group. A command that starts from it
composes under those choices, so that every key of theirs may be overridden, and then changes the kept configuration exactly
where the command line does.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from holotrain.checks import described_by
from holotrain.config.arguments import Arguments, literal
from holotrain.config.composition import composed
from holotrain.config.folders import LAST_CHECKPOINT, run_folder
from holotrain.config.schema import COMMANDS, KINDS, PLAIN, RunConfig
from holotrain.config.schema.running import PROCESSES, STRATEGIES
from holotrain.errors import UserError

KEY = "holotrain"
"""Where a checkpoint holds what ``stamp`` returns."""

BRINGS = {"task": ("data", "model", "backward"), "model": ("backward",)}
"""The groups whose default an option of another group brings along."""


def stamp(config: RunConfig, choices: dict[str, str], description: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of a run, in plain containers.

    Args:
        description: of what was trained, as ``holotrain.config.build.description`` gives it.
    """
    shared = {field.name for field in fields(RunConfig)}
    kept = {key: value for key, value in container(config).items() if key in shared}
    return {"config": kept, "choices": choices, "description": description}


def container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers, from which ``typed`` makes it again."""
    return OmegaConf.to_container(OmegaConf.structured(config))


@dataclass
class Origin:
    """The checkpoint a command starts from, and the group choices made in its name."""

    path: Path
    config: dict[str, Any]
    choices: list[str]


def origin(arguments: Arguments) -> Origin | None:
    """The checkpoint that ``ckpt_path=`` or ``resume=true`` name on the command line, if any.

    In a sweep of trainings there is none: each job composes its own configuration and continues in its own folder. Other
    sweeps may vary anything but the checkpoint itself.

    Raises:
        UserError: there is no such file, or it is no checkpoint of holotrain's.
    """
    if arguments.multirun and (arguments.command == "fit" or "," in (arguments.value("ckpt_path") or "")):
        return None
    path = _checkpoint_path(arguments)
    if path is None:
        return None
    kept = load(path)[KEY]
    given = {override.partition("=")[0] for override in arguments.overrides}
    given |= {brought for group in given for brought in BRINGS.get(group, ())}
    if arguments.command != "fit" and kept["choices"].get("trainer") in STRATEGIES:
        given.add("trainer")
    choices = [f"{group}={option}" for group, option in kept["choices"].items() if group not in given]
    return Origin(path, kept["config"], choices)


def _checkpoint_path(arguments: Arguments) -> Path | None:
    if (arguments.value("resume") or "").lower() in ("true", "1", "yes", "on"):
        from holotrain.ranks import shards

        folder = arguments.value("hydra.run.dir")
        path = Path(folder or run_folder(arguments.command, arguments.value("output_dir") or "runs", True)) / LAST_CHECKPOINT
        shards.recover(path)
        return path
    path = arguments.value("ckpt_path")
    return None if path in (None, "null", "") else Path(path)


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of holotrain's, on the CPU, running nothing that stands in it; of an exported folder all but weights.

    What lies in shards is not read yet (:func:`holotrain.ranks.shards.read_all`).

    Raises:
        UserError: it is missing, damaged, or of another program.
    """
    from holotrain.ranks import shards

    if is_exported(path):
        return _exported(path)
    if not path.exists():
        raise UserError(f"ckpt_path: there is no file {path}")
    with described_by("ckpt_path"):
        checkpoint = shards.load(path)
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        raise UserError(f"ckpt_path: {path} was not written by holotrain: it holds no configuration of a run")
    return _described(checkpoint, path)


def is_exported(path: Path) -> bool:
    """Whether this is a folder of ``holotrain export``'s, if it is anything: a checkpoint in shards is one too."""
    from holotrain.ranks.shards import is_folder

    return path.is_dir() and not is_folder(path)


def _exported(folder: Path) -> dict[str, Any]:
    from holotrain.models.saved import read_config

    if not (folder / "config.json").is_file() and (folder / LAST_CHECKPOINT).exists():
        raise UserError(f"ckpt_path: {folder} is the folder of a run; give ckpt_path={folder / LAST_CHECKPOINT}")
    with described_by("ckpt_path"):
        config = read_config(folder)
    if KEY not in config:
        raise UserError(f"ckpt_path: {folder} was not exported by the command line: it holds no configuration of a run")
    return _described({KEY: config[KEY]}, folder)


def _described(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    kept = checkpoint[KEY]
    if not isinstance(kept, dict) or not {"config", "choices", "description"} <= kept.keys():
        raise UserError(f"ckpt_path: {path} is of an older holotrain, or damaged: it does not say what was trained")
    return checkpoint


def adopted(command: str, config: DictConfig, start: Origin, overrides: list[str]) -> dict[str, Any]:
    """The checkpoint's configuration, changed where ``overrides`` (this job's) say so.

    Args:
        config: what Hydra composed under the checkpoint's choices and the overrides.
    """
    changed = OmegaConf.to_container(config, resolve=True)
    before = OmegaConf.to_container(composed(command, start.choices), resolve=True)
    result = changed | {key: value for key, value in start.config.items() if key in changed}
    if command != "fit":  # a training in many processes leaves a checkpoint that one can read
        result["trainer"] = result["trainer"] | {name: changed["trainer"][name] for name in PROCESSES}
    _change(result, before, changed)
    for override in overrides:
        key = override.lstrip("+").partition("=")[0].replace("/", ".")
        if key == "trainer":  # its options differ in the processes; all else that the run was given stays
            result["trainer"] = result["trainer"] | {name: changed["trainer"][name] for name in PROCESSES}
        elif override not in start.choices and not key.startswith(("hydra", "~")):
            _set(result, changed, key.split("."))
    return result


def _change(result: dict, before: dict, after: dict) -> None:
    """Sets in ``result`` what differs between the two; a group of another kind is replaced whole."""
    for key, value in after.items():
        old = before.get(key)
        if value == old:
            continue
        nested = isinstance(value, dict) and isinstance(old, dict) and isinstance(result.get(key), dict)
        if nested and value.get("kind") == old.get("kind") == result[key].get("kind"):
            _change(result[key], old, value)
        else:
            result[key] = value


def _set(result: dict, source: dict, path: list[str]) -> None:
    """Copies one value, or a whole group; paths that are no part of the configuration (``experiment=``) are passed over."""
    *parents, name = path
    for parent in parents:
        if not isinstance(source.get(parent), dict):
            return
        result, source = result.setdefault(parent, {}), source[parent]
    if name in source:
        result[name] = source[name]


def typed(command: str, plain: dict[str, Any]) -> RunConfig:
    """Checks a configuration against the schemas and returns it as dataclasses.

    Raises:
        UserError: a value out of range, or a combination that cannot be.
        OmegaConfBaseException: an unknown key, a value of another type, a value that is missing.
    """
    root = OmegaConf.structured(COMMANDS[command])
    for group, classes in KINDS.items():
        if not isinstance(plain.get(group), dict):
            raise UserError(f"{group}: an option is needed; give {group}=...")
        kind = plain[group].get("kind")
        if kind not in classes:
            raise UserError(f"{group}.kind: {kind!r} is not one of {', '.join(classes)}")
        root[group] = OmegaConf.structured(classes[kind])
    for group, schema in PLAIN.items():
        root[group] = OmegaConf.structured(schema)
    return OmegaConf.to_object(OmegaConf.merge(root, _literally(plain)))


def _literally(node: Any) -> Any:
    """What was resolved already is not to be resolved again: a prompt may well hold a dollar and a brace."""
    if isinstance(node, dict):
        return {key: _literally(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_literally(value) for value in node]
    return literal(node) if isinstance(node, str) else node
