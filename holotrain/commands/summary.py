"""What a run leaves in figures: summary.json."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holotrain.commands.files import write_whole
from holotrain.errors import UserError

if TYPE_CHECKING:  # who only reads summaries need not wait for torch and Lightning
    from torch import nn

    from holotrain.commands.run import Run
    from holotrain.config.schema import RunConfig
    from holotrain.config.schema.running import TrainerConfig

SUMMARY = "summary.json"


@dataclass
class Summary:
    """The end of a run in figures. Times in seconds, memory in bytes; None where a figure does not apply."""

    command: str
    status: str
    overrides: list[str]
    device: str
    precision: str
    backward: str
    synthesis: str
    parameters: int
    seconds: float
    strategy: str = "single"
    processes: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    epochs: int | None = None
    steps: int | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    checkpoint: str | None = None

    @classmethod
    def of(cls, run: Run, config: RunConfig, model: nn.Module, status: str = "completed") -> Summary:
        """The summary of a run, without its figures yet."""
        from holotrain.config.devices import device_name

        return cls(
            command=run.command,
            status=status,
            overrides=run.overrides,
            device=device_name(config.trainer.accelerator),
            precision=config.trainer.precision,
            backward=config.backward.kind,
            synthesis=config.synthesis.kind,
            parameters=parameter_count(model),
            seconds=0.0,
            strategy=config.trainer.strategy,
            processes=run.place.size if run.place else 1,
        )

    def write(self, folder: Path) -> None:
        """Writes ``summary.json`` into the run's folder, whole or not at all."""
        write_whole(folder / SUMMARY, json.dumps(_finite(asdict(self)), indent=2) + "\n")


def ended(trainer: TrainerConfig, folder: Path) -> str | None:
    """Says so of a training that has got to where it is to end; None of one that has not, or has left no summary.

    To resume it would leave figures of nothing in the place of its own.
    """
    found = read(folder)
    if found is None or found["command"] != "fit" or found["status"] != "completed":
        return None
    for name, limit in (("epochs", trainer.max_epochs), ("steps", trainer.max_steps)):
        if limit > 0 and (found.get(name) or 0) >= limit:
            return f"{folder}: completed before, {found[name]} {name} of {limit}; left as it is"
    return None


def read(folder: Path) -> dict[str, Any] | None:
    """A run's summary; None where it left none.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / SUMMARY
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no readable summary: {error}") from error
    if not isinstance(found, dict) or not {"command", "status", "overrides", "metrics"} <= found.keys():
        raise UserError(f"{path} is no summary of a run")
    return found


def parameter_count(model: nn.Module) -> int:
    """How many numbers a model learns."""
    return sum(parameter.numel() for parameter in model.parameters())


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
