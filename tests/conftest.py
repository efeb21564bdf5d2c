"""Shared fixtures: threads per worker, seeds, and the command line in this process."""

import os
import random
import shutil
import sys
from functools import partial

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that use all cores slow each other down
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    config.option.randomly_reset_seed = False  # pytest-randomly shuffles the tests; `seeded` seeds them


@pytest.fixture(autouse=True)
def seeded():
    """The same seed before every test, so that no result depends on the tests that ran before."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Caches of runs, such as measured groups, are kept out of the user's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def compiler(request, monkeypatch):
    """What torch.compile uses where the code under test names no backend: the captured graph as it is, or generated code."""
    import torch

    if request.param == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler")
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    yield request.param
    torch.compiler.reset()


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
