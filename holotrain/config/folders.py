"""Run folders ``<output_dir>/<command>/<date>_<time>/`` and ``<output_dir>/<command>/sweeps/<date>_<time>/<job>/``."""

from datetime import datetime
from pathlib import Path

from holotrain.errors import UserError
from holotrain.outside import read_json

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"


def run_folder(kind: str, root: str, resume: bool) -> str:
    """A new folder; to resume, that of the latest run or sweep with a checkpoint.

    Args:
        kind: the command; for a sweep, whose jobs have numbered folders in its folder, ``<command>/sweeps``.
    """
    parent = Path(root, kind)
    evidence = (Path("*"), "sweep that has begun") if parent.name == "sweeps" else (LAST_CHECKPOINT, "run with a checkpoint")
    return str(_latest(parent, *evidence) if resume else _fresh(parent))


def checkpoint_path(given: str, command: str, root: str) -> Path:
    """The checkpoint that an option ``ckpt_path`` stands for.

    Args:
        given: a file, a folder that an export or a sharded checkpoint is in, the folder of a run (its best checkpoint; to train
            on, its last), or ``best`` or ``last``: of the latest training.
        root: folder of all runs.

    Raises:
        UserError: there is no such training, or it is a folder of several.
    """
    if given in ("best", "last") and not Path(given).exists():
        folder = _latest(Path(root) / "fit", LAST_CHECKPOINT, "run with a checkpoint", f"ckpt_path={given}")
    else:
        folder = Path(given).expanduser()
    last = folder / LAST_CHECKPOINT
    if not last.exists():
        _require_no_runs_in(folder, given)
        return folder
    best = None if given == "last" or (command == "fit" and given != "best") else _best(folder)
    return best or last


def _require_no_runs_in(folder: Path, given: str) -> None:
    """
    Raises:
        UserError: this is a folder of runs, of a sweep or of several sweeps.
    """
    below = ("*", "*/*", "sweeps/*/*", "fit/sweeps/*/*")  # of a sweep, of all sweeps, of all trainings, of all runs
    runs = [path.parent.parent for level in below for path in folder.glob(f"{level}/{LAST_CHECKPOINT}")]
    if runs and not (folder / "config.json").exists():
        latest = max(runs, key=lambda run: (run / LAST_CHECKPOINT).stat().st_mtime)
        raise UserError(f"ckpt_path={given}: there are {len(runs)} runs in this folder; choose one, such as ckpt_path={latest}")


def _best(folder: Path) -> Path | None:
    """The checkpoint that the run's summary names, else the newest of the best; None: there is none."""
    found = sorted((folder / LAST_CHECKPOINT.parent).glob("best-*"), key=lambda path: path.stat().st_mtime)
    try:
        named = Path(read_json(folder / "summary.json")["checkpoint"]).name
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    return next((path for path in found if path.name == named), found[-1] if found else None)


def from_here(path: Path) -> Path:
    """The path relative to the current folder, if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _fresh(parent: Path) -> Path:
    """Makes the folder, so that of two runs that start in the same second each has its own.

    Raises:
        UserError: it cannot be made.
    """
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, count = parent / stamp, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not folder.exists():
                raise UserError(f"cannot write to {error.filename or parent}: {error.strerror or error}") from error
        count += 1
        folder = parent / f"{stamp}-{count}"


def _latest(parent: Path, evidence: Path, noun: str, option: str = "resume=true") -> Path:
    found = [folder for folder in parent.glob("*") if any(folder.glob(str(evidence)))]
    if not found:
        hint = "; to start one, leave out resume=true" if option == "resume=true" else ""
        raise UserError(f"{option}: there is no {noun} in {parent}{hint}")
    return max(found, key=lambda folder: max(path.stat().st_mtime for path in folder.glob(str(evidence))))
