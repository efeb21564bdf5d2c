"""``holotrain report``: one HTML page that compares runs."""

import glob
from pathlib import Path

import yaml
from rich.progress import track

from holotrain.commands import summary
from holotrain.commands.console import plain
from holotrain.commands.writing import write_whole
from holotrain.config.command_options import ReportConfig
from holotrain.config.jobs import JOB, UNENDED, read_job
from holotrain.dashboard.logs import read_events, read_images, read_scalars, read_texts
from holotrain.dashboard.page import page
from holotrain.dashboard.table import Reported
from holotrain.errors import UserError
from holotrain.files import read_text, require_shallow
from holotrain.folders import refuse_links
from holotrain.numeric import counted

LARGEST = 2**20
"""Bytes of a config.yaml. Those of a run have some thousand; PyYAML reads about 100 KiB a second."""

LEFT_BY_RUNS = ("config.yaml", summary.SUMMARY, "tensorboard", "csv", JOB)


def run(config: ReportConfig) -> int:
    """Writes the page and returns 0. Raises a UserError if an argument names no run, no run can be read, none has scalars, or
    the page cannot be written."""
    target = Path(config.to)
    if target.is_dir():
        raise UserError(f"to: {target} is a folder; give a file, such as to={target / 'report.html'}")
    folders = {folder.resolve(): folder for word in config.runs for folder in runs_at(word)}
    console = plain(soft_wrap=True)
    read: dict[Path, Reported] = {}
    unreadable: dict[Path, UserError] = {}
    for place in track(folders, "reading", console=console, transient=True, disable=not console.is_terminal):
        try:
            refuse_links(folder := folders[place], LEFT_BY_RUNS)
            config_yaml, ended, events = _config(folder / "config.yaml"), summary.read(folder) or {}, read_events(folder)
            curves, images, texts = read_scalars(folder, events), read_images(events), read_texts(events)
            read[place] = Reported(folder, config_yaml, ended, curves, images, texts, *_job(folder / JOB))
        except UserError as error:  # the other runs are still worth comparing
            unreadable[place] = error
    if not read:
        raise next(iter(unreadable.values()))
    if not any(reported.curves for reported in read.values()):
        raise UserError(f"{' '.join(config.runs)}: no scalars found; train with logger=tensorboard or logger=csv")
    write_whole(target, page(list(read.values())))
    for error in unreadable.values():
        console.print(f"left out: {error}")
    for reported in read.values():
        if not reported.curves:
            console.print(f"{reported.folder} has no scalars; it appears only in the table")
    console.print(f"{counted(len(read), 'run')} written to {target} ({target.stat().st_size / 2**10:.0f} KiB)")
    return 0


def runs_at(word: str) -> list[Path]:
    """The run folders that an argument of the command line names. Raises a UserError if there are none."""
    path = Path(word).expanduser()
    matched = [path] if path.exists() else [Path(found) for found in sorted(glob.glob(str(path), recursive=True))]
    if not matched:
        raise UserError(f"there is no folder {word}" if not glob.has_magic(word) else f"no folder matches {word}")
    try:
        runs = [folder for place in matched for folder in _runs_of(place)]
    except OSError as error:
        raise UserError(f"cannot read {error.filename}: {error.strerror or error}") from error
    if not runs:
        raise UserError(f"{word} is not the folder of a run and contains none")
    return runs


def _runs_of(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else the runs in it, then the jobs of the sweeps in it."""
    if _is_run(folder):
        return [folder]
    sweeps = folder if folder.name == "sweeps" else folder / "sweeps"
    runs = _runs_in(folder)
    for sweep in sorted(sweeps.iterdir()) if sweeps.is_dir() else ():
        runs += _runs_in(sweep)
    return runs


def _runs_in(folder: Path) -> list[Path]:
    """The runs right in a folder, the jobs of a sweep in order."""
    within = [child for child in folder.iterdir() if _is_run(child)] if folder.is_dir() else []
    return sorted(within, key=lambda child: (int(child.name) if child.name.isdigit() else -1, child.name))


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in LEFT_BY_RUNS)


def _job(path: Path) -> tuple[list[str], str | None]:
    """The overrides of a job of a sweep, and why it failed; a job that has not ended may still be running."""
    job = read_job(path)
    if job is None:
        return [], None
    return job.overrides, None if job.error == UNENDED else job.error


def _config(path: Path) -> dict:
    try:
        if not path.is_file():
            return {}
        options = yaml.safe_load(read_text(path, LARGEST))
        require_shallow(options)
        if not isinstance(options, dict):
            raise TypeError("it holds no mapping")
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:  # TypeError: of a list as a key
        raise UserError(f"{path} is not a readable configuration") from error
    return options
