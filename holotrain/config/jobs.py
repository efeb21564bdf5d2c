"""The jobs of a sweep. Hydra's sweeper chooses them, and its launcher runs them, maybe in other processes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.types import RunMode

from holotrain.config.annotations import read_fields
from holotrain.config.command_line import explaining
from holotrain.config.composition import composed, config_folder
from holotrain.config.start import Start
from holotrain.errors import UserError
from holotrain.files import write_json
from holotrain.folders import refuse_links, relative_to_cwd

JOB = "job.json"


@dataclass
class Job:
    """What a job leaves as ``job.json``, first when it begins: until it ends, its error is that its process died."""

    number: int
    overrides: list[str]
    exit_status: int = 1
    error: str | None = "its process died"

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / JOB, vars(self))


def read_jobs(folder: Path) -> dict[Path, Job]:
    """The jobs that have begun, by their folders, in order. What is not one of our files is left out."""
    kinds = {each.name: str(each.type) for each in fields(Job)}
    jobs = {}
    for path in folder.rglob(JOB):
        with suppress(UserError):
            jobs[path.parent] = Job(**read_fields(path, kinds, "job", ("error",)))
    return dict(sorted(jobs.items(), key=lambda item: item[1].number))


def prepare_sweep(start: Start) -> Path:
    """The folder of a sweep that is about to start. Raises a UserError if the options of a job, as far as known, are wrong."""
    arguments, search_path = start.arguments, create_config_search_path(config_folder())
    if arguments.config_dir:
        folder = f"file://{Path(arguments.config_dir).resolve()}"
        search_path.prepend("command-line", folder, SearchPathQuery(provider="schema"))  # as Hydra does
    setup_globals()
    with explaining(arguments):
        loader = ConfigLoaderImpl(search_path)
        hydra = loader.load_configuration(arguments.primary, arguments.overrides, RunMode.MULTIRUN).hydra
        if hydra.sweeper._target_.endswith(".BasicSweeper"):  # others choose later, and may find that some values fail
            words = [*(f"{name}={value}" for name, value in (hydra.sweeper.params or {}).items()), *hydra.overrides.task]
            parsed = OverridesParser.create(loader).parse_overrides(words)
            batches = BasicSweeper.split_arguments(parsed, hydra.sweeper.max_batch_size)
            _check_jobs(start, [job for batch in batches for job in batch])
        folder = relative_to_cwd(Path(str(hydra.sweep.dir)))
    refuse_links(folder, ["multirun.yaml", *(path.name for path in folder.glob("*") if path.name.isdigit())])
    for earlier in folder.rglob(JOB):  # of a sweep that is resumed
        earlier.unlink()
    return folder


def _check_jobs(start: Start, jobs: list[list[str]]) -> None:
    if not jobs:
        raise UserError("-m: the sweep has no job, because one of its options has no value; range(0) has none, for example")
    for number, job in enumerate(jobs):
        try:
            with explaining(start.arguments):
                config = composed(start.arguments.primary, job, start.arguments.config_dir)
            start.structured(config, job)
        except UserError as error:
            varied = " ".join(word for word in job if any(word not in other for other in jobs))
            raise UserError(f"job {number} ({varied}): {error}; no job was started") from error
