"""Which classes a file may name. The command line and the user's YAML folders may name any; a checkpoint may not."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from holotrain.config.chosen import TARGET
from holotrain.config.composition import config_folder
from holotrain.config.signatures import signature
from holotrain.errors import UserError

ALWAYS = ("holotrain.tasks.optimizers", "holotrain.tasks.schedules", "torch.optim")
"""Packages whose classes and functions only compute."""


def require_trusted(
    config: dict[str, Any], path: Path, packages: Iterable[str], named: Iterable[str], config_dir: str | None
) -> None:
    """Nothing is imported for this check.

    Args:
        config: the configuration in a checkpoint.
        path: that of the checkpoint.
        packages: packages that the user trusts.
        named: classes that the command line names.
        config_dir: the user's YAML folder.

    Raises:
        UserError: it names a class that is neither in a trusted package nor in a YAML file at hand.
    """
    allowed = None
    for where, target in targets(config):
        try:
            defined = signature(target).target if isinstance(target, str) else ""
        except ValueError:
            defined = ""
        if any(defined.startswith(f"{package}.") for package in (*ALWAYS, *packages)):
            continue
        if allowed is None:
            allowed = {*named, *_named_in_files(config_dir)}
        if target not in allowed:
            package = str(target).partition(".")[0]
            raise UserError(
                f"ckpt_path: {path} names {target!r} as {where}, but neither the command line nor a file in conf or "
                f"--config-dir does; if you trust it, add trust={package}"
            )


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


def _named_in_files(config_dir: str | None) -> Iterator[str]:
    for folder in filter(None, (config_folder(), config_dir)):
        for path in Path(folder).rglob("*.yaml"):
            node = OmegaConf.to_container(OmegaConf.load(path))
            yield from (target for _, target in targets(node) if isinstance(target, str))
