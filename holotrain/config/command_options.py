"""The options of each command as dataclasses, and which of them go together.

The string below a field is its help text, and ``__post_init__`` checks what a type cannot say. Nothing here imports torch, so
that ``--help`` is fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from holotrain.config import option_groups as groups
from holotrain.config.option_groups import BackwardConfig, ObjectConfig, is_a, loads_weights
from holotrain.config.signatures import Option, signature
from holotrain.errors import UserError, as_user_error, check_choice
from holotrain.numeric import parse_bytes, require_at_least, require_within
from holotrain.schedules import AUTO


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
        with as_user_error("memory"):
            parse_bytes(self.memory or "1B")
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
        return getattr(self.optimizer, "in_backward", False)


class CheckpointConfig(RunConfig):
    """The options of a command that needs a checkpoint."""

    or_pretrained = False  # whether pretrained weights will do, before any training

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ckpt_path and not (self.or_pretrained and loads_weights(self.model.plain() if self.model else None)):
            raise UserError("ckpt_path: a checkpoint is needed; give ckpt_path=best, or the folder of a run")
        if self.batch_is_open:
            raise UserError(f"{self.batch_option[0]}=auto: only fit and plan support auto; give a number")

    @property
    def checkpoint(self) -> Path:
        return Path(cast(str, self.ckpt_path))  # which is required


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
    profiler: Literal["trace"] | None = None
    """trace: trace.json.gz (for ui.perfetto.dev) and a table of operators; see also trainer.profiler"""


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
    probabilities: bool = False
    """also a column with the probability of each class"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_a(self.task, groups.MASKED_LM):
            raise UserError("predict: MaskedLM predicts nothing; use a checkpoint of sequence_classification or causal_lm")
        if self.probabilities and not is_a(self.task, groups.CLASSIFIER):
            raise UserError(f"probabilities: {self.task.name} has no classes; leave it out")
        other = "texts" if is_a(self.data, groups.IMAGES) else "images" if is_a(self.data, groups.TEXT) else "to"
        if getattr(self, other, None) is not None:
            raise UserError(f"predict: the checkpoint learned from {self.data.name}, not from {other}; leave {other}= out")


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
    models, data = next(((some, of) for ours, (some, of, _) in groups.COMPATIBLE.items() if is_a(config.task, ours)), ((), ""))
    others = {model for some, _, _ in groups.COMPATIBLE.values() for model in some}
    if models and not is_a(config.data, data) and is_a(config.data, groups.IMAGES, groups.TEXT):
        raise UserError(f"data: {config.task.name} learns from {data.rpartition('.')[2]}, not from {config.data.name}")
    if models and not is_a(config.model, *models) and is_a(config.model, *others):
        names = " or ".join(target.rpartition(".")[2] for target in models)
        raise UserError(f"model: {config.task.name} trains {names}, not {config.model.name}")


def check_trainer(trainer: ObjectConfig) -> None:
    """Raises a UserError or a ValueError for options that Lightning would take, but not as they are meant."""
    if not is_a(trainer, groups.TRAINER):
        raise ValueError(f"{trainer.target} is not Lightning's Trainer")
    counts = ("devices", "num_nodes", "tensor_parallel", "overlap", "timeout", "microbatches", "nccl_max_ctas")
    for name in (*counts, "pipeline_stages", "accumulate_grad_batches", "check_val_every_n_epoch"):
        require_at_least(1, **{name: getattr(trainer, name)})
    require_at_least(0, gradient_clip_val=trainer.gradient_clip_val)
    if trainer.graphs not in (True, False, AUTO):
        raise ValueError(f"graphs: must be true, false or auto, not {trainer.graphs!r}")
    if trainer.strategy == "single" and (trainer.devices not in (1, AUTO) or trainer.num_nodes not in (1, None)):
        raise ValueError("devices: trainer=default uses one process; for several, use trainer=ddp, fsdp, tp or pipeline")
    unlimited = trainer.max_epochs in (None, -1) and trainer.max_steps < 0 and trainer.max_time is None
    if unlimited and not trainer.fast_dev_run:
        raise ValueError("max_epochs=-1: how long to train? Set trainer.max_epochs, trainer.max_steps or trainer.max_time")
    if 0 in (trainer.max_epochs, trainer.max_steps, trainer.limit_train_batches):
        raise ValueError("max_epochs, max_steps and limit_train_batches: with 0 nothing is trained; use validate")


def check_groups(config: RunConfig) -> None:
    """Raises a UserError if options of several groups exclude each other."""
    option, _ = config.batch_option
    for other in ("data.batch_size", "data.max_tokens"):
        if other != option and getattr(config.data, other.removeprefix("data."), None) == AUTO:
            raise UserError(f"{other}=auto: {option} sets the batch size here; give {option}=auto")
    for one, is_used, others in exclusive(config):
        for other, is_used_too in others.items():
            if is_used and is_used_too:
                raise UserError(f"{one}: does not go together with {other}")


def exclusive(config: RunConfig) -> list[tuple[str, Any, dict[str, Any]]]:
    """What does not go together, though no class says so, since a result would be wrong: an option, whether it is in use, and
    the others with whether they are."""
    trainer, backward, strategy = config.trainer, config.backward, f"trainer={config.trainer.strategy}"
    several: dict[str, Any] = {"several processes": trainer.strategy != "single"}
    scaled = {"trainer.precision=16-mixed": trainer.precision == "16-mixed"}
    stepwise = {"trainer.accumulate_grad_batches above 1": trainer.accumulate_grad_batches > 1} | scaled
    by_norm = trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value"
    clipped = {"clipping by norm; use trainer.gradient_clip_algorithm=value": by_norm}
    synthesis = {"a synthesis": config.synthesis is not None}
    diffused = {"task=error_diffusion": is_a(config.task, groups.ERROR_DIFFUSION)}
    automatic = {"an automatic batch size": config.batch_is_open}
    planned = {"backward=auto": backward.open, "plan": isinstance(config, PlanConfig)}
    whole = planned | automatic | scaled | diffused | {"an average of the weights": config.average}
    adapted = {f"model.{name}": getattr(config.model, name, None) for name in ("adapters", "quantised")}
    frozen = {"model.trained=head": getattr(config.model, "trained", "all") == "head"}
    frozen["model.freeze"] = getattr(config.model, "freeze", None)
    few_bits = {"an optimizer of few bits": getattr(config.optimizer, "target", None) == groups.LOW_BIT}
    layered = {"optimizer.layer_decay": getattr(config.optimizer, "layer_decay", 1.0) != 1}
    return [
        ("optimizer.in_backward", config.steps_in_backward, several | stepwise | synthesis | clipped | diffused),
        ("trainer.graphs", trainer.graphs is True, several | scaled | {"optimizer.in_backward": config.steps_in_backward}),
        ("synthesis.cuda_graph", getattr(config.synthesis, "cuda_graph", False), several),
        ("task=error_diffusion", diffused["task=error_diffusion"], synthesis),
        (strategy, trainer.strategy in ("fsdp", "tp", "pipeline"), whole),
        (strategy, trainer.strategy in ("tp", "pipeline"), adapted | synthesis),
        (strategy, trainer.strategy == "pipeline", frozen | stepwise | few_bits | layered),
        ("backward=auto", backward.open, automatic),
    ]
