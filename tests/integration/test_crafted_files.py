"""Files that somebody has crafted: nothing in them runs, becomes an argument or decides where files go."""

import json
import os
import pickle
import re
import shutil
import struct
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed
import yaml
from covering import slow
from left_by_runs import only, summary
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from made_once import made_once
from omegaconf import OmegaConf
from small_run import SMALL, fit_in, run_in
from small_trainings import quiet_trainer

from holotrain.commands.evaluation import lightning_refusals
from holotrain.errors import UserError

pytestmark = pytest.mark.usefixtures("contacts_nobody")

TEXT = [
    "task=causal_lm", "data=text_files", "data.files=texts/*.txt", "data.context=16", "data.batch_size=2", "data.cache_dir=.",
    "data.val_files=texts/a.txt", "data.test_files=texts/a.txt", "trainer.max_steps=1", "trainer.val_check_interval=1.0",
]  # fmt: skip


class Payload:
    """What pickle calls when it reads this."""

    def __reduce__(self):
        return (os.system, ("touch ran",))


CALL = {"_target_": "os.system", "command": "touch ran", "_args_": ["touch ran"]}
"""What Hydra calls when it instantiates this."""


def put(*path_and_value):
    """A change of a checkpoint: the value at a path within what holotrain keeps in it."""
    *path, name, value = path_and_value

    def change(kept):
        for key in path:
            kept = kept[key]
        kept[name] = value

    return change


