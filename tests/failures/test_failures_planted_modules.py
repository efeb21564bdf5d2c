"""Modules in the folder that one stands in: only those that the command line names are taken from there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ["trainer.max_steps=1", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1", "trainer.accelerator=cpu"]
SMALL += ["model.dim=16", "model.depth=1", "model.heads=2", "hydra.run.dir=run"]

LOOKS = """
import json, sys
from importlib.abc import MetaPathFinder

missing = set()

class Looks(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if path is None:
            missing.add(name)

sys.meta_path.append(Looks())
from holotrain.cli import main
for words in json.loads(sys.argv[1]):
    assert main(words) == 0
json.dump(sorted(missing), open("missing.json", "w"))
"""


def run(*command: str, folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


@pytest.mark.slow
def test_nothing_that_is_missing_is_taken_from_the_working_directory(tmp_path):
    commands = [["fit", *SMALL], ["test", "ckpt_path=run/checkpoints/last.ckpt"], ["export", "ckpt_path=run", "to=exported"]]
    run("-c", LOOKS, json.dumps(commands), folder=tmp_path)
    planted = json.loads((tmp_path / "missing.json").read_text())
    assert len(planted) > 5
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    for name in planted:
        (stranger / f"{name}.py").write_text(f"open({str(tmp_path / 'RAN')!r}, 'a').write({name!r})")
    for command in commands:
        run("-m", "holotrain", *command, folder=stranger)
    assert not (tmp_path / "RAN").exists(), (tmp_path / "RAN").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["word", "folder"])
def test_a_class_that_the_command_line_names_is_found_there(tmp_path, how):
    (tmp_path / "own_rates.py").write_text(
        "import torch\ndef slow(optimizer, steps): return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)\n"
    )
    (tmp_path / "mine" / "scheduler").mkdir(parents=True)
    (tmp_path / "mine" / "scheduler" / "slow.yaml").write_text("_target_: own_rates.slow\n")
    words = {"word": ["scheduler._target_=own_rates.slow"], "folder": ["--config-dir", "mine", "scheduler=slow"]}[how]
    run("-m", "holotrain", "fit", *SMALL, *words, folder=tmp_path)
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "holotrain", "fit", *SMALL, *words], cwd=tmp_path, capture_output=True
    )
    assert refused.returncode == 2 and b"own_rates" in refused.stderr
