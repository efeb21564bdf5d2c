"""Python programs in processes of their own, forked from a process that has imported torch, Lightning and holotrain before."""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import runpy
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch


def composed_once() -> AbstractContextManager:
    """Hydra composes everything once more to see whether a configuration sets its mode. None of the tests' does."""
    from hydra._internal.hydra import Hydra, RunMode

    def mode(self, config_name, overrides):
        return RunMode.MULTIRUN if "hydra.mode=MULTIRUN" in overrides else None

    return patch.object(Hydra, "get_mode", mode)


COMMAND_LINE = "import sys; from holotrain.cli import main; sys.exit(main(sys.argv[1:]))"
"""A program for :class:`Forked`: ``holotrain`` with the given words."""

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["lightning.pytorch", "holotrain.commands.fit", "holotrain.cli", "torch.distributed.fsdp"])


class Forked:
    """A program that runs in a process of its own.

    Importing torch and Lightning takes seconds; a fork takes milliseconds. The process ends by ``os._exit``, so a test of how
    Python itself ends needs ``subprocess``. Variables that C libraries read when they are loaded, such as OMP_NUM_THREADS, have
    no effect in ``env``.

    Args:
        program: a script, or the text of a program.
        arguments: its ``sys.argv[1:]``.
        folder: its working directory.
        out, errors: files that its output goes to.
    """

    def __init__(
        self,
        program: Path | str,
        *arguments: str,
        folder: Path,
        env: dict[str, str] | None = None,
        out: Path | str = os.devnull,
        errors: Path | str = os.devnull,
    ) -> None:
        given = (program, list(map(str, arguments)), str(folder), dict(env or os.environ), str(out), str(errors))
        self._process = _CONTEXT.Process(target=_run, args=(multiprocessing.get_start_method(), *given))
        with patch.dict(os.environ, TORCH_CPP_LOG_LEVEL="ERROR"):  # which torch reads in the process that is forked
            self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float = 600) -> int:
        self._process.join(timeout)
        assert self._process.exitcode is not None, f"process {self.pid} has not ended after {timeout} seconds"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _run(
    method: str, program: Path | str, arguments: list[str], folder: str, env: dict[str, str], out: str, errors: str
) -> None:
    gc.freeze()
    multiprocessing.set_start_method(method, force=True)  # data workers start as they do elsewhere
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for path, stream in ((out, 1), (errors, 2)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(handle, stream)
        os.close(handle)
    faulthandler.enable()  # on the standard error that has just been opened
    with composed_once():
        if isinstance(program, Path):
            sys.argv = [str(program), *arguments]
            sys.path.insert(0, str(program.parent))
            runpy.run_path(str(program), run_name="__main__")
        else:
            sys.argv = ["-c", *arguments]
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
