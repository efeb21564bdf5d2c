"""What a run leaves in figures: summary.json."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from holotrain.commands.files import write_whole

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
    metrics: dict[str, float] = field(default_factory=dict)
    epochs: int | None = None
    steps: int | None = None
    samples_per_second: float | None = None
    step_seconds: float | None = None
    peak_memory_bytes: int | None = None
    checkpoint: str | None = None

    def write(self, folder: Path) -> None:
        """Writes ``summary.json`` into the run's folder, whole or not at all."""
        write_whole(folder / SUMMARY, json.dumps(_finite(asdict(self)), indent=2) + "\n")


def read(folder: Path) -> dict[str, Any] | None:
    """A run's summary; None where it left none."""
    path = folder / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
