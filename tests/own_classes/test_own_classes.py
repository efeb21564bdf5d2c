"""A user's own classes, from the command line, without a change in holotrain."""

import csv
import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from compared import assert_close
from forked import Forked
from left_by_runs import assert_same_weights, only, scalars, summary
from small_run import SMALL, fit_and_kill

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
WORDS = [*SMALL, "--config-dir", "conf", "experiment=guest", "callbacks.progress=null", "trainer.limit_train_batches=5"]
OWN = ["--config-dir", "conf", "trainer.accelerator=cpu", "trainer.max_epochs=2", "callbacks.progress=null"]
GUEST = [*OWN, "experiment=guest", "model=net", "data=stripes", "trainer.log_every_n_steps=1"]
LAST = "checkpoints/last.ckpt"


@pytest.fixture
def typed(holotrain, tmp_path, monkeypatch):
    """The command line, in a folder with the user's package and YAML files."""
    shutil.copy(HERE / "own_package.py", tmp_path)
    shutil.copytree(HERE / "conf", tmp_path / "conf")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_package", raising=False)
    return holotrain


def test_an_optimizer_a_schedule_and_a_callback_train_and_a_checkpoint_names_them_only_where_the_user_does_too(typed):
    status, out, err = typed("fit", *WORDS, "optimizer.weight_decay=0.1", "scheduler.times=3", "hydra.run.dir=run")
    assert (status, err) == (0, "") and "lion, lr 0.001" in out
    assert scalars(Path("run"))["diary/count"] == [5, 10]
    rates = [round(1e-3 / rate) for rate in scalars(Path("run"))["train/lr"]]
    assert rates == [1, 1, 1, 2, 2, 4, 4, 4, 8, 8]
    checkpoint = torch.load(f"run/{LAST}", weights_only=True)
    assert [group["weight_decay"] for group in checkpoint["optimizer_states"][0]["param_groups"]] == [0.1, 0.0]

    words = ["test", f"ckpt_path=run/{LAST}"]
    err = typed.refused(*words)
    assert "names 'own_package.Lion' as optimizer" in err and "trust=own_package" in err
    named = {"optimizer": "Lion", "scheduler": "halving", "callbacks.diary": "Diary"}
    on_the_line = [f"{key}._target_=own_package.{name}" for key, name in named.items()]
    for allowed in (["trust=own_package"], ["--config-dir", "conf"], [*on_the_line, "optimizer.lr=1"]):
        typed.done(*words, *allowed)


LOADS = """
import sys, torch, holotrain
model = holotrain.load(sys.argv[1], trust=["own_package"])
print(model(torch.ones(1, 1, 8, 8)).tolist(), flush=True)
"""


def test_a_model_on_data_goes_through_every_command(typed):
    assert typed("fit", *GUEST, "hydra.run.dir=run")[::2] == (0, "")
    found = summary(Path("run"))
    assert (found["backward"], found["steps"]) == ("as built", 10)
    assert {"val/accuracy", "test/accuracy"} <= found["metrics"].keys()
    for command in ("validate", "predict", "plan", "export"):
        typed.done(command, "--config-dir", "conf", "ckpt_path=run")
    rows = list(csv.reader((only(Path("runs/predict")) / "predictions.csv").open()))
    assert rows[0] == ["sample", "class", "probability"] and len(rows) == 25
    plan = json.loads((only(Path("runs/plan")) / "plan.json").read_text())
    peaks = {name: footprint["peak"] for name, footprint in plan["footprints"].items()}
    assert plan["backward"] == "reversible" and peaks["reversible"] < peaks["autograd"]
    exported = only(Path("runs/export")) / "export"
    assert Forked(LOADS, exported, folder=Path.cwd(), out="printed").wait() == 0
    loaded = torch.tensor(json.loads(Path("printed").read_text()))

    from own_package import Net

    from holotrain import UserError, load

    net = Net(2, 8, 1)
    best = torch.load(found["checkpoint"], weights_only=True)["state_dict"]
    net.load_state_dict({name.removeprefix("model."): weight for name, weight in best.items() if name.startswith("model.")})
    assert_close(loaded, net(torch.ones(1, 1, 8, 8)))
    with pytest.raises(UserError, match="trust='own_package'"):
        load(exported)


