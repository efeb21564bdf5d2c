"""Every option under conf/ composes and builds, and has a type and a meaning; every mistake is answered in one line."""

import copy
import inspect
import os
import re
from functools import cache
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from omegaconf import OmegaConf

import holotrain
from holotrain.callbacks import BestCheckpoint, ThroughputMonitor
from holotrain.commands import screen
from holotrain.config import build, command_line, command_options, composition, structured
from holotrain.config.build import build_callbacks, build_data, build_task, build_trainer, check_device, validation_and_logging
from holotrain.config.command_line import quoted
from holotrain.config.option_groups import COMPATIBLE, SEQUENCE_CLASSIFIER, ObjectConfig, is_a
from holotrain.config.signatures import REQUIRED, UNKNOWN, signature, structured_config, to_plain
from holotrain.data import HubImages
from holotrain.data.text.module import TextDataModule
from holotrain.errors import UserError, as_user_error
from holotrain.folders import run_folder
from holotrain.optimizers import InBackward
from holotrain.overlap.tuner import Tuner
from holotrain.parallel.processes import group_options
from holotrain.parallel.rank import ProcessRank
from holotrain.targets import targets

GROUPS = composition.option_names()
IMAGENET = "data.root=images trainer.accelerator=cpu"
NEEDS = {
    "data=imagefolder": IMAGENET,
    "data=text_stdlib": "task=causal_lm",
    "data=text_files": "task=masked_lm data.files=texts/*.txt",
    "data=hub": "task=masked_lm data.name=texts/*.txt data.val_fraction=0.3 data.test_fraction=0.3",
    "data=hub_images": "data.name=images data.image_size=32 model=rev_vit_tiny",
    **{f"experiment={name}": IMAGENET for name in GROUPS["experiment"]},
    "experiment=high_resolution": f"{IMAGENET} data=imagefolder",
    "model=error_diffusion": "task=error_diffusion",
    "model=timm": "model.name=vit_tiny_patch16_224 data=fake",
    "model=huggingface": "data=fake model.name=vit model.config.model_type=vit model.config.hidden_size=32 "
    "model.config.num_attention_heads=2 model.config.num_hidden_layers=1",
}
"""What an option does not go without; the models of each family below."""


def needs(option):
    group, _, name = option.partition("=")
    if option in NEEDS or group != "model":
        return NEEDS.get(option, "")
    family, _, size = name.removeprefix("rev_").partition("_")
    if family in ("gpt", "roberta"):
        return "task=causal_lm" if family == "gpt" else "task=masked_lm"
    pixels = 32 if size in ("nano", "tiny") and (family, size) != ("swin", "tiny") else 224
    return f"data=fake data.image_size={pixels}"


@cache
def chosen(command, *choices):
    composition.register()
    return composition.composed(command, list(choices))


def configuration(words="", command="fit"):
    """Composed by Hydra for the options of groups, once for each choice of them; values are laid over as Hydra lays them."""
    words = words.split()
    choices = [word for word in words if word.partition("=")[0] in GROUPS]
    config = copy.deepcopy(chosen(command, *choices))
    for override in OverridesParser.create().parse_overrides([word for word in words if word not in choices]):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    plain = structured.without_replaced_options(OmegaConf.to_container(config, resolve=True), words)
    return structured.structured(command, plain)


def built(config, folder):
    """The data, the task with its optimizer and schedule, and the callbacks of a training."""
    task = build_task(config, data := build_data(config))
    optimizer = task.make_optimizer(task.model)
    return data, task, optimizer, task.make_scheduler(optimizer, 70), build_callbacks(config, folder, task, data)


def callbacks_of(words, folder):
    return built(configuration(words), folder)[-1]


@pytest.fixture
def images(tmp_path, monkeypatch):
    """An image folder and some texts where the options that need them look for them."""
    from PIL import Image

    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"some words {number}\n\nand more {number}\n")
    monkeypatch.chdir(tmp_path)
    for part in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / "images" / part).mkdir(parents=True)
        Image.new("RGB", (40, 30)).save(tmp_path / "images" / part / "0.png")


