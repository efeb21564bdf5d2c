"""The options of each command as dataclasses, and which of them go together.

The string below a field is its help text, and ``__post_init__`` checks what a type cannot say. Nothing here imports torch, so
that ``--help`` is fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from holotrain.config import option_groups as groups
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import BackwardConfig, is_a, loads_weights, takes
from holotrain.config.signatures import Option, signature
from holotrain.errors import UserError, as_user_error, check_choice, refuse
from holotrain.numeric import parse_bytes, require_at_least, require_within
from holotrain.schedules import AUTO, PLAIN


class Composed:
    """How a configuration came about, which no option says. `compose` sets it; one made in another way does without."""

    overrides: list[str] = []
    choices: dict[str, str] = {}
    folder: str | None = None


Config = TypeVar("Config", bound="RunConfig")


@dataclass(kw_only=True)
class RunConfig(Composed):
    """The options of every command."""

    task: ObjectConfig
    data: ObjectConfig
    model: ObjectConfig | None
    backward: BackwardConfig
    synthesis: ObjectConfig | None
    optimizer: ObjectConfig | None
    scheduler: ObjectConfig | None
    callbacks: dict[str, ObjectConfig]
    trainer: ObjectConfig
    logger: dict[str, ObjectConfig]

    seed: int = 0
    """random seed of weights, batches, augmentation and dropout"""
    compile: bool | Literal["max-autotune-no-cudagraphs"] = False
    """compile each block with torch.compile; max-autotune-no-cudagraphs: it measures more kernels, which takes minutes"""
    memory: str | None = None
    """memory budget, such as 16GiB, of plan, backward=auto and batch_size=auto; null: the free memory of the device"""
    output_dir: str = "runs"
    """folder in which runs are saved"""
    name: str | None = None
    """name of the run in tables, reports and loggers; it decides no folder"""
    tags: Sequence[str] = ()
    """words that describe the run, shown with its name, such as [baseline,long]"""
    ckpt_path: str | None = None
    """checkpoint to start from, with its configuration, which overrides change: a file, the folder of a run, best or last"""
    trust: str | Sequence[str] | None = None
    """package, or list of packages, whose classes a checkpoint may name; holotrain's and torch's optimizers are trusted"""

    def __post_init__(self) -> None:
        with as_user_error("trainer", self.trainer.arguments):
            check_trainer(self.trainer)
        if self.model is not None and is_a(self.model, groups.HUGGING_FACE):  # with its config.json, a checkpoint needs no file
            from holotrain.models.huggingface_files import network_of

            name, network, download = (self.model.arguments[name] for name in ("name", "config", "download"))
            with as_user_error("model.name"):
                self.model = self.model.with_arguments(config=network_of(name, network, download))
        require_within(0, 2**32, seed=self.seed)
        if isinstance(self.compile, str):
            check_choice("compile", self.compile, ["max-autotune-no-cudagraphs"])
        for option, texts in (("name", [self.name or "-"]), ("tags", self.tags)):
            if wrong := [text for text in texts if not text.isprintable() or not text.strip()]:
                raise UserError(f"{option}: {wrong[0]!r} is not one line of text")
        if self.memory is not None:
            with as_user_error("memory"):
                parse_bytes(self.memory)
        check_task(self)
        check_groups(self)

    @property
    def average(self) -> str | None:
        """The name of the callback that averages the weights; None: there is none."""
        return next((name for name, each in self.callbacks.items() if is_a(each, groups.AVERAGE)), None)

    @property
    def batch_option(self) -> tuple[str, Any]:
        """The option that sets the batch size, and its value."""
        tokens = getattr(self.data, "max_tokens", None)
        if tokens is None or is_a(self.task, groups.CAUSAL_LM):  # its blocks have one length
            return "data.batch_size", getattr(self.data, "batch_size", None)
        return "data.max_tokens", tokens

    def with_batch(self, size: int) -> Self:
        """The same configuration with this batch size."""
        return replace(self, data=self.data.with_arguments(**{self.batch_option[0].removeprefix("data."): size}))

    @property
    def batch_is_open(self) -> bool:
        return self.batch_option[1] == AUTO

    @property
    def steps_in_backward(self) -> bool:
        return getattr(self.optimizer, groups.IN_BACKWARD, False)


class CheckpointConfig(RunConfig):
    """The options of a command that needs a checkpoint."""

    or_pretrained = False  # whether pretrained weights will do, before any training

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ckpt_path and not (self.or_pretrained and loads_weights(self.model.plain() if self.model else None)):
            also = ", or a model with pretrained weights" if self.or_pretrained else ""
            raise UserError(f"ckpt_path: {self.command} needs a checkpoint; give ckpt_path=best, or the folder of a run{also}")
        if self.batch_is_open:
            raise UserError(f"{self.batch_option[0]}=auto: only fit and plan support auto; give a number")

    @property
    def checkpoint(self) -> Path:
        return Path(cast(str, self.ckpt_path))  # which is required

    @property
    def command(self) -> str:
        return next(name for name, schema in COMMANDS.items() if schema is type(self))


@dataclass
class ModelConfig(CheckpointConfig):
    """The options of a command that uses a trained model in one process."""

    quantised: Literal["8bit", "4bit"] | None = None
    """store the weights in few bits (torchao), 8bit or 4bit: less memory and smaller files, but slower on a CPU"""


@dataclass
class FitConfig(RunConfig):
    """Train a model, then test its best checkpoint."""

    resume: bool = False
    """continue the latest run (with -m: sweep) in output_dir from its last checkpoint"""
    test: bool = True
    """test the best checkpoint after training"""
    objective: str | None = None
    """what a sweep optimises, such as test/accuracy or step_seconds; null: the metric that selects the best checkpoint"""
    profiler: Literal["simple", "advanced", "trace"] | None = None
    """simple, advanced: write fit-profile.txt; trace: trace.json.gz (for ui.perfetto.dev) and a table of operators"""


class ValidateConfig(CheckpointConfig):
    """Evaluate a checkpoint, or pretrained weights, on the validation set."""

    or_pretrained = True


class TestConfig(CheckpointConfig):
    """Evaluate a checkpoint, or pretrained weights, on the test set."""

    or_pretrained = True


@dataclass
class PredictConfig(ModelConfig):
    """Classify images or texts, or score texts, with a checkpoint. Writes predictions.csv."""

    images: str | None = None
    """image file or folder of images to classify; null: the test set"""
    texts: str | None = None
    """text file or folder of text files to classify or (causal_lm) to score; null: the test set"""

    def __post_init__(self) -> None:
        super().__post_init__()
        learned = "texts" if is_a(self.data, groups.TEXT) else "images" if is_a(self.data, groups.IMAGES) else None
        other = {"texts": self.images, "images": self.texts}.get(learned or "")
        if is_a(self.task, groups.MASKED_LM):
            raise UserError("predict: MaskedLM predicts nothing; use a checkpoint of sequence_classification or causal_lm")
        if other is not None:
            raise UserError(f"predict: the checkpoint learned from {learned}; give {learned}=...")


@dataclass
class GenerateConfig(ModelConfig):
    """Continue a text with a causal_lm checkpoint."""

    prompt: str | None = None
    """text to continue"""
    prompts: str | None = None
    """file of prompts: one per line, or .jsonl with a field named prompt, or messages (a chat)"""
    chat: bool | None = None
    """a prompt is the message of a user, which the assistant answers; null: if the model learned chats (data.messages)"""
    max_tokens: int = 256
    """number of tokens to generate"""
    temperature: float = 0.8
    """sampling temperature; 0: always the most likely token"""
    top_k: int | None = None
    """sample from the k most likely tokens; null: from all"""
    top_p: float | None = None
    """sample from the most likely tokens whose probabilities sum to this; null: from all"""
    stream: bool = True
    """print the text of a single prompt while it is generated"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_a(self.task, groups.CAUSAL_LM):
            raise UserError(f"generate: needs a checkpoint of causal_lm; this one is of {self.task.name}")
        if (self.prompt is None) == (self.prompts is None):
            raise UserError('generate: give prompt="..." or prompts=FILE, not both')


