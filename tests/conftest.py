"""Shared fixtures: threads per worker, and the command line in this process."""

import os
import sys

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that use all cores slow each other down
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Caches of runs, such as measured groups, are kept out of the user's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def holotrain(tmp_path, monkeypatch, capfd):
    """Runs a command line in this process, in an empty folder: (exit status, standard output, standard error)."""
    from holotrain.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["holotrain"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", ""))

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(list(words))
        return status, *capfd.readouterr()

    return run
