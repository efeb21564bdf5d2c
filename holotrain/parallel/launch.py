"""Starts the processes of a job on this machine, watches them and starts them again, with torch.distributed.elastic.

The processes run a command of ours, not a function: so nothing is pickled, and a script that calls us needs no main guard.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from holotrain.errors import MachineFailure, UserError

LOOPBACK = "127.0.0.1"

GRACE = 2.0
"""Seconds that a process lives on after its error. So the others, whose collectives fail with it, are not found dead first."""

START = """
import json, os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback
job = json.load(open(sys.argv[1]))
sys.path[:] = job["path"]
for name, value in job["environment"].items():
    os.environ.setdefault(name, value)
from {module} import work
from holotrain.parallel.launch import serve
serve(work, job)
"""


class ProcessFailed(Exception):
    """A process died, or failed with ``trace``."""

    def __init__(self, words: str, trace: str = "") -> None:
        super().__init__(words)
        self.trace = trace


class Loopback(StaticTCPRendezvous):
    """A rendezvous of one machine. The store of torch's own would accept commands from every other machine.

    Args:
        mistake: a file with a mistake of the user, after which the processes do not start again.
    """

    def __init__(self, run_id: str, mistake: Path) -> None:
        super().__init__(LOOPBACK, 0, 0, 1, run_id, 60)
        self.mistake = mistake

    def get_backend(self) -> str:
        return "loopback"

    def next_rendezvous(self) -> RendezvousInfo:
        if self.mistake.exists():
            raise UserError(self.mistake.read_text(encoding="utf-8"))
        listener = socket.create_server((LOOPBACK, 0))
        self.master_port = listener.getsockname()[1]
        port, patience = self.master_port, timedelta(seconds=60)
        self._store = TCPStore(LOOPBACK, port, None, True, patience, False, master_listen_fd=listener.detach())
        return super().next_rendezvous()


rendezvous_handler_registry.register("loopback", lambda given: Loopback(given.run_id, Path(given.get("mistake"))))


def launch(module: str, work: Any, size: int, max_restarts: int, patience: float) -> int:
    """Runs ``work(...)`` of a module in ``size`` processes. Only the first one prints.

    Args:
        module: its function ``work`` takes the next argument and returns an exit status.
        work: plain containers, passed on as JSON.
        max_restarts: how often all processes are started again after one of them died or failed, other than by a mistake.
        patience: seconds that they have to save a checkpoint after a signal.

    Returns:
        The first process's exit status; 128 + n if signal n ended this process's wait. The signal is passed on.

    Raises:
        UserError: a process raised it.
        ProcessFailed: a process died or raised another error.
    """
    elastic = logging.getLogger("torch.distributed.elastic")  # what it says, we say in one line
    elastic.addHandler(logging.NullHandler())
    elastic.propagate = False
    with tempfile.TemporaryDirectory(prefix="holotrain-") as folder, _signals() as received:
        job, result, mistake = (Path(folder, name) for name in ("job.json", "status.json", "mistake.txt"))
        given = {"path": sys.path, "environment": _environment(size), "result": str(result), "mistake": str(mistake)}
        job.write_text(json.dumps(given | {"work": work}), encoding="utf-8")
        new: dict[str, Any] = {"shutdown_timeout": int(patience)}  # older versions of torch have 30 seconds
        config = LaunchConfig(
            1,
            1,
            size,
            logs_specs=DefaultLogsSpecs(folder, local_ranks_filter={0}),
            run_id="holotrain",
            rdzv_backend="loopback",
            rdzv_configs={"mistake": str(mistake)},
            max_restarts=max_restarts,
            signals_to_handle="SIGINT",
            **(new if new.keys() <= LaunchConfig.__dataclass_fields__.keys() else {}),
        )
        try:
            # -P: a json.py in the working directory would be imported instead of Python's
            elastic_launch(config, sys.executable)("-P", "-c", START.format(module=module), str(job))
        except ChildFailedError as error:
            raise _cause(error, mistake) from None
        except SignalException as error:
            received.append(error.sigval)
        if received == [signal.SIGINT] and not result.exists():
            raise KeyboardInterrupt
        if received and not result.exists():
            print("holotrain: SIGTERM ended the processes at once", file=sys.stderr)
        status = json.loads(result.read_text()) if result.exists() else 0
        return 128 + received[0] if received and (status or not result.exists()) else status


def serve(work: Callable[[Any], int], job: dict[str, Any]) -> None:
    """The main function of a started process. Its error is left in a file for the process that started it."""
    if sys.platform == "linux":  # if that process is killed, this one ends too
        torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGINT)  # ty: ignore[missing-attribute]
    try:
        status = record(work)(job["work"])
    except BaseException as error:
        again = os.environ["TORCHELASTIC_RESTART_COUNT"] != os.environ["TORCHELASTIC_MAX_RESTARTS"]
        if isinstance(error, UserError) and not (again and isinstance(error, MachineFailure)):
            with suppress(FileExistsError), open(job["mistake"], "x", encoding="utf-8") as file:  # others repeat the first
                file.write(str(error))
        time.sleep(GRACE)
        sys.stdout.flush()
        os._exit(1)  # without closing connections first, and without another traceback
    if os.environ["RANK"] == "0":
        Path(job["result"]).write_text(json.dumps(status))


def _environment(size: int) -> dict[str, str]:
    """Variables that are read when torch is imported."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    chosen = {"OMP_NUM_THREADS": str(max(1, cores // size)), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return chosen | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})


@contextmanager
def _signals() -> Generator[list[int]]:
    """Passes SIGTERM on as SIGINT, for it would end the processes' data workers too, and restores the handlers of both."""
    received: list[int] = []

    def terminated(signum: int, frame: object) -> None:
        received.append(signum)
        raise SignalException("SIGTERM", signal.SIGINT)

    kept = {}
    if threading.current_thread() is threading.main_thread():
        kept = {signal.SIGTERM: signal.signal(signal.SIGTERM, terminated), signal.SIGINT: signal.getsignal(signal.SIGINT)}
    try:
        yield received
    finally:
        for signum, handler in kept.items():
            signal.signal(signum, handler)


def _cause(error: ChildFailedError, mistake: Path) -> Exception:
    if mistake.exists():
        return UserError(mistake.read_text(encoding="utf-8"))
    rank, failure = next(iter(error.failures.items()))  # the first that was found; the others were ended then
    if isinstance(failure.message, dict):
        words, trace = failure.message["message"], failure.message["extraInfo"]["py_callstack"]
        return ProcessFailed(f"rank {rank} failed: {words.splitlines()[0]}", trace)
    ended = f"was killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exited with status {failure.exitcode}"
    return ProcessFailed(f"rank {rank} (process {failure.pid}) {ended}")
