"""The options of each command as dataclasses, and which of them go together.

The string below a field is its help text, and ``__post_init__`` checks what a type cannot say. Nothing here imports torch, so
that ``--help`` is fast.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from holotrain.config import option_groups as groups
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import (
    BackwardConfig,
    is_a,
    loads_weights,
    model_options,
    reversible,
    takes,
    trainer_options,
)
from holotrain.config.signatures import Option, signature
from holotrain.errors import UserError, as_user_error, check_choice
from holotrain.numeric import parse_bytes, require_at_least, require_within
from holotrain.schedules import PLAIN


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
        if self.model is not None:
            with as_user_error("model", groups.MODEL_OPTIONS):
                model_options(**{name: self.model.arguments[name] for name in groups.MODEL_OPTIONS})
                if is_a(self.model, groups.HUGGING_FACE):  # with its config.json, a checkpoint needs no other file
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
        return self.batch_option[1] == groups.AUTO

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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer.strategy != "single":
            raise UserError(f"trainer={self.trainer.strategy}: {self.command} runs in one process; use trainer=default")


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
        if is_a(self.task, groups.MASKED_LM):
            raise UserError("predict: MaskedLM predicts nothing; use a checkpoint of sequence_classification or causal_lm")
        for name, of, other in (("images", groups.TEXT, "texts"), ("texts", groups.IMAGES, "images")):
            if getattr(self, name) is not None and is_a(self.data, of):
                raise UserError(f"{name}: the checkpoint learned from {other}; give {other}=...")


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
        if self.prompt is None and self.prompts is None:
            raise UserError('generate needs prompt="..." or prompts=FILE')
        if self.prompt is not None and self.prompts is not None:
            raise UserError("generate: give either prompt= or prompts=, not both")
        require_at_least(1, max_tokens=self.max_tokens, top_k=self.top_k)
        require_at_least(0, temperature=self.temperature)
        require_within(1e-9, 1, closed=True, top_p=1 if self.top_p is None else self.top_p)


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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer.strategy in ("fsdp", "tp", "pipeline"):
            raise UserError(f"trainer={self.trainer.strategy}: plan runs in one process; use trainer=default")


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


def check_groups(config: RunConfig) -> None:
    """Raises a UserError if options of several groups exclude each other."""
    _check_task(config)
    _check_error_diffusion(config)
    _check_backward(config)
    _check_batch(config)
    _check_strategy(config)
    _check_in_backward(config)
    _check_callbacks(config)


SEARCHES = {
    "lightning.pytorch.callbacks.batch_size_finder.BatchSizeFinder": "data.batch_size=auto plans the largest batch",
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder": "-m sweep=learning_rate tries several rates",
}
"""Callbacks of Lightning that run trainings of their own before a training, and what does the same here."""


def _check_callbacks(config: RunConfig) -> None:
    for name, each in config.callbacks.items():
        for target, instead in SEARCHES.items():
            if is_a(each, target):
                raise UserError(f"callbacks.{name}: {each.name} does not work here; {instead}")


def _check_task(config: RunConfig) -> None:
    task, model, data = config.task, config.model, config.data
    if is_a(task, groups.SEQUENCE_CLASSIFIER) and getattr(data, "label", "given") is None:
        raise UserError("data.label: give the field or column of the class as data.label=..., or data.label=folder")
    if getattr(model, "trained", "all") == "head" and is_a(task, groups.CAUSAL_LM, groups.MASKED_LM):
        raise UserError(f"model.trained=head: {task.name} shares its head with the embedding; use trained=all, or LoRA")
    ours = next((each for each in groups.COMPATIBLE if is_a(task, each)), None)
    if ours is None:
        return
    models, of = groups.COMPATIBLE[ours]
    if is_a(data, groups.IMAGES, groups.TEXT) and not is_a(data, of):
        kind = "images" if of == groups.IMAGES else "text"
        others = _options(each for each in groups.COMPATIBLE if is_a(data, groups.COMPATIBLE[each][1]))
        raise UserError(f"data: {task.name} learns from {kind}, which {data.name} does not have; use other data, or {others}")
    trainers = [each for each, (classes, _) in groups.COMPATIBLE.items() if is_a(model, *classes)]
    if model is not None and trainers and not is_a(model, *models):
        names = " or ".join(target.rpartition(".")[2] for target in models)
        raise UserError(f"model: {task.name} trains {names}, not {model.name}; use another model, or {_options(trainers)}")


def _options(tasks: Iterable[str]) -> str:
    return " or ".join(f"task={groups.TASK_OPTIONS[each]}" for each in tasks)


def _check_error_diffusion(config: RunConfig) -> None:
    if not is_a(config.task, groups.ERROR_DIFFUSION) or config.model is None:
        return
    layers = "an error diffusion network has no"
    if config.backward.kind not in (None, PLAIN[0]):
        raise UserError(f"backward={config.backward.kind}: {layers} blocks to recompute; use backward={PLAIN[0]}")
    if config.synthesis is not None:
        raise UserError(f"synthesis: {layers} Linear layers, which it needs; use synthesis=none")
    if config.compile:
        raise UserError(f"compile: {layers} blocks; on a GPU use backward.cuda_graph=true")
    if getattr(config.optimizer, "target", None) == groups.MUON:
        raise UserError(f"optimizer=muon: {layers} blocks, which it needs; use error_diffusion, sgd or adamw")
    if config.task.clamp_signs and config.model.rule == "kaneko":
        raise UserError("task.clamp_signs: model.rule=kaneko never changes a sign; use rule article or backpropagation")


def _check_batch(config: RunConfig) -> None:
    option, size = config.batch_option
    for name in ("batch_size", "max_tokens"):
        if isinstance(value := getattr(config.data, name, None), str) and value != groups.AUTO:
            raise UserError(f"data.{name}: {value!r} is not a whole number or auto")
    for other in ("batch_size", "max_tokens"):
        if f"data.{other}" != option and getattr(config.data, other, None) == groups.AUTO:
            raise UserError(f"data.{other}=auto: {option} sets the batch size here; give {option}=auto")
    if size == groups.AUTO and config.backward.open:
        raise UserError(f"{option}=auto: cannot be combined with backward=auto; set one of the two")
    if config.trainer.overfit_batches and getattr(config.data, "streaming", False):
        raise UserError("trainer.overfit_batches: a stream has no batch twice; set data.streaming=false")


def _check_strategy(config: RunConfig) -> None:
    strategy = config.trainer.strategy
    if strategy == "single":
        return
    if config.backward.cuda_graph or getattr(config.synthesis, "cuda_graph", False):
        option = "backward" if config.backward.cuda_graph else "synthesis"
        raise UserError(f"{option}.cuda_graph: CUDA graphs do not work with trainer={strategy}; set it to false")
    if strategy == "ddp":
        return
    if is_a(config.task, groups.ERROR_DIFFUSION):
        raise UserError(f"trainer={strategy}: error diffusion networks have no blocks to shard; use trainer=ddp")
    parts = f"trainer={strategy} {'divides' if strategy == 'pipeline' else 'shards'} them"
    # What works under FSDP2, but not where layers are divided, too.
    whole = getattr(config.synthesis, "mode", None) == "bind" or getattr(config.synthesis, "block_length", None) == 0
    if config.synthesis is not None and (strategy != "fsdp" or whole):
        also = ", or synthesis=shared or associative with a block length under trainer=fsdp"
        raise UserError(f"synthesis: needs whole gradients, and {parts}; use trainer=ddp{also}")
    if getattr(config.synthesis, "split", "none") != "none":
        raise UserError(f"synthesis.split: needs whole gradients, and {parts}; use split=none")
    if getattr(config.optimizer, "target", None) == groups.LOW_BIT:
        name = f"adamw_{getattr(config.optimizer, 'bits', 8)}"
        raise UserError(f"optimizer={name}: needs whole parameters, and {parts}; use trainer=ddp, or optimizer=adafactor")
    if strategy in ("tp", "pipeline") and getattr(config.model, "adapters", 0):
        raise UserError(f"model.adapters: trainer={strategy} does not support adapters; use trainer=fsdp or ddp")
    if strategy in ("tp", "pipeline") and getattr(config.model, "quantised", None):
        raise UserError(f"model.quantised: trainer={strategy} does not support it; use trainer=fsdp or ddp")
    trained = getattr(config.model, "trained", "all")
    if strategy == "pipeline" and trained != "all":
        raise UserError(f"model.trained={trained}: a stage of trainer=pipeline would train nothing; use trainer=fsdp or ddp")
    batch, count = getattr(config.data, "batch_size", None), config.trainer.microbatches
    if count and isinstance(batch, int) and batch % count:
        raise UserError(f"trainer.microbatches={count}: data.batch_size={batch} is not a multiple of it")
    if config.average is not None:
        raise UserError(f"callbacks.{config.average}: needs whole weights, and {parts}; use trainer=ddp")
    if config.backward.open or config.batch_is_open:
        raise UserError(f"auto: planning needs whole parameters, and {parts}; set backward and the batch size yourself")


def _check_backward(config: RunConfig) -> None:
    backward, model, rebuilds = config.backward, config.model, reversible(config.model)
    if takes(model, "backward"):
        ours = model.target.startswith("holotrain.")  # of models of others it is known when they are built
        if ours and not rebuilds and backward.kind not in (None, *PLAIN, groups.AUTO):
            raise UserError(
                f"backward={backward.kind}: {model.name} is not reversible; use backward={PLAIN[0]} or model=rev_..."
            )
        for name in [name for name in backward.engine() if name != "tile" and not takes(model, name)]:
            why = "is not reversible" if ours else f"has no argument {name}"
            raise UserError(f"backward.{name}: {model.name} {why}; remove the option")
    if config.compile and any("+" in schedule for schedule in backward.blocks):
        raise UserError("backward.blocks: compiled blocks cannot keep results; remove what follows + or use compile=false")
    if config.compile and backward.keep:
        raise UserError("backward.keep: compiled blocks cannot keep results; use compile=false")
    checkpointed, trainer = backward.kind in (*PLAIN[1:], groups.AUTO) and not rebuilds, config.trainer
    refused = {
        "cannot capture the checkpointing of a plain model; use backward=autograd": checkpointed,
        "no support for accumulation; use trainer.accumulate_grad_batches=1": trainer.accumulate_grad_batches > 1,
        "no gradient scaling of 16-mixed; use trainer.precision=bf16-mixed": trainer.precision == "16-mixed",
        f"batches of {config.task.name} vary in shape": is_a(config.task, groups.MASKED_LM, groups.SEQUENCE_CLASSIFIER),
    }
    for reason in [reason for reason, found in refused.items() if found and backward.cuda_graph]:
        raise UserError(f"backward.cuda_graph: {reason}")


def _check_in_backward(config: RunConfig) -> None:
    if not config.steps_in_backward:
        return
    from holotrain.optimizers.stepping import refuse_in_backward  # imports torch

    trainer = config.trainer
    by_norm = "trainer.gradient_clip_val by norm (use null, or trainer.gradient_clip_algorithm=value)"
    with as_user_error(f"optimizer.{groups.IN_BACKWARD}"):
        refuse_in_backward(
            {
                f"trainer={trainer.strategy}": trainer.strategy != "single",
                "trainer.accumulate_grad_batches above 1": trainer.accumulate_grad_batches > 1,
                by_norm: bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value",
                "trainer.precision=16-mixed": trainer.precision == "16-mixed",
                "a synthesis": config.synthesis is not None,
                "backward.cuda_graph=true": config.backward.cuda_graph,
                config.task.name: is_a(config.task, groups.ERROR_DIFFUSION),
            }
        )


def check_trainer(trainer: ObjectConfig) -> None:
    """Raises a ValueError if a value is out of range, or options exclude each other."""
    if not is_a(trainer, groups.TRAINER):
        raise ValueError(f"{trainer.target} is not Lightning's Trainer")
    trainer_options(**{name: trainer.arguments[name] for name in groups.TRAINER_OPTIONS})
    if trainer.strategy in ("fsdp", "tp", "pipeline") and trainer.precision == "16-mixed":
        raise ValueError(f"precision=16-mixed: trainer={trainer.strategy} has no gradient scaling; use bf16-mixed")
    if trainer.strategy == "pipeline" and trainer.accumulate_grad_batches > 1:
        raise ValueError("accumulate_grad_batches: a pipeline accumulates over parts of a batch; set trainer.microbatches")
    if trainer.max_epochs not in (None, -1):
        require_at_least(1, max_epochs=trainer.max_epochs)
    elif trainer.max_steps < 1 and trainer.max_time is None:
        raise ValueError("max_epochs=-1: needs a limit; set trainer.max_steps or trainer.max_time")
    if trainer.max_steps == 0:
        raise ValueError("max_steps: must be above 0; for no limit, use trainer.max_steps=-1")
    least = {"max_steps": -1, "num_sanity_val_steps": -1, "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1}
    for name, smallest in (least | {"log_every_n_steps": 0, "gradient_clip_val": 0}).items():
        require_at_least(smallest, **{name: getattr(trainer, name)})
    if type(trainer.val_check_interval) not in (int, float, type(None)):
        text = "give a whole number of batches or a fraction in [0, 1]"
        raise ValueError(f"val_check_interval: {trainer.val_check_interval!r} is not valid; {text}")
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches: must be above 0; to evaluate without training, use validate or test")
    if trainer.val_check_interval == 0:
        raise ValueError("val_check_interval: must be above 0; to skip validation, set trainer.limit_val_batches=0")
