"""Shared fixtures: threads per worker, seeds, the command line in this process, and finished runs."""

import gc
import logging
import os
import random
import re
import shutil
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from covering import slow
from forked import composed_once
from made_once import made_once
from small_run import SMALL, fit_in
from watched import watched

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that use all cores slow each other down
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config):
    config.option.randomly_reset_seed = False  # pytest-randomly shuffles the tests; `seeded` seeds them


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of a long case of a slow test ``long`` counts."""
    for item in items:
        if item.get_closest_marker("long"):
            item.own_markers = [marker for marker in item.own_markers if marker.name != "slow"]


def pytest_unconfigure():
    gc.unfreeze()  # else libraries report leaks when Python ends


@pytest.fixture(autouse=True)
def seeded():
    """The same seed before every test, so that no result depends on the tests that ran before."""
    import torch

    random.seed(0)
    torch.manual_seed(0)
    with suppress(ModuleNotFoundError):  # torch and pytest are all that the tests marked cuda need
        import numpy

        numpy.random.seed(0)


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """``datasets`` (4.4) puts a copy in place of ``os.environ`` when it reads in several processes: that ends with a test."""
    monkeypatch.setattr(os, "environ", os.environ)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """Caches of runs, such as measured groups, are kept out of the user's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def contacts_nobody(tmp_path):
    """The test fails if it asks an address or starts a program."""
    with watched(tmp_path / "secret") as noted:
        yield
    assert noted == []


@pytest.fixture
def float64_stays(monkeypatch):
    """``x.float()`` leaves a tensor in float64: transformers casts logits to float32, which would hide errors."""
    import torch

    monkeypatch.setattr(torch.Tensor, "float", lambda self: self if self.dtype == torch.float64 else self.to(torch.float32))


@pytest.fixture(params=["eager", slow("inductor")])
def compiler(request, monkeypatch):
    """What torch.compile uses where the code under test names no backend: the captured graph as it is, or generated code."""
    import torch

    if request.param == "inductor" and not any(map(shutil.which, ("g++", "clang++"))):
        pytest.skip("torch.compile needs a C++ compiler")
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=request.param))
    yield request.param
    torch.compiler.reset()


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """Each run ends with a garbage collection: it need not look through all that was imported, which takes half a second."""
    gc.collect()
    gc.freeze()


class CommandLine:
    """Runs command lines in this process."""

    def __init__(self, capfd: pytest.CaptureFixture) -> None:
        self._capfd = capfd

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error without warnings of PyTorch's sockets, which depend on the machine."""
        from holotrain.cli import main

        self._capfd.readouterr()
        status = main(list(words))
        out, err = self._capfd.readouterr()
        return status, out, re.sub(r"(?m)^(\[rank\d+\]:)?\[W\d{4} .*(socket|TCPStore|ProcessGroup).*\n", "", err)

    def done(self, *words: str) -> str:
        """What is printed by one that ends well, with nothing on the standard error."""
        status, out, err = self(*words)
        assert (status, err) == (0, ""), (words, err)
        return out

    def refused(self, *words: str) -> str:
        """The one line that answers a mistake."""
        status, _, err = self(*words)
        assert status == 2 and err.startswith("holotrain: ") and err.count("\n") == 1, (words, err)
        return err


@pytest.fixture
def holotrain(tmp_path, monkeypatch, capfd):
    """A :class:`CommandLine` in an empty folder."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["holotrain"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", ""))

    log = logging.getLogger()
    level, handlers = log.level, list(log.handlers)
    with patch.dict(os.environ), composed_once():
        yield CommandLine(capfd)
    log.setLevel(level)  # Hydra's --info sets it, and a handler that writes to the stream of this test
    log.handlers[:] = handlers
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_library(tmp_path_factory, monkeypatch) -> None:
    """The default text is a few packages of the standard library."""
    from data_files import copy_of_the_standard_library

    folder = made_once(tmp_path_factory, "standard_library", copy_of_the_standard_library)
    monkeypatch.setattr("holotrain.data.text.sources.sysconfig", SimpleNamespace(get_path=lambda name: str(folder)))


@pytest.fixture
def tokens(tmp_path_factory, small_library) -> Path:
    """A folder for data.cache_dir: the default text is tokenised there once."""
    return made_once(tmp_path_factory, "tokens", lambda folder: None)


@pytest.fixture(scope="session")
def image_run(tmp_path_factory) -> Path:
    """The folder of a finished training of images, for tests that leave it as it is."""
    words = ["optimizer=sgd", "synthesis=associative", "logger=none", "data.val_fraction=0.2", "hydra.run.dir=run"]
    return made_once(tmp_path_factory, "image_run", lambda folder: fit_in(folder, *SMALL, *words)) / "run"
