"""Which classes a file may name. The command line and the user's YAML folders may name any; a checkpoint may not."""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from holotrain.config.composition import config_folder
from holotrain.config.given import GIVEN
from holotrain.config.signatures import is_defined_in, signature
from holotrain.errors import UserError
from holotrain.targets import TARGET, targets

COMPUTING = {
    "optimizer": ("holotrain.tasks.optimizers.", "torch.optim.optimizer.Optimizer"),
    "scheduler": ("holotrain.tasks.schedules.", "torch.optim.lr_scheduler.LRScheduler"),
}
"""What needs no further trust in these groups: the public functions of a module, and classes of ``torch.optim`` with a base."""


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
    allowed: dict[str, set[tuple[str, str]]] = {}
    for where, target in targets(config):
        if not isinstance(target, str):
            raise UserError(f"ckpt_path: {path} is damaged: the name of the class in {where} is not a string")
        if _only_computes(where, target) or is_defined_in(target, packages):
            continue
        group = where.partition(".")[0]
        if group not in allowed:
            allowed[group] = {*_named_by(words), *_named_in_files(config_dir, group)}
        if (where, target) in allowed[group]:
            continue
        if target == GIVEN:
            raise UserError(
                f"ckpt_path: {path} was trained with an object of Python code as {where}; give it to holotrain.fit or "
                f"holotrain.test as {where}=..."
            )
        package = target.partition(".")[0]
        raise UserError(
            f"ckpt_path: {path} names {target!r} as {where}, but neither the command line nor a file in conf or "
            f"--config-dir does; if you trust it, add trust={package}"
        )


def _only_computes(where: str, target: str) -> bool:
    """Whether it is an optimizer or schedule of torch's or holotrain's, by the name that will be imported."""
    if (where, target) in DATA:
        return True
    module, base = COMPUTING.get(where, (None, None))
    if module is None:
        return False
    if target.startswith(module):
        return re.fullmatch(r"[^_.][^.]*", target.removeprefix(module)) is not None
    try:
        return target.startswith("torch.optim.") and base in signature(target).bases
    except ValueError:
        return False


def _named_by(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        key, _, target = word.lstrip("+").partition("=")
        if key.endswith(f".{TARGET}"):
            yield key.removesuffix(f".{TARGET}"), target


DATA = {("model.adapters", "peft.LoraConfig")}
"""Places and classes that only hold values."""

OF_ANY_GROUP = ("experiment", "debug", "sweep", "task")
"""Groups whose files change others."""


def _named_in_files(config_dir: str | None, group: str) -> Iterator[tuple[str, str]]:
    for folder, name in itertools.product(filter(None, (config_folder(), config_dir)), (group, *OF_ANY_GROUP)):
        for path in Path(folder, name).rglob("*.yaml"):
            try:
                node = OmegaConf.to_container(OmegaConf.load(path))
            except (YAMLError, OmegaConfBaseException, OSError):
                continue  # it vouches for nothing
            within = ("", name) if name == group else ("",)  # a file of the group task may change others, or be a task alone
            for place in within if name in OF_ANY_GROUP else (name,):
                yield from ((where, target) for where, target in targets(node, place) if isinstance(target, str))
