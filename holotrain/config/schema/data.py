"""What is learned from."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from holotrain.checks import at_least, at_least_or_auto, one_of, within
from holotrain.errors import UserError


@dataclass
class DataConfig:
    kind: str = MISSING


@dataclass
class ImageDataConfig(DataConfig):
    batch_size: Any = 128
    """images a step; auto: the most that memory holds, by the plan"""

    num_workers: int = 0
    """processes that load images beside the training; 0 loads them in it"""

    pin_memory: bool | None = None
    """page-locked batches, copied faster to a GPU; null: where there is one"""

    augment: bool = True
    """random crops, flips or shifts, as suits the data"""

    randaugment_ops: int = 0
    """random operations an image (RandAugment); 0: none"""

    randaugment_magnitude: int = 9
    """their strength, 0 to 30"""

    mixup_alpha: float = 0.0
    """MixUp's Beta parameter; 0: none"""

    cutmix_alpha: float = 0.0
    """CutMix's Beta parameter; 0: none; with both, each batch takes one of the two"""

    def __post_init__(self) -> None:
        at_least_or_auto("data.batch_size", self.batch_size, 1)
        at_least("data.num_workers", self.num_workers, 0)
        at_least("data.randaugment_ops", self.randaugment_ops, 0)
        within("data.randaugment_magnitude", self.randaugment_magnitude, 0, 30, closed=True)
        at_least("data.mixup_alpha", self.mixup_alpha, 0)
        at_least("data.cutmix_alpha", self.cutmix_alpha, 0)


@dataclass
class DigitsConfig(ImageDataConfig):
    kind: str = "digits"

    val_fraction: float = 0.1
    """share of what is not held out for the test that validates"""

    classes: list[Any] = field(default_factory=list)
    """those to keep, by name or number, such as [0, 1]; []: all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("data.val_fraction", self.val_fraction, 0, 1)


@dataclass
class TorchvisionConfig(ImageDataConfig):
    kind: str = MISSING

    root: str = "data"
    """folder that holds the data set, or will"""

    download: bool = True
    """fetch it into root where it is missing"""

    val_fraction: float = 0.1
    """share of the published training part that validates"""

    classes: list[Any] = field(default_factory=list)
    """those to keep, by name or number, such as [0, 1]; []: all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("data.val_fraction", self.val_fraction, 0, 1)


@dataclass
class ImageFolderConfig(ImageDataConfig):
    kind: str = "imagefolder"

    root: str = MISSING
    """folder with train/<class>/*, val/<class>/* and, if there is one, test/<class>/*"""

    image_size: int = 224
    """pixels along an image after augmentation"""

    on_corrupt: str = "error"
    """an unreadable image ends the run (error) or is named and left out (skip)"""

    classes: list[Any] = field(default_factory=list)
    """those to keep, by name or number, such as [0, 1]; []: all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.image_size", self.image_size, 1)
        one_of("data.on_corrupt", self.on_corrupt, ("error", "skip"))


@dataclass
class FakeConfig(ImageDataConfig):
    kind: str = "fake"

    image_size: int = 224
    """pixels along an image"""

    channels: int = 3
    """colour channels"""

    num_classes: int = 1000
    """classes to tell apart"""

    train_size: int = 1024
    """images to train on"""

    val_size: int = 128
    """images to validate on"""

    test_size: int = 128
    """images to test on"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "channels", "train_size", "val_size", "test_size"):
            at_least(f"data.{name}", getattr(self, name), 1)
        at_least("data.num_classes", self.num_classes, 2)


@dataclass
class TextDataConfig(DataConfig):
    context: int = 256
    """tokens that a model sees at once: of a packed block, or at most of a document"""

    batch_size: Any = 32
    """packed blocks a step; documents, where max_tokens is null; auto: the most that memory holds, by the plan"""

    max_tokens: Any = 8192
    """of documents, in the place of batch_size: a batch's longest times its number, at most; auto: as for batch_size"""

    bucketing: bool = True
    """documents of about one length share a batch; false: random ones do"""

    pad_to_multiple_of: int = 1
    """documents are padded to their batch's longest, rounded up to a multiple of this"""

    tokenizer: str | None = None
    """byte, bpe (trained on the training part) or the path of a tokenizer.json; null: that of model.pretrained, else byte"""

    vocab_size: int = 8192
    """words of a bpe that is trained"""

    unit: str | None = None
    """a document: file (or row), paragraph or line; null: paragraph for masked_lm, and to classify text_stdlib; else file"""

    val_fraction: float = 0.01
    """share of the files that validates, the same ones always"""

    test_fraction: float = 0.02
    """share of the files that tests"""

    cache_dir: str = "data/text"
    """folder for tokens, made once"""

    num_workers: int = 0
    """processes that load beside the training; 0 loads in it"""

    pin_memory: bool | None = None
    """page-locked batches, copied faster to a GPU; null: where there is one"""

    def __post_init__(self) -> None:
        for name in ("context", "pad_to_multiple_of", "vocab_size"):
            at_least(f"data.{name}", getattr(self, name), 1)
        at_least_or_auto("data.batch_size", self.batch_size, 1)
        if self.max_tokens is not None:
            at_least_or_auto("data.max_tokens", self.max_tokens, 1)
        at_least("data.num_workers", self.num_workers, 0)
        if self.unit is not None:
            one_of("data.unit", self.unit, ("file", "paragraph", "line"))
        if self.context % self.pad_to_multiple_of:
            raise UserError(f"data.pad_to_multiple_of: {self.pad_to_multiple_of} does not divide data.context, {self.context}")
        within("data.val_fraction", self.val_fraction, 1e-6, 1)
        within("data.test_fraction", self.test_fraction, 1e-6, 1)


@dataclass
class StdlibTextConfig(TextDataConfig):
    kind: str = "text_stdlib"

    classes: int = 8
    """of sequence_classification: the so many packages with most files, to be told apart"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.classes", self.classes, 2)


@dataclass
class TextFilesConfig(TextDataConfig):
    kind: str = "text_files"

    files: Any = MISSING
    """glob of files, or a list of globs: plain text, .jsonl, .parquet"""

    val_files: Any = field(default_factory=list)
    """the same of files that validate, in the place of val_fraction"""

    test_files: Any = field(default_factory=list)
    """the same of files that test, in the place of test_fraction"""

    text: str = "text"
    """field or column that holds the text, of .jsonl and .parquet"""

    label: str | None = None
    """of sequence_classification: the field or column that holds the class; folder: the name of a file's folder"""

    on_error: str = "error"
    """a file or row that cannot be read ends the run (error) or is left out and counted (skip)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data.on_error", self.on_error, ("error", "skip"))
        for name in ("files", "val_files", "test_files"):
            patterns = getattr(self, name)
            patterns = [patterns] if isinstance(patterns, str) else patterns
            if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
                raise UserError(f"data.{name}: {patterns!r} is neither a glob of files nor a list of globs")


DATA = {
    "digits": DigitsConfig,
    "mnist": TorchvisionConfig,
    "cifar10": TorchvisionConfig,
    "cifar100": TorchvisionConfig,
    "imagefolder": ImageFolderConfig,
    "fake": FakeConfig,
    "text_stdlib": StdlibTextConfig,
    "text_files": TextFilesConfig,
}
