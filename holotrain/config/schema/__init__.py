"""Every option there is, typed and explained: dataclasses that Hydra checks configurations against.

A polymorphic group (task, data, model, synthesis, optimizer, scheduler) names its class by ``kind``; the cross-checks of one
group stand in its ``__post_init__``, those between groups in RunConfig's. Nothing here imports torch: ``--help`` is quick.
"""

from dataclasses import dataclass, field

from omegaconf import MISSING

from holotrain.config.checks import within
from holotrain.config.schema.data import DATA, DataConfig
from holotrain.config.schema.model import MODELS, SCHEDULES, BackwardConfig, ModelConfig
from holotrain.config.schema.optimization import OPTIMIZERS, SCHEDULERS, OptimizerConfig, SchedulerConfig
from holotrain.config.schema.running import CallbacksConfig, LoggerConfig, TrainerConfig
from holotrain.config.schema.synthesis import SYNTHESES, SynthesisConfig
from holotrain.config.schema.task import TASKS, TaskConfig
from holotrain.errors import UserError

KINDS: dict[str, dict[str, type]] = {
    "task": TASKS,
    "data": DATA,
    "model": MODELS,
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "synthesis": SYNTHESES,
}
"""The classes of each polymorphic group by kind."""

PLAIN = {"backward": BackwardConfig, "callbacks": CallbacksConfig, "trainer": TrainerConfig, "logger": LoggerConfig}
"""The class of each of the other groups."""


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

    output_dir: str = "runs"
    """folder that runs are written to"""

    ckpt_path: str | None = None
    """checkpoint to start from; its configuration is taken too, and overrides change it"""

    def __post_init__(self) -> None:
        within("seed", self.seed, 0, 2**32)
        allowed = SCHEDULES[self.model.kind]
        if self.backward.kind not in allowed:
            raise UserError(
                f"backward={self.backward.kind}: model kind {self.model.kind!r} is not reversible; "
                f"take backward={allowed[0]} or model=rev_{self.model.kind}_..."
            )
        if self.backward.engine() and "reversible" not in allowed:
            option = next(iter(self.backward.engine()))
            raise UserError(f"backward.{option}: model kind {self.model.kind!r} is not reversible and has no use for it")
        if self.compile and self.backward.keep:
            raise UserError("backward.keep: it cannot reach into compiled blocks; take compile=false")
        if self.backward.cuda_graph and self.backward.kind == "checkpoint" and "reversible" not in allowed:
            raise UserError("backward.cuda_graph: a plain model's checkpoints cannot be captured; take backward=autograd")
        if self.backward.cuda_graph and self.trainer.accumulate_grad_batches > 1:
            raise UserError("backward.cuda_graph: a replay overwrites gradients; take trainer.accumulate_grad_batches=1")
        if self.backward.cuda_graph and self.trainer.precision == "16-mixed":
            raise UserError("backward.cuda_graph: the scale of 16-mixed would be captured as it was; take bf16-mixed")


@dataclass
class FitConfig(RunConfig):
    """Train a model, then test its best checkpoint."""

    resume: bool = False
    """continue the latest run (or sweep) in output_dir, in its own folder, from its last checkpoint"""

    test: bool = True
    """test the best checkpoint after training"""


@dataclass
class ValidateConfig(RunConfig):
    """Measure a checkpoint on the validation part of the data."""


@dataclass
class TestConfig(RunConfig):
    """Measure a checkpoint on the test part of the data."""


@dataclass
class PredictConfig(RunConfig):
    """Classify images with a checkpoint; writes predictions.csv."""

    images: str | None = None
    """image file, or folder of images, to classify; null: the test part of the data"""


COMMANDS: dict[str, type[RunConfig]] = {
    "fit": FitConfig,
    "validate": ValidateConfig,
    "test": TestConfig,
    "predict": PredictConfig,
}
"""The configuration of each command."""
