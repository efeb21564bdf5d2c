"""The commands as Python functions: the same as the command line, also with objects of a program's own."""

import logging
import math
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from threading import Thread

import lightning.pytorch as pl
import pytest
import torch
from left_by_runs import assert_same_weights
from made_once import made_once
from small_run import SMALL, fit_in, run_in
from small_trainings import Memo
from torch import nn
from torch.utils.data import TensorDataset

import holotrain

SHORT = [word for word in SMALL if word.startswith("trainer.")]


class Net(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Dropout(0.1), nn.Linear(width, 10))

    def forward(self, images):
        return self.layers(images)


OfTransformers = type("GPT2LMHeadModel", (Net,), {"__module__": "transformers.models.gpt2.modeling_gpt2"})


def samples() -> pl.LightningDataModule:
    """Lightning's own data module, which knows nothing of holotrain."""
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(48, 1, 8, 8, generator=generator), torch.randint(10, (48,), generator=generator)
    part = TensorDataset(images, labels)
    data = pl.LightningDataModule.from_datasets(part, part, part, batch_size=8)
    data.num_classes = 10
    return data


class Alone(pl.LightningModule):
    """A LightningModule with a model, a loss and an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a finished training, with an export in it."""

    def make(folder: Path) -> None:
        fit_in(folder, *SMALL, "hydra.run.dir=run")
        run_in(folder, "export", "ckpt_path=run/checkpoints/last.ckpt", "to=run/exported")

    return made_once(tmp_path_factory, "api_run", make) / "run"


def same(model: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))