@dataclass
class ExportConfig(ModelConfig):
    """Write a checkpoint's model as safetensors, for holotrain.load."""

    to: str | None = None
    """folder to write; null: export in the run's folder"""


@dataclass
class PlanConfig(RunConfig):
    """Predict peak memory and the largest batch and depth that fit."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda or cpu; auto: cpu with trainer.accelerator=cpu, else cuda, even if this machine has no GPU"""
    json: str | None = None
    """another file for the content of plan.json; -: print it to standard output instead of the table"""


COMMANDS: dict[str, type[RunConfig]] = {
    "fit": FitConfig,
    "validate": ValidateConfig,
    "test": TestConfig,
    "predict": PredictConfig,
    "generate": GenerateConfig,
    "export": ExportConfig,
    "plan": PlanConfig,
}
"""The configuration of each command that Hydra composes."""


def options_of(schema: type) -> dict[str, Option]:
    """The options of one of these dataclasses."""
    return signature(f"{schema.__module__}.{schema.__qualname__}").options


def check_task(config: RunConfig) -> None:
    """Raises a UserError if the data or the model are none for the task, as far as all are ours."""
    task, model, data = config.task, config.model, config.data
    ours = next((each for each in groups.COMPATIBLE if is_a(task, each)), None)
    if ours is None:
        return
    models, of = groups.COMPATIBLE[ours]
    tasks = [f"task={groups.TASK_OPTIONS[each]}" for each, (_, other) in groups.COMPATIBLE.items() if is_a(data, other)]
    if tasks and not is_a(data, of):
        kind, other = "images" if of == groups.IMAGES else "text", " or ".join(tasks)
        raise UserError(f"data: {task.name} learns from {kind}, which {data.name} does not have; use other data, or {other}")
    tasks = [f"task={groups.TASK_OPTIONS[each]}" for each, (some, _) in groups.COMPATIBLE.items() if is_a(model, *some)]
    if model is not None and tasks and not is_a(model, *models):
        names, other = " or ".join(target.rpartition(".")[2] for target in models), " or ".join(tasks)
        raise UserError(f"model: {task.name} trains {names}, not {model.name}; use another model, or {other}")


