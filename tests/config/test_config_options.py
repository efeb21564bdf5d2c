"""Every option under conf/ composes and builds; every mistake is answered in one line."""

import copy
import inspect
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.callbacks import StochasticWeightAveraging
from omegaconf import OmegaConf

from holotrain.callbacks import MemoryMonitor
from holotrain.config.build import build_data, build_model, build_task
from holotrain.config.build_synthesis import build_synthesis
from holotrain.config.build_trainer import build_fit_callbacks, build_loggers, build_progress, build_trainer
from holotrain.config.checkpointed import container, typed
from holotrain.config.chosen import with_own_options
from holotrain.config.composition import composed, config_folder, option_names
from holotrain.config.devices import check_device, check_training_device
from holotrain.config.register import register
from holotrain.config.schema import COMMANDS
from holotrain.data import TextDataModule
from holotrain.errors import UserError

GROUPS = option_names()
IMAGENET = ["data.root=images", "trainer.accelerator=cpu"]
NEEDS = {
    ("data", "imagefolder"): IMAGENET,
    ("experiment", "imagenet_rev_vit_small"): IMAGENET,
    ("data", "text_stdlib"): ["task=causal_lm"],
    ("data", "text_files"): ["task=masked_lm", "data.files=texts/*.txt"],
}


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Where the standard library is tokenised once."""
    return tmp_path_factory.mktemp("tokens")


def needs(group, option):
    """What an option does not go without."""
    if group != "model":
        return NEEDS.get((group, option), [])
    if option == "error_diffusion":
        return ["task=error_diffusion"]
    family, _, size = option.removeprefix("rev_").partition("_")
    if family in ("gpt", "roberta"):
        return ["task=causal_lm" if family == "gpt" else "task=masked_lm"]
    pixels = 32 if size in ("nano", "tiny") and (family, size) != ("swin", "tiny") else 224
    return ["data=fake", f"data.image_size={pixels}"]


@cache
def chosen(command, *choices):
    register()
    return composed(command, list(choices))


def configuration(command, *overrides):
    """Composed by Hydra for the options of groups, once for each choice of them; values are laid over as Hydra lays them."""
    choices = [word for word in overrides if word.partition("=")[0] in GROUPS]
    config = copy.deepcopy(chosen(command, *choices))
    for override in OverridesParser.create().parse_overrides([word for word in overrides if word not in choices]):
        OmegaConf.update(config, override.key_or_group, override.value())
    plain = with_own_options(OmegaConf.to_container(config, resolve=True), overrides)
    return typed(command, plain)


@pytest.fixture
def images(tmp_path, monkeypatch):
    """An image folder and some texts where the options that need them look for them."""
    from PIL import Image

    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text("some words\n\nand more\n")

    monkeypatch.chdir(tmp_path)
    for part in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "images" / part / name).mkdir(parents=True)
            Image.new("RGB", (40, 30)).save(tmp_path / "images" / part / name / "0.png")


def is_larger(group, option):
    """Whether it is a model that differs in numbers alone from the smallest of its family."""
    return group == "model" and option.endswith(("_small", "_base", "_medium", "_large"))


@pytest.mark.parametrize(
    ("group", "option"),
    [pytest.param(g, o, marks=[pytest.mark.slow] * is_larger(g, o)) for g, options in GROUPS.items() for o in options],
)
def test_every_option_builds(group, option, images, tokens):
    config = configuration("fit", f"{group}={option}", *needs(group, option))
    data = build_data(config)
    if isinstance(data, TextDataModule):
        data.cache = tokens
        data.prepare_data()
        data.setup("fit")
        sample, shape = torch.zeros(1, 9, dtype=torch.long), (1, 9, data.vocab_size)
        if config.task.kind == "sequence_classification":
            shape = (1, data.num_classes)
    else:
        sample, shape = torch.empty(1, *data.image_shape), (1, data.num_classes)
    with torch.device("meta"):
        task = build_task(config, data)
    assert task.model(sample.to("meta")).shape == shape
    if config.trainer.accelerator == "cpu" or torch.cuda.is_available() or option != "gpu":
        check_device(config.trainer)


def test_every_file_under_conf_is_an_option():
    files = {path.relative_to(config_folder()).as_posix() for path in Path(config_folder()).rglob("*.yaml")}
    options = {f"{group}/{option}.yaml" for group, names in GROUPS.items() for option in names}
    assert files == options | {f"{command}.yaml" for command in COMMANDS} | {"_common.yaml", "_hydra.yaml"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_composes(command):
    started = [] if command == "fit" else ["ckpt_path=some.ckpt"]
    config = configuration(command, *started, *(["task=causal_lm", "prompt=x"] if command == "generate" else []))
    assert type(config) is COMMANDS[command]
    if command == "generate":
        assert (config.model.kind, config.data.kind, config.optimizer.betas) == ("rev_gpt", "text_stdlib", [0.9, 0.95])
        return
    assert (config.model.kind, config.data.kind, config.backward.kind) == ("rev_vit", "digits", "reversible")


def test_a_plain_model_brings_its_own_backward():
    assert configuration("fit", "model=vit_tiny").backward.kind == "autograd"
    assert configuration("fit", "model=vit_tiny", "backward=checkpoint").backward.kind == "checkpoint"


@pytest.mark.parametrize(("size", "patch"), [(8, 2), (28, 4), (32, 4), (112, 16), (224, 16)])
def test_patches_suit_the_image(size, patch):
    config = configuration("fit", "data=fake", f"data.image_size={size}", "data.num_classes=3")
    model = build_model(config, build_data(config))
    assert model.embedding.project.kernel_size == (patch, patch)
    config = configuration("fit", "model.patch_size=1")
    assert build_model(config, build_data(config)).embedding.position.shape[1] == 64


def test_options_reach_what_they_describe():
    config = configuration(
        "fit", "optimizer=sgd", "optimizer.momentum=0.5", "optimizer.lr=0.25", "task.label_smoothing=0.1",
        "model.drop_path=0.2", "data.batch_size=5", "seed=3", "data.augment=false", "model.mlp_ratio=2", "backward=checkpoint",
    )  # fmt: skip
    data = build_data(config)
    task = build_task(config, data)
    optimizer = task.make_optimizer(task.model)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["lr"]) == (0.5, 0.25)
    assert task.label_smoothing == 0.1 and task.model.blocks.backward == "checkpoint"
    assert task.model.blocks.blocks[-1].g.drop_path.probability == 0.2
    assert task.model.blocks.blocks[0].g.widen.out_features == 2 * 96
    assert (data.batch_size, data.augment, data.seed) == (5, False, 3)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.precision=banana"], "trainer.precision: 'banana' is not one of 32-true"),
        (["data.batch_size=-3"], "data.batch_size: -3 is out of range"),
        (["trainer.limit_train_batches=1.5"], "1.5 is not valid; give a whole number of batches or a fraction"),
        (["trainer.val_check_interval=often"], "'often' is not valid; give a whole number"),
        (["model=vit_tiny", "backward=reversible"], "not reversible; use backward=autograd"),
        (["backward=pareprop", "backward.store=-1"], "backward.store: -1 is not valid"),
        (["backward=autograd", "backward.store=2"], "backward=autograd already stores every block"),
        (["backward=checkpoint", "backward.keep=[attention]"], "backward.keep: not supported by backward=checkpoint"),
        (["backward.exact=some"], "backward.exact: 'some' is not valid"),
        (["model=vit_tiny", "backward.exact=true"], "backward.exact: model kind 'vit' is not reversible"),
        (["backward.cuda_graph=true", "trainer.accumulate_grad_batches=2"], "accumulate_grad_batches=1"),
        (["backward.cuda_graph=true", "trainer.precision=16-mixed"], "use trainer.precision=bf16-mixed"),
        (["compile=true", "backward.keep=[attention]"], "use compile=false"),
        (["callbacks.drift.threshold=-1"], "callbacks.drift.threshold"),
        (["synthesis=shared", "synthesis.transform=fftt"], "synthesis.transform: 'fftt' is not one of fft, hadamard. Did"),
        (["synthesis=associative", "synthesis.dtype=int8"], "synthesis.dtype: 'int8' is not one of fp32"),
        (["synthesis=associative", "synthesis.decay_warmup=-1"], "synthesis.decay_warmup"),
        (["synthesis=associative", "synthesis.seed=99999999999999999999999"], "synthesis.seed"),
        (["synthesis=associative", "synthesis.decay=1.5", "synthesis.decay_warmup=3"], "synthesis.decay: 1.5 is out of range"),
        (["callbacks.progress=fancy"], "callbacks.progress"),
        (["callbacks.ema.decay=1"], "callbacks.ema.decay"),
        (["callbacks.checkpoint.mode=most"], "callbacks.checkpoint.mode"),
        (["data=imagefolder", "data.root=x", "data.on_corrupt=shrug"], "data.on_corrupt"),
        (["task.label_smoothing=2"], "task.label_smoothing"),
        (["model.drop_path=1"], "model.drop_path"),
        (["seed=-1"], "seed: -1 is out of range"),
        (["task=causal_lm", "model=rev_vit_tiny"], "task=causal_lm trains gpt, not rev_vit; use another model or task=image_"),
        (["model=gpt_tiny"], "use another model or task=causal_lm"),
        (["task=masked_lm", "data=digits"], "task=masked_lm needs one of text_stdlib, text_files, not digits"),
        (
            ["task=sequence_classification", "data=text_files", "data.files=x"],
            "data.label: give the field or column of the class",
        ),
        (["task=causal_lm", "model.trained=head"], "model.trained=head: task=causal_lm shares its head with the embedding"),
        (
            ["model.trained=adapters"],
            "model.trained=adapters: the model has no adapters; give their width, such as model.adapters=64",
        ),
        (["model.trained=heads"], "model.trained: 'heads' is not one of all, head, adapters. Did you mean 'head'?"),
        (["model=swin_tiny", "model.depths=[]"], "model.depths: give one number per stage"),
        (["model=swin_tiny", "model.heads=[3,0,3,3]"], "model.heads: 0 is out of range"),
        (["model=mvit_tiny", "model.kv_stride=0"], "model.kv_stride"),
        (["task=causal_lm", "model.positions=none"], "model.positions: 'none' is not one of rotary, learned"),
        (["task=masked_lm", "task.mask_probability=0"], "task.mask_probability"),
        (["task=masked_lm", "model=roberta_tiny", "model.norm=middle"], "model.norm"),
        (["task=masked_lm", "backward.cuda_graph=true"], "backward.cuda_graph: needs batches of one shape"),
        (["task=masked_lm", "data.max_tokens=100"], "data.max_tokens: 100 is out of range"),
        (["task=causal_lm", "data.unit=word"], "data.unit: 'word' is not one of file, paragraph, line"),
        (["seed=99999999999999"], "seed: 99999999999999 is out of range"),
    ],
)
def test_values_out_of_range_are_named(overrides, words):
    with pytest.raises(UserError) as error:
        configuration("fit", *overrides)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optimizer.lr=nan"], "optimizer.lr: nan is not a number"),
        (["optimizer.lrr=1"], "optimizer.lrr: there is no 'lrr' in optimizer. Did you mean 'lr'?"),
        (["optimizer.model=1"], "optimizer.model: there is no 'model' in optimizer."),
        (["optimizer.betas=[0.9]"], "optimizer.betas: [0.9] is not a list of 2 values"),
        (["optimizer.betas=[0.9,1.5]"], "optimizer: Invalid beta parameter at index 1: 1.5"),
        (["optimizer.lr=-1"], "optimizer: Invalid learning rate: -1.0"),
        (
            ["optimizer=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"],
            "optimizer: Nesterov momentum requires a momentum",
        ),
        (["optimizer=muon", "optimizer.momentum=1"], "optimizer: momentum 1.0 is out of range; it must be in [0, 1)"),
        (["scheduler.warmup=1"], "scheduler: warmup 1.0 is out of range; it must be in [0, 1)"),
        (["scheduler.final=2"], "scheduler: final 2.0 is out of range; it must be in [0, 1]"),
        (["scheduler=multistep", "scheduler.milestones=[2]"], "scheduler: milestones 2.0 is out of range"),
        (
            ["optimizer._target_=torch.optim.NAdaam"],
            "optimizer._target_: there is no 'NAdaam' in torch.optim. Did you mean 'NAdam'?",
        ),
        (["optimizer._target_=tourch.optim.Adam"], "optimizer._target_: there is no package 'tourch' with"),
        (["optimizer._target_=torch.optim"], "optimizer._target_: torch.optim is not a class or function"),
        (["optimizer._target_=torch.nn.Linear"], "optimizer.in_features: a value is needed"),
        (["scheduler._target_=torch.optim.lr_scheduler.StepLR"], "scheduler.step_size: a value is needed"),
    ],
)
def test_optimizers_and_schedules_that_cannot_be_are_named(overrides, words):
    with pytest.raises(UserError) as error:
        config = configuration("fit", *overrides)
        build_task(config, build_data(config))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_optimizers_and_schedules_of_torch():
    config = configuration(
        "fit", "optimizer._target_=torch.optim.NAdam", "optimizer.lr=0.01", "optimizer.weight_decay=0.1",
        "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "scheduler.max_lr=0.02",
    )  # fmt: skip
    task = build_task(config, build_data(config))
    optimizer = task.make_optimizer(task.model)
    assert type(optimizer) is torch.optim.NAdam
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(task.model.parameters()))
    schedule = task.make_scheduler(optimizer, 70)
    assert type(schedule) is torch.optim.lr_scheduler.OneCycleLR and schedule.total_steps == 70


TRAINER = inspect.signature(pl.Trainer).parameters
ELSEWHERE = ("callbacks", "logger", "default_root_dir")
"""Arguments of Lightning's Trainer that are groups, or output_dir."""


