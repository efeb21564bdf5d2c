"""The options of each command."""

from dataclasses import dataclass, field
from typing import Literal

from holotrain.config.schema.classes import CAUSAL_LM, IMAGES, MASKED_LM, TEXT, is_a
from holotrain.config.schema.run import RunConfig
from holotrain.config.signatures import Option, signature
from holotrain.errors import UserError
from holotrain.ranges import require_at_least, require_within


class OfCheckpoint(RunConfig):
    """The options of a command that needs a checkpoint."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ckpt_path:
            raise UserError(f"ckpt_path: {self.command} needs a checkpoint; give ckpt_path=best, or the folder of a run")

    @property
    def command(self) -> str:
        return next(name for name, schema in COMMANDS.items() if schema is type(self))


@dataclass
class OfModel(OfCheckpoint):
    """The options of a command that uses a trained model in one process."""

    int8: bool = False
    """quantize weights to 8 bits, one scale per row (torchao)"""

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

    profiler: Literal["simple", "advanced", "trace"] | None = None
    """simple or advanced: write fit-profile.txt; trace: write trace.json (for ui.perfetto.dev) and a memory plot; null: off"""


class ValidateConfig(OfCheckpoint):
    """Evaluate a checkpoint on the validation set."""


class TestConfig(OfCheckpoint):
    """Evaluate a checkpoint on the test set."""


@dataclass
class PredictConfig(OfModel):
    """Classify images or texts, or score texts, with a checkpoint. Writes predictions.csv."""

    images: str | None = None
    """image file or folder of images to classify; null: the test set"""

    texts: str | None = None
    """text file or folder of text files to classify or (causal_lm) to score; null: the test set"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if is_a(self.task, MASKED_LM):
            raise UserError("predict: MaskedLM predicts nothing; use a checkpoint of sequence_classification or causal_lm")
        for name, of, other in (("images", TEXT, "texts"), ("texts", IMAGES, "images")):
            if getattr(self, name) is not None and is_a(self.data, of):
                raise UserError(f"{name}: the checkpoint learned from {other}; give {other}=...")


@dataclass
class GenerateConfig(OfModel):
    """Continue a text with a causal_lm checkpoint."""

    prompt: str | None = None
    """text to continue"""

    prompts: str | None = None
    """file of prompts: one per line, or .jsonl with a field named prompt"""

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
        if not is_a(self.task, CAUSAL_LM):
            raise UserError(f"generate: needs a checkpoint of causal_lm; this one is of {self.task.name}")
        if self.prompt is None and self.prompts is None:
            raise UserError('generate needs prompt="..." or prompts=FILE')
        if self.prompt is not None and self.prompts is not None:
            raise UserError("generate: give either prompt= or prompts=, not both")
        require_at_least(1, max_tokens=self.max_tokens, top_k=self.top_k)
        require_at_least(0, temperature=self.temperature)
        require_within(1e-9, 1, closed=True, top_p=1 if self.top_p is None else self.top_p)


@dataclass
class ExportConfig(OfModel):
    """Write a checkpoint's model as safetensors (for holotrain.load), torch.export program or ONNX."""

    to: str | None = None
    """folder to write; null: export in the run's folder"""

    format: Literal["safetensors", "program", "onnx"] = "safetensors"
    """safetensors; for image classifiers also program (torch.export) or onnx, written in addition"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format != "safetensors" and is_a(self.data, TEXT):
            raise UserError(f"format={self.format}: needs a model of images; use format=safetensors")
        if self.format != "safetensors" and self.int8:
            raise UserError(f"int8: not supported by format={self.format}; use format=safetensors")


@dataclass
class PlanConfig(RunConfig):
    """Predict peak memory, the largest batch and depth that fit, and the speed on several devices."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda or cpu; auto: cpu with trainer.accelerator=cpu, else cuda, even if this machine has no GPU"""

    json: str | None = None
    """another file for the content of plan.json; -: print it to standard output instead of the table"""

    devices: int | None = None
    """number of devices for which to predict memory and time of DDP, FSDP2 and tensor parallel; null: none"""

    link: str = "nvlink"
    """link between the devices: nvlink, nvlink3 to 5, pcie, pcie4, pcie5, infiniband, ethernet, ethernet10 or ethernet100"""

    gpu: str | None = None
    """estimate times for A100, B200, H100, H100 NVL, H100 PCIe, H200, L40S, RTX 4090 or RTX 5090; null: measure them here"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trainer.strategy in ("fsdp", "tp", "pipeline"):
            raise UserError(
                f"trainer={self.trainer.strategy}: plan runs in one process; use trainer=default, and devices=8 to plan for 8"
            )
        require_at_least(1, devices=self.devices)
        for name, given in (("gpu", self.gpu is not None), ("link", self.link != "nvlink")):
            if given and self.devices is None:
                raise UserError(f"{name}: needs devices, the number of devices; give devices=8, for example")


@dataclass
class ReportConfig:
    """Compare runs on one HTML page: curves, differing options and results."""

    runs: list[str] = field(
        default_factory=list,
        metadata={"word": "RUN", "needs": "the folder of a run or sweep; for example holotrain report runs/fit/sweeps/..."},
    )
    """folder of a run, a sweep or several runs, or a glob: 'runs/fit/2026-*'"""

    to: str = "report.html"
    """file to write"""


@dataclass
class InitConfig:
    """Write a small working project with a model, data and a callback of your own."""

    name: str = field(default="", metadata={"word": "NAME", "needs": "a name; for example holotrain init my_project"})
    """name of the project and of its Python package; a path: the folder to write, whose last part is the name"""


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


WORD_COMMANDS = {"report": ReportConfig, "init": InitConfig}
"""Commands that take words instead of a composed configuration. The first field of each gets the words, one or a list."""