def is_slow(group, option):
    """Recipes, and models that differ in numbers alone from the smallest of their family."""
    return group == "experiment" or (group == "model" and option.endswith(("_small", "_base", "_medium", "_large")))


OPTIONS = [(is_slow(group, name), f"{group}={name}") for group, names in GROUPS.items() for name in names]


@pytest.mark.parametrize("option", [pytest.param(each, marks=[pytest.mark.slow] * apart) for apart, each in OPTIONS])
def test_every_option_builds(option, images, tokens):
    config = configuration(f"{option} {needs(option)}")
    data = build_data(config)
    if isinstance(data, TextDataModule):
        data.cache = tokens
        data.prepare_data()
        data.setup("fit")
        sample, shape = torch.zeros(1, 9, dtype=torch.long), (1, 9, data.vocab_size)
        if is_a(config.task, SEQUENCE_CLASSIFIER):
            shape = (1, data.num_classes)
    else:
        if isinstance(data, HubImages):  # whose classes are known when they were read
            data.setup("fit")
        sample, shape = torch.empty(1, *data.image_shape), (1, data.num_classes)
    with torch.device("meta"):
        task = build_task(config, data)
    assert task.model(sample.to("meta")).shape == shape
    if config.trainer.accelerator == "cpu" or torch.cuda.is_available() or option != "trainer=gpu":
        check_device(config.trainer)


def test_every_file_under_conf_is_an_option():
    files = {
        path.relative_to(composition.config_folder()).as_posix() for path in Path(composition.config_folder()).rglob("*.yaml")
    }
    stored = composition.stored()
    options = {f"{group}/{name}.yaml" for group, names in GROUPS.items() for name in names if name not in stored.get(group, ())}
    assert files == options | {"_common.yaml"}


def test_a_users_model_begins_from_one_of_ours(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [rev_vit_small]\nheads: 3")
    model = holotrain.compose("fit", ["model=mine"], tmp_path).model
    assert (model.target, model.dim, model.heads) == ("holotrain.models.RevViT", 384, 3)


def test_options_reach_what_they_describe(tmp_path):
    words = "optimizer=sgd optimizer.momentum=0.5 optimizer.lr=0.25 task.label_smoothing=0.1 model.drop_path=0.2 seed=3 "
    words += "data.batch_size=5 data.augment=false model.mlp_ratio=2 backward=checkpoint"
    data, task, optimizer, *_ = built(configuration(words), tmp_path)
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.defaults["momentum"], optimizer.defaults["lr"]) == (0.5, 0.25)
    assert task.label_smoothing == 0.1 and task.model.blocks.backward == "checkpoint"
    assert task.model.blocks.blocks[-1].g.drop_path.probability == 0.2
    assert task.model.blocks.blocks[0].g.widen.out_features == 2 * 96
    assert (data.batch_size, data.augment, data.seed) == (5, False, 3)


@pytest.mark.parametrize(
    ("cuda", "words", "precision"),
    [
        (None, "", "bf16-mixed"),
        (True, "", "bf16-mixed"),
        (False, "", "32-true"),
        (True, "device=cpu", "32-true"),
        (None, "trainer.accelerator=cpu device=cuda", "bf16-mixed"),
        (True, "trainer.accelerator=cpu", "32-true"),
        (True, "trainer.precision=16-mixed", "16-mixed"),
        (True, "task=error_diffusion", "32-true"),
        (None, "trainer=gpu", "bf16-mixed"),
    ],
)
def test_the_precision_is_that_of_the_device(monkeypatch, cuda, words, precision):
    """``cuda``: whether a GPU computes in bfloat16; None: there is no GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda is not None)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert configuration(words, "plan").trainer.precision == precision
    if cuda is None and not words:
        assert configuration().trainer.precision == "32-true"


def test_optimizers_and_schedules_of_torch(tmp_path):
    words = "optimizer._target_=torch.optim.NAdam optimizer.lr=0.01 optimizer.weight_decay=0.1 "
    words += "scheduler._target_=torch.optim.lr_scheduler.OneCycleLR scheduler.max_lr=0.02"
    _, task, optimizer, schedule, _ = built(configuration(words), tmp_path)
    assert type(optimizer) is torch.optim.NAdam
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(task.model.parameters()))
    assert type(schedule) is torch.optim.lr_scheduler.OneCycleLR and schedule.total_steps == 70
    assert type(built(configuration(IN_BACKWARD), tmp_path)[2]) is InBackward


IN_BACKWARD = "optimizer.in_backward=true trainer.gradient_clip_algorithm=value trainer.gradient_clip_val=0.01"


TRAINER = inspect.signature(pl.Trainer).parameters
ELSEWHERE = ("callbacks", "logger", "default_root_dir")
"""Arguments of Lightning's Trainer that are groups, or output_dir."""


