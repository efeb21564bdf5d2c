"""Expensive results, made by one pytest worker and read by all."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path


def made_once(tmp_path_factory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder of this session, filled by ``make`` in the first worker that needs it."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / name
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.made").exists():
            assert not folder.exists(), f"{name} failed in another worker"
            folder.mkdir()
            make(folder)
            (base / f"{name}.made").touch()
    return folder
