"""What each command reads beside."""

from dataclasses import dataclass, field

from holotrain.checks import at_least, one_of, within
from holotrain.config.schema.run import RunConfig
from holotrain.config.schema.task import of_images
from holotrain.errors import UserError


def _require_one_process(command: str, config: RunConfig) -> None:
    if config.trainer.strategy != "single":
        raise UserError(f"trainer={config.trainer.strategy}: {command} runs in one process; leave it out")


def _require_checkpoint(command: str, path: str | None) -> None:
    if not path:
        raise UserError(f"ckpt_path: {command} needs a checkpoint; give ckpt_path=runs/fit/.../checkpoints/last.ckpt")


@dataclass
class FitConfig(RunConfig):
    """Train a model, then test its best checkpoint."""

    resume: bool = False
    """continue the latest run (or sweep) in output_dir, in its own folder, from its last checkpoint"""

    test: bool = True
    """test the best checkpoint after training"""

    profiler: str | None = None
    """simple or advanced: a table of where the time went, as fit-profile.txt in the run's folder; trace: of a few training
    batches, trace.json for ui.perfetto.dev, a table of the dearest operators, and memory over one batch as a picture"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.profiler is not None:
            one_of("profiler", self.profiler, ("simple", "advanced", "trace"))


@dataclass
class ValidateConfig(RunConfig):
    """Measure a checkpoint on the validation part of the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_checkpoint("validate", self.ckpt_path)


@dataclass
class TestConfig(RunConfig):
    """Measure a checkpoint on the test part of the data."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_checkpoint("test", self.ckpt_path)


@dataclass
class PredictConfig(RunConfig):
    """Classify images or texts, or score texts, with a checkpoint; writes predictions.csv."""

    images: str | None = None
    """image file, or folder of images, to classify; null: the test part of the data"""

    texts: str | None = None
    """text file, or folder of them, to classify or (causal_lm) to score; null: the test part of the data"""

    int8: bool = False
    """weights in 8 bits, a scale a row (torchao)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_checkpoint("predict", self.ckpt_path)
        _require_one_process("predict", self)
        if self.task.kind == "masked_lm":
            raise UserError("predict: a masked_lm tells masked words alone; train sequence_classification or causal_lm from it")
        wrong = "texts" if of_images(self.task.kind) else "images"
        if getattr(self, wrong) is not None:
            right = "images" if wrong == "texts" else "texts"
            raise UserError(f"{wrong}: the checkpoint is of task={self.task.kind}; give {right}=...")


@dataclass
class GenerateConfig(RunConfig):
    """Continue a text with a causal_lm checkpoint."""

    prompt: str | None = None
    """text to continue"""

    prompts: str | None = None
    """file of prompts in its place: one a line, or .jsonl with a field prompt"""

    max_tokens: int = 256
    """tokens to add"""

    temperature: float = 0.8
    """logits are divided by it; 0: always the likeliest token"""

    top_k: int | None = None
    """draw among so many of the likeliest tokens; null: all"""

    top_p: float | None = None
    """draw among the likeliest tokens that reach this probability together; null: all"""

    stream: bool = True
    """show the text of a single prompt as it comes"""

    int8: bool = False
    """weights in 8 bits, a scale a row (torchao)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_checkpoint("generate", self.ckpt_path)
        _require_one_process("generate", self)
        if self.task.kind != "causal_lm":
            raise UserError(f"generate: it continues texts with a causal_lm; the checkpoint is of task={self.task.kind}")
        if self.prompt is None and self.prompts is None:
            raise UserError('generate needs prompt="..." or prompts=FILE')
        if self.prompt is not None and self.prompts is not None:
            raise UserError("generate: both prompt= and prompts= are given; take one of the two")
        at_least("max_tokens", self.max_tokens, 1)
        at_least("temperature", self.temperature, 0)
        if self.top_k is not None:
            at_least("top_k", self.top_k, 1)
        if self.top_p is not None:
            within("top_p", self.top_p, 1e-9, 1, closed=True)


@dataclass
class ExportConfig(RunConfig):
    """Write a checkpoint's model as safetensors, for holotrain.load, or as a program."""

    to: str | None = None
    """folder to write; null: export in the run's own"""

    format: str = "safetensors"
    """safetensors; of image classifiers also program (torch.export) or onnx beside it"""

    int8: bool = False
    """weights in 8 bits, a scale a row (torchao)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_checkpoint("export", self.ckpt_path)
        _require_one_process("export", self)
        one_of("format", self.format, ("safetensors", "program", "onnx"))
        if self.format != "safetensors" and not of_images(self.task.kind):
            raise UserError(f"format={self.format}: it is for image classifiers; the checkpoint is of task={self.task.kind}")
        if self.format != "safetensors" and self.int8:
            raise UserError(f"int8: format={self.format} holds full weights; take format=safetensors")


@dataclass
class PlanConfig(RunConfig):
    """Foretell the memory of a training, the largest batch and depth that fit, and what several devices would make of it."""

    device: str = "auto"
    """cuda, cpu, or auto: the CPU with trainer.accelerator=cpu, else a GPU, be there one here or not"""

    json: str | None = None
    """file to write the figures to beside plan.json in the run's folder; -: the standard output, in place of the table"""

    devices: int | None = None
    """predict, on paper, memory and time of DDP, FSDP2 and tensor parallel on so many"""

    link: str = "nvlink"
    """between those devices: nvlink, nvlink3, nvlink4, nvlink5, pcie, pcie4, pcie5, infiniband, ethernet, ethernet10 or
    ethernet100"""

    gpu: str | None = None
    """GPU whose peak stands for times that cannot be measured here: A100, B200, H100, H100 NVL, H100 PCIe, H200, L40S,
    RTX 4090, RTX 5090"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("device", self.device, ("auto", "cuda", "cpu"))
        if self.trainer.strategy in ("fsdp", "tp"):
            raise UserError(f"trainer={self.trainer.strategy}: a plan is of one process, and of several on paper by devices=8")
        if self.devices is not None:
            at_least("devices", self.devices, 1)
        if self.gpu is not None and self.devices is None:
            raise UserError("gpu: it is for the times of several devices; give devices=8 too")
        if self.link != "nvlink" and self.devices is None:
            raise UserError("link: it lies between several devices; give devices=8 too")


@dataclass
class ReportConfig:
    """Compare runs on one HTML page: their curves, what differs among them, what came of each."""

    runs: list[str] = field(default_factory=list)
    """folder of a run, of a sweep or of several runs, or a pattern of such: 'runs/fit/2026-*'"""

    to: str = "report.html"
    """file to write"""


COMMANDS: dict[str, type[RunConfig]] = {
    "fit": FitConfig,
    "validate": ValidateConfig,
    "test": TestConfig,
    "predict": PredictConfig,
    "generate": GenerateConfig,
    "export": ExportConfig,
    "plan": PlanConfig,
}
"""The configuration of each command that Hydra composes one for."""

FOLDER_COMMANDS = {"report": ReportConfig}
"""Commands that take folders instead: what has been run, with no configuration to compose."""