def written(value):
    return {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value


def test_every_argument_of_lightnings_trainer_is_an_option():
    values = {name: parameter.default for name, parameter in TRAINER.items() if name not in ELSEWHERE}
    values |= {"strategy": "ddp", "devices": 1, "precision": "bf16-mixed", "max_epochs": 3}
    config = configuration(" ".join(f"trainer.{name}={written(value)}" for name, value in values.items()))
    assert {name: getattr(config.trainer, name) for name in values} == values


def test_arguments_of_the_trainer_reach_it(tmp_path):
    words = "trainer.accelerator=cpu trainer.fast_dev_run=3 trainer.min_steps=2 trainer.enable_progress_bar=false "
    words += "trainer.reload_dataloaders_every_n_epochs=2 trainer.gradient_clip_val=0.5 trainer.profiler=simple "
    words += "trainer.plugins=[{_target_:lightning.pytorch.plugins.environments.LightningEnvironment}]"
    trainer = build_trainer(configuration(words).trainer, tmp_path, callbacks_of(words, tmp_path), False)
    assert (trainer.fast_dev_run, trainer.min_steps, trainer.gradient_clip_val) == (3, 2, 0.5)
    assert trainer.progress_bar_callback is None and type(trainer.profiler).__name__ == "SimpleProfiler"
    assert type(trainer._accelerator_connector.cluster_environment).__name__ == "LightningEnvironment"


WRONG = {
    # by one option alone, or with its class
    "trainer.check_val_every_n_epoch=0": "trainer.check_val_every_n_epoch: must be at least 1, not 0",
    "trainer.max_steps=0": "trainer: max_epochs, max_steps and limit_train_batches: with 0 nothing is trained",
    "trainer.devices=two": "trainer.devices: 'two' is not a number or auto",
    "data.batch_size=many": "data.batch_size: 'many' is not a number or auto",
    "backward=pareprop backward.store=-1": "backward.store: must be a number of blocks up to 6 or indices below 6, not -1",
    "backward.exact=some": "backward.exact: Value 'some' of type 'str' is incompatible with",
    "backward.exact=60": "backward.exact: must be False, True or a number of bits up to 52, not 60",
    "backward.kind=parreprop": "backward.kind: 'parreprop' is not one of",
    "model=vit_tiny backward=reversible": "model: a model that is not reversible takes backward autograd, checkpoint",
    "model=swin_tiny model.depths=[]": "model: depths and heads need one number",
    "optimizer.lr=-1": "optimizer: Invalid learning rate: -1",
    "optimizer.betas=[0.9]": "optimizer: holotrain.tasks.optimizer_functions.adamw: tuple index out of range",
    "optimizer=adafactor optimizer.eps=[null,-1]": "optimizer: epsilon2 should be >= 0 but is: -1.0",
    "scheduler.warmup=1": "scheduler.warmup: must be in [0, 1), not 1.0",
    "callbacks.mine._target_=torch.nn.ReLU": "callbacks.mine: torch.nn.ReLU is not a Callback; calling it gives a ReLU",
    "callbacks.checkpoint.monitor=val/acuracy": "callbacks.checkpoint.monitor: 'val/acuracy' is not one of",
    # several together
    "task=causal_lm model=rev_vit_tiny": "model: CausalLM trains GPT or HuggingFace, not RevViT",
    "task=masked_lm data=digits": "data: MaskedLM learns from TextDataModule, not from Digits",
    "task=masked_lm data.batch_size=auto": "data.batch_size=auto: data.max_tokens sets the batch size here",
    "trainer.graphs=true trainer.precision=16-mixed": "trainer.graphs: does not go together with trainer.precision",
    "trainer.graphs=maybe": "trainer.graphs",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_value_is_named(words, tmp_path):
    with pytest.raises(UserError) as error:
        built(configuration(words), tmp_path)
    assert WRONG[words] in str(error.value) and "\n" not in str(error.value)


SAID = [  # on which device, with which options, what stands on the first screen
    ("cpu", "trainer.graphs=auto", "eager: needs an NVIDIA GPU"),
    ("cpu", "", "None"),
    ("cuda", "", "off; trainer.graphs=auto"),
    ("cuda", "trainer.graphs=true", "forward and backward, .*; optimizer eager"),
    ("cuda", "trainer.graphs=auto trainer.precision=16-mixed", "eager: does not go together with trainer.precision"),
    ("cuda", "trainer.graphs=auto trainer=ddp trainer.devices=2", "eager: does not go together with several processes"),
    (
        "cuda",
        "trainer.graphs=auto optimizer.in_backward=true trainer.gradient_clip_val=null",
        "eager: does not go together with optimizer.in_backward",
    ),
]


@pytest.mark.parametrize(("device", "words", "line"), SAID)
def test_what_is_captured_is_said(device, words, line, monkeypatch):
    monkeypatch.setattr(build, "device_kind", lambda accelerator: device)
    assert re.match(line, str(screen._graphs(configuration(words))))


USED = {
    "task=error_diffusion": "task=error_diffusion",
    "an automatic batch size": "data.batch_size=auto",
    "model.trained=head": "model.trained=head",
    "model.freeze": "model.freeze=[embedding.*]",
    "optimizer.layer_decay": "optimizer.layer_decay=0.75",
    "model.adapters": "model.adapters._target_=peft.LoraConfig",
    "model.quantised": "model.quantised=4bit",
    "backward=auto": "backward=auto",
    "a synthesis": "synthesis=shared",
    "synthesis.cuda_graph": "synthesis=shared synthesis.cuda_graph=true",
    "an optimizer of few bits": "optimizer=adamw_4bit",
    "optimizer.in_backward": IN_BACKWARD,
    "an average of the weights": "callbacks=ema",
    "several processes": "trainer=ddp",
    **{f"trainer={name}": f"trainer={name}" for name in ("fsdp", "tp", "pipeline")},
    "trainer.precision=16-mixed": "trainer.precision=16-mixed",
    "trainer.accumulate_grad_batches above 1": "trainer.accumulate_grad_batches=2",
    "clipping by norm; use trainer.gradient_clip_algorithm=value": "trainer.gradient_clip_val=0.5",
}
"""How each part of a pair that does not go together comes into use."""

USUAL = {"clipping by norm; use trainer.gradient_clip_algorithm=value"}
"""Those that the default training has."""


def in_use(words):
    rows = command_options.exclusive(configuration(words))
    return {name for one, used, others in rows for name, held in {one: used, **others}.items() if held}


def test_what_is_in_use_is_noticed():
    assert in_use("") == USUAL
    for name, words in USED.items():
        assert name in in_use(words), name


PAIRS = [(place, other) for place, (*_, others) in enumerate(command_options.exclusive(configuration(""))) for other in others]


@pytest.mark.parametrize(("place", "other"), PAIRS)
def test_what_does_not_go_together_is_refused(monkeypatch, place, other):
    config, one = configuration(""), command_options.exclusive(configuration(""))[place][0]
    monkeypatch.setattr(command_options, "exclusive", lambda config: [(one, True, {"another": False, other: True})])
    with pytest.raises(UserError) as error:
        command_options.check_groups(config)
    assert str(error.value) == f"{one}: does not go together with {other}"


def one(made, kind):
    return next(callback for callback in made if type(callback) is kind)


def test_callbacks_are_given_what_the_program_knows(tmp_path):
    stopping, given = (
        "callbacks=early_stopping",
        "callbacks.throughput.peak_flops=1e12 callbacks.checkpoint.every_n_train_steps=7",
    )
    made = callbacks_of(f"{stopping} {given}", tmp_path)
    best, stop, speed = one(made, BestCheckpoint), one(made, EarlyStopping), one(made, ThroughputMonitor)
    assert (best.monitor, best.mode, Path(best.dirpath)) == ("val/accuracy", "max", tmp_path / "checkpoints")
    assert (stop.monitor, stop.mode, stop.patience) == ("val/accuracy", "max", 5)
    assert speed.peak_flops == 1e12 and speed.hardware_flops_per_sample > speed.model_flops_per_sample > 0
    assert [c._every_n_train_steps for c in made if isinstance(c, ModelCheckpoint)] == [0, 0, 7]
    made = callbacks_of(f"{stopping} callbacks.early_stopping.monitor=val/loss", tmp_path)
    stop, speed = one(made, EarlyStopping), one(made, ThroughputMonitor)
    assert (stop.monitor, stop.mode, speed.model_flops_per_sample) == ("val/loss", "min", None)
    # without a validation those that follow a metric of it are left out
    made = callbacks_of(f"{stopping} trainer.limit_val_batches=0", tmp_path)
    assert not any(isinstance(callback, EarlyStopping | BestCheckpoint) for callback in made)
    made = callbacks_of(f"{stopping} trainer.limit_val_batches=0 callbacks.early_stopping.monitor=train/loss", tmp_path)
    assert one(made, EarlyStopping).mode == "min"


def test_a_module_that_names_no_metric_has_no_best_checkpoint(tmp_path):
    def best_of(words):
        config = configuration(words)
        made = one(build_callbacks(config, tmp_path, pl.LightningModule(), build_data(config)), BestCheckpoint)
        return made.monitor, made.mode, made.save_top_k

    with pytest.raises(UserError, match=r"callbacks.early_stopping: .* argument: 'monitor'"):
        best_of("callbacks=early_stopping")
    assert best_of("")[::2] == (None, 0)
    assert best_of("callbacks.checkpoint.monitor=mine callbacks.checkpoint.mode=max") == ("mine", "max", 1)


def test_the_order_of_callbacks(tmp_path):
    """What looks at a validation comes before an average, and what measures gradients before a synthesis."""
    words = "callbacks=ema synthesis=shared callbacks.more._target_=holotrain.callbacks.DriftMonitor"
    names = [type(each).__name__ for each in callbacks_of(words, tmp_path)]
    assert names[0] == "ExactResume" and names[-1] == "SaveOnSignal"
    assert names.count("DriftMonitor") == 2
    assert names.index("Samples") < names.index("WeightAverage") < names.index("SynthesisCallback")
    assert names.index("BestCheckpoint") < names.index("ExactCheckpoint")


MESSAGES = {
    "width must be at least 1": "model.width: must be at least 1",
    "width 3 is not even": "model.width: 3 is not even",
    "width=3: it must be even": "model.width=3: it must be even",
    "width: it must be even": "model.width: it must be even",
    "width and depth leave nothing": "model: width and depth leave nothing",
    "widths must be even": "model: widths must be even",
    "Invalid width: 3": "model: Invalid width: 3",
}


@pytest.mark.parametrize("text", MESSAGES)
def test_a_message_that_begins_with_an_option_is_about_it(text):
    with pytest.raises(UserError, match=f"^{MESSAGES[text]}$"), as_user_error("model", ["width", "depth"]):
        raise ValueError(text)


@pytest.mark.skipif(torch.cuda.is_available() or torch.backends.mps.is_available(), reason="for a machine without a GPU")
@pytest.mark.parametrize(
    "words",
    [
        "trainer=gpu",
        "trainer.accelerator=mps",
    ],
)
def test_what_the_machine_cannot_do_is_refused(words):
    with pytest.raises(UserError, match="there is none here"):
        check_device(configuration(words).trainer)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a build of torch with NCCL")
def test_nccl_takes_the_sms_and_the_priority_that_it_is_given():
    process = ProcessRank(0, 2, 0, 2)
    assert group_options(configuration("trainer=tp").trainer, process, "cpu")["pg_options"] is None
    given = configuration("trainer=tp trainer.nccl_max_ctas=2 trainer.nccl_high_priority=true trainer.timeout=60")
    options = group_options(given.trainer, process, "cpu")["pg_options"]
    assert (options.config.min_ctas, options.config.max_ctas, options.is_high_priority_stream) == (1, 2, True)
    assert options._timeout.total_seconds() == 60


def test_tensor_parallel_layers_overlap_in_groups_that_are_measured_or_given():
    configured = [configuration(f"trainer=tp {words}").trainer for words in ("", "trainer.overlap=4", "trainer.overlap=null")]
    measured, given_four, none = (build.build_strategy(trainer, ProcessRank(0, 2, 0, 2)).styles for trainer in configured)
    assert {type(style.groups) for style in measured} == {Tuner} and {style.groups for style in given_four} == {4}
    assert none is None


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16), ("32-true", torch.float32)]
)
def test_a_product_outside_of_a_trainer_has_the_dtype_of_the_precision(precision, dtype):
    with build.autocast_of(configuration(f"trainer.accelerator=cpu trainer.precision={precision}").trainer):
        assert (torch.ones(1, 1) @ torch.ones(1, 1)).dtype == dtype