def check_trainer(trainer: ObjectConfig) -> None:
    """Raises a UserError or a ValueError for options that Lightning would take, but not as they are meant."""
    if not is_a(trainer, groups.TRAINER):
        raise ValueError(f"{trainer.target} is not Lightning's Trainer")
    counts = ("devices", "num_nodes", "tensor_parallel", "overlap", "timeout", "microbatches", "nccl_max_ctas")
    for name in (*counts, "accumulate_grad_batches", "check_val_every_n_epoch"):
        require_at_least(1, **{name: getattr(trainer, name)})
    require_at_least(2, pipeline_stages=trainer.pipeline_stages)
    require_at_least(0, gradient_clip_val=trainer.gradient_clip_val)
    usual = signature("holotrain.config.option_groups.trainer_options").options
    for name, strategies in groups.OF_STRATEGIES.items():
        if trainer.strategy not in strategies and getattr(trainer, name) != usual[name].default:
            raise ValueError(f"{name}: needs trainer={' or '.join(strategies)}")
    interval, limits = trainer.val_check_interval, (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches)
    has_no_limit = trainer.max_epochs in (None, -1) and trainer.max_steps < 0 and trainer.max_time is None
    several = trainer.devices not in (1, AUTO) or trainer.num_nodes not in (1, None)
    is_interval = interval is None or (type(interval) in (int, float) and interval != 0)
    refuse(
        {
            "trainer.devices: trainer=default uses one process; for several, use trainer=ddp, fsdp, tp or pipeline": (
                several and trainer.strategy == "single"
            ),
            "trainer.signals: needs trainer.overlap": trainer.signals and trainer.overlap is None,
            "trainer.max_epochs=-1: needs a limit; set trainer.max_steps or trainer.max_time": has_no_limit,
            "trainer.max_epochs, max_steps and limit_train_batches: with 0 nothing is trained; use validate": 0 in limits,
            f"trainer.val_check_interval: {interval!r} is no number of batches and no fraction above 0": not is_interval,
        }
    )


