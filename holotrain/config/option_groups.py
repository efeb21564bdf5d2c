"""The configuration groups: their options beside those of the classes that they name, and which classes belong to each task.

Nothing here imports torch, so that ``--help`` is fast. The string below a field of a dataclass is its help text.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn, TypeGuard, TypeVar

from holotrain.config.signatures import Option, Signature, signature
from holotrain.errors import UserError, check_choice
from holotrain.numeric import require_at_least
from holotrain.schedules import AUTO, COMPILED, OPTIONS, kind_of
from holotrain.targets import TARGET

PYTHON_OBJECT = f"{__name__}.python_object"
"""What a configuration, and so a checkpoint, names in place of an object that Python code passed to a run."""


def python_object(kind: str) -> NoReturn:
    """An object of Python code, of a class with this name. No file can name it, so the command line cannot make it."""
    raise ValueError(f"a {kind} that Python code made is needed; give it to holotrain.fit, test, ... as an object")


@dataclass(frozen=True)
class ObjectConfig:
    """A class or function and its arguments, which are also attributes.

    Args:
        target: its full name, as the user wrote it.
        arguments: by name, in plain containers.
        object: what Python code made in its place. What is not among the arguments is an attribute of it.
    """

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    object: Any = field(default=None, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("arguments", ()):
            return self.arguments[name]
        if self.__dict__.get("object") is None or name.startswith("__"):
            raise AttributeError(f"{self.__dict__.get('target')} is not given {name!r}")
        return getattr(self.object, name)

    @property
    def name(self) -> str:
        """The last part of the name of the class."""
        return self.target.rpartition(".")[2] if self.object is None else type(self.object).__name__

    @property
    def bases(self) -> tuple[str, ...]:
        """Full names of the class and its base classes; of a function none."""
        return signature(self.target).bases if self.object is None else tuple(map(full_name, type(self.object).__mro__))

    def with_arguments(self, **arguments: Any) -> "ObjectConfig":
        return replace(self, arguments=self.arguments | arguments)

    def plain(self) -> dict[str, Any]:
        return {TARGET: self.target, **self.arguments}


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass
class BackwardConfig:
    """How the backward pass gets its activations: stored, checkpointed or recomputed."""

    kind: str | None = None
    """one of SCHEDULES; auto: choose to fit memory=; null: as the model's class has it"""
    blocks: Sequence[str] = ()
    """schedules for backward=auto, one per block, such as [pareprop+attention, autograd] (+: keep outputs); []: choose"""
    store: int | Sequence[int] = 0
    """blocks that store their activations: a number (the last n blocks) or a list of indices"""
    exact: bool | int = False
    """recompute activations bit for bit on a fixed-point grid; true: choose its step from the first batch; k: step 2^-k"""
    keep: Sequence[str] = ()
    """results to store instead of recomputing: [attention], [matmul] (with it), or operators such as aten.mm.default"""
    tile: int | None = None
    """tokens at a time that layers take which work token by token, such as MLPs; null: all tokens at once"""
    chunk: int | None = None
    """tokens of a sequence that a causal language model of transformers takes at a time; null: all tokens at once"""
    keys: Literal["device", "host"] = "device"
    """where chunks keep keys and values: on the device, or in main memory (host)"""
    inexact: bool = False
    """backward=auto may also choose inexact schedules"""
    on_mismatch: Literal["store", "error"] = "store"
    """what follows if activations are rebuilt wrongly: store: a warning, and block inputs are stored from then on; error"""

    def __post_init__(self) -> None:
        kind = kind_of(self.kind or AUTO)
        check_choice("backward.kind", kind, OPTIONS)
        require_at_least(1, tile=self.tile, chunk=self.chunk)
        if kind in COMPILED and (self.tile, self.chunk) != (None, None):
            raise UserError(f"backward={self.kind} takes no backward.tile and backward.chunk; use backward={COMPILED[kind]}")
        if self.keys == "host" and self.chunk is None:
            raise UserError("backward.keys=host is for chunks; set backward.chunk, too, such as backward.chunk=4096")

    @property
    def name(self) -> str:
        """The kind; ``as built``: as the model's class has it."""
        return self.kind or "as built"

    @property
    def open(self) -> bool:
        """Whether the schedules are still to be chosen."""
        return self.kind == AUTO and not self.blocks

    def engine(self) -> dict[str, Any]:
        """The arguments of a reversible sequence other than the schedule, where they differ from the default."""
        options = {"store": self.store, "exact": self.exact, "keep": tuple(self.keep), "tile": self.tile}
        return {name: value for name, value in options.items() if value}