@given(st.text("\\'${}a \"\\n"))
def test_an_override_is_read_as_the_text_that_was_quoted(text):
    parsed = OverridesParser.create().parse_override(f"prompt={quoted(text)}")
    assert OmegaConf.create({"prompt": parsed.value()}).prompt == text


def test_images_for_weights_of_timm_are_normalised_as_its_model_says():
    words = ["data=imagefolder", "data.root=x", "model=timm", "model.name=test_vit"]
    found = lambda *more: command_line.compose("fit", [*words, *more]).data.processor  # noqa: E731
    assert found() is None and found("model.pretrained=w.pth") == "test_vit"
    assert found("model.pretrained=w.pth", "data.processor=null") is None


def test_other_images_are_normalised_as_those_of_the_checkpoint():
    words = ["data=imagefolder", "data.root=x", "model=timm", "model.name=test_vit", "model.pretrained=w.pth"]
    for processor in (None, "a"):
        before = command_line.compose("fit", [*words, f"data.processor={processor or 'null'}"])
        arguments = command_line.parse(["fit", "data=imagefolder", "data.root=y"])
        arguments.before = structured.to_container(before)
        name = command_line.primary(arguments, {"config": arguments.before, "choices": {}})
        data = command_line.completed(arguments, composition.composed(name, arguments.overrides), arguments.overrides).data
        assert (data.root, data.processor) == ("y", processor)


