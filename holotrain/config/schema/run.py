"""The options of every command, and the checks across groups."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from holotrain.checks import naming_group
from holotrain.config.chosen import Chosen, Filled
from holotrain.config.schema.backward import AUTO, PLAIN, BackwardConfig
from holotrain.config.schema.beside import BEGINNING, Beginning, check_trainer, with_network
from holotrain.config.schema.classes import (
    CAUSAL_LM,
    ERROR_DIFFUSION,
    MASKED_LM,
    SEQUENCE_CLASSIFIER,
    check_together,
    is_a,
    reversible,
    takes,
)
from holotrain.config.schema.optimizer import check_in_backward
from holotrain.errors import UserError
from holotrain.ranges import require_within
from holotrain.sizes import parse_bytes

FACTS = ("image_size", "channels", "classes", "num_classes", "vocab", "vocab_size", "context", "pad_id")
"""Parameters of models and tasks that the data module tells, if it can."""

OPEN = {
    "task": Filled(("model", "optimizer", "scheduler", "cuda_graph", "token_bytes", "mask_id"), known=FACTS),
    "data": Filled(("seed", "layout", "tokenizer_json", "labels"), or_auto=("batch_size", "max_tokens")),
    "model": Filled(
        ("backward", "store", "exact", "keep"), known=(*FACTS, "head"), also="holotrain.config.schema.beside.Beginning"
    ),
    "synthesis": Filled(),
    "optimizer": Filled(("model", "params"), also="holotrain.config.schema.optimizer.Stepping"),
    "scheduler": Filled(("optimizer", "steps", "total_steps")),
    "trainer": Filled(("callbacks", "logger", "default_root_dir"), also="holotrain.config.schema.beside.TrainerOptions"),
}
"""The groups that name any class or function, and what the program knows of their parameters."""

OF_THE_TASK = ("model", "optimizer", "scheduler")
"""Groups that a task takes as parameters. A LightningModule without such a parameter has no such group."""

NAMED = {
    "callbacks": Filled(
        (
            *("dirpath", "probabilities", "count_samples", "count_tokens", "unbucketed"),
            *("model_flops_per_sample", "hardware_flops_per_sample"),
        ),
        unless_given=("monitor", "mode", "peak_flops"),
    ),
    "logger": Filled(("save_dir", "root_dir"), unless_given=("name", "run_name", "group", "tracking_uri", "artifact_location")),
}
"""The groups that are mappings from a name to a class or function, in the same way."""

GROUPS = (*OPEN, *NAMED, "backward")

LOW_BIT = "holotrain.tasks.optimizers.adamw_low_bit"

AVERAGE = "lightning.pytorch.callbacks.weight_averaging.WeightAveraging"
"""The base class of callbacks that average the weights."""


@dataclass(kw_only=True)
class RunConfig:
    """The options of every command."""

    task: Chosen
    data: Chosen
    model: Chosen | None
    backward: BackwardConfig
    synthesis: Chosen | None
    optimizer: Chosen | None
    scheduler: Chosen | None
    callbacks: dict[str, Chosen]
    trainer: Chosen
    logger: dict[str, Chosen]

    seed: int = 0
    """random seed of weights, batches, augmentation and dropout"""

    compile: bool | Literal["max-autotune-no-cudagraphs"] = False
    """compile each block with torch.compile; max-autotune-no-cudagraphs: it measures more kernels, which takes minutes"""

    memory: str | None = None
    """memory budget, such as 16GiB, of plan, backward=auto and batch_size=auto; null: the free memory of the device"""

    output_dir: str = "runs"
    """folder in which runs are saved"""

    ckpt_path: str | None = None
    """checkpoint to start from, with its configuration, which overrides change: a file, the folder of a run, best or last"""

    trust: str | Sequence[str] | None = None
    """package, or list of packages, whose classes a checkpoint may name; holotrain's and torch's optimizers are trusted"""

    # Not options, but how they came about; `compose` sets them, and a configuration made in another way does without.
    overrides: ClassVar[list[str]] = []
    choices: ClassVar[dict[str, str]] = {}
    folder: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        with naming_group("trainer", self.trainer.arguments):
            check_trainer(self.trainer)
        if self.model is not None:
            with naming_group("model", BEGINNING):
                Beginning(**{name: self.model.arguments[name] for name in BEGINNING})
            self.model = with_network(self.model)
        require_within(0, 2**32, seed=self.seed)
        if self.memory is not None:
            with naming_group("memory"):
                parse_bytes(self.memory)
        self._check_task()
        self._check_error_diffusion()
        self._check_backward()
        self._check_batch()
        self._check_strategy()
        check_in_backward(self)

    def _check_task(self) -> None:
        check_together(self.task, self.model, self.data)
        if is_a(self.task, SEQUENCE_CLASSIFIER) and getattr(self.data, "label", "given") is None:
            raise UserError("data.label: give the field or column of the class as data.label=..., or data.label=folder")
        if getattr(self.model, "trained", "all") == "head" and is_a(self.task, CAUSAL_LM, MASKED_LM):
            raise UserError(f"model.trained=head: {self.task.name} shares its head with the embedding; use all or adapters")

    def _check_error_diffusion(self) -> None:
        if not is_a(self.task, ERROR_DIFFUSION) or self.model is None:
            return
        layers = "an error diffusion network has no"
        if self.backward.kind not in (None, PLAIN[0]):
            raise UserError(f"backward={self.backward.kind}: {layers} blocks to recompute; use backward={PLAIN[0]}")
        if self.synthesis is not None:
            raise UserError(f"synthesis: {layers} Linear layers, which it needs; use synthesis=none")
        if self.compile:
            raise UserError(f"compile: {layers} blocks; on a GPU use backward.cuda_graph=true")
        if self.optimizer.target == "holotrain.tasks.optimizers.muon":
            raise UserError(f"optimizer=muon: {layers} blocks, which it needs; use error_diffusion, sgd or adamw")
        if self.task.clamp_signs and self.model.rule == "kaneko":
            raise UserError("task.clamp_signs: model.rule=kaneko never changes a sign; use rule article or backpropagation")

    @property
    def average(self) -> str | None:
        """The name of the callback that averages the weights; None: there is none."""
        return next((name for name, each in self.callbacks.items() if is_a(each, AVERAGE)), None)

    @property
    def batch_option(self) -> tuple[str, Any]:
        """The option that sets the batch size, and its value."""
        tokens = getattr(self.data, "max_tokens", None)
        if tokens is None or is_a(self.task, CAUSAL_LM):  # its blocks have one length
            return "data.batch_size", getattr(self.data, "batch_size", None)
        return "data.max_tokens", tokens

    def with_batch(self, size: int) -> "RunConfig":
        """The same configuration with this batch size."""
        return replace(self, data=self.data.with_arguments(**{self.batch_option[0].removeprefix("data."): size}))

    @property
    def batch_is_open(self) -> bool:
        """Whether the batch size is still to be chosen."""
        return self.batch_option[1] == AUTO

    def _check_batch(self) -> None:
        option, size = self.batch_option
        for other in ("batch_size", "max_tokens"):
            if f"data.{other}" != option and getattr(self.data, other, None) == AUTO:
                raise UserError(f"data.{other}=auto: {option} sets the batch size here; give {option}=auto")
        if size == AUTO and self.backward.open:
            raise UserError(f"{option}=auto: cannot be combined with backward=auto; set one of the two")

    def _check_strategy(self) -> None:
        strategy = self.trainer.strategy
        if strategy == "single":
            return
        if self.backward.cuda_graph or getattr(self.synthesis, "cuda_graph", False):
            option = "backward" if self.backward.cuda_graph else "synthesis"
            raise UserError(f"{option}.cuda_graph: CUDA graphs do not work with trainer={strategy}; set it to false")
        if strategy == "ddp":
            return
        if is_a(self.task, ERROR_DIFFUSION):
            raise UserError(f"trainer={strategy}: error diffusion networks have no blocks to shard; use trainer=ddp")
        parts = f"trainer={strategy} {'divides' if strategy == 'pipeline' else 'shards'} them"
        self._check_shared_out(parts)
        if strategy in ("tp", "pipeline") and getattr(self.model, "adapters", 0):
            raise UserError(f"model.adapters: trainer={strategy} does not support adapters; use trainer=fsdp or ddp")
        if strategy == "pipeline" and getattr(self.model, "trained", "all") != "all":
            raise UserError(
                f"model.trained={self.model.trained}: a stage of trainer=pipeline would train nothing; use trainer=fsdp or ddp"
            )
        batch, count = getattr(self.data, "batch_size", None), self.trainer.microbatches
        if count and isinstance(batch, int) and batch % count:
            raise UserError(f"trainer.microbatches={count}: data.batch_size={batch} is not a multiple of it")
        if self.average is not None:
            raise UserError(f"callbacks.{self.average}: needs whole weights, and {parts}; use trainer=ddp")
        if self.backward.open or self.batch_is_open:
            raise UserError(f"auto: planning needs whole parameters, and {parts}; set backward and the batch size yourself")

    def _check_shared_out(self, parts: str) -> None:
        """What works under FSDP2, but not where layers are divided, too."""
        strategy = self.trainer.strategy
        whole = getattr(self.synthesis, "mode", None) == "bind" or getattr(self.synthesis, "block_length", None) == 0
        if self.synthesis is not None and (strategy != "fsdp" or whole):
            also = ", or synthesis=shared or associative with a block length under trainer=fsdp"
            raise UserError(f"synthesis: needs whole gradients, and {parts}; use trainer=ddp{also}")
        if getattr(self.synthesis, "split", "none") != "none":
            raise UserError(f"synthesis.split: needs whole gradients, and {parts}; use split=none")
        if strategy != "fsdp" and self.optimizer is not None and self.optimizer.target == LOW_BIT:
            name = f"adamw_{self.optimizer.bits}"
            raise UserError(f"optimizer={name}: trainer={strategy} does not support it; use trainer=fsdp or ddp")

    def _check_backward(self) -> None:
        backward, rebuilds = self.backward, reversible(self.model)
        # Of models of others it is known when they are built.
        ours = takes(self.model, "backward") and self.model.target.startswith("holotrain.")
        if ours and not rebuilds and backward.kind not in (None, *PLAIN, AUTO):
            raise UserError(
                f"backward={backward.kind}: {self.model.name} is not reversible; use backward={PLAIN[0]} or model=rev_..."
            )
        for name in backward.engine():
            if takes(self.model, "backward") and not takes(self.model, name):
                why = "is not reversible" if ours else f"has no argument {name}"
                raise UserError(f"backward.{name}: {self.model.name} {why}; remove the option")
        if self.compile and any("+" in words for words in backward.blocks):
            raise UserError("backward.blocks: compiled blocks cannot keep results; remove what follows + or use compile=false")
        if self.compile and backward.keep:
            raise UserError("backward.keep: compiled blocks cannot keep results; use compile=false")
        if backward.cuda_graph and backward.kind in ("checkpoint", AUTO) and not rebuilds:
            raise UserError("backward.cuda_graph: cannot capture the checkpointing of a plain model; use backward=autograd")
        if backward.cuda_graph and self.trainer.accumulate_grad_batches > 1:
            raise UserError("backward.cuda_graph: no support for gradient accumulation; use trainer.accumulate_grad_batches=1")
        if backward.cuda_graph and self.trainer.precision == "16-mixed":
            raise UserError(
                "backward.cuda_graph: no support for the gradient scaling of 16-mixed; use trainer.precision=bf16-mixed"
            )
        if backward.cuda_graph and is_a(self.task, MASKED_LM, SEQUENCE_CLASSIFIER):
            raise UserError(f"backward.cuda_graph: needs batches of one shape; those of {self.task.name} vary")
