"""The jobs of a sweep, whichever sweeper chooses them and whichever launcher runs them.

A job leaves ``job.json`` in its folder, because a launcher may run it in another process, and Hydra has only its return value.
"""

import logging
import math
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus

from holotrain.config.annotations import read_fields
from holotrain.config.command_line import CONFIGURATION_ERRORS
from holotrain.errors import UserError
from holotrain.files import write_json
from holotrain.folders import refuse_links, relative_to_cwd
from holotrain.targets import first_line

JOB = "job.json"

MULTIRUN = "multirun.yaml"
"""What Hydra writes into the folder of a sweep before it launches a job."""

KEPT = {"number": "int", "overrides": "list[str]", "exit_status": "int", "error": "str | None", "value": "float | None"}
"""What it holds of a job, with the types as annotations."""


@dataclass
class Job:
    """How a job ended.

    Args:
        number: its number in the sweep.
        overrides: those of the command line, and those that the sweeper chose.
        exit_status: as of a command line with these overrides.
        error: why it failed, in one line; None: it did not fail.
        value: what a sweeper may optimise; None: there is no such value.
        folder: folder of its files; None: it left none.
    """

    number: int
    overrides: list[str]
    exit_status: int
    error: str | None = None
    value: float | None = None
    folder: Path | None = None

    def write(self, folder: Path) -> None:
        """Writes ``job.json`` into the job's folder."""
        kept = {name: getattr(self, name) for name in KEPT}
        if self.value is not None and not math.isfinite(self.value):  # JSON has no infinity
            kept["value"] = None
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JOB, kept)

    @classmethod
    def read(cls, path: Path) -> "Job | None":
        """A job from its ``job.json``; None if the file is not one of ours."""
        try:
            return cls(**read_fields(path, KEPT, "job", ("error", "value")), folder=path.parent)
        except UserError:
            return None


@dataclass
class Sweep:
    """The jobs that a sweeper launched.

    Args:
        check: called with the overrides of each job before any is launched, if all jobs are known; raises a UserError.
        launcher: Hydra's; None: this is no sweep.
        folder: folder of the sweep; None: nothing was launched.
        launched: the overrides of each job, by its number.
        lost: why a job left no result, by its number.
    """

    check: Callable[[list[str]], object]
    launcher: Any = None
    folder: Path | None = None
    launched: dict[int, list[str]] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def require_jobs(self) -> None:
        """
        Raises:
            UserError: the sweep has ended without a job.
        """
        if self.launcher is not None and not self.launched:
            self._leave_nothing()
            raise UserError("-m: the sweep has no job, because one of its options has no value; range(0) has none, for example")

    def _leave_nothing(self) -> None:
        """Removes the folder of a sweep that has not begun."""
        folder = Path(str(self.launcher.config.hydra.sweep.dir))
        with suppress(OSError):  # another program's files, or a folder that cannot be removed
            if [path.name for path in folder.iterdir()] == [MULTIRUN]:
                (folder / MULTIRUN).unlink()
                folder.rmdir()

    def _check_all(self, launched: dict[int, list[str]]) -> None:
        """Refuses jobs with a mistake in their overrides."""
        wrong: dict[int, UserError] = {}
        for number, overrides in launched.items():
            try:
                self.check(overrides)
            except UserError as error:
                wrong[number] = error
        if not wrong:
            return
        number, error = next(iter(wrong.items()))
        every = self.launched.values()
        if len(wrong) == len(every) and len({*map(str, wrong.values())}) == 1:  # nothing that jobs differ in
            raise error
        varied = [word for word in launched[number] if any(word not in others for others in every)]
        started = f"no job from {min(launched)} on was started" if min(launched) else "no job was started"
        raise UserError(f"job {number} ({' '.join(varied)}): {error}; {started}") from error

    def ended(self) -> list[Job]:
        """The jobs that ended, in order. A signal that ends a sweep may leave some unstarted."""
        jobs = {number: Job(number, self.launched[number], 1, error) for number, error in self.lost.items()}
        jobs |= self.left()
        return [jobs[number] for number in sorted(jobs)]

    def left(self) -> dict[int, Job]:
        """What the launched jobs have left, by number."""
        found = [Job.read(path) for path in self.folder.rglob(JOB)] if self.folder else []
        return {job.number: job for job in found if job is not None and job.number in self.launched}

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Lets the launcher run jobs. One whose process dies has failed, and does not end the sweep."""
        launcher = self.launcher
        self.folder = relative_to_cwd(Path(str(launcher.config.hydra.sweep.dir)))
        refuse_links(self.folder, map(str, range(initial_job_idx, initial_job_idx + len(job_overrides))))
        launched = {initial_job_idx + index: list(overrides) for index, overrides in enumerate(job_overrides)}
        self.launched |= launched
        basic = str(launcher.config.hydra.sweeper._target_).endswith("BasicSweeper")  # others may find that some values fail
        if basic:
            try:
                self._check_all(launched)
            except UserError:
                self._leave_nothing()
                raise
        for number, job in self.left().items():
            if number in launched and job.folder is not None:  # the sweep is resumed
                (job.folder / JOB).unlink()
        results: dict[int, JobReturn] = {}
        reason = "its process died"
        try:
            results = dict(zip(launched, launcher.launch(job_overrides, initial_job_idx) or (), strict=False))
        except (*CONFIGURATION_ERRORS, OSError):
            raise
        except Exception as error:  # of the launcher: those of jobs have been caught
            reason = f"{type(error).__name__}: {first_line(error)}"
        left = self.left()
        for number, overrides in launched.items():
            if number not in left:
                self.lost[number] = reason
                print(f"holotrain: job {number} left no result, {reason}: {' '.join(overrides)}", file=sys.stderr)
            if number not in results or results[number].status is not JobStatus.COMPLETED:
                results[number] = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
                results[number].return_value = left[number].value if number in left else None
        return [results[number] for number in launched]


@contextmanager
def launched_jobs(check: Callable[[list[str]], object]) -> Generator[Sweep]:
    """Records the jobs that sweepers launch inside; ``check``: that of :class:`Sweep`."""
    ordinary = Plugins.instantiate_launcher
    sweep = Sweep(check)
    # It would warn that a failed job has returned None. The job has said why it failed.
    logging.getLogger("hydra_plugins.hydra_optuna_sweeper").setLevel(logging.CRITICAL)
    logging.getLogger("optuna.storages").setLevel(logging.WARNING)  # it would tell the random name of its study

    def instantiate(*args: Any, **kwargs: Any) -> Any:
        launcher: Any = ordinary(*args, **kwargs)
        sweep.launcher = launcher
        refuse_links(Path(str(launcher.config.hydra.sweep.dir)), (MULTIRUN,))  # which Hydra writes before it launches
        return SimpleNamespace(launch=sweep.launch)

    Plugins.instantiate_launcher = instantiate
    try:
        yield sweep
    finally:
        Plugins.instantiate_launcher = ordinary