CHANGES = {
    "a callback of Hydra's among the choices": put("choices", "+hydra.callbacks.x", json.dumps(CALL)),
    "a callback of Hydra's as an option": put("choices", "model", "rev_vit_tiny +hydra.callbacks.x={_target_:os.system}"),
    "a rerun of Hydra's among the choices": put("choices", "--experimental-rerun", "evil.pickle"),
    "the folder of the run among the choices": put("choices", "hydra.run.dir", "elsewhere"),
    "the environment among the choices": put("choices", "hydra.job.env_set.CRAFTED", "1"),
    "a launcher among the choices": put("choices", "hydra/launcher", "submitit_slurm"),
    "choices that are no mapping": put("choices", ["hydra.run.dir=elsewhere"]),
    "a configuration of Hydra's": put("config", "hydra", {"run": {"dir": "elsewhere"}, "callbacks": {"x": CALL}}),
    "an option of another command": put("config", "to", "elsewhere"),
    "a target at the top": put("config", "_target_", "os.system"),
    "a target in place of a group": put("config", "model", CALL),
    "a target in a group": put("config", "optimizer", "_target_", "os.system"),
    "a command in place of an optimizer": put("config", "optimizer", {"_target_": "subprocess.run", "input": None}),
    "a command by way of torch": put("config", "optimizer", {"_target_": "torch.optim.lr_scheduler.warnings.warn"}),
    "a command among an optimizer's arguments": put("config", "optimizer", {"_target_": "torch.optim.AdamW", "lr": CALL}),
    "an interpolation that names a class": put(
        "config", "optimizer", {"_target_": "torch.optim.SGD", "lr": "${oc.create:{_target_:os.system,command:touch ran}}"}
    ),
    "an optimizer of another module": put("config", "optimizer", "_target_", "holotrain.tasks.optimizer_functions.nn.Linear"),
    "a class in a list": put("config", "optimizer", {"_target_": "torch.optim.AdamW", "lr": [CALL]}),
    "a class whose name is a list": put("config", "optimizer", {"_target_": "torch.optim.AdamW", "lr": {"_target_": ["os"]}}),
    "a trainer within the trainer": put("config", "trainer", "strategy", {"_target_": "lightning.pytorch.Trainer"}),
    "an optimizer that nobody has": put("config", "optimizer", "_target_", "torch.optim.Nothing"),
    "a command in place of a synthesis": put("config", "synthesis", {"_target_": "os.system", "command": "touch ran"}),
    "a synthesis among the callbacks": put("config", "callbacks", "x", {"_target_": "holotrain.callbacks.SynthesisCallback"}),
    "a word in place of a group": put("config", "synthesis", "shared"),
    "a target below a group": put("config", "callbacks", "checkpoint", "_target_", "os.system"),
    **{f"a command as {group}": put("config", group, "_target_", "os.system") for group in ("model", "data", "task")},
    "a command among a model's arguments": put("config", "model", "dim", CALL),
    "callbacks that are no mapping": put("config", "callbacks", ["os.system"]),
    "a callback that is no mapping": put("config", "callbacks", "checkpoint", "os.system"),
    "a folder to write to": put("config", "callbacks", "checkpoint", "dirpath", "elsewhere"),
    "a class among a callback's arguments": put("config", "callbacks", "samples", "tokenizer", CALL),
    "another callback": put("config", "callbacks", "x", {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint"}),
    "a target in place of a number": put("config", "data", "batch_size", CALL),
    "a target in a list": put("config", "backward", "store", [CALL]),
    "a resolver in place of a size": put("config", "memory", "${oc.env:CRAFTED_SECRET}"),
    "a resolver in place of a class": put("config", "model", "_target_", "${oc.env:CRAFTED_SECRET}"),
    "a resolver in place of a number": put("config", "seed", "${oc.env:CRAFTED_SECRET}"),
    "defaults of its own": put("config", "defaults", [{"override hydra/launcher": "submitit_slurm"}]),
    "a model of another library": put("description", "target", "os.system"),
    "another model than was trained": put("description", "target", "holotrain.models.ViT"),
    "a fact that is a class": put("description", "facts", "classes", CALL),
    "a target among the model's arguments": put("description", "arguments", "dim", CALL),
    "an argument that the model lacks": put("description", "arguments", "_target_", "os.system"),
    "class names that are no names": put("description", "class_names", [CALL]),
    "no class names": lambda kept: kept["description"].pop("class_names"),
    "statistics of one kind": put("description", "statistics", [[0.0]]),
    "an unknown entry in the description": put("description", "_target_", "os.system"),
    "a tokenizer that is no JSON": put("description", "tokenizer", "!!python/object/apply:os.system ['touch ran']"),
    "a tokenizer of an unknown kind": put("description", "tokenizer", json.dumps({"model": CALL})),
}
"""Changes of what a checkpoint or an export says of itself."""


def saved(path: Path, checkpoint: dict, **changes) -> None:
    torch.save(checkpoint | changes, path)


def saved_in_a_folder(path: Path, checkpoint: dict, **changes) -> None:
    """Whose tensors are elsewhere."""
    path.mkdir()
    saved(path / "checkpoint.pt", checkpoint, state_dict=without_numbers(checkpoint), **changes)


def without_numbers(checkpoint: dict) -> dict:
    return {name: torch.empty_like(x, device="meta") for name, x in checkpoint["state_dict"].items()}


def bare_pickle(path: Path, checkpoint: dict) -> None:
    path.write_bytes(pickle.dumps(Payload()))


def legacy_pickle(path: Path, checkpoint: dict) -> None:
    torch.save({"holotrain": Payload()}, path, _use_new_zipfile_serialization=False)


def tensors_nowhere(path: Path, checkpoint: dict) -> None:
    saved(path, checkpoint, state_dict=without_numbers(checkpoint))


def tensor_in_place_of_a_number(path: Path, checkpoint: dict) -> None:
    checkpoint["holotrain"]["config"]["data"]["batch_size"] = torch.ones(2)
    saved(path, checkpoint)


def without_weights(path: Path, checkpoint: dict) -> None:
    saved(path, {key: value for key, value in checkpoint.items() if key != "state_dict"})


FILES = {
    "a zipped pickle": partial(saved, extra=Payload()),
    "a bare pickle": bare_pickle,
    "a legacy pickle": legacy_pickle,
    "tensors elsewhere": partial(saved_in_a_folder, tensors="../elsewhere"),
    "tensors nowhere": tensors_nowhere,
    "a folder with a pickle": partial(saved_in_a_folder, tensors="tensors-0", holotrain=Payload()),
    "a state of another type": partial(saved, state_dict=["_target_"]),
    "weights of another type": partial(saved, state_dict={"model.head.weight": CALL}),
    "a tensor in place of a number": tensor_in_place_of_a_number,
    "without weights": without_weights,
    "another Lightning": partial(saved, **{"pytorch-lightning_version": "zzz"}),
}
"""Checkpoints that are crafted as files."""


def weights_of(content: bytes):
    return lambda folder: (folder / "model.safetensors").write_bytes(content)


def config_with(**changes):
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return change


FAR = json.dumps({"x": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
INSIDE = "holotrain.models.RevViT.forward.__globals__.update"  # an attribute of a class that is trusted

EXPORTS = {
    "a huge header": weights_of(struct.pack("<Q", 2**62) + b"{}"),
    "offsets beyond the file": weights_of(struct.pack("<Q", len(FAR)) + FAR),
    "pickled weights": weights_of(pickle.dumps(Payload())),
    "a deep configuration": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "a command as the model": config_with(target="os.system"),
    "a command as arguments": config_with(arguments=CALL),
    "adapters that are no number": config_with(adapters="x"),
    "a negative number of adapters": config_with(adapters=-1),
    "an attribute of a class": config_with(target=INSIDE, arguments={}),
    "an attribute of a class among the arguments": config_with(arguments={"dim": {"_target_": INSIDE, "ran": True}}),
    "a function of ours": config_with(target="holotrain.models.load_pretrained"),
}
"""Files of an export that are crafted."""


@pytest.fixture(scope="session")
def honest(tmp_path_factory):
    """A folder with two small trainings: ``image`` and ``text``, a checkpoint and an export of each."""

    def make(folder):
        (folder / "texts").mkdir()
        for name in "abc":
            (folder / f"texts/{name}.txt").write_text(f"The text of {name}. " * 40)
        for kind, words in (("image", []), ("text", TEXT)):
            fit_in(folder, *SMALL, *words, "test=false", "logger=none", f"hydra.run.dir={kind}")
            shutil.copy(folder / f"{kind}/checkpoints/last.ckpt", folder / f"{kind}.ckpt")
            run_in(folder, "export", f"ckpt_path={kind}.ckpt", f"to={kind}_export")
        for left in ("image", "text", "runs"):
            shutil.rmtree(folder / left)

    return made_once(tmp_path_factory, "honest", make)


@pytest.fixture
def refused(holotrain, honest, monkeypatch):
    """Gives a crafted checkpoint to a command, which answers in one line and leaves nothing behind."""
    monkeypatch.setenv("CRAFTED_SECRET", "holotrain.models.RevViT")
    shutil.copytree(honest, ".", dirs_exist_ok=True)

    def give(path: str, number: int) -> None:
        commands = [
            ["test"],
            ["export", "to=elsewhere"],
            ["validate"],
            ["plan"],
            ["predict"],
            ["fit"],
            ["generate", "prompt=a"],
        ]
        words = [*commands[number % len(commands)], f"ckpt_path={path}"]
        before, environment = sorted(Path(".").rglob("*")), dict(os.environ)
        status, out, err = holotrain(*words)
        assert (status, out, err.count("\n")) == (2, "", 1) and err.startswith("holotrain: "), (words, out, err)
        left = [found for found in sorted(Path(".").rglob("*")) if found not in before and found.parts[0] != "runs"]
        assert not left and not [found for found in Path(".").glob("runs/**/*") if found.is_file()], (words, left)
        changed = {name for name in environment.keys() | os.environ.keys() if environment.get(name) != os.environ.get(name)}
        assert changed <= {"HYDRA_FULL_ERROR", "KINETO_LOG_LEVEL"}  # the second by quieten

    return give


@pytest.mark.parametrize("change", CHANGES)
def test_a_crafted_description_is_refused(refused, change):
    """In a checkpoint, or in the config.json of an export, which has the same."""
    number, kind = [*CHANGES].index(change), "text" if "tokenizer" in change else "image"
    if number % 4:
        crafted = torch.load(f"{kind}.ckpt", weights_only=True)
        CHANGES[change](crafted["holotrain"])
        torch.save(crafted, "crafted.ckpt")
        refused("crafted.ckpt", number)
    else:
        path = Path(f"{kind}_export/config.json")
        config = json.loads(path.read_text())
        CHANGES[change](config["holotrain"])
        path.write_text(json.dumps(config))
        refused(f"{kind}_export", number)


@pytest.mark.parametrize("kind", FILES)
def test_a_crafted_checkpoint_is_refused(refused, kind):
    FILES[kind](Path("crafted.ckpt"), torch.load("image.ckpt", weights_only=True))
    refused("crafted.ckpt", [*FILES].index(kind))


@pytest.mark.parametrize("lacking", ["loops", "optimizer_states", "epoch, lr_schedulers, pytorch-lightning_version"])
def test_no_training_continues_from_a_part_of_a_checkpoint(holotrain, honest, lacking):
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    torch.save({key: value for key, value in crafted.items() if key not in lacking.split(", ")}, "crafted.ckpt")
    err = holotrain.refused("fit", "ckpt_path=crafted.ckpt")
    assert err == f"holotrain: ckpt_path: crafted.ckpt has no {lacking}; training cannot continue from it\n"


def test_no_training_continues_with_parts_of_another_optimizers_state(holotrain):
    assert holotrain("fit", *SMALL, "optimizer=adamw_8bit", "test=false", "logger=none", "hydra.run.dir=run")[0] == 0
    crafted = torch.load("run/checkpoints/last.ckpt", weights_only=True)
    crafted["optimizer_states"][0]["state"][0]["exp_avg"] = torch.zeros(7)
    torch.save(crafted, "crafted.ckpt")
    err = holotrain.refused("fit", "ckpt_path=crafted.ckpt", "trainer.max_epochs=9", "logger=none")
    assert "ckpt_path: the optimizer's state does not fit: exp_avg is torch.float32 (7,), not torch.float32 (" in err


@pytest.mark.parametrize("part", ["exact_resume", slow("lr_schedulers"), slow("optimizer_states"), "callbacks"])
def test_no_training_continues_from_parts_that_cannot_be_restored(holotrain, honest, part):
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    values = {
        "exact_resume": [5, {"random": [], "shares": 1}, {"random": [{}], "shares": 1}],
        "lr_schedulers": [[5]],
        "optimizer_states": [[{"state": 5, "param_groups": []}]],
        "callbacks": [dict.fromkeys(crafted["callbacks"], 5)],
    }
    for value in values[part]:
        torch.save(crafted | {part: value}, "crafted.ckpt")
        err = holotrain.refused("fit", "ckpt_path=crafted.ckpt", "trainer.max_epochs=9", "logger=none")
        assert re.match("holotrain: ckpt_path: (the checkpoint|crafted.ckpt) is damaged, or of another training: ", err), err


class Hooked(BoringModel):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["what I forgot to save"]


def test_mistakes_in_hooks_and_lost_processes_are_not_those_of_a_checkpoint(tmp_path, monkeypatch):
    """Which is being restored meanwhile."""
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(BoringModel())
    trainer.save_checkpoint(tmp_path / "sound.ckpt")

    def continued(model):
        with lightning_refusals("fit"):
            quiet_trainer(max_steps=2).fit(model, ckpt_path=tmp_path / "sound.ckpt", weights_only=True)

    continued(BoringModel())
    with pytest.raises(KeyError, match="what I forgot"):
        continued(Hooked())
    # It needs the other processes, and here there are none.
    monkeypatch.setattr(_CheckpointConnector, "restore_optimizers_and_schedulers", staticmethod(torch.distributed.barrier))
    with pytest.raises(ValueError, match="process group has not been initialized"):
        continued(BoringModel())


@pytest.mark.parametrize("kind", EXPORTS)
def test_crafted_files_of_an_export_are_refused(holotrain, honest, kind):
    from holotrain import load

    shutil.copytree(honest / "image_export", "crafted")
    EXPORTS[kind](Path("crafted"))
    holotrain.refused(("test", "predict", "export")[[*EXPORTS].index(kind) % 3], "ckpt_path=crafted")
    with pytest.raises(UserError):
        load("crafted")
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("command", "sizes"),
    [("test", {"depth": 10**7}), ("fit", {"adapters": 10**12})],
)
def test_a_model_that_no_machine_holds_is_not_built(holotrain, honest, sizes, command):
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    crafted["holotrain"]["config"]["model"] |= sizes
    if "adapters" not in sizes:
        crafted["holotrain"]["description"]["arguments"] |= sizes
    torch.save(crafted, "crafted.ckpt")
    err = holotrain.refused(command, "ckpt_path=crafted.ckpt")
    assert "do not fit into memory" in err or "fewer blocks" in err, err


@pytest.mark.parametrize(
    "of",
    [
        "local://{folder}/precious",
        slow("{folder}/precious"),
        slow("{checkpoints}/../../precious"),
    ],
)
def test_a_checkpoint_does_not_say_what_is_removed(holotrain, honest, of):
    """Lightning removes the files that a checkpoint names as saved before it."""
    Path("precious").mkdir()
    Path("precious/work.ckpt").write_text("mine")
    checkpoints = Path("run/checkpoints")
    checkpoints.mkdir(parents=True)
    named = of.format(folder=Path.cwd(), checkpoints=checkpoints.resolve())
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    for state in crafted["callbacks"].values():
        if "best_model_path" in state:
            state |= {"dirpath": str(checkpoints.resolve()), "kth_best_model_path": named, "last_model_path": named}
            best = {named: torch.tensor(0.0), f"{named}/work.ckpt": torch.tensor(0.0)}
            state |= {"best_model_path": named, "best_k_models": best}
    torch.save(crafted, checkpoints / "last.ckpt")
    more = ["trainer.max_epochs=4", "test=false"]
    for words in (["ckpt_path=run/checkpoints/last.ckpt"], ["resume=true", "hydra.run.dir=run"]):
        holotrain.done("fit", *words, *more)
        assert Path("precious/work.ckpt").read_text() == "mine"


def test_a_checkpoint_does_not_decide_where_files_go(holotrain, honest):
    """An honest checkpoint names the folders of its run. Only the command line names those of the next."""
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    crafted["holotrain"]["config"] |= {"output_dir": "elsewhere", "ckpt_path": "elsewhere/last.ckpt"}
    server = {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "tracking_uri": "file:elsewhere"}
    crafted["holotrain"]["config"]["logger"] = {"mlflow": server}
    crafted["holotrain"]["choices"]["logger"] = "../elsewhere"
    torch.save(crafted, "crafted.ckpt")
    for command in ("fit", "test"):
        out = holotrain.done(command, "ckpt_path=crafted.ckpt", "--cfg", "job")
        assert "elsewhere" not in out and [*yaml.safe_load(out)["logger"]] == ["tensorboard"]
    Path("run/checkpoints").mkdir(parents=True)
    for option, expected in {"../elsewhere": ["tensorboard"], "csv": ["csv"], "none": []}.items():
        crafted["holotrain"]["choices"]["logger"] = option
        torch.save(crafted, "run/checkpoints/last.ckpt")
        out = holotrain.done("fit", "resume=true", "hydra.run.dir=run", "--cfg", "job")
        assert [*yaml.safe_load(out)["logger"]] == expected and "file:elsewhere" not in out
    holotrain.done("test", "ckpt_path=crafted.ckpt")
    assert not Path("elsewhere").exists()
    assert summary(only(Path("runs/test")))["checkpoint"] == "crafted.ckpt"


@pytest.mark.slow
def test_a_checkpoint_does_not_decide_where_data_are_written(holotrain, honest):
    shown = ["test", f"ckpt_path={honest / 'text.ckpt'}", "--cfg", "job"]
    assert yaml.safe_load(holotrain(*shown)[1])["data"]["cache_dir"] == "data/text"
    assert yaml.safe_load(holotrain(*shown, "data.cache_dir=mine")[1])["data"]["cache_dir"] == "mine"
    crafted = torch.load(honest / "image.ckpt", weights_only=True)
    config = crafted["holotrain"]["config"]
    shared = {name: config["data"][name] for name in ("batch_size", "num_workers")}
    config["data"] = shared | {"_target_": "holotrain.data.MNIST", "root": "elsewhere", "download": True}
    torch.save(crafted, "crafted.ckpt")
    assert "data.download is false" in holotrain.refused("test", "ckpt_path=crafted.ckpt")
    assert "give data.root=" in holotrain.refused("test", "ckpt_path=crafted.ckpt", "data.download=true")
    assert not Path("elsewhere").exists()


def test_the_advice_to_resume_repeats_what_a_checkpoint_does_not_keep():
    from holotrain.commands.run_folder import Run

    words = ["data.cache_dir=cache", "optimizer.lr=1", "test=false", "logger.mlflow.tracking_uri=http://a;b", "experiment=mine"]
    said = Run("fit", Path("my runs"), words, {"logger": "mlflow"}).how_to_resume
    assert said.endswith(
        "'hydra.run.dir=my runs' data.cache_dir=cache test=false 'logger.mlflow.tracking_uri=http://a;b' logger=mlflow"
    )
    for local in ({}, {"logger": "csv"}):
        assert "logger=" not in Run("fit", Path("run"), ["optimizer.lr=1", "logger=csv"], local).how_to_resume


@pytest.mark.parametrize("name", ["${oc.env:HOME}", r"\${oc.env:HOME}", r"\\${oc.env:HOME}", "${", "{a: 1}", "a,b"])
def test_text_in_a_checkpoint_is_never_resolved(honest, tmp_path, name):
    """A folder may well be called like an interpolation. It stays a name."""
    from holotrain.config.command_line import parse
    from holotrain.config.composition import composed, register
    from holotrain.config.start import primary, start_checkpoint

    crafted = torch.load(honest / "text.ckpt", weights_only=True)
    crafted["holotrain"]["config"]["data"] |= {"text": name, "files": [name]}
    torch.save(crafted, tmp_path / "crafted.ckpt")
    arguments = parse(["test", f"ckpt_path={tmp_path / 'crafted.ckpt'}"])
    register()
    config = composed(primary(arguments, start_checkpoint(arguments)), arguments.overrides)
    plain = OmegaConf.to_container(OmegaConf.masked_copy(config, ["data"]), resolve=True)
    assert plain["data"]["text"] == name and plain["data"]["files"] == [name]


def test_the_command_line_is_laid_over_a_checkpoint(holotrain, honest):
    """Values and groups that it names change; everything else stays as the checkpoint has it."""
    checkpoint = f"ckpt_path={honest / 'image.ckpt'}"

    def composed(*words):
        return yaml.safe_load(holotrain.done("fit", checkpoint, *words, "--cfg", "job", "--resolve"))

    kept = composed()
    assert kept["model"]["dim"] == 16 and kept["trainer"]["max_epochs"] == 2
    changed = composed("data.batch_size=7", "trainer=ddp", "trainer.max_epochs=9", "optimizer=sgd", "backward=pareprop")
    assert changed["data"] == kept["data"] | {"batch_size": 7}
    assert changed["trainer"] == kept["trainer"] | {"strategy": "ddp", "devices": "auto", "max_epochs": 9}
    assert changed["optimizer"]["_target_"].endswith(".sgd") and changed["backward"]["kind"] == "pareprop"
    assert changed["model"] == kept["model"]
    assert composed("model=swin_nano")["model"]["_target_"] == "holotrain.models.Swin"
    for word in ("~callbacks.drift", "callbacks.drift=null"):
        assert kept["callbacks"].keys() - composed(word)["callbacks"].keys() == {"drift"}
    assert composed("callbacks.ema=null")["callbacks"] == kept["callbacks"]  # it is left out already
    swa = "callbacks.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging"
    for word in (swa, f"+{swa}"):
        assert composed(word, "callbacks.swa.swa_lrs=0.1")["callbacks"].keys() - kept["callbacks"].keys() == {"swa"}
    average = composed("callbacks=ema", "callbacks.drift.every_n_steps=5")["callbacks"]
    assert average.keys() - kept["callbacks"].keys() == {"ema"} and average["drift"]["every_n_steps"] == 5
    assert composed("experiment=cifar10_rev_vit_tiny")["data"]["_target_"] == "holotrain.data.CIFAR10"
    for option in ("data.batch_size", "seed"):  # a class in the place of a number
        assert holotrain.refused("fit", checkpoint, f"{option}._target_=x").startswith(f"holotrain: {option}")