def written(value):
    return {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value


@pytest.mark.parametrize("name", [name for name in TRAINER if name not in ELSEWHERE])
def test_every_argument_of_lightnings_trainer_is_an_option(name):
    default = TRAINER[name].default
    value = {"strategy": "ddp", "devices": 1, "precision": "bf16-mixed", "max_epochs": 3}.get(name, default)
    config = configuration("fit", f"trainer.{name}={written(value)}")
    assert getattr(config.trainer, name) == value
    with pytest.raises(UserError) as error:
        configuration("fit", f"trainer.{name}x=1")
    assert f"trainer.{name}x: there is no '{name}x' in trainer. Did you mean {name!r}?" in str(error.value)


def test_arguments_of_the_trainer_reach_it(tmp_path):
    config = configuration(
        "fit", "trainer.accelerator=cpu", "trainer.fast_dev_run=3", "trainer.min_steps=2", "trainer.enable_progress_bar=false",
        "trainer.reload_dataloaders_every_n_epochs=2", "trainer.gradient_clip_val=0.5", "trainer.profiler=simple",
        "trainer.plugins=[{_target_: lightning.pytorch.plugins.environments.LightningEnvironment}]",
    )  # fmt: skip
    trainer = build_trainer(config.trainer, tmp_path, build_progress(config), False)
    assert (trainer.fast_dev_run, trainer.min_steps, trainer.gradient_clip_val) == (3, 2, 0.5)
    assert trainer.progress_bar_callback is None and type(trainer.profiler).__name__ == "SimpleProfiler"
    assert type(trainer._accelerator_connector.cluster_environment).__name__ == "LightningEnvironment"


def test_arguments_of_the_trainer_that_exclude_each_other_are_named(tmp_path):
    config = configuration("fit", "trainer.accelerator=cpu", "trainer.barebones=true")
    with pytest.raises(UserError, match="trainer: .*barebones"):
        build_trainer(config.trainer, tmp_path, [], True)


SWA = "callbacks.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging"


def test_callbacks_of_others(tmp_path):
    config = configuration("fit", SWA, "callbacks.swa.swa_lrs=0.1", "callbacks.memory=false")
    data = build_data(config)
    made = build_fit_callbacks(config, tmp_path, build_task(config, data), data)
    (swa,) = [callback for callback in made if isinstance(callback, StochasticWeightAveraging)]
    assert swa._swa_lrs == 0.1 and not any(isinstance(callback, MemoryMonitor) for callback in made)
    assert typed("fit", container(config)) == config


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([SWA], "callbacks.swa.swa_lrs: a value is needed"),
        ([SWA, "callbacks.swa.swa_lrs=0.1", "callbacks.swa.epochs=1"], "callbacks.swa.epochs: there is no 'epochs'"),
        ([SWA, "callbacks.swa.swa_lrs=0.1", "callbacks.swa.annealing_strategy=sin"], "'sin' is not one of cos, linear"),
        (["callbacks.mine._target_=torch.nn.ReLU"], "callbacks.mine: torch.nn.ReLU is not a callback of Lightning but a ReLU"),
        (
            ["callbacks.mine._target_=lightning.pytorch.callbacks.Nothing"],
            "there is no 'Nothing' in lightning.pytorch.callbacks",
        ),
    ],
)
def test_callbacks_of_others_that_cannot_be_are_named(overrides, words, tmp_path):
    with pytest.raises(UserError) as error:
        config = configuration("fit", *overrides)
        data = build_data(config)
        build_fit_callbacks(config, tmp_path, build_task(config, data), data)
    assert words in str(error.value) and "\n" not in str(error.value)


