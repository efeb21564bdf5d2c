"""The options of every command, and the checks across groups."""

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from holotrain.checks import described_by, within
from holotrain.config.chosen import Chosen, Filled, chosen
from holotrain.config.schema.backward import AUTO, PLAIN, BackwardConfig, reversible, schedules_of
from holotrain.config.schema.data import DATA, DataConfig
from holotrain.config.schema.model import ModelConfig, TransformerConfig, family
from holotrain.config.schema.running import CallbacksConfig, LoggerConfig
from holotrain.config.schema.synthesis import SynthesisConfig
from holotrain.config.schema.task import FAMILIES, LEARNED_FROM, TaskConfig, tells_classes
from holotrain.config.schema.trainer import check_trainer
from holotrain.errors import UserError
from holotrain.sizes import parse_bytes

OPEN = {
    "optimizer": Filled("model", "params"),
    "scheduler": Filled("optimizer", "steps", "total_steps"),
    "trainer": Filled("callbacks", "logger", "default_root_dir", also="holotrain.config.schema.trainer.Processes"),
}
"""The groups that name any class or function, and what the program knows of their parameters."""


@dataclass
class RunConfig:
    """The options of every command."""

    task: TaskConfig = MISSING

    data: DataConfig = MISSING

    model: ModelConfig = MISSING

    backward: BackwardConfig = MISSING

    synthesis: SynthesisConfig = MISSING

    optimizer: Any = MISSING

    scheduler: Any = MISSING

    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)

    trainer: Any = MISSING

    logger: LoggerConfig = MISSING

    seed: int = 0
    """random seed of weights, batches, augmentation and dropout"""

    compile: bool = False
    """compile each block with torch.compile"""

    memory: str | None = None
    """memory budget, such as 16GiB, of plan, backward=auto and batch_size=auto; null: the free memory of the device"""

    output_dir: str = "runs"
    """folder in which runs are saved"""

    ckpt_path: str | None = None
    """checkpoint to start from, with its configuration; overrides change that"""

    trust: Any = None
    """package, or list of packages, whose classes a checkpoint may name; holotrain's and torch's optimizers are trusted"""

    def __post_init__(self) -> None:
        for group, filled in OPEN.items():
            if not isinstance(getattr(self, group), Chosen):
                setattr(self, group, chosen(group, getattr(self, group), filled))
        check_trainer(self.trainer)
        within("seed", self.seed, 0, 2**32)
        if self.memory is not None:
            with described_by("memory"):
                parse_bytes(self.memory)
        self._check_task()
        self._check_error_diffusion()
        self._check_backward()
        self._check_batch()
        self._check_strategy()

    def _check_task(self) -> None:
        task, families, data = self.task.kind, FAMILIES[self.task.kind], LEARNED_FROM[self.task.kind]
        if family(self.model.kind) not in families:
            tasks = [name for name, trained in FAMILIES.items() if family(self.model.kind) in trained]
            raise UserError(
                f"model: task={task} trains {' or '.join(families)}, not {self.model.kind}; "
                f"use another model or task={' or '.join(tasks)}"
            )
        if not isinstance(self.data, data):
            kinds = [kind for kind, schema in DATA.items() if issubclass(schema, data)]
            raise UserError(f"data: task={task} needs one of {', '.join(kinds)}, not {self.data.kind}")
        of_documents = task in ("masked_lm", "sequence_classification")
        if of_documents and isinstance(self.data.max_tokens, int) and self.data.max_tokens < self.data.context:
            raise UserError(
                f"data.max_tokens: {self.data.max_tokens} is out of range; it must be at least data.context={self.data.context}"
            )
        if task == "sequence_classification" and getattr(self.data, "label", "given") is None:
            raise UserError("data.label: give the field or column of the class as data.label=..., or data.label=folder")
        if isinstance(self.model, TransformerConfig) and self.model.trained == "head" and not tells_classes(task):
            raise UserError(f"model.trained=head: task={task} shares its head with the embedding; use all or adapters")

    def _check_error_diffusion(self) -> None:
        if self.task.kind != "error_diffusion":
            return
        layers = "an error diffusion network has no"
        if self.backward.kind not in schedules_of(self.model.kind):
            raise UserError(f"backward={self.backward.kind}: {layers} blocks to recompute; use backward={PLAIN[0]}")
        if self.synthesis.kind != "none":
            raise UserError(f"synthesis={self.synthesis.kind}: {layers} Linear layers, which it needs; use synthesis=none")
        if self.compile:
            raise UserError(f"compile: {layers} blocks; on a GPU use backward.cuda_graph=true")
        if self.optimizer.target == "holotrain.tasks.optimizers.muon":
            raise UserError(f"optimizer=muon: {layers} blocks, which it needs; use error_diffusion, sgd or adamw")
        if self.task.clamp_signs and self.model.rule == "kaneko":
            raise UserError("task.clamp_signs: model.rule=kaneko never changes a sign; use rule article or backpropagation")

    @property
    def batch_option(self) -> tuple[str, Any]:
        """The option that sets the batch size, and its value."""
        tokens = getattr(self.data, "max_tokens", None)
        if tokens is None or self.task.kind == "causal_lm":  # its blocks have one length
            return "data.batch_size", self.data.batch_size
        return "data.max_tokens", tokens

    def with_batch(self, size: int) -> "RunConfig":
        """The same configuration with this batch size."""
        return replace(self, data=replace(self.data, **{self.batch_option[0].removeprefix("data."): size}))

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
        if self.task.kind == "error_diffusion":
            raise UserError(f"trainer={strategy}: error diffusion networks have no blocks to shard; use trainer=ddp")
        parts = f"trainer={strategy} shards them"
        if self.synthesis.kind != "none":
            raise UserError(f"synthesis={self.synthesis.kind}: needs whole gradients, and {parts}; use trainer=ddp")
        if strategy == "tp" and getattr(self.model, "adapters", 0):
            raise UserError("model.adapters: trainer=tp does not support adapters; use trainer=fsdp or ddp")
        if self.callbacks.ema.decay is not None:
            raise UserError(f"callbacks.ema: needs whole weights, and {parts}; use trainer=ddp")
        if self.backward.open or self.batch_is_open:
            raise UserError(f"auto: planning needs whole parameters, and {parts}; set backward and the batch size yourself")

    def _check_backward(self) -> None:
        backward, rebuilds = self.backward, reversible(self.model.kind)
        if backward.kind not in (*PLAIN, AUTO) and not rebuilds:
            raise UserError(
                f"backward={backward.kind}: model kind {self.model.kind!r} is not reversible; "
                f"use backward={PLAIN[0]} or model=rev_{self.model.kind}_..."
            )
        if backward.engine() and not rebuilds:
            option = next(iter(backward.engine()))
            raise UserError(f"backward.{option}: model kind {self.model.kind!r} is not reversible; remove the option")
        if self.compile and any("+" in words for words in backward.blocks):
            raise UserError("backward.blocks: compiled blocks cannot keep results; remove what follows + or use compile=false")
        if backward.cuda_graph and backward.kind == AUTO and not rebuilds:
            raise UserError("backward.cuda_graph: cannot capture the checkpointing of a plain model; use backward=autograd")
        if self.compile and backward.keep:
            raise UserError("backward.keep: compiled blocks cannot keep results; use compile=false")
        if backward.cuda_graph and backward.kind == "checkpoint" and not rebuilds:
            raise UserError("backward.cuda_graph: cannot capture the checkpointing of a plain model; use backward=autograd")
        if backward.cuda_graph and self.trainer.accumulate_grad_batches > 1:
            raise UserError("backward.cuda_graph: no support for gradient accumulation; use trainer.accumulate_grad_batches=1")
        if backward.cuda_graph and self.trainer.precision == "16-mixed":
            raise UserError(
                "backward.cuda_graph: no support for the gradient scaling of 16-mixed; use trainer.precision=bf16-mixed"
            )
        if backward.cuda_graph and self.task.kind in ("masked_lm", "sequence_classification"):
            raise UserError(f"backward.cuda_graph: needs batches of one shape; those of task={self.task.kind} vary")
