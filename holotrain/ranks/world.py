"""The processes of a run: messages between them, and their process group."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from subprocess import Popen, TimeoutExpired
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore

from holotrain.errors import UserError
from holotrain.ranks.place import Place
from holotrain.ranks.progress import Position, launched
from holotrain.ranks.watch import BEAT, GRACE, PATIENCE, Verdict, Watch, longer

POLL = 0.02
"""Seconds between two checks of the store."""


class Broken(Exception):
    """A process died or failed. The message says which; ``status`` is the exit status."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.what)
        self.status = verdict.status


class World:
    """
    Args:
        place: place of this process.
        timeout: seconds within which processes must answer each other.
        store: the shared store; None: connect to it.
        children: the processes that this one started.

    Raises:
        UserError: the port is in use, or the main process cannot be reached.
    """

    def __init__(self, place: Place, timeout: float, store: TCPStore | None = None, children: Sequence[Popen] = ()) -> None:
        self.place, self.timeout, self.children = place, timeout, list(children)
        connection = store or _connected(place)
        self.store: Store = PrefixStore(f"holotrain/{place.attempt}", connection)
        self.jobs = 0
        self.watch = Watch(place, timeout, lambda: Position(self.jobs, launched()), self.children)
        self.watch.start()

    def post(self, name: str, value: Any) -> None:
        """Publishes a value for all processes, as JSON."""
        self.store.set(name, json.dumps(value))

    def read(self, name: str) -> Any:
        """Waits for the value of a name and returns it.

        Raises:
            Broken: a process died meanwhile.
        """
        self._await([name])
        return json.loads(self.store.get(name))

    def _await(self, names: list[str], mistake: str | None = None, status: int = 1) -> None:
        """Waits until all names are posted; only briefly if a mistake ended the job in this process."""
        ends = time.monotonic() + GRACE
        while not self._there(names):
            if mistake and time.monotonic() > ends and self.watch.verdict is None:
                self.watch.failed(f"rank {self.place.rank}: {mistake}", status)
            if self.watch.verdict is not None:
                raise Broken(self.watch.verdict)
            time.sleep(POLL)  # the store's own wait writes to stderr

    def _there(self, names: list[str]) -> bool:
        try:
            return self.store.check(names)
        except dist.DistNetworkError as error:
            raise Broken(self.watch.waited(GRACE) or Verdict("rank 0 died")) from error

    def agreed(self, name: str, value: Any = None) -> Any:
        """The main process's value, in all processes. Plain containers only."""
        name = f"{self.jobs}/agreed/{name}"
        if self.place.is_main:
            self.post(name, value)
            return value
        return self.read(name)

    def gathered(self, name: str, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        name = f"{self.jobs}/gathered/{name}"
        self.post(f"{name}/{self.place.rank}", value)
        return [self.read(f"{name}/{rank}") for rank in range(self.place.size)]

    @contextmanager
    def group(self, backend: str, device: torch.device) -> Iterator[None]:
        """The process group of torch.distributed, for one job."""
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            backend,
            store=PrefixStore(f"group/{self.jobs}", self.store),
            rank=self.place.rank,
            world_size=self.place.size,
            timeout=longer(self.timeout),
            device_id=device if device.type == "cuda" else None,
        )
        try:
            yield
        finally:
            with suppress(RuntimeError):  # fails if another process is dead
                dist.destroy_process_group()
            # The group's threads end when the last reference is gone; one that outlives Python (torch 2.15) aborts the process.
            gc.collect()

    def finish_job(self, status: int, mistake: str | None) -> int:
        """Waits until every process has finished the job. Returns the highest exit status.

        Args:
            mistake: the message of the error that ended the job in this process, if any.

        Raises:
            Broken: another process died, or did not finish although this one did.
        """
        job, self.jobs = self.jobs, self.jobs + 1
        self.post(f"{job}/done/{self.place.rank}", status)
        names = [f"{job}/done/{rank}" for rank in range(self.place.size)]
        self._await(names, mistake, status)
        return max(json.loads(self.store.get(name)) for name in names)

    def leave(self) -> None:
        """Stops the watch and tells the main process that this one no longer needs the store."""
        self.close()
        self.post(f"gone/{self.place.rank}", True)

    def see_off(self) -> None:
        """Waits until all others have left, because this process may host the store."""
        with suppress(Broken, dist.DistError):
            self._await([f"gone/{rank}" for rank in range(1, self.place.size)])

    def close(self) -> None:
        """Stops the watch and waits for the child processes. Kills those that do not exit."""
        self.watch.stop()
        ends = time.monotonic() + (2 * BEAT if self.watch.verdict else 2 * GRACE)
        for child in self.children:
            try:
                child.wait(max(0, ends - time.monotonic()))
            except TimeoutExpired:
                child.kill()
                child.wait()


def _connected(place: Place) -> TCPStore:
    try:
        return TCPStore(place.address, place.port, None, place.hosts, timedelta(seconds=PATIENCE), wait_for_workers=False)
    except RuntimeError as error:
        where = f"{place.address}:{place.port}"
        if "EADDRINUSE" in str(error):
            raise UserError(f"MASTER_PORT={place.port}: the port is in use; give another") from error
        raise UserError(f"rank {place.rank} cannot reach the main process at {where}") from error
