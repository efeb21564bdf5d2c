"""Chosen groups, saved to a file for each shape and device."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from holotrain.atomic_files import replacing
from holotrain.outside import read_json
from holotrain.overlap.groups import Job

VERSION = 2


@dataclass(frozen=True)
class Tuned:
    """The choice for a job.

    Args:
        sizes: rows (or columns) of each group.
        predicted: seconds in these groups, predicted.
        confirmed: seconds in these groups, measured.
        in_one: seconds in one group, measured.
        columns: whether the groups are of columns instead of rows.
    """

    sizes: list[int]
    predicted: float
    confirmed: float
    in_one: float
    columns: bool = False


def default_folder() -> Path:
    """``holotrain/overlap`` in the user's cache (``XDG_CACHE_HOME``)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holotrain" / "overlap"


def described(job: Job, link: str) -> dict[str, object]:
    """The job, its device and its link, as plain JSON."""
    threads = torch.get_num_threads()
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else f"{job.device.type}, {threads} threads"
    return asdict(job) | {"dtype": str(job.dtype).removeprefix("torch."), "device": device, "link": link}


def versions(device: torch.device) -> dict[str, str]:
    """What else the measured times depend on."""
    found = {"torch": torch.__version__}
    if device.type == "cuda":
        found["compute capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        found["CUDA"] = torch.version.cuda or f"ROCm {torch.version.hip}"
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "none"
    return found


def path_of(folder: Path, job: Job, link: str) -> Path:
    """The file of a job: its name has the shape, for people, and a digest of the job, the device and the link."""
    about = described(job, link)
    kind = f"{job.collective}{'_covered' * job.covered}{'_before' * job.before}-{job.rows}x{job.inputs}x{job.outputs}"
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{kind}-{about['dtype']}-{job.ranks}_ranks-{digest}.json"


def read(path: Path, job: Job, link: str) -> Tuned | None:
    """Returns None if there is no file for this job and device. A warning names a file that is broken or of other versions."""
    try:
        found = read_json(path)
        if found["version"] != VERSION or found["of"] != described(job, link):
            raise ValueError("of another job")
        if (before := found["with"]) != (now := versions(job.device)):
            changed = [f"{name} {before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value]
            warnings.warn(f"{path} was measured with {'; '.join(changed)}; measuring again", stacklevel=2)
            return None
        tuned = Tuned(**found["tuned"])
        _require(tuned, job)
    except OSError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{path} is not a valid choice of groups ({error!r}); measuring again", stacklevel=2)
        return None
    return tuned


def _require(tuned: Tuned, job: Job) -> None:
    sizes, total = tuned.sizes, job.outputs if tuned.columns else job.rows
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != total:
        raise ValueError(f"groups of {sizes} for {total}")
    for seconds in (tuned.predicted, tuned.confirmed, tuned.in_one):
        if not isinstance(seconds, float) or not 0 <= seconds < float("inf"):
            raise ValueError(f"{seconds!r} seconds")


def write(path: Path, job: Job, link: str, tuned: Tuned) -> None:
    """A folder that cannot be written does not stop the training."""
    choice = {"version": VERSION, "of": described(job, link), "with": versions(job.device), "tuned": asdict(tuned)}
    text = json.dumps(choice, indent=2) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        warnings.warn(f"cannot save the measured groups to {path}: {error.strerror or error}", stacklevel=2)