def synthesis_of(*overrides):
    config = configuration("fit", *overrides)
    return build_synthesis(config.synthesis, build_task(config, build_data(config)))


@pytest.mark.parametrize("kind", ["associative", "bind", "shared"])
def test_every_synthesis_builds(kind):
    assert synthesis_of(f"synthesis={kind}")._arguments["mode"] == kind


def test_the_options_of_a_synthesis_reach_it():
    callback = synthesis_of(
        "synthesis=shared", "synthesis.superpose=4", "synthesis.decay=0.8", "synthesis.decay_warmup=4", "synthesis.dtype=bf16",
        "synthesis.cover=['*.blocks.*','*.head.*']", "synthesis.exclude=['*.norm.*']", "synthesis.cosine_floor=0.1",
    )  # fmt: skip
    options = callback._arguments
    assert (options["superpose"], options["dtype"], options["cosine_floor"]) == (4, "bf16", 0.1)
    assert [options["decay"](step) for step in (0, 2, 4, 9)] == pytest.approx([0, 0.4, 0.8, 0.8])
    names = ("model.blocks.0.f.qkv.weight", "model.head.bias", "model.blocks.0.norm.weight", "model.embedding.position")
    assert [options["covers"](name, None) for name in names] == [True, True, False, False]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["synthesis=associative", "synthesis.mix=2"], r"synthesis: mix=2.0: it must be in \[0, 1\]"),
        (
            ["synthesis=bind", "synthesis.cover=[nothing]"],
            "synthesis.cover: 'nothing' matches no parameter; names look like model.",
        ),
        (["synthesis=shared", "synthesis.exclude=['*head*','haed']"], "synthesis.exclude: 'haed' matches no parameter"),
        (["synthesis=shared", "synthesis.exclude=['*']"], "synthesis.exclude: excludes all parameters"),
        (["synthesis=shared", "synthesis.subsample=0.0001"], "synthesis: subsample=0.0001 selects nothing"),
        (["synthesis=shared", "synthesis.block_length=100000000"], "synthesis: block_length=100000000: it is longer"),
        (["synthesis=shared", "synthesis.compile=true"], "synthesis: compile has no effect with mode='shared'"),
    ],
)
def test_a_synthesis_that_cannot_be_is_named(overrides, words):
    with pytest.raises(UserError, match=words):
        synthesis_of(*overrides)


