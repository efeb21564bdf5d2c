"""What tests of the command line share."""

import os
import sys

import pytest


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
