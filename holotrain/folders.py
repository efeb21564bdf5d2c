"""The folders of runs: new ones, the latest, the checkpoints in them, and tables and texts that are never half written."""

import csv
import io
import os
import stat
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path

from holotrain.errors import UserError, readable
from holotrain.files import read_json, replacing
from holotrain.numeric import counted

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"


def run_folder(kind: str, root: str, resume: bool) -> str:
    """A new folder; to resume, that of the latest run or sweep with a checkpoint.

    Args:
        kind: the command; for a sweep ``<command>/sweeps``. Its jobs have numbered folders in its folder.
    """
    parent = Path(root, kind)
    # Of a sweep a folder of a job: one that was refused before has none.
    evidence = ("*/", "sweep that has begun") if parent.name == "sweeps" else (str(LAST_CHECKPOINT), "run with a checkpoint")
    return str(_latest(parent, *evidence) if resume else _fresh(parent))


def checkpoint_path(path: str, command: str, root: str) -> Path:
    """The checkpoint that an option ``ckpt_path`` stands for.

    Args:
        path: a file, a folder that an export or a sharded checkpoint is in, the folder of a run (its best checkpoint; to train
            on, its last), or ``best`` or ``last``: of the latest training.
        root: folder of all runs.
    """
    if path in ("best", "last") and not Path(path).exists():
        folder = _latest(Path(root) / "fit", str(LAST_CHECKPOINT), "run with a checkpoint", f"ckpt_path={path}")
    else:
        folder = Path(path).expanduser()
    last = folder / LAST_CHECKPOINT
    if not last.exists():
        below = ("*", "*/*", "sweeps/*/*", "fit/sweeps/*/*")  # of a sweep, of all sweeps, of all trainings, of all runs
        runs = [found.parent.parent for level in below for found in folder.glob(f"{level}/{LAST_CHECKPOINT}")]
        if runs and not (folder / "config.json").exists():
            latest = max(runs, key=lambda run: (run / LAST_CHECKPOINT).stat().st_mtime)
            advice = "give" if len(runs) == 1 else "choose one, such as"
            raise UserError(f"ckpt_path={path}: this folder holds {counted(len(runs), 'run')}; {advice} ckpt_path={latest}")
        return folder
    best = None if path == "last" or (command == "fit" and path != "best") else _best(folder)
    return best or last


def _best(folder: Path) -> Path | None:
    """The checkpoint that the run's summary names, else the newest of the best; None: there is none."""
    found = sorted((folder / LAST_CHECKPOINT.parent).glob("best-*"), key=lambda path: path.stat().st_mtime)
    try:
        named = Path(read_json(folder / "summary.json")["checkpoint"]).name
    except (OSError, ValueError, KeyError, TypeError):
        named = None
    return next((path for path in found if path.name == named), found[-1] if found else None)


def relative_to_cwd(path: Path) -> Path:
    """The path relative to the current folder, if it is in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def refuse_links(folder: Path, names: Iterable[str]) -> None:
    """Refuses the folder of a run in which one of these files and folders, or something in one, is a link or no regular file.
    What is read or written could be somewhere else."""
    places = [folder / name for name in names if os.path.lexists(folder / name)]
    while places:
        path = places.pop()
        found = path.lstat()
        mode = found.st_mode
        if stat.S_ISDIR(mode):
            places.extend(path.iterdir())
        elif stat.S_ISREG(mode) and found.st_nlink > 1:
            raise UserError(f"{path} has another name elsewhere (a hard link), which would be written, too; copy the folder")
        elif not stat.S_ISREG(mode):
            kind = "a link" if stat.S_ISLNK(mode) else "no regular file"
            raise UserError(f"{path} is {kind}; the folder of a run has nothing but files and folders of its own")


def _fresh(parent: Path) -> Path:
    """Makes the folder, so that of two runs that start in the same second each has its own."""
    time = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder, count = parent / time, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except OSError as error:
            if not folder.exists():
                raise UserError(f"cannot write to {error.filename or parent}: {error.strerror or error}") from error
        count += 1
        folder = parent / f"{time}-{count}"


def _latest(parent: Path, evidence: str, noun: str, option: str = "resume=true") -> Path:
    """The latest of the folders in which there is something of the pattern ``evidence``."""
    found = [folder for folder in parent.glob("*") if any(folder.glob(evidence))]
    if not found:
        hint = "; to start one, leave out resume=true" if option == "resume=true" else ""
        raise UserError(f"{option}: there is no {noun} in {parent}{hint}")
    return max(found, key=lambda folder: max(path.stat().st_mtime for path in folder.glob(evidence)))


def as_word(folder: Path | str) -> str:
    """A path as an override gives it. One that begins with a dollar or a quote would be an interpolation or a quoted text."""
    return f"./{folder}" if str(folder).startswith(("'", '"', "$")) else str(folder)


def write_table(path: Path, columns: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    """Writes a CSV file. Text that a spreadsheet would take for a formula is written after an apostrophe, as one would type it,
    and what controls a terminal is escaped. Raises a UserError if the file cannot be written."""
    text = io.StringIO()
    csv.writer(text).writerows([_not_run(cell) for cell in row] for row in (columns, *rows))
    write_whole(path, text.getvalue())


def _not_run(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    cell = readable(cell)
    if not cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def require_no_device(option: str, path: Path) -> None:
    """Raises a UserError, before anything is written, if what is to be written is there, and is no regular file."""
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):  # /dev/stdout is a link
        raise UserError(f"{option}: {path} is no regular file, and is not replaced")


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is complete as soon as it can be seen. Raises a UserError if the file cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", errors="backslashreplace")  # file names need not be valid UTF-8
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
