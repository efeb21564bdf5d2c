"""Groups that were chosen, kept in a file for each shape and device."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from holotrain.overlap.groups import Job

VERSION = 1


@dataclass(frozen=True)
class Tuned:
    """What was chosen for a job.

    Args:
        sizes: rows of each group.
        predicted: seconds in these groups, by the recurrence.
        confirmed: seconds in these groups, measured.
        in_one: seconds in one group, measured.
    """

    sizes: list[int]
    predicted: float
    confirmed: float
    in_one: float


def default_folder() -> Path:
    """Below the user's cache (``XDG_CACHE_HOME``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holotrain" / "overlap"


def described(job: Job, link: str) -> dict[str, object]:
    """All that a choice depends on, as JSON has it."""
    threads = torch.get_num_threads()
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else f"{job.device.type}, {threads} threads"
    return asdict(job) | {
        "dtype": str(job.dtype).removeprefix("torch."),
        "device": device,
        "link": link,
        "torch": torch.__version__,
    }


def path_of(folder: Path, job: Job, link: str) -> Path:
    """Of the shape, for a person, and of a digest of all that counts."""
    about = described(job, link)
    kind = f"{job.collective}{'_covered' if job.covered else ''}-{job.rows}x{job.inputs}x{job.outputs}"
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{kind}-{about['dtype']}-{job.ranks}_ranks-{digest}.json"


def read(path: Path, job: Job, link: str) -> Tuned | None:
    """None where there is no such file, or one that does not belong to this job, device and torch; a broken one is named."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return None
    try:
        found = json.loads(text)
        if found["version"] != VERSION or found["of"] != described(job, link):
            return None
        tuned = Tuned(**found["tuned"])
        _require(tuned, job)
    except (ValueError, TypeError, KeyError) as error:
        warnings.warn(f"{path} is not a choice of groups ({error!r}); measuring anew", stacklevel=2)
        return None
    return tuned


def _require(tuned: Tuned, job: Job) -> None:
    sizes = tuned.sizes
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != job.rows:
        raise ValueError(f"groups of {sizes} rows for {job.rows}")
    for seconds in (tuned.predicted, tuned.confirmed, tuned.in_one):
        if not isinstance(seconds, float) or not 0 <= seconds < float("inf"):
            raise ValueError(f"{seconds!r} seconds")


def write(path: Path, job: Job, link: str, tuned: Tuned) -> None:
    """To a temporary name beside it, then renamed. A folder that cannot be written is no reason to stop a training."""
    text = json.dumps({"version": VERSION, "of": described(job, link), "tuned": asdict(tuned)}, indent=2) + "\n"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        warnings.warn(f"cannot keep what was measured in {path}: {error.strerror}", stacklevel=2)