def test_a_budget_stands_in_the_name_of_a_schedule():
    assert command_line.compose("fit", ["data=digits", "backward=compiled:0.3"]).backward.kind == "compiled:0.3"
    for option, message in {
        "backward=compiled:1.5": "such as compiled:1",
        "backward=checkpoint:0.3": "not checkpoint",
        "backward=compild": "compiled",
        "backward=compiled backward.tile=16": "use backward=checkpoint",
    }.items():
        with pytest.raises(UserError, match=message):
            command_line.compose("fit", ["data=digits", *option.split()])


FILES = [path for group in ("data", "task") for path in Path(composition.config_folder(), group).glob("*.yaml")]
STORED = composition.stored()
NODES = [*STORED["model"].values(), *STORED["data"].values(), *(OmegaConf.to_container(OmegaConf.load(path)) for path in FILES)]


@pytest.mark.parametrize("target", sorted({target for node in NODES for _, target in targets(node)}))
def test_every_option_has_a_type_a_default_and_a_meaning(target):
    found = signature(target)
    assert not found.takes_others
    for name, option in found.options.items():
        assert option.type and option.meaning and option.default is not UNKNOWN, name
    defaults = {name: option.default for name, option in found.options.items() if option.default is not REQUIRED}
    assert to_plain(structured_config({name: found.options[name] for name in defaults})) == defaults


