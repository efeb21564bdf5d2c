"""One run of a command: its folder and where it came from."""

from dataclasses import dataclass, field
from pathlib import Path

from holotrain.config.folders import LAST_CHECKPOINT


@dataclass
class Run:
    """
    Args:
        command: fit, validate, test, predict, generate, export or plan.
        folder: where it leaves its files; it exists.
        overrides: what the command line changed, as written there.
        choices: the option of each configuration group, for checkpoints to keep.
        varied: the options and groups in which the jobs of a sweep differ; none outside of a sweep.
    """

    command: str
    folder: Path
    overrides: list[str]
    choices: dict[str, str]
    varied: list[str] = field(default_factory=list)

    @property
    def checkpoints(self) -> Path:
        return self.folder / LAST_CHECKPOINT.parent

    @property
    def last_checkpoint(self) -> Path:
        return self.folder / LAST_CHECKPOINT