def test_sizes_that_do_not_divide_are_named():
    config = configuration("fit", "model.heads=5")
    with pytest.raises(UserError, match="model: dim must be a multiple of heads, but 96 is not a multiple of 5"):
        build_model(config, build_data(config))


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize("override", ["trainer.precision=16-mixed", "trainer=gpu", "trainer.accelerator=mps"])
def test_what_the_machine_cannot_do_is_refused(override):
    with pytest.raises(UserError, match="GPU|none"):
        check_device(configuration("fit", override).trainer)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize(
    "overrides",
    [
        ["backward.cuda_graph=true"],
        ["synthesis=bind", "synthesis.cuda_graph=true"],
        ["synthesis=shared", "synthesis.offload=true"],
    ],
)
def test_what_needs_a_gpu_is_refused_without_one(overrides):
    with pytest.raises(UserError, match="needs an NVIDIA GPU; set it to false"):
        check_training_device(configuration("fit", *overrides))


def test_the_options_of_the_engine_reach_the_model():
    config = configuration("fit", "backward=pareprop", "backward.store=[0,2]", "backward.exact=12", "backward.keep=[attention]")
    blocks = build_task(config, build_data(config)).model.blocks
    assert (blocks.backward, list(blocks.store), blocks.exact, blocks.keep) == ("pareprop", [0, 2], 12, ("attention",))
    assert blocks.grid.step.item() == 2**-12


def test_an_engine_option_that_does_not_fit_the_model_is_named():
    config = configuration("fit", "backward.store=99")
    with pytest.raises(UserError, match="store must be a number of blocks up to 6"):
        build_model(config, build_data(config))


@pytest.mark.parametrize("kind", ["wandb", "mlflow"])
def test_a_logger_that_is_not_installed_says_what_to_install(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=rf"pip install 'holotrain\[{kind}\]'"):
        build_loggers(configuration("fit", f"logger={kind}").logger, tmp_path)