def refusal(call, *arguments, **options) -> str:
    with pytest.raises(holotrain.UserError) as caught:
        call(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_importing_is_fast_and_dir_lists_the_functions():
    program = "import sys, holotrain; assert set(holotrain.__all__) <= set(dir(holotrain)); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
    assert all(callable(getattr(holotrain, name)) for name in holotrain.__all__)
    assert holotrain.data.Digits and holotrain.tasks
    with pytest.raises(AttributeError, match="no attribute 'fti'"):
        holotrain.fti  # noqa: B018


def test_compose_returns_the_options_of_the_command_line(here):
    config = holotrain.compose("fit", ["model=rev_vit_small", "data=fake", "optimizer.lr=2e-3"])
    chosen = config.model.dim, config.data.name, config.optimizer.lr, config.backward.kind
    assert chosen == (384, "Fake", 2e-3, "reversible")
    assert holotrain.compose().optimizer.lr == 1e-3  # nothing stays of the one before
    (here / "mine/optimizer").mkdir(parents=True)
    (here / "mine/optimizer/nadam.yaml").write_text("_target_: torch.optim.NAdam\nlr: 0.5\n")
    assert holotrain.compose("fit", ["optimizer=nadam"], config_dir=here / "mine").optimizer.lr == 0.5
    with pytest.raises(holotrain.UserError, match="modle") as caught:
        holotrain.fit(overrides=["modle=vit_tiny"])
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("Traceback") == 1 and "/hydra/" not in shown


def test_a_command_that_is_none(here):
    config = holotrain.compose("fit")
    assert "test takes compose('test', ...), not a FitConfig" in refusal(holotrain.test, config)
    assert "they belong into compose(...)" in refusal(holotrain.fit, config, overrides=["seed=1"])


def test_fit_is_the_command_line(here, run, capsys):
    filters, level = list(warnings.filters), logging.getLogger("lightning.pytorch").level
    result = holotrain.fit(holotrain.compose("fit", SMALL), folder="run", quiet=True)
    assert capsys.readouterr().out == ""
    assert (warnings.filters, logging.getLogger("lightning.pytorch").level) == (filters, level)
    assert_same_weights(run / "checkpoints/last.ckpt", here / "run/checkpoints/last.ckpt")
    assert {path.name for path in result.folder.iterdir()} == {path.name for path in run.iterdir()} - {"exported", "log.txt"}
    assert (result.folder, result.checkpoint.parent) == (Path("run"), Path("run/checkpoints"))
    assert 0 <= result.metrics["test/accuracy"] <= 1 and result.checkpoint.name.startswith("best-")
    assert not result.model.training and same(result.model, holotrain.load(run))
    summaries = [holotrain.api.read_summary(folder) for folder in (run, result.folder)]
    assert summaries[0]["overrides"] == [*summaries[1]["overrides"]]


def test_a_module_and_data_of_a_program(here, run):
    torch.manual_seed(0)
    net, data = Net(), samples()
    first = net.layers[1].weight.detach().clone()
    result = holotrain.fit(model=net, data=data, overrides=[*SHORT, "optimizer.lr=1e-2"], folder="mine", quiet=True)
    assert result.model is net and not torch.equal(net.layers[1].weight, first)
    assert math.isfinite(result.metrics["test/loss"]) and holotrain.api.read_summary(result.folder)["parameters"] == 610
    other = holotrain.load("mine", model=Net())
    assert same(other, net) and not other.training
    metrics = holotrain.test(model=Net(), data=data, overrides=[f"ckpt_path={result.checkpoint}"], quiet=True)
    assert metrics == {name: value for name, value in result.metrics.items() if name.startswith("test/")}
    # What cannot know the objects says so.
    assert "Net that Python code made; give one to holotrain.load(..., model=...)" in refusal(holotrain.load, "mine")
    words = ["ckpt_path=mine/checkpoints/last.ckpt"]
    assert "give it to holotrain.fit, test or validate in Python as" in refusal(holotrain.compose, "test", words)
    assert "holds another model" in refusal(holotrain.load, "mine", model=Net(9))
    assert "holds another model" in refusal(holotrain.load, run, model=Net())

    words = [*SHORT, "ckpt_path=mine/checkpoints/last.ckpt", "trainer.max_epochs=3"]
    assert holotrain.api.read_summary(holotrain.fit(model=Net(), data=data, overrides=words, quiet=True).folder)["epochs"] == 3


@pytest.mark.parametrize(
    ("objects", "words", "expected"),
    [
        ({"model": 3}, [], "expected a Module as model="),
        ({"model": OfTransformers()}, ["task=causal_lm"], "name its folder as in overrides=['model=huggingface'"),
        ({"model": Net()}, ["trainer=ddp"], "trainer=ddp: an object is in one process only"),
        ({"data": holotrain.data.Digits(batch_size="auto")}, [], "batch_size='auto' is for data that are named"),
        ({}, [*SMALL, "trainer=ddp", "trainer.devices=2"], "torchrun --standalone --nproc-per-node 2 -m holotrain fit"),
    ],
)
def test_mistakes_with_objects(here, objects, words, expected):
    assert expected in refusal(holotrain.fit, **objects, overrides=words, quiet=True)
    assert not list(here.glob("runs/fit/*"))


def test_load_predict_and_export_read_checkpoints_and_runs(here, run):
    last = torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"]
    last = {name.removeprefix("model."): value for name, value in last.items() if name.startswith("model.")}
    checkpoint = f"ckpt_path={run / 'checkpoints/last.ckpt'}"
    predictions = holotrain.predict(holotrain.compose("predict", [checkpoint, "trainer.limit_predict_batches=1"]), quiet=True)
    assert predictions.read_text().startswith("image,class,probability")
    exported = holotrain.export(holotrain.compose("export", [checkpoint]), quiet=True)
    for path in (run / "checkpoints/last.ckpt", run / "exported", exported):
        model = holotrain.load(path)
        assert not model.training and all(torch.equal(value, last[name]) for name, value in model.state_dict().items())
    assert "there is no file" in refusal(holotrain.load, here / "none.ckpt")


class Counts(pl.Callback):
    """Counts training batches, and notes the callbacks beside it and the ends of tests."""

    def __init__(self) -> None:
        self.batches, self.beside, self.tests = 0, set(), 0

    def on_train_batch_end(self, trainer, *_):
        self.batches += 1
        self.beside |= {type(each).__name__ for each in trainer.callbacks}

    def on_test_end(self, *_):
        self.tests += 1


def test_callbacks_and_loggers_of_a_program_stand_beside_ours(here):
    counts, memo, data = Counts(), Memo(), samples()
    for number, given in enumerate([{"callbacks": [counts], "logger": memo}, {"callbacks": counts, "logger": [memo]}], 1):
        memo.rows.clear()
        result = holotrain.fit(model=Net(), data=data, **given, overrides=SHORT, folder=f"run{number}", quiet=True)
        assert (counts.batches, counts.tests) == (6 * number, number)
        assert {"BestCheckpoint", "EpochLog", "ExactResume"} <= counts.beside
        assert list(result.folder.glob("tensorboard/events*"))
        assert [step for step, _ in memo.of("train/loss")] == [0, 1, 2, 3, 4, 5]  # as Lightning has it
        assert memo.of("test/loss") and memo.of("val/loss") and memo.of("seconds")
    words = [f"ckpt_path={result.checkpoint}"]
    metrics = holotrain.test(model=Net(), data=data, callbacks=counts, logger=memo, overrides=words, quiet=True)
    assert counts.tests == 3 and memo.of("test/loss")[-1][1] == metrics["test/loss"]


@pytest.mark.parametrize(
    ("objects", "expected"),
    [
        ({"callbacks": Counts}, "callbacks: expected a Callback of lightning.pytorch, or a list of them, not the class Counts"),
        ({"callbacks": [Counts(), Memo()]}, "not small_trainings.Memo"),
        ({"logger": False}, "logger: expected a Logger of lightning.pytorch, or a list of them, not builtins.bool"),
    ],
)
def test_what_is_no_callback_or_logger(here, objects, expected):
    assert expected in refusal(holotrain.fit, model=Net(), data=samples(), **objects, quiet=True)
    assert not list(here.glob("runs/fit/*"))


@pytest.mark.parametrize("parts", [("train",), ("train", "val", "test")])
def test_loaders_are_data(here, parts):
    data = samples()
    loaders = {part: getattr(data, f"{part}_dataloader")() for part in parts}
    words = [*SHORT, "task.classes=10"]
    result = holotrain.fit(model=Net(), data=loaders if parts[1:] else loaders["train"], overrides=words, quiet=True)
    assert {name.partition("/")[0] for name in result.metrics} >= {*parts} and result.checkpoint is not None
    assert ("test/loss" in result.metrics) == ("test" in parts)
    assert "or DataLoaders as data=" in refusal(
        holotrain.fit, model=Net(), data={"training": loaders["train"]}, overrides=words
    )


def test_a_head_of_another_size_is_refused(here):
    net = Net()
    net.layers[-1] = nn.Linear(8, 7)
    said = refusal(holotrain.fit, model=net, data=samples(), overrides=SHORT, quiet=True)
    assert said == "model: a Net with 7 outputs does not fit the data, which have 10 classes"


class Fails(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 7:
            raise LookupError("mine")


def test_an_error_of_a_callback_leaves_a_summary_and_how_to_resume(here, capsys):
    words = [*SHORT, "trainer.max_epochs=3"]
    with pytest.raises(LookupError, match="^mine$") as raised:
        holotrain.fit(model=Net(), data=samples(), callbacks=Fails(), overrides=words, folder="run", quiet=True)
    assert raised.traceback[-1].name == "on_train_batch_start"
    left = holotrain.api.read_summary(Path("run"))
    assert (left["status"], left["steps"]) == ("failed", 7) and "train/loss" in left["metrics"]
    assert "a LookupError ended the training at step 7; resume with: holotrain.fit(" in capsys.readouterr().err


class Starts(pl.Callback):
    """Starts a training in another thread, from within one."""

    def on_train_start(self, trainer, module):
        thread = Thread(target=lambda: setattr(self, "said", refusal(holotrain.fit, model=Net(), data=samples(), quiet=True)))
        thread.start()
        thread.join()


def test_a_training_in_another_thread_is_refused(here):
    callback, before = Starts(), sys.stdout
    holotrain.fit(model=Net(), data=samples(), callbacks=callback, overrides=SHORT, quiet=True)
    assert callback.said.startswith("a command of holotrain runs in another thread") and sys.stdout is before


class ByHand(Alone):
    """Steps its optimizer itself, for which Lightning clips no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


def test_a_lightning_module_has_no_recipe_of_ours(here, capsys):
    data = samples()
    assert "max_epochs=-1: how long to train? Set trainer.max_epochs" in refusal(holotrain.fit, model=Alone(), data=data)
    words = ["trainer.accelerator=cpu", "logger=none"]
    result = holotrain.fit(model=ByHand(), data=data, overrides=[*words, "trainer.max_steps=246"])  # 41 epochs of 6
    assert holotrain.api.read_summary(result.folder)["steps"] == 246
    out = capsys.readouterr().out
    assert "at most 246 steps" in out and re.search(r"(?m)^epoch 41  step 246  loss \d", out)
    holotrain.fit(model=Alone(), data=data, overrides=[*words, "trainer.fast_dev_run=true"], quiet=True)  # a limit too


@pytest.mark.slow
def test_plan_of_objects_leaves_them_as_they_are(here, capsys):
    net, data = Net(), samples()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    words = ["trainer.accelerator=cpu", "memory=1GiB"]
    plan = holotrain.plan(model=net, data=data, overrides=words)
    weights = sum(value.numel() * 4 for value in before.values())
    assert plan.configured.parts["parameters"] == weights and plan.fits
    assert plan.limits[0].configured == 8
    assert holotrain.plan(model=Net(32), data=data, overrides=words).configured.peak > plan.configured.peak
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not any(here.iterdir()) and capsys.readouterr().out == ""
    assert holotrain.plan(model=Alone(), data=data, overrides=words).configured.parts["optimizer"] == weights  # momentum