def journal(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_task_without_model_and_optimizer(typed, tmp_path):
    """The class has everything; what the command line would bring along is left out."""
    words = [*OWN, "task=denoising", "task.noise=0.1", "logger=journal", "logger.journal.digits=3"]
    assert typed("fit", *words, "output_dir=whole")[::2] == (0, "")
    whole = only(Path("whole/fit"))
    assert {"val/error", "test/error", "best/val/error"} <= summary(whole)["metrics"].keys()
    fit_and_kill(tmp_path, *words, "output_dir=killed", "callbacks.checkpoint.every_n_train_steps=2")
    resume = ["resume=true", "output_dir=killed", *words[-2:]]  # a checkpoint holds no loggers
    assert typed("fit", "--config-dir", "conf", *resume)[::2] == (0, "")
    killed = only(Path("killed/fit"))
    assert_same_weights(whole / LAST, killed / LAST)
    curves = [{line["step"]: line["val/error"] for line in journal(run) if "val/error" in line} for run in (killed, whole)]
    assert curves[0] == curves[1] and len(curves[0]) >= 2
    for command in ("test", "predict", "plan", "export"):
        assert typed(command, "--config-dir", "conf", f"ckpt_path={whole}")[::2] == (0, "")
    rows = list(csv.reader((only(Path("runs/predict")) / "predictions.csv").open()))
    assert rows[0] == ["sample", "brightness"] and len(rows) == 25


def test_trust_in_a_class_or_package_is_no_trust_in_what_it_holds(typed):
    """Attributes of a trusted class, what a trusted module imports, and another class in the place of the trusted one."""
    from holotrain import UserError, load

    assert typed("fit", *OWN, "task=denoising", "hydra.run.dir=run", "test=false")[0] == 0
    assert typed("export", "--config-dir", "conf", "ckpt_path=run", "to=honest")[0] == 0
    config = json.loads(Path("honest/config.json").read_text())
    Path("evil.ckpt").write_bytes(pickle.dumps(Payload()))
    by_pickle, read = ({name: "evil.ckpt", "weights_only": False} for name in ("checkpoint_path", "f"))
    for target, arguments in (
        ("own_package.Denoising.load_from_checkpoint", by_pickle),
        ("own_package.torch.load", read),
        ("own_package:torch.load", read),
        ("own_package.Denoising", {"image_size": 8, "noise": {"_target_": "own_package.torch.load", **read}}),
        ("own_package.Net", {"classes": 2, "image_size": 8, "channels": 1}),
    ):
        shutil.copytree("honest", "crafted", dirs_exist_ok=True)
        Path("crafted/config.json").write_text(json.dumps(config | {"target": target, "arguments": arguments}))
        typed.refused("validate", "--config-dir", "conf", "ckpt_path=crafted")
        with pytest.raises(UserError):
            load("crafted", trust=["own_package"])
        assert not Path("ran").exists(), target


class Payload:
    """What pickle calls when it reads this."""

    def __reduce__(self):
        return (os.system, ("touch ran",))


FAULTY = """
from own_package import Net


class Faulty(Net):
    def forward(self, images):
        raise ValueError("width must be at least 1")
"""


def test_an_error_of_a_model_in_use_keeps_its_traceback(typed):
    """It is a bug of the model, whatever its words: no option is blamed for it, and nothing is advised."""
    Path("faulty.py").write_text(FAULTY)
    status, _, err = typed("fit", *GUEST, "model._target_=faulty.Faulty")
    assert status == 1 and err.startswith("Traceback") and 'faulty.py", line 7, in forward' in err
    assert err.endswith("\nValueError: width must be at least 1\n") and "holotrain: " not in err
