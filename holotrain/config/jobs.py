"""What the jobs of a sweep return, from whichever process Hydra's launcher runs them in."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus


@contextmanager
def recorded_jobs(tell: Callable[[list[str], Any], None]) -> Iterator[None]:
    """Within, calls ``tell`` for each job that a launcher has run: its overrides, and what the task function returned.

    A job counts as having returned None where the launcher says nothing of it, as where its process died. Hydra's ``main``
    keeps this to itself.
    """
    ordinary = Plugins.instantiate_launcher

    def instantiate(*args: Any, **kwargs: Any) -> Any:
        launcher = ordinary(*args, **kwargs)
        launch = launcher.launch

        def launch_and_tell(job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            left = launch(job_overrides, initial_job_idx)
            told = [_returned(job) for job in left or ()]
            told += [None] * (len(job_overrides) - len(told))
            for overrides, returned in zip(job_overrides, told, strict=True):
                tell(list(overrides), returned)
            return left

        launcher.launch = launch_and_tell
        return launcher

    Plugins.instantiate_launcher = instantiate
    try:
        yield
    finally:
        Plugins.instantiate_launcher = ordinary


def _returned(job: Any) -> Any:
    return job.return_value if isinstance(job, JobReturn) and job.status is JobStatus.COMPLETED else None
