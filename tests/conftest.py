"""What tests share: threads for each worker, the command line in this process, and runs that it left."""

import gc
import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from made_once import made_once
from small_run import SMALL, fit_in

if "PYTEST_XDIST_WORKER" in os.environ:  # workers that each take all cores get in each other's way
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """What a run keeps for later ones, such as measured groups, stays out of the user's home."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module", autouse=True)
def short_collections():
    """Each run ends with a garbage collection: it need not look through all that was imported, which takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def holotrain(tmp_path, monkeypatch, capfd):
    """Runs a command line in this process, in an empty folder: (exit status, standard output, standard error)."""
    import torch
    from hydra._internal.hydra import Hydra, RunMode

    from holotrain.cli import main

    def mode(self, config_name, overrides):
        return RunMode.MULTIRUN if "hydra.mode=MULTIRUN" in overrides else None

    # Hydra composes everything once more to see whether a configuration sets its mode, which none of ours does.
    monkeypatch.setattr(Hydra, "get_mode", mode)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["holotrain"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", ""))

    def run(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        status = main(list(words))
        return status, *capfd.readouterr()

    with patch.dict(os.environ):
        yield run
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Path:
    """A folder for data.cache_dir: the text that is configured by default is tokenised there once, by whoever comes first."""
    return made_once(tmp_path_factory, "tokens", lambda folder: None)


@pytest.fixture(scope="session")
def image_run(tmp_path_factory) -> Path:
    """The folder of a finished training of images, for tests that leave it as it is."""
    words = ["optimizer=sgd", "synthesis=associative", "logger=none", "data.val_fraction=0.2", "hydra.run.dir=run"]
    return made_once(tmp_path_factory, "image_run", lambda folder: fit_in(folder, *SMALL, *words)) / "run"