_ACCUMULATION, _SCALING = "trainer.accumulate_grad_batches above 1", "trainer.precision=16-mixed"
_SHARDED = (
    *(f"{_SCALING}; use bf16-mixed", "task=error_diffusion; use trainer=ddp", "an average of the weights; use trainer=ddp"),
    *("backward=auto; choose it yourself", "an automatic batch size; give a number", "plan; use trainer=default"),
    "a command of one process; use trainer=default",
)
_DIVIDED = (*_SHARDED, *(f"{each}; use trainer=fsdp or ddp" for each in ("model.adapters", "model.quantised", "a synthesis")))
EXCLUSIVE = {
    "optimizer.in_backward": (
        *("several processes; use trainer=default", _ACCUMULATION, f"{_SCALING}; use bf16-mixed", "a synthesis"),
        *("trainer.gradient_clip_val by norm; use trainer.gradient_clip_algorithm=value, or null", "backward.cuda_graph"),
        "task=error_diffusion",
    ),
    "backward.cuda_graph": (
        *("several processes; use trainer=default", _ACCUMULATION, f"{_SCALING}; use bf16-mixed"),
        *("batches that vary in shape", "checkpointing of a plain model; use backward=autograd"),
    ),
    "synthesis.cuda_graph": ("several processes; use trainer=default",),
    "task=error_diffusion": (
        *("recomputation; use backward=autograd", "a synthesis; use synthesis=none", "compile; use backward.cuda_graph"),
        "optimizer=muon; use error_diffusion, sgd or adamw",
    ),
    "trainer=ddp": ("a command of one process; use trainer=default",),
    "trainer=fsdp": _SHARDED,
    "trainer=tp": _DIVIDED,
    "trainer=pipeline": (
        *(*_DIVIDED, "model.trained=head; use trainer=fsdp or ddp", f"{_ACCUMULATION}; use trainer.microbatches"),
        "an optimizer of few bits; use trainer=ddp, or optimizer=adafactor",
    ),
    "compile": ("backward.keep or results to keep in backward.blocks",),
    "backward=auto": ("an automatic batch size; give one of the two",),
    "model.trained=head": ("model.adapters",),
    "scheduler.monitor": ("a schedule that follows no metric; leave it out",),
    "trainer.overfit_batches": ("data.streaming",),
}
"""What does not go together, though no class says so, and what to do: a result would be wrong, or an option without effect."""

SEARCHES = (
    "lightning.pytorch.callbacks.batch_size_finder.BatchSizeFinder",
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder",
)
"""Callbacks of Lightning that run trainings of their own before a training."""


def check_groups(config: RunConfig) -> None:
    """Raises a UserError if options of several groups exclude each other."""
    for name, each in config.callbacks.items():
        if is_a(each, *SEARCHES):
            raise UserError(
                f"callbacks.{name}: {each.name} does not work here; see -m sweep=learning_rate, data.batch_size=auto"
            )
    option, _ = config.batch_option
    for other in ("data.batch_size", "data.max_tokens"):
        if other != option and getattr(config.data, other.removeprefix("data."), None) == AUTO:
            raise UserError(f"{other}=auto: {option} sets the batch size here; give {option}=auto")
    used = in_use(config)
    for one, others in EXCLUSIVE.items():
        for other in others:
            if used[one] and used[other.partition(";")[0]]:
                raise UserError(f"{one}: does not go together with {other}")


def in_use(config: RunConfig) -> dict[str, object]:
    """The options of :data:`EXCLUSIVE`, and whether they are in use."""
    task, backward, synthesis, trainer = config.task, config.backward, config.synthesis, config.trainer
    return {
        "task=error_diffusion": is_a(task, groups.ERROR_DIFFUSION),
        "batches that vary in shape": is_a(task, groups.MASKED_LM, groups.SEQUENCE_CLASSIFIER),
        "data.streaming": getattr(config.data, "streaming", False),
        "an automatic batch size": config.batch_is_open,
        "model.trained=head": getattr(config.model, "trained", "all") == "head",
        "model.adapters": getattr(config.model, "adapters", 0),
        "model.quantised": getattr(config.model, "quantised", None),
        "backward=auto": backward.open,
        "backward.cuda_graph": backward.cuda_graph,
        "backward.keep or results to keep in backward.blocks": backward.keep or any("+" in each for each in backward.blocks),
        "recomputation": backward.kind not in (None, PLAIN[0]),
        "checkpointing of a plain model": backward.kind in (*PLAIN[1:], AUTO) and not takes(config.model, "store"),
        "a synthesis": synthesis is not None,
        "synthesis.cuda_graph": getattr(synthesis, "cuda_graph", False),
        "optimizer=muon": getattr(config.optimizer, "target", None) == groups.MUON,
        "an optimizer of few bits": getattr(config.optimizer, "target", None) == groups.LOW_BIT,
        "optimizer.in_backward": config.steps_in_backward,
        "scheduler.monitor": getattr(config.scheduler, "monitor", None),
        "a schedule that follows no metric": not is_a(config.scheduler, groups.PLATEAU),
        "an average of the weights": config.average,
        "several processes": trainer.strategy != "single",
        **{f"trainer={name}": trainer.strategy == name for name in ("ddp", "fsdp", "tp", "pipeline")},
        "a command of one process": isinstance(config, PredictConfig | GenerateConfig | ExportConfig),
        _SCALING: trainer.precision == "16-mixed",
        _ACCUMULATION: trainer.accumulate_grad_batches > 1,
        "trainer.gradient_clip_val by norm": trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value",
        "trainer.overfit_batches": trainer.overfit_batches,
        "compile": config.compile,
        "plan": isinstance(config, PlanConfig),
    }