def test_classes_that_options_depend_on_are_where_they_are_said_to_be():
    """A name of yesterday would make every check of it pass in silence."""
    for task, (models_of_it, data, _) in COMPATIBLE.items():
        for target in (task, *models_of_it, data):
            assert target in signature(target).bases


@pytest.mark.parametrize(
    ("target", "option", "given", "taken"),
    [
        ("holotrain.models.RevViT", "backward", ["autograd", "reversible+attention"], ["autograd", "reversible+attention"]),
        ("holotrain.models.RevGPT", "exact", True, True),
        ("holotrain.models.RevGPT", "exact", 12, 12),
        ("holotrain.data.Digits", "classes", [3, "5"], [3, "5"]),
        ("holotrain.data.TextFiles", "max_tokens", None, None),
        ("holotrain.tasks.MaskedLM", "mask_probability", 0.3, 0.3),
    ],
)
def test_values_are_taken_as_they_are_meant(target, option, given, taken):
    schema = structured_config({option: signature(target).options[option]})
    found = to_plain(OmegaConf.merge(schema, {option: given}))[option]
    assert found == taken and type(found) is type(taken)


@pytest.mark.parametrize(
    ("options", "batches", "expected"),
    [
        ({}, 10, (1.0, 1)),
        ({"val_check_interval": 0.5}, 10, (0.5, 1)),
        ({"val_check_interval": 4}, 10, (4, None)),  # counted through epochs
        ({"val_check_interval": 400, "max_epochs": 16, "max_steps": 1000}, 4, (1.0, 1)),  # short epochs, which end it
        ({"val_check_interval": 400, "max_epochs": 16, "check_val_every_n_epoch": None}, 4, (64, None)),  # through epochs
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 100}, 4, (100, None)),
        ({"max_steps": 3}, 10, (3, None)),  # ends in its first epoch
        ({"max_steps": 30}, 10, (1.0, 1)),
        ({"max_epochs": 3, "check_val_every_n_epoch": 5}, 10, (30, None)),
        # the last batches of an epoch step as well, though they are fewer: 2 steps an epoch of 5 batches
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 4}, 5, (10, None)),
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 4}, 5, (9, None)),
        ({"val_check_interval": 400, "max_epochs": 2, "limit_train_batches": 3}, 10, (1.0, 1)),
        ({"val_check_interval": 400, "max_epochs": 2, "limit_train_batches": 0.5}, 10, (1.0, 1)),
        ({"max_epochs": -1, "max_time": "00:01:00:00"}, 10, (1.0, 1)),
        ({"val_check_interval": 400, "max_epochs": 20, "overfit_batches": 1}, 10, (1.0, 1)),
        ({"max_steps": 8, "log_every_n_steps": 20}, 100, 8),
        ({"max_steps": 80, "log_every_n_steps": 20}, 100, 20),
        ({"max_steps": 8, "log_every_n_steps": 0}, 100, 0),
    ],
)
def test_a_training_is_validated_and_logged_before_it_ends(options, batches, expected):
    plain = {"_target_": "lightning.pytorch.Trainer", "max_epochs": 16, **options}
    trainer = ObjectConfig(plain["_target_"], to_plain(OmegaConf.merge(structured.group_config("trainer", plain), plain)))
    found = validation_and_logging(trainer, batches)
    asked = (found["val_check_interval"], found["check_val_every_n_epoch"])
    found = {"log_every_n_steps": trainer.log_every_n_steps} | found
    assert (asked if isinstance(expected, tuple) else found["log_every_n_steps"]) == expected


def test_a_sweep_without_a_job_is_not_resumed(tmp_path):
    """Such as one that was refused."""
    (tmp_path / "fit/sweeps/begun/0").mkdir(parents=True)
    (tmp_path / "fit/sweeps/refused").mkdir()
    (tmp_path / "fit/sweeps/refused/multirun.yaml").touch()
    os.utime(tmp_path / "fit/sweeps/begun/0", (0, 0))
    assert run_folder("fit/sweeps", str(tmp_path), resume=True) == str(tmp_path / "fit/sweeps/begun")
