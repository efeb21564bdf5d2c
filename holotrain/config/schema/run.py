"""What every command reads, and which options go together."""

from dataclasses import dataclass, field, replace
from typing import Any

from omegaconf import MISSING

from holotrain.checks import described_by, within
from holotrain.config.schema.backward import AUTO, PLAIN, BackwardConfig, reversible, schedules_of
from holotrain.config.schema.data import DATA, DataConfig
from holotrain.config.schema.model import ModelConfig, TransformerConfig, family
from holotrain.config.schema.optimization import OptimizerConfig, SchedulerConfig
from holotrain.config.schema.running import CallbacksConfig, LoggerConfig, TrainerConfig
from holotrain.config.schema.synthesis import SynthesisConfig
from holotrain.config.schema.task import FAMILIES, LEARNED_FROM, TaskConfig, tells_classes
from holotrain.errors import UserError
from holotrain.sizes import parse_bytes


@dataclass
class RunConfig:
    """What every command reads."""

    task: TaskConfig = MISSING

    data: DataConfig = MISSING

    model: ModelConfig = MISSING

    backward: BackwardConfig = MISSING

    synthesis: SynthesisConfig = MISSING

    optimizer: OptimizerConfig = MISSING

    scheduler: SchedulerConfig = MISSING

    callbacks: CallbacksConfig = field(default_factory=CallbacksConfig)

    trainer: TrainerConfig = field(default_factory=TrainerConfig)

    logger: LoggerConfig = MISSING

    seed: int = 0
    """of weights, batches, augmentation and dropout"""

    compile: bool = False
    """compile each block with torch.compile"""

    memory: str | None = None
    """of the device that a run may take, such as 16GiB, to plan by and for backward=auto; null: what is free"""

    output_dir: str = "runs"
    """folder that runs are written to"""

    ckpt_path: str | None = None
    """checkpoint to start from; its configuration is taken too, and overrides change it"""

    def __post_init__(self) -> None:
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
                f"take another model or task={' or '.join(tasks)}"
            )
        if not isinstance(self.data, data):
            kinds = [kind for kind, schema in DATA.items() if issubclass(schema, data)]
            raise UserError(f"data: task={task} learns from {', '.join(kinds)}, not {self.data.kind}")
        of_documents = task in ("masked_lm", "sequence_classification")
        if of_documents and isinstance(self.data.max_tokens, int) and self.data.max_tokens < self.data.context:
            raise UserError(
                f"data.max_tokens: {self.data.max_tokens} is out of range; a document may have data.context={self.data.context}"
            )
        if task == "sequence_classification" and getattr(self.data, "label", "given") is None:
            raise UserError("data.label: which field, or column, holds the class? Give data.label=..., or data.label=folder")
        if isinstance(self.model, TransformerConfig) and self.model.trained == "head" and not tells_classes(task):
            raise UserError(f"model.trained=head: the head of task={task} is its embedding; take all or adapters")

    def _check_error_diffusion(self) -> None:
        if self.task.kind != "error_diffusion":
            return
        layers = "a network for error diffusion has no"
        if self.backward.kind not in schedules_of(self.model.kind):
            raise UserError(f"backward={self.backward.kind}: {layers} blocks to rebuild; leave it at {PLAIN[0]}")
        if self.synthesis.kind != "none":
            raise UserError(f"synthesis={self.synthesis.kind}: {layers} Linear layers, which it works on")
        if self.compile:
            raise UserError(f"compile: {layers} blocks; on a GPU take backward.cuda_graph=true")
        if self.optimizer.kind == "muon":
            raise UserError(f"optimizer=muon: {layers} blocks, which it is for; take error_diffusion, sgd or adamw")
        if self.task.clamp_signs and self.model.rule == "kaneko":
            raise UserError("task.clamp_signs: model.rule=kaneko loses no sign; it is for article and backpropagation")

    @property
    def batch_option(self) -> tuple[str, Any]:
        """The option that says how large a batch is, and its value."""
        tokens = getattr(self.data, "max_tokens", None)
        if tokens is None or self.task.kind == "causal_lm":  # whose blocks are of one length
            return "data.batch_size", self.data.batch_size
        return "data.max_tokens", tokens

    def with_batch(self, size: int) -> "RunConfig":
        """The same with that option set."""
        return replace(self, data=replace(self.data, **{self.batch_option[0].removeprefix("data."): size}))

    @property
    def batch_is_open(self) -> bool:
        """Whether the size of a batch is still to be chosen."""
        return self.batch_option[1] == AUTO

    def _check_batch(self) -> None:
        option, size = self.batch_option
        for other in ("batch_size", "max_tokens"):
            if f"data.{other}" != option and getattr(self.data, other, None) == AUTO:
                raise UserError(f"data.{other}=auto: here {option} says how large a batch is; give {option}=auto")
        if size == AUTO and self.backward.open:
            raise UserError(f"{option}=auto: backward=auto wants the same memory; give one of the two a value")

    def _check_strategy(self) -> None:
        strategy = self.trainer.strategy
        if strategy == "single":
            return
        if self.backward.cuda_graph or getattr(self.synthesis, "cuda_graph", False):
            option = "backward" if self.backward.cuda_graph else "synthesis"
            raise UserError(f"{option}.cuda_graph: a replay talks to no other process; with trainer={strategy} leave it out")
        if strategy == "ddp":
            return
        if self.task.kind == "error_diffusion":
            raise UserError(f"trainer={strategy}: it shares out blocks, which error diffusion has none of; take trainer=ddp")
        parts = f"trainer={strategy} leaves a process parts alone"
        if self.synthesis.kind != "none":
            raise UserError(f"synthesis={self.synthesis.kind}: it transforms whole gradients, and {parts}; take trainer=ddp")
        if strategy == "tp" and getattr(self.model, "adapters", 0):
            raise UserError("model.adapters: trainer=tp shares out plain layers; take trainer=fsdp or ddp")
        if self.callbacks.ema.decay is not None:
            raise UserError(f"callbacks.ema: it averages whole weights, and {parts}; take trainer=ddp")
        if self.backward.open or self.batch_is_open:
            raise UserError(f"auto: memory is planned for whole models, and {parts}; choose backward and batch yourself")

    def _check_backward(self) -> None:
        backward, rebuilds = self.backward, reversible(self.model.kind)
        if backward.kind not in (*PLAIN, AUTO) and not rebuilds:
            raise UserError(
                f"backward={backward.kind}: model kind {self.model.kind!r} is not reversible; "
                f"take backward={PLAIN[0]} or model=rev_{self.model.kind}_..."
            )
        if backward.engine() and not rebuilds:
            option = next(iter(backward.engine()))
            raise UserError(f"backward.{option}: model kind {self.model.kind!r} is not reversible and has no use for it")
        if self.compile and any("+" in words for words in backward.blocks):
            raise UserError("backward.blocks: nothing can be kept within compiled blocks; leave out what follows the plus")
        if backward.cuda_graph and backward.kind == AUTO and not rebuilds:
            raise UserError("backward.cuda_graph: a plain model's checkpoints cannot be captured; take backward=autograd")
        if self.compile and backward.keep:
            raise UserError("backward.keep: it cannot reach into compiled blocks; take compile=false")
        if backward.cuda_graph and backward.kind == "checkpoint" and not rebuilds:
            raise UserError("backward.cuda_graph: a plain model's checkpoints cannot be captured; take backward=autograd")
        if backward.cuda_graph and self.trainer.accumulate_grad_batches > 1:
            raise UserError("backward.cuda_graph: a replay overwrites gradients; take trainer.accumulate_grad_batches=1")
        if backward.cuda_graph and self.trainer.precision == "16-mixed":
            raise UserError("backward.cuda_graph: the scale of 16-mixed would be captured as it was; take bf16-mixed")
        if backward.cuda_graph and self.task.kind in ("masked_lm", "sequence_classification"):
            raise UserError(f"backward.cuda_graph: a graph wants batches of one shape, and those of {self.task.kind} vary")
