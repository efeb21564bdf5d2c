"""``python -m holotrain COMMAND [overrides]``: reads the command line, lets Hydra compose the configuration, runs the command.

Exit status: 0; 1 for a defect of holotrain or a failure of the machine, with a traceback; 2 for a mistake of the user, in one
line; 128 + n if signal n ended the run, also SIGPIPE, if nobody reads the output of a command any more.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from holotrain.config import command_line
from holotrain.config.command_line import HELP, Arguments, command_help, overview, parse, prepare_sweep, quoted
from holotrain.config.composition import Job, composed, config_folder, key_of, read_jobs, register
from holotrain.config.signatures import explaining, to_plain
from holotrain.errors import UserError, files_named, printable, readable
from holotrain.folders import LAST_CHECKPOINT, as_word, relative_to_cwd
from holotrain.parallel.rank import ProcessRank, rank_from_environment
from holotrain.targets import find_here, first_line, named_packages
from holotrain.templates import init

if TYPE_CHECKING:
    from holotrain.commands.run import Run
    from holotrain.parallel.processes import Processes

log = logging.getLogger("holotrain")

CLOCKS_DIFFER = 2.0
"""Seconds by which the clock of a machine that runs jobs of a sweep may be behind."""

ALLOCATOR = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}
"""Variables that set up PyTorch's allocator for GPUs."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command line and returns its exit status.

    Args:
        argv: what follows ``holotrain``; None: that of this process.
    """
    if argv is not None:
        return _main(argv)
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="backslashreplace")  # names need not be text  # ty: ignore[missing-union-attribute]
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch would warn of each connection that another process has closed
    if not ALLOCATOR & os.environ.keys():  # before torch is imported; segments that grow leave fewer gaps on a GPU
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    argv = sys.argv[1:]
    if not sys.flags.safe_path or rank_from_environment() is not None:  # a process of a launcher has been given it
        find_here(named_packages(argv))
    try:
        status = _main(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except BrokenPipeError:  # nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes when it ends
        return 128 + signal.SIGPIPE


def _main(argv: list[str]) -> int:
    if not argv or argv[0] in (*HELP, "help"):
        print(overview())
        return 0
    if argv[0] == "--version":
        from holotrain import __version__

        print(f"holotrain {__version__}")
        return 0
    try:
        return _run(argv)
    except UserError as error:
        print(f"holotrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"SIGINT ended {argv[0]}", file=sys.stderr)
        return 128 + signal.SIGINT


@files_named()
def _run(argv: list[str]) -> int:
    process = rank_from_environment()
    if process is not None and not process.is_main:
        from holotrain.commands.multiprocess import MULTIPROCESS_COMMANDS, follow

        # The main process alone runs the commands that need one process.
        return follow(process) if argv[0] in MULTIPROCESS_COMMANDS and not HELP & set(argv) else 0
    if argv[0] == "init":
        return init(argv[1:])
    arguments = parse(argv)
    register(arguments.resume, arguments.fixed)
    if arguments.help:
        with explaining():
            print(command_help(arguments))
        return 0
    launch = Launch(arguments, process)
    return launch.show() if arguments.shows else launch.run()


@contextmanager
def nothing_collected() -> Generator[None]:
    """Inside, Python looks for no reference cycles: imports make many objects, and all of them stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class Ended(BaseException):
    """A signal ended a run, and with it the sweep that it belongs to. Hydra would catch an Exception."""


