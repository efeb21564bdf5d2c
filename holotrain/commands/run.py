"""One run of a command: its folder, where it came from, and who does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holotrain.config.folders import LAST_CHECKPOINT
from holotrain.errors import UserError
from holotrain.ranks.place import Place
from holotrain.ranks.world import World


@dataclass
class Run:
    """
    Args:
        command: fit, validate, test, predict, generate, export or plan.
        folder: where it leaves its files; it exists.
        overrides: what the command line changed, as written there.
        choices: the option of each configuration group, for checkpoints to keep.
        varied: the options and groups in which the jobs of a sweep differ; none outside of a sweep.
        world: the processes that do it together; None: this one alone.
    """

    command: str
    folder: Path
    overrides: list[str]
    choices: dict[str, str]
    varied: list[str] = field(default_factory=list)
    world: World | None = None

    @property
    def checkpoints(self) -> Path:
        return self.folder / LAST_CHECKPOINT.parent

    @property
    def last_checkpoint(self) -> Path:
        return self.folder / LAST_CHECKPOINT

    @property
    def how_to_resume(self) -> str:
        job = f"python -m holotrain fit resume=true hydra.run.dir={self.folder}"
        if not self.varied:
            return f"resume with: {job}"
        return f"resume the sweep by its own command and resume=true, or this job with: {job}"

    def hint(self) -> str:
        """How to go on after a death, if there is a checkpoint."""
        return f"; {self.how_to_resume}" if self.last_checkpoint.exists() else ""

    @property
    def place(self) -> Place | None:
        return self.world and self.world.place

    @property
    def is_main(self) -> bool:
        """Whether this process is the one that speaks and writes."""
        return self.world is None or self.world.place.is_main

    def agreed(self, name: str, value: Any) -> Any:
        """What the main process says; the others' values do not count. Plain containers."""
        return value if self.world is None else self.world.agreed(name, value)

    def once_a_machine(self, name: str, act: Callable[[], object]) -> None:
        """Calls ``act`` in one process of each machine, and then in the others, which find done what it does once.

        Raises:
            UserError: ``act`` did, in all processes if in one.
        """
        if self.world is None:
            act()
            return
        mistake = None
        if self.place.local_rank == 0:
            try:
                act()
            except UserError as error:
                mistake = str(error)
        for rank, theirs in enumerate(self.world.gathered(name, mistake)):
            if theirs is not None:
                raise UserError(theirs if rank == 0 else f"rank {rank}: {theirs}")
        if self.place.local_rank != 0:
            act()
