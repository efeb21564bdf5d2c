"""Noticing that one of the processes of a run has died or hangs, and saying which, whatever the others are waiting for.

A collective whose peer is gone raises (gloo) or hangs (NCCL); neither says who is missing. So every process has a thread that
leaves a sign of life with the others twice a second, and says how far the process has come. The main process looks at the
signs, and at its children, and passes a verdict; the others look for the verdict.
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
"""Seconds between two signs of life."""

PATIENCE = 120.0
"""Seconds that a process has to start in."""

GRACE = 5.0
"""Seconds in which the main thread of a process may end by itself after a verdict, before it is ended."""


def longer(timeout: float) -> timedelta:
    """For which collectives wait: the watch, which can say who is missing, comes first."""
    return timedelta(seconds=timeout + 2 * GRACE)


@dataclass(frozen=True)
class Verdict:
    """What ends all processes.

    Args:
        what: went wrong, and with which rank.
        status: the exit status that it deserves.
    """

    what: str
    status: int = 1


class Watch(threading.Thread):
    """
    Args:
        place: of this process.
        timeout: seconds without a sign of life, or of others waiting for it, after which a process counts as lost.
        position: says how far this process has come.
        children: the processes that this one started, in order of their ranks from 1 on.

    Attributes:
        verdict: what went wrong with which rank; None as long as all live.
        hint: how to go on, said behind the verdict by who ends a process.
        urgent: a collective failed here: who is silent for ``GRACE`` seconds is dead.
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
        # A connection of its own: a client is locked while it waits for a key.
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
                self.verdict = Verdict("rank 0 died, or cannot be reached")
            if self.verdict is not None:
                self._enforce()
                return

    def stop(self) -> None:
        """Ends the watch: the processes may end from now on."""
        self._over.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def failed(self, what: str, status: int = 1) -> Verdict:
        """Passes a verdict, unless there is one; returns the one that counts."""
        said = self._store.compare_set(self._key("verdict"), "", json.dumps(asdict(Verdict(what, status))))
        self.verdict = self.verdict or Verdict(**json.loads(said))
        return self.verdict

    def waited(self, seconds: float) -> Verdict | None:
        """The verdict, for which a process whose collective failed waits so long."""
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
            self.failed(f"rank {rank} died, or hangs: no sign of life for {now - since:.0f} s")

    def _compare(self) -> None:
        """Looks for whom the others have waited too long, without a step forward of its own."""
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
        """Ends this process, if its main thread does not end by itself when it need wait no longer."""
        if self._over.wait(GRACE):
            return
        for child in self.children:
            child.kill()
        if dist.is_initialized() and dist.get_backend() == "nccl":  # which waits for the dead; gloo notices that they are gone
            threading.Thread(target=_abort, daemon=True).start()  # for it may wait itself
        if self._over.wait(GRACE):
            return
        if self.place.is_main or (self.place.rank == 1 and self.verdict.what.startswith("rank 0 died")):
            print(f"holotrain: {self.verdict.what}{self.hint()}", file=sys.stderr, flush=True)
        os._exit(self.verdict.status)


def _abort() -> None:
    with suppress(Exception):
        dist.distributed_c10d._abort_process_group()


def ended_by(status: int) -> str:
    """How a process ended, in words."""
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