# The classes of ours that options depend on, by full name.
IMAGES = "holotrain.data.images.ImageDataModule"
TEXT = "holotrain.data.text.module.TextDataModule"
CLASSIFIER = "holotrain.tasks.classification.Classifier"
SEQUENCE_CLASSIFIER = "holotrain.tasks.classification.SequenceClassifier"
ERROR_DIFFUSION = "holotrain.tasks.classification.ErrorDiffusionClassifier"
CAUSAL_LM = "holotrain.tasks.language.CausalLM"
MASKED_LM = "holotrain.tasks.language.MaskedLM"

TIMM = "holotrain.models.external.Timm"
HUGGING_FACE = "holotrain.models.huggingface.HuggingFace"

ADAMW = "holotrain.tasks.optimizer_functions.adamw"
MUON = "holotrain.tasks.optimizer_functions.muon"
LOW_BIT = "holotrain.tasks.optimizer_functions.adamw_low_bit"

EARLY_STOPPING = "lightning.pytorch.callbacks.early_stopping.EarlyStopping"
PLATEAU = "torch.optim.lr_scheduler.ReduceLROnPlateau"
AVERAGE = "lightning.pytorch.callbacks.weight_averaging.WeightAveraging"
TRAINER = "lightning.pytorch.trainer.trainer.Trainer"

_ROBERTA = "holotrain.models.roberta.RoBERTa"
_IMAGES = ("holotrain.models.vit.ViT", "holotrain.models.swin.Swin", "holotrain.models.mvit.MViT")
COMPATIBLE = {
    # An image classifier too, so first.
    ERROR_DIFFUSION: (("holotrain.error_diffusion.cells.ImageErrorDiffusion",), IMAGES, "error_diffusion"),
    "holotrain.tasks.classification.ImageClassifier": ((*_IMAGES, TIMM, HUGGING_FACE), IMAGES, "image_classification"),
    SEQUENCE_CLASSIFIER: ((_ROBERTA, HUGGING_FACE), TEXT, "sequence_classification"),
    CAUSAL_LM: (("holotrain.models.gpt.GPT", HUGGING_FACE), TEXT, "causal_lm"),
    MASKED_LM: ((_ROBERTA, HUGGING_FACE), TEXT, "masked_lm"),
}
"""The models and the data of each of our tasks, and the head that a Hugging Face model has for it."""

STRATEGIES = ("ddp", "fsdp", "tp", "pipeline")  # those of several processes

Named = TypeVar("Named", ObjectConfig, str)
"""What is configured, or the full name of a class."""


def is_a(config: Named | None, *bases: str) -> TypeGuard[Named]:
    """Whether this, or the class of this name, is one of the classes or derived from one."""
    own = signature(config).bases if isinstance(config, str) else config.bases if config else ()
    return not {*bases}.isdisjoint(own)


def takes(config: Named | None, parameter: str) -> TypeGuard[Named]:
    """Whether this, or the class of this name, has such a parameter."""
    return config is not None and parameter in _signature(config).options


def default_backward(model: ObjectConfig | str | None) -> str | None:
    """The default of the model's parameter ``backward``; None if it has none."""
    option = None if model is None else _signature(model).options.get("backward")
    return option.default if option and isinstance(option.default, str) else None


def _signature(config: ObjectConfig | str) -> Signature:
    return signature(config if isinstance(config, str) else config.target)


def loads_weights(model: Mapping[str, Any] | None) -> bool:
    """Whether a training with these options of the model, in plain containers, starts from pretrained weights."""
    if not model or model.get("pretrained") or not is_a(model[TARGET], HUGGING_FACE, TIMM):
        return bool(model and model.get("pretrained"))
    if is_a(model[TARGET], HUGGING_FACE) and isinstance(model.get("name"), str):
        from holotrain.models.huggingface_files import has_weights  # imports torch

        with suppress(ValueError):  # there is no such folder, or not yet
            return has_weights(model["name"])
    return bool(model.get("download"))


