"""The options of each command as dataclasses.

The string below a field is its help text, and ``__post_init__`` checks what a type cannot say. Nothing here imports torch, so
that ``--help`` is fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, cast

from holotrain.config import option_groups as groups
from holotrain.config.fine_tuning import loads_weights
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_checks import check_groups, check_trainer
from holotrain.config.option_groups import BackwardConfig, is_a, model_options
from holotrain.config.signatures import Option, signature
from holotrain.errors import UserError, as_user_error
from holotrain.numeric import parse_bytes, require_at_least, require_within


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
