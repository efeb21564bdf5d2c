"""Files that somebody has crafted: nothing in them runs, becomes an argument or decides where files go."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed
import yaml
from covering import slow
from left_by_runs import only, summary
from made_once import made_once
from small_run import SMALL, fit_in, run_in

import holotrain as package
from holotrain.errors import UserError

pytestmark = pytest.mark.usefixtures("contacts_nobody")


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    """A checkpoint and an export of a small training, which averages its weights."""

    def make(folder):
        fit_in(folder, *SMALL, "callbacks=ema", "test=false", "logger=none", "hydra.run.dir=run")
        (folder / "run/checkpoints/last.ckpt").rename(folder / "image.ckpt")
        run_in(folder, "export", "ckpt_path=image.ckpt", "to=image_export")
        for left in ("run", "runs"):
            shutil.rmtree(folder / left)

    return made_once(tmp_path_factory, "honest", make)


class Payload:
    """What pickle calls when it reads this."""

    def __reduce__(self):
        return (os.system, ("touch ran",))


CALL = {"_target_": "os.system", "command": "touch ran", "_args_": ["touch ran"]}
"""What Hydra calls when it instantiates this."""


def put(*path_and_value):
    """A change of a checkpoint: the value at a path in it."""
    *path, name, value = path_and_value

    def change(checkpoint):
        for key in path:
            checkpoint = checkpoint[key]
        checkpoint[name] = value(checkpoint[name]) if callable(value) else value

    return change


def option(*path_and_value):
    return put("holotrain", "config", *path_and_value)


def described(*path_and_value):
    return put("holotrain", "description", *path_and_value)


WEIGHT = "model.head.weight"
RESOLVER = "${oc.env:CRAFTED_SECRET}"

CHANGES = {
    # Classes.
    "a command as an optimizer": (option("optimizer", {"_target_": "subprocess.run"}), "names 'subprocess.run' as optimizer"),
    "a command as an argument": (
        option("optimizer", {"_target_": "torch.optim.AdamW", "lr": CALL}),
        "could not be converted to Float",
    ),
    "a class of a callback": (option("callbacks", "samples", "prompts", CALL), "Cannot merge DictConfig with ListConfig"),
    "another callback": (
        option("callbacks", "x", {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint"}),
        "ModelCheckpoint' as callbacks.x, but neither",
    ),
    # Texts that a resolver would replace.
    "a resolver as a class": (option("model", "_target_", RESOLVER), "model._target_: there is no package"),
    # The description of the model.
    "another model than was trained": (described("target", "holotrain.models.ViT"), "holotrain.models.ViT', and its config"),
    "more tags than anybody reads": (option("tags", ["a"] * 100_000), "it has more than 50000 options"),
    # The rest of the file.
    "a pickle": (put("extra", lambda _: Payload()), "is not a readable checkpoint"),
}
"""What is changed in a checkpoint, and what the line says that refuses it."""


@pytest.fixture
def crafted(holotrain, honest, monkeypatch):
    """Writes ``crafted.ckpt``, a changed checkpoint."""
    monkeypatch.setenv("CRAFTED_SECRET", "holotrain.models.RevViT")
    shutil.copytree(honest, ".", dirs_exist_ok=True)

    def make(change) -> None:
        checkpoint = torch.load("image.ckpt", weights_only=True) | {"extra": None}
        change(checkpoint)
        torch.save(checkpoint, "crafted.ckpt")

    return make


@pytest.mark.parametrize("change", CHANGES)
def test_a_crafted_checkpoint_is_refused(crafted, change):
    crafted(CHANGES[change][0])
    before, environment = sorted(Path(".").rglob("*")), dict(os.environ)
    with pytest.raises(UserError, match=rf"^ckpt_path: crafted.ckpt [^\n]*{CHANGES[change][1]}"):
        package.compose("test", ["ckpt_path=crafted.ckpt"])
    assert sorted(Path(".").rglob("*")) == before
    changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
    assert changed <= {"HYDRA_FULL_ERROR", "KINETO_LOG_LEVEL"}  # the second by quieten


FETCH = {"_target_": "peft.utils.save_and_load.load_peft_weights", "model_id": "a/b", "local_dir": "ran"}


@pytest.mark.parametrize("adapters", [CALL, FETCH, {"_target_": "peft.LoraConfig", "target_modules": CALL}])
def test_loading_a_model_calls_no_adapters_but_those_of_peft(crafted, adapters):
    crafted(option("model", "adapters", adapters))
    with pytest.raises(UserError, match="as model.adapters; only peft.LoraConfig is trusted"):
        package.load("crafted.ckpt")
    assert not Path("ran").exists()


@pytest.mark.parametrize(("name", "value"), [("quantised", 8), ("quantised", "2bit"), ("trained", ["all"])])
def test_loading_a_model_takes_no_other_options_of_it(crafted, name, value):
    crafted(option("model", name, value))
    with pytest.raises(UserError, match="crafted.ckpt is damaged, or of another version of holotrain"):
        package.load("crafted.ckpt")


def test_a_file_of_the_user_names_no_checkpoint(holotrain, honest):
    Path("mine/experiment").mkdir(parents=True)
    Path("mine/experiment/x.yaml").write_text(f"# @package _global_\nckpt_path: {honest / 'image.ckpt'}\n")
    said = "ckpt_path: a file in --config-dir cannot name it; give it on the command line"
    assert said in holotrain.refused("validate", "--config-dir", "mine", "experiment=x")


DAMAGED = "the checkpoint is damaged, or of another training: "

STATES = {
    "no loops": (lambda held: held.pop("loops"), "crafted.ckpt does not hold the whole state of a training"),
    "another average": (put("current_model_state", WEIGHT, lambda w: w[:1]), "holds another model: model.head.weight is "),
    "no optimizer state": (put("optimizer_states", 0, "state", 5), DAMAGED),
    "no random states": (put("exact_resume", "random", 0, "torch", 5), DAMAGED),
}
"""Changes of what only a training that continues takes over."""


@pytest.mark.parametrize("case", STATES)
def test_what_a_training_takes_over(holotrain, crafted, case):
    change, line = STATES[case]
    crafted(change)
    assert line in holotrain.refused("fit", "ckpt_path=crafted.ckpt", "trainer.max_epochs=3", "logger=none")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("run/checkpoints/last.ckpt", ["fit", "resume=true", "hydra.run.dir=run"]),
        ("export/config.json", ["predict", "ckpt_path=export"]),
        ("weights.pt", ["fit", *SMALL, "model.pretrained=weights.pt"]),
    ],
)
def test_files_that_are_no_regular_ones(holotrain, honest, file, words):
    shutil.copytree(honest / "image_export", "export")
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    holotrain.refused(*words)


@pytest.mark.parametrize("words", [slow(["resume=true", "hydra.run.dir=run"]), slow(["ckpt_path=run/checkpoints/last.ckpt"])])
def test_a_checkpoint_does_not_say_what_is_removed(holotrain, honest, words):
    """Lightning removes the files that a checkpoint names as saved before it."""
    Path("precious").mkdir()
    Path("precious/work.ckpt").write_text("mine")
    checkpoints = Path("run/checkpoints")
    checkpoints.mkdir(parents=True)
    named = f"local://{Path.cwd()}/precious"
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    for state in crafted["callbacks"].values():
        if "best_model_path" in state:
            state |= {"dirpath": str(checkpoints.resolve()), "kth_best_model_path": named, "last_model_path": named}
            best = {named: torch.tensor(0.0), f"{named}/work.ckpt": torch.tensor(0.0)}
            state |= {"best_model_path": named, "best_k_models": best}
    torch.save(crafted, checkpoints / "last.ckpt")
    holotrain.done("fit", *words, "trainer.max_epochs=4", "test=false")
    assert Path("precious/work.ckpt").read_text() == "mine"


def test_a_checkpoint_does_not_decide_where_files_go(holotrain, honest):
    """An honest checkpoint names the folders of its run. Only the command line names those of the next."""
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    crafted["holotrain"]["config"] |= {"output_dir": "elsewhere", "ckpt_path": "elsewhere/last.ckpt"}
    server = {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": "file:elsewhere"}
    crafted["holotrain"]["config"]["logger"] = {"mlflow": server}
    # The second would be a word of Hydra's on a command line.
    crafted["holotrain"]["choices"] |= {"logger": "../elsewhere", "+hydra.callbacks.x": json.dumps(CALL)}
    torch.save(crafted, "crafted.ckpt")
    for command in ("fit", "test"):
        out = holotrain.done(command, "ckpt_path=crafted.ckpt", "--cfg", "job")
        assert "elsewhere" not in out and [*yaml.safe_load(out)["logger"]] == ["tensorboard"]
    holotrain.done("test", "ckpt_path=crafted.ckpt")
    assert not Path("elsewhere").exists() and not Path("ran").exists()
    assert summary(only(Path("runs/test")))["checkpoint"] == "crafted.ckpt"
