"""Run folders ``<output_dir>/<command>/<date>_<time>/`` and ``<output_dir>/<command>/sweeps/<date>_<time>/<job>/``."""

from datetime import datetime
from pathlib import Path

from holotrain.errors import UserError

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"


def run_folder(command: str, root: str, resume: bool) -> str:
    """A new folder; to resume, the folder of the latest run with a checkpoint."""
    parent = Path(root) / command
    return str(_latest(parent, LAST_CHECKPOINT, "run") if resume else _fresh(parent))


def sweep_folder(command: str, root: str, resume: bool) -> str:
    """The same for a sweep, whose jobs have numbered folders in it."""
    parent = Path(root) / command / "sweeps"
    return str(_latest(parent, Path("*"), "sweep") if resume else _fresh(parent))


def from_here(path: Path) -> Path:
    """The path relative to the current folder, if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _fresh(parent: Path) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, count = parent / stamp, 1
    while folder.exists():
        count += 1
        folder = parent / f"{stamp}-{count}"
    return folder


def _latest(parent: Path, evidence: Path, noun: str) -> Path:
    found = [folder for folder in parent.glob("*") if any(folder.glob(str(evidence)))]
    if not found:
        raise UserError(f"resume=true: there is no {noun} with a checkpoint in {parent}")
    return max(found, key=lambda folder: max(path.stat().st_mtime for path in folder.glob(str(evidence))))
