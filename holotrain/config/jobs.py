"""The results of the jobs of a sweep, also of those that a launcher runs in other processes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus


@contextmanager
def recorded_jobs(record: Callable[[list[str], Any], None]) -> Iterator[None]:
    """Inside, calls ``record`` for each job that a launcher has run, with its overrides and what the task function returned.

    If the launcher reports no result, for example because the process of a job died, the result is None. Hydra's ``main`` does
    not return the results of a sweep.
    """
    ordinary = Plugins.instantiate_launcher

    def instantiate(*args: Any, **kwargs: Any) -> Any:
        launcher = ordinary(*args, **kwargs)
        launch = launcher.launch

        def launch_and_record(job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            left = launch(job_overrides, initial_job_idx)
            results = [_returned(job) for job in left or ()]
            results += [None] * (len(job_overrides) - len(results))
            for overrides, returned in zip(job_overrides, results, strict=True):
                record(list(overrides), returned)
            return left

        launcher.launch = launch_and_record
        return launcher

    Plugins.instantiate_launcher = instantiate
    try:
        yield
    finally:
        Plugins.instantiate_launcher = ordinary


def _returned(job: Any) -> Any:
    return job.return_value if isinstance(job, JobReturn) and job.status is JobStatus.COMPLETED else None
