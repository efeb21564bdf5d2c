"""One run of a command: its folder, its overrides and its processes."""

from __future__ import annotations

import shlex
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from holotrain.config.checkpointed import COMMAND_LINE_ONLY
from holotrain.config.command_options import FitConfig, RunConfig
from holotrain.config.composition import LOG, key_of
from holotrain.config.objects import PYTHON_OBJECT
from holotrain.config.start import LOCAL_LOGGERS
from holotrain.errors import UserError
from holotrain.folders import LAST_CHECKPOINT, as_word, refuse_links
from holotrain.parallel.rank import ProcessRank
from holotrain.targets import TARGET

OF_FIT = {option.name for option in fields(FitConfig)} - {option.name for option in fields(RunConfig)} - {"resume"}
"""Options of fit alone, which a checkpoint does not keep."""


@dataclass
class Run:
    """
    Args:
        command: fit, validate, test, predict, generate, export or plan.
        folder: the folder of its files.
        overrides: the overrides of the command line, as written there.
        choices: the chosen option of each configuration group, saved in checkpoints.
        varied: the options and groups that a sweep varies; empty without a sweep.
        direction: ``maximize`` or ``minimize``, what the sweeper does with the monitored metric; None: it does not optimise.
        config_dir: the user's folder of options; None: there is none.
        process: rank of this process among those of the run; None: it is the only one.
        errors: what went wrong in several processes, in one line.
        started: when, by the clock of this machine.
    """

    command: str
    folder: Path
    overrides: list[str]
    choices: dict[str, str]
    varied: list[str] = field(default_factory=list)
    direction: str | None = None
    config_dir: str | None = None
    process: ProcessRank | None = None
    errors: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def last_checkpoint(self) -> Path:
        return self.folder / LAST_CHECKPOINT

    @property
    def how_to_resume(self) -> str:
        if any(word.endswith(f".{TARGET}={PYTHON_OBJECT}") for word in self.overrides):
            return f"resume with: holotrain.fit(the same objects, overrides=['resume=true'], folder={str(self.folder)!r})"
        words = ["--config-dir", self.config_dir] if self.config_dir else []
        words += ["resume=true", f"hydra.run.dir={as_word(self.folder)}"]
        for word in self.overrides:
            key = key_of(word)
            if key in (*COMMAND_LINE_ONLY, *OF_FIT) or key.startswith("logger.") or key.endswith(f".{TARGET}"):
                words.append(word.lstrip("+"))  # the checkpoint has what it added
        if (logger := self.choices.get("logger", LOCAL_LOGGERS[0])) not in LOCAL_LOGGERS:  # also that of an experiment
            words.append(f"logger={logger}")
        job = shlex.join(["python", "-m", "holotrain", "fit", *words])
        if not self.varied:
            return f"resume with: {job}"
        return f"resume the sweep with its command plus resume=true, or this job with: {job}"

    def hint(self) -> str:
        """How to resume after a process died or the test failed, if there is a checkpoint."""
        return f"; {self.how_to_resume}" if self.last_checkpoint.exists() else ""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes files."""
        return self.process is None or self.process.is_main


WRITTEN_IN_PLACE = (LOG, LAST_CHECKPOINT.parts[0], "tensorboard", "csv", "fit-profile.txt")
"""What a run opens to write, or makes files in. All else is written under another name, and renamed."""


@contextmanager
def run_folder_made(folder: Path) -> Generator[None]:
    """Makes a folder, and removes it if nothing was written. Raises a UserError if it cannot be made, or what a run writes to
    would be elsewhere."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename or folder}: {error.strerror or error}") from error
    refuse_links(folder, WRITTEN_IN_PLACE)
    try:
        yield
    finally:
        with suppress(OSError):  # such as: it is not empty
            folder.rmdir()
