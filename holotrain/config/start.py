"""From the words of a command line, or of a call in Python, to the checked configuration of a run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from holotrain.checks import did_you_mean
from holotrain.config.arguments import Arguments, key_of, parse
from holotrain.config.composition import composed, member_names, own_hydra, register, require_new_names
from holotrain.config.explain import CONFIGURATION_ERRORS, explained, explaining
from holotrain.config.folders import checkpoint_path, run_folder
from holotrain.config.schema.run import NAMED, RunConfig
from holotrain.config.start_checkpoint import StartCheckpoint, primary, start_checkpoint, without_leftovers
from holotrain.config.typed import completed, typed, with_own_options
from holotrain.errors import UserError
from holotrain.targets import TARGET


@dataclass
class Start:
    """What a run starts from: words, and the checkpoint that they name.

    Args:
        arguments: the words; its primary configuration is set.
        checkpoint: the checkpoint.
    """

    arguments: Arguments
    checkpoint: StartCheckpoint | None = field(init=False)

    def __post_init__(self) -> None:
        if self.arguments.config_dir:
            require_new_names(self.arguments.config_dir)
        self.checkpoint = start_checkpoint(self.arguments)
        if self.checkpoint is not None:
            self.arguments.primary = primary(self.arguments, self.checkpoint)

    def completed(self, config: DictConfig, overrides: list[str]) -> DictConfig:
        """What Hydra composed, with the defaults of all options. Checks no values."""
        plain = with_own_options(OmegaConf.to_container(config), overrides, self.checkpoint and self.checkpoint.config)
        self._check_left_out(plain)
        if self.checkpoint is not None:
            plain = without_leftovers(plain, self.checkpoint, overrides)
        return OmegaConf.create(completed(self.arguments.command, plain, overrides))

    def _check_left_out(self, plain: dict[str, Any]) -> None:
        """What is null must be a name in a file, or in the checkpoint; the checkpoint may have left it out already."""
        for group in NAMED:
            for name in [name for name, value in plain[group].items() if value is None]:
                kept = self.checkpoint.config.get(group, {}) if self.checkpoint is not None else {}
                known = {*member_names(group, self.arguments.config_dir), *kept}
                if name not in known:
                    raise UserError(f"{group}.{name}: there is no {name!r} in {group}.{did_you_mean(name, known)}")

    def typed(self, config: DictConfig, overrides: list[str]) -> RunConfig:
        """What Hydra composed, as dataclasses. Checks the options, but not what only their classes know.

        Raises:
            UserError: a mistake in the configuration.
        """
        try:
            plain = OmegaConf.to_container(self.completed(config, overrides), resolve=True, throw_on_missing=True)
        except CONFIGURATION_ERRORS as error:
            raise explained(error, self.arguments) from error
        config = typed(self.arguments.command, plain)
        if config.ckpt_path is not None:
            config.ckpt_path = str(checkpoint_path(config.ckpt_path, self.arguments.command, config.output_dir))
        return config

    def choices(self, config: RunConfig, chosen: Mapping[str, str | None], overrides: Iterable[str]) -> dict[str, str]:
        """The option of each group, for display; a group whose class an override names has none.

        Args:
            chosen: those of Hydra.
        """
        options = {group: option for group, option in chosen.items() if option and "/" not in group}
        found = {"backward": config.backward.name} | (self.checkpoint.choices if self.checkpoint else {}) | options
        for key in map(key_of, overrides):
            if key.endswith(f".{TARGET}"):
                found.pop(key.removesuffix(f".{TARGET}"), None)
        return found


def check_values(config: RunConfig) -> None:
    """
    Raises:
        UserError: a class refuses a value. Those of a checkpoint have been accepted before.
    """
    if config.ckpt_path is None and not getattr(config, "resume", False):
        from holotrain.config import build  # imports torch

        build.check_values(config)


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
    register(arguments.resume)
    with own_hydra():
        start = Start(arguments)
        with explaining(arguments):
            composition = composed(arguments.primary, arguments.overrides, arguments.config_dir, with_hydra=True)
        words = OmegaConf.to_container(composition.hydra.overrides.task)  # unresolved: interpolations mean other options
        chosen = OmegaConf.to_container(composition.hydra.runtime.choices)
        with open_dict(composition):
            del composition["hydra"]
        config = start.typed(composition, words)
    check_values(config)
    config.overrides, config.choices = words, start.choices(config, chosen, words)
    config.folder = arguments.value("hydra.run.dir")
    if config.folder is None and arguments.resume:
        config.folder = run_folder(command, config.output_dir, True)
    return config
