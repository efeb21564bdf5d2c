"""Detects which process of a run died or hangs, even while the others wait in a collective.

A collective that lost a process raises (gloo) or hangs (NCCL) without saying which process is missing. So a thread in every
process writes a heartbeat and its progress to the store twice a second. The main process checks the heartbeats and its child
processes, and writes a verdict to the store. The others read the verdict.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from subprocess import Popen

import torch.distributed as dist
from torch.distributed import TCPStore

from holotrain.ranks.place import Place
from holotrain.ranks.progress import Position, waited_for

BEAT = 0.5
"""Seconds between two heartbeats."""

PATIENCE = 120.0
"""Seconds that a process may take to start."""

GRACE = 5.0
"""Seconds that the main thread of a process has to exit after a verdict, before the process is killed."""


def longer(timeout: float) -> timedelta:
    """The timeout of collectives, longer than that of the watch, which can report the missing process."""
    return timedelta(seconds=timeout + 2 * GRACE)


@dataclass(frozen=True)
class Verdict:
    """Why all processes end.

    Args:
        what: what went wrong, and in which rank.
        status: exit status.
    """

    what: str
    status: int = 1


class Watch(threading.Thread):
    """
    Args:
        place: place of this process.
        timeout: seconds without a heartbeat, or of others waiting for it, after which a process is considered lost.
        position: returns the progress of this process.
        children: the processes that this one started, by rank from 1 on.

    Attributes:
        verdict: what went wrong; None while all processes run.
        hint: returns how to resume, printed after the verdict when a process is killed.
        urgent: a collective failed here, so a process without a heartbeat for ``GRACE`` seconds is considered dead.
    """

    def __init__(
        self,
        place: Place,
        timeout: float,
        position: Callable[[], Position],
        children: Sequence[Popen] = (),
    ) -> None:
        super().__init__(name="holotrain-watch", daemon=True)
        self.place, self.timeout, self.position, self.children = place, timeout, position, children
        self.verdict: Verdict | None = None
        self.urgent = False
        self.hint: Callable[[], str] = str
        self._over = threading.Event()
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._positions: dict[int, Position] = {}
        self._waited_for: dict[int, tuple[Position, float]] = {}
        # A separate connection, because a client blocks while it waits for a key.
        self._store = TCPStore(
            place.address, place.port, None, False, timedelta(seconds=min(timeout, 30)), wait_for_workers=False
        )

    def run(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            try:
                self._beat(count)
            except Exception:
                self.verdict = Verdict("rank 0 died or cannot be reached")
            if self.verdict is not None:
                self._enforce()
                return

    def stop(self) -> None:
        """Stops the watch. The processes may exit from now on."""
        self._over.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def failed(self, what: str, status: int = 1) -> Verdict:
        """Sets the verdict unless there is one already; returns the valid one."""
        said = self._store.compare_set(self._key("verdict"), "", json.dumps(asdict(Verdict(what, status))))
        self.verdict = self.verdict or Verdict(**json.loads(said))
        return self.verdict

    def waited(self, seconds: float) -> Verdict | None:
        """Waits up to ``seconds`` for the verdict, after a collective failed in this process."""
        self.urgent = True
        ends = time.monotonic() + seconds
        while self.verdict is None and time.monotonic() < ends:
            time.sleep(BEAT / 5)
        return self.verdict

    def _key(self, name: str) -> str:
        return f"watch/{self.place.attempt}/{name}"

    def _beat(self, count: int) -> None:
        self._store.set(self._key(f"beat/{self.place.rank}"), json.dumps([count, asdict(self.position())]))
        if self._store.check([self._key("verdict")]):
            self.verdict = Verdict(**json.loads(self._store.get(self._key("verdict"))))
            return
        for rank, child in enumerate(self.children, 1):
            if (status := child.poll()) not in (None, 0):
                self.failed(f"rank {rank} (process {child.pid}) {ended_by(status)}")
                return
        for rank in range(self.place.size) if self.place.is_main else (0,):
            self._listen(rank)
        if self.place.is_main:
            self._compare()

    def _listen(self, rank: int) -> None:
        key, now = self._key(f"beat/{rank}"), time.monotonic()
        beat = self._store.get(key) if self._store.check([key]) else b""
        last, since = self._beats.setdefault(rank, (b"", now))
        silence = GRACE if self.urgent else self.timeout
        if beat != last:
            self._beats[rank] = beat, now
            self._positions[rank] = Position(**json.loads(beat)[1])
        elif now - since > (silence if beat else max(silence, PATIENCE)):
            self.failed(f"rank {rank} died or hangs: no heartbeat for {now - since:.0f} s")

    def _compare(self) -> None:
        """Looks for a process that makes no progress while others have waited for it too long."""
        if len(self._positions) < self.place.size:
            return
        now, before = time.monotonic(), self._waited_for
        self._waited_for = {}
        for rank in waited_for(self._positions):
            position, since = before.get(rank, (None, now))
            since = since if position == self._positions[rank] else now
            self._waited_for[rank] = self._positions[rank], since
            if now - since > self.timeout:
                self.failed(f"rank {rank} hangs: the others have waited for it for {now - since:.0f} s")

    def _enforce(self) -> None:
        """Kills this process if its main thread does not exit by itself after the verdict."""
        if self._over.wait(GRACE):
            return
        for child in self.children:
            child.kill()
        if dist.is_initialized() and dist.get_backend() == "nccl":  # NCCL waits for dead processes; gloo raises
            threading.Thread(target=_abort, daemon=True).start()  # in a thread, because it may block
        if self._over.wait(GRACE):
            return
        if self.place.is_main or (self.place.rank == 1 and self.verdict.what.startswith("rank 0 died")):
            print(f"holotrain: {self.verdict.what}{self.hint()}", file=sys.stderr, flush=True)
        os._exit(self.verdict.status)


def _abort() -> None:
    with suppress(Exception):
        dist.distributed_c10d._abort_process_group()


def ended_by(status: int) -> str:
    """How a process ended, as text."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"