class Launch:
    """One start of the command line: a single run, or every job of a sweep.

    Args:
        process: position of this process among those of a launcher; it is the main one. None: there is no launcher.
    """

    def __init__(self, arguments: Arguments, process: ProcessRank | None = None) -> None:
        self.arguments = arguments
        self.process = process
        command_line.begin(arguments)
        self.statuses = [0]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Makes this process, to which a launcher sent a job, ready for its configuration."""
        vars(self).update(state)
        find_here(named_packages([*self.arguments.words, "--config-dir", self.arguments.config_dir or ""]))
        register(self.arguments.resume, self.arguments.fixed)

    def run(self) -> int:
        """Lets Hydra call ``job`` once, or once for each job of a sweep. Returns the worst exit status. Raises a UserError if
        the configuration cannot be composed, or a folder cannot be written."""
        arguments = self.arguments
        sys.argv = [f"holotrain {arguments.command}", *arguments.flags, *arguments.overrides]
        os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its exceptions unchanged, and `explaining` turns them into one line
        launch = hydra_main(version_base="1.3", config_path=config_folder(), config_name=arguments.primary)(self.job)
        try:
            if not arguments.multirun:
                with explaining():
                    launch()
            else:
                self._sweep(launch)
        except Ended:
            pass
        except OSError as error:
            raise UserError(f"cannot write to {error.filename or 'the output folder'}: {error.strerror or error}") from error
        finally:
            if self.processes is not None:
                self.processes.close()
        return max(self.statuses, key=lambda status: (status > 128, status == 1, status))  # a signal, a defect, a mistake

    def _sweep(self, launch: Callable[[], None]) -> None:
        """Lets Hydra run the jobs of a sweep, and shows their table."""
        from holotrain.commands.screen import quieten

        folder, began = prepare_sweep(self.arguments), time.time() - CLOCKS_DIFFER
        quieten()
        sys.argv.append(f"hydra.sweep.dir={quoted(str(folder))}")
        try:
            with explaining():
                launch()
            if not read_jobs(folder, began):
                raise UserError("-m: the sweep has no job, because one of its options has no value; range(0) has none")
        except Exception as error:  # of the sweeper or the launcher
            explained = isinstance(error, UserError)  # as if an option of the command line were wrong
            if (explained or isinstance(error, OSError)) and not read_jobs(folder, began):
                raise
            cause = cast("Exception", error.__context__) if explained else error
            print(f"holotrain: the sweep ended: {printable(first_line(cause))}", file=sys.stderr)
            self.statuses.append(2 if explained else 1)
        finally:
            jobs = read_jobs(folder, began)
            if folder.is_dir() and [path.name for path in folder.iterdir()] == ["multirun.yaml"]:
                (folder / "multirun.yaml").unlink()
            with suppress(OSError):  # such as: it is not empty
                folder.rmdir()
            if jobs:
                from holotrain.commands.sweep import show_sweep

                self.statuses += [job.exit_status for job in jobs.values()]
                show_sweep(self.arguments.command, folder, jobs)

    @cached_property
    def processes(self) -> Processes | None:
        """The processes of the launcher."""
        if self.process is None:
            return None
        from holotrain.parallel.processes import Processes  # imports torch

        return Processes(self.process)

    def job(self, config: DictConfig) -> float | None:
        """One run. Returns what a sweeper may optimise. A mistake ends the run, not the sweep that it belongs to. Raises an
        Ended if a signal ended the run."""
        hydra = cast("DictConfig", HydraConfig.get())  # which HydraConf only describes
        # Unresolved: the name of a folder may look like an interpolation, and those of overrides mean other options.
        folder = relative_to_cwd(Path(to_plain(hydra.runtime)["output_dir"]))
        # That of its folder, which a sweep that was resumed with other values has numbered on.
        number = int(folder.name) if folder.name.isdigit() else hydra.job.get("num", 0)
        job, swept = Job(number, to_plain(hydra.overrides.task)), hydra.mode is RunMode.MULTIRUN
        if swept:
            job.write(folder)
        if swept and "json=-" not in job.overrides:
            print(f"job {job.number}: {' '.join(job.overrides)}")
        self._run_job(job, config, hydra, folder)
        value = None
        if swept:
            job.write(folder)
            if self.arguments.command == "fit" and not job.exit_status:
                from holotrain.commands.sweep import best

                value = best(folder)
        else:
            self.statuses.append(job.exit_status)
            with suppress(OSError):  # such as: it is not empty
                folder.rmdir()
        if job.exit_status > 128 or (self.process is not None and job.exit_status):  # the other processes have failed, too
            raise Ended
        gc.collect()  # trainers are reference cycles, and would use memory in the next job of a sweep
        return value

    def _run_job(self, job: Job, config: DictConfig, hydra: DictConfig, folder: Path) -> None:
        """Runs a job, prints why it failed, and writes down how it ended."""
        run = None
        try:
            with files_named(), nothing_collected():
                typed = command_line.typed(self.arguments, config, job.overrides, hydra.runtime.choices)
                from holotrain.commands.multiprocess import run_job  # imports Lightning, which can now be silenced
                from holotrain.commands.run import Run
                from holotrain.commands.screen import quieten

                quieten()
            command, varied, config_dir = self.arguments.command, self._varied(job.overrides), self.arguments.config_dir
            direction = OmegaConf.select(hydra, "sweeper.direction")  # a word or a member of an Enum; of several results a list
            direction = direction if isinstance(direction, str) else getattr(direction, "name", None)
            run = Run(command, folder, job.overrides, typed.choices, varied, direction, config_dir)
            words = [command, *self.arguments.flags, *self.arguments.words, f"hydra.run.dir={as_word(folder)}"]
            job.exit_status = run_job(typed, run, self.processes, None if self.arguments.multirun else words)
            job.error = next(iter(run.errors), None)
        except UserError as error:
            print(f"holotrain: {error}", file=sys.stderr)
            job.exit_status, job.error = 2, str(error)
        except Exception as error:
            log.error(traceback.format_exc().rstrip())
            job.exit_status, job.error = 1, f"{type(error).__name__}: {error}".splitlines()[0]
        except KeyboardInterrupt:
            log.warning(self._kept(folder, run))
            job.exit_status, job.error = 128 + signal.SIGINT, "ended by SIGINT"

    def _kept(self, folder: Path, run: Run | None) -> str:
        """What is left of a run (None: it has not begun) that Ctrl-C has ended at once."""
        if self.arguments.command != "fit":
            return f"SIGINT ended {self.arguments.command}"
        last, text = folder / LAST_CHECKPOINT, "SIGINT ended the training at once; "
        if not last.exists():
            return f"{text}nothing was saved yet"
        return f"{text}the last state that was saved is in {last}" + (f"\n{run.how_to_resume}" if run else "")

    def _varied(self, overrides: list[str]) -> list[str]:
        """The keys that a sweep varies: those with several values on the command line, and those of a sweep file."""
        if not self.arguments.multirun:
            return []
        return [key for key in map(key_of, overrides) if key not in self.arguments.fixed]

    def show(self) -> int:
        """``--cfg job``: prints the configuration."""
        arguments = self.arguments
        with explaining():
            config = composed(arguments.primary, arguments.overrides, arguments.config_dir)
            config = command_line.completed(arguments, config, arguments.overrides)
            print(readable(OmegaConf.to_yaml(config, resolve="--resolve" in arguments.flags)), end="")
        return 0