def optimizer_for(optimizer: dict[str, Any], model: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of an optimizer, with those that depend on the weights that the training starts from.

    ``optimizer=auto`` is AdamW for pretrained weights, and Muon for random ones. Unless a rate is given, AdamW has a smaller
    one for pretrained weights; a head or adapters alone, which are new, keep its usual one.
    """
    is_fine_tuning, model = loads_weights(model), model or {}
    if optimizer.get(TARGET) == AUTO:
        optimizer = {**optimizer, TARGET: ADAMW if is_fine_tuning else MUON}
    in_part = model.get("trained") == "head" or isinstance(model.get("adapters"), Mapping)
    if is_fine_tuning and not in_part and optimizer.get(TARGET) in (ADAMW, LOW_BIT):
        return {"lr": 1e-4, **optimizer}
    return optimizer


def data_for(data: dict[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The options of data: images for weights of timm are normalised as its model says, unless ``processor`` is given."""
    if loads_weights(model) and is_a(model[TARGET], TIMM) and "processor" in signature(data[TARGET]).options:
        return {"processor": model.get("name"), **data}
    return data


def optimizer_options(in_backward: bool = False, layer_decay: float = 1.0) -> None:
    """Options of every optimizer.

    Args:
        in_backward: step each parameter in the backward, as soon as its gradient is complete, and free the gradient
        layer_decay: each block learns with this times the rate of the next one, the embedding slowest, the head with lr
    """


def scheduler_options(interval: Literal["step", "epoch"] | None = None, monitor: str | None = None) -> None:
    """Options of every schedule.

    Args:
        interval: after what the schedule advances; null: every optimizer step, or for ReduceLROnPlateau every epoch
        monitor: the metric that ReduceLROnPlateau follows, such as val/loss; null: the first that the task names
    """


def model_options(
    pretrained: str | None = None,
    trained: Literal["all", "head"] = "all",
    freeze: Sequence[str] = (),
    adapters: int | dict = 0,
    quantised: Literal["8bit", "4bit"] | None = None,
) -> None:
    """How the training of a model begins.

    Args:
        pretrained: initial weights: a file, run or export of holotrain, or of the library of the model; null: random
        trained: what to train: all, or head (only the classifier), with the rest frozen
        freeze: patterns (fnmatch) of the names of parameters that are not trained, such as [embedding.*, '*.blocks.0.*']
        adapters: layers of peft to train, such as {_target_: peft.LoraConfig, r: 8, target_modules: [query_key_value]}; 0: none
        quantised: store the weights that are not trained in 8bit or 4bit (torchao), as QLoRA does; null: as they are
    """


def trainer_options(
    accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto",
    precision: Literal["auto", "32-true", "64-true", "bf16-mixed", "16-mixed"] = "auto",
    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest",
    graphs: bool | Literal["auto"] = False,
    strategy: Literal["single", "ddp", "fsdp", "tp", "pipeline"] = "single",
    devices: int | Literal["auto"] = 1,
    num_nodes: int | None = None,
    tensor_parallel: int | None = None,
    overlap: int | Literal["auto"] | None = "auto",
    signals: bool = False,
    pipeline_stages: int | None = None,
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b",
    microbatches: int | None = None,
    backend: Literal["auto", "nccl", "gloo"] = "auto",
    nccl_max_ctas: int | None = None,
    nccl_high_priority: bool = False,
    compression: Literal["none", "bf16", "fp16"] = "none",
    sharded_checkpoints: bool = False,
    timeout: float = 600.0,
) -> None:
    """Options of the trainer beside those of Lightning; they replace those with the same name.

    Args:
        accelerator: cpu, gpu (NVIDIA or Apple), mps (Apple) or auto (the GPU, if there is one)
        precision: 32-true, 64-true, bf16-mixed, 16-mixed, or auto: bf16-mixed on a GPU that computes in it, else 32-true
        float32_matmul_precision: products of float32 on a GPU: highest, high (TF32) or medium (TF32, or less), as in torch
        graphs: capture forward and backward as CUDA graphs, for up to 8 shapes of batches (GPU only); auto: where it can be
        strategy: single (process), ddp, fsdp (FSDP2), tp (tensor parallel) or pipeline (each process has some of the blocks)
        devices: processes on this machine, one per GPU; auto: one for each GPU, or as many as torchrun started
        num_nodes: number of machines; start the command on each with torchrun; null: as many as were started
        tensor_parallel: tp: processes per tensor parallel group; FSDP2 runs across the groups; null: all
        overlap: tp: row groups per all-reduce, overlapped with computation; auto: the best; null: no overlap (torch's layers)
        signals: tp with overlap: one kernel signals each finished group (NVIDIA GPUs, bf16-mixed)
        pipeline_stages: pipeline: processes that share a model; null: all
        pipeline_schedule: pipeline: 1f1b (each backward begins as soon as it can) or gpipe (all forwards, then all backwards)
        microbatches: pipeline: parts of a batch that pass through the stages one after another; null: two for each stage
        backend: communication backend: nccl, gloo or auto (nccl on GPUs, gloo on CPUs)
        nccl_max_ctas: SMs of a GPU that a collective of NCCL may take, at most; null: NCCL decides
        nccl_high_priority: collectives of NCCL come first where an SM is free, before the waiting parts of a product
        compression: ddp: the data type in which gradients are sent: none (their own), bf16 or fp16
        sharded_checkpoints: fsdp, tp: save a checkpoint as a folder with one part per process, instead of one file
        timeout: seconds after which a collective fails that another process does not join
    """


PASSED_ON = ("accelerator", "precision")
"""Options of :func:`trainer_options` that are passed on to Lightning."""


@dataclass(frozen=True)
class GroupSchema:
    """Which parameters of a group's class are options, and which the program fills in.

    Args:
        names: parameters that the program fills in, which are no options.
        elsewhere: parameters that are options of other groups, with their keys there.
        known: options that the program fills in where they are null, which is their default.
        also: the function whose parameters are options too, and come first.
    """

    names: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    known: tuple[str, ...] = ()
    also: str | None = None

    def options(self, target: str) -> dict[str, Option]:
        """The options of a class or function. Raises a ValueError if there is no such class or function."""
        own = signature(f"{__name__}.{self.also}").options if self.also else {}
        found = {name: each for name, each in (signature(target).options | own).items() if name not in self.reserved}
        for name in found.keys() & {*self.known}:
            found[name] = replace(found[name], type=found[name].type and f"{found[name].type} | None", default=None)
        for name in found.keys() & {"batch_size", "max_tokens"}:  # may be auto, which is replaced before the class sees it
            found[name] = replace(found[name], type=found[name].type and f'{found[name].type} | Literal["auto"]')
        return found

    @property
    def own(self) -> set[str]:
        """Options that are not passed on to the class."""
        return {*signature(f"{__name__}.{self.also}").options}.difference(PASSED_ON) if self.also else set()

    def of_class(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that are passed on to the class."""
        unknown = {name for name in self.known if arguments.get(name) is None}
        return {name: value for name, value in arguments.items() if name not in self.own | unknown}

    @property
    def reserved(self) -> set[str]:
        return {*self.names, *self.elsewhere}


DATA_PROPERTIES = ("image_size", "channels", "classes", "num_classes", "vocab", "vocab_size", "context", "pad_id")
"""Parameters of models and tasks that the data module tells, if it can."""

OBJECT_GROUPS = {
    "task": GroupSchema(("model", "optimizer", "scheduler", "graphs", "token_bytes", "mask_id"), known=DATA_PROPERTIES),
    "data": GroupSchema(("seed", "layout", "tokenizer_json", "labels")),
    "model": GroupSchema(
        elsewhere={"backward": "backward.kind", **{name: f"backward.{name}" for name in ("store", "exact", "keep", "tile")}},
        known=(*DATA_PROPERTIES, "head"),
        also="model_options",
    ),
    "synthesis": GroupSchema(),
    "optimizer": GroupSchema(("model", "params"), also="optimizer_options"),
    "scheduler": GroupSchema(("optimizer", "steps", "total_steps"), also="scheduler_options"),
    "trainer": GroupSchema(("callbacks", "logger", "default_root_dir"), also="trainer_options"),
}
"""The groups that name any class or function, and what the program knows of their parameters."""

PROCESS_OPTIONS = OBJECT_GROUPS["trainer"].own - {"float32_matmul_precision", "graphs", "backend", "timeout"}
"""Options about several processes. A training continues with the same ones; the other commands default to one process."""

NAMED_GROUPS = {
    "callbacks": GroupSchema(
        ("dirpath", "count_samples", "count_tokens", "model_flops_per_sample", "hardware_flops_per_sample"),
        known=("monitor", "mode", "peak_flops"),
    ),
    "logger": GroupSchema(("save_dir", "root_dir"), known=("name", "run_name", "group", "tags")),
}
"""The groups that are mappings from a name to a class or function, in the same way."""

GROUPS = (*OBJECT_GROUPS, *NAMED_GROUPS, "backward")


def schema_of(where: str) -> GroupSchema:
    """That of a group, or of a name in a group, such as ``callbacks.memory``."""
    return (OBJECT_GROUPS | NAMED_GROUPS)[where.partition(".")[0]]
