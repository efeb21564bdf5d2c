"""Which classes a file may name. The command line and the user's YAML folders may name any; a checkpoint may not."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from holotrain.config.chosen import TARGET
from holotrain.config.composition import config_folder
from holotrain.config.signatures import signature
from holotrain.errors import UserError

BASES = {
    "optimizer": ("torch.optim.optimizer.Optimizer",),
    "scheduler": ("torch.optim.lr_scheduler.LRScheduler",),
}
"""What the classes of ``torch.optim`` must be, in these groups, to need no further trust."""

OURS = {"optimizer": "holotrain.tasks.optimizers.", "scheduler": "holotrain.tasks.schedules."}
"""Modules whose public functions need no further trust, in these groups."""


def require_trusted(
    config: dict[str, Any], path: Path, packages: Iterable[str], words: Iterable[str], config_dir: str | None
) -> None:
    """Nothing is imported for this check.

    Args:
        config: the configuration in a checkpoint.
        path: that of the checkpoint.
        packages: packages that the user trusts.
        words: the overrides of the command line, which may name a class at the same place.
        config_dir: the user's YAML folder, whose files may do so too.

    Raises:
        UserError: it names a class that nobody vouches for.
    """
    allowed = None
    for where, target in targets(config):
        if not isinstance(target, str):
            raise UserError(f"ckpt_path: {path} is damaged: the class in {where} is no name")
        if _only_computes(where, target) or any(f"{target}.".startswith(f"{package}.") for package in packages):
            continue
        if allowed is None:
            allowed = {*_named_by(words), *_named_in_files(config_dir)}
        if (where, target) not in allowed:
            package = target.partition(".")[0]
            raise UserError(
                f"ckpt_path: {path} names {target!r} as {where}, but neither the command line nor a file in conf or "
                f"--config-dir does; if you trust it, add trust={package}"
            )


def _only_computes(where: str, target: str) -> bool:
    """Whether it is an optimizer or schedule of torch's or holotrain's, by the name that will be imported."""
    if where not in BASES:
        return False
    if target.startswith(OURS[where]):
        return not target.removeprefix(OURS[where]).startswith("_") and "." not in target.removeprefix(OURS[where])
    try:
        return target.startswith("torch.optim.") and set(BASES[where]) <= {*signature(target).bases}
    except ValueError:
        return False


def targets(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The classes that a configuration names, at any depth, with where."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == TARGET:
                yield where, value
            else:
                yield from targets(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, list):
        for place, value in enumerate(node):
            yield from targets(value, f"{where}[{place}]")


def _named_by(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, _, target = word.lstrip("+").partition("=")
        if key.endswith(f".{TARGET}"):
            yield key.removesuffix(f".{TARGET}"), target


def _named_in_files(config_dir: str | None) -> Iterator[tuple[str, str]]:
    for folder in filter(None, (config_folder(), config_dir)):
        for path in Path(folder).glob("*/*.yaml"):
            try:
                node = OmegaConf.to_container(OmegaConf.load(path))
            except (YAMLError, OmegaConfBaseException, OSError):
                continue  # it vouches for nothing
            group = "" if path.parent.name in ("experiment", "debug", "sweep", "task") else path.parent.name
            for where, target in targets(node, group):
                if isinstance(target, str):
                    yield where, target
