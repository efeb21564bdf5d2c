"""Options of the data sets."""

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
    """images per step and process; auto: the largest batch that fits into memory, by the plan"""

    num_workers: int = 0
    """worker processes that load images; 0: load in the training process"""

    pin_memory: bool | None = None
    """pin batches in host memory for faster copies to a GPU; null: if a GPU is used"""

    augment: bool = True
    """random crops, flips or shifts, depending on the data set"""

    randaugment_ops: int = 0
    """RandAugment operations per image; 0: none"""

    randaugment_magnitude: int = 9
    """strength of the RandAugment operations, 0 to 30"""

    mixup_alpha: float = 0.0
    """alpha of MixUp's Beta distribution; 0: no MixUp"""

    cutmix_alpha: float = 0.0
    """alpha of CutMix's Beta distribution; 0: no CutMix; with MixUp too, each batch uses one of the two"""

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
    """fraction of the images outside the test set that is used for validation"""

    classes: list[Any] = field(default_factory=list)
    """classes to keep, by name or number, such as [0, 1]; []: all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("data.val_fraction", self.val_fraction, 0, 1)


@dataclass
class TorchvisionConfig(ImageDataConfig):
    kind: str = MISSING

    root: str = "data"
    """folder of the data set"""

    download: bool = True
    """download the data set into root if it is missing"""

    val_fraction: float = 0.1
    """fraction of the training set that is used for validation"""

    classes: list[Any] = field(default_factory=list)
    """classes to keep, by name or number, such as [0, 1]; []: all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("data.val_fraction", self.val_fraction, 0, 1)


@dataclass
class ImageFolderConfig(ImageDataConfig):
    kind: str = "imagefolder"

    root: str = MISSING
    """folder with train/<class>/*, val/<class>/* and, optionally, test/<class>/*"""

    image_size: int = 224
    """height and width of an image after augmentation, in pixels"""

    on_corrupt: str = "error"
    """what to do with an unreadable image: error (end the run) or skip (warn and leave it out)"""

    classes: list[Any] = field(default_factory=list)
    """classes to keep, by name or number, such as [0, 1]; []: all"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.image_size", self.image_size, 1)
        one_of("data.on_corrupt", self.on_corrupt, ("error", "skip"))


@dataclass
class FakeConfig(ImageDataConfig):
    kind: str = "fake"

    image_size: int = 224
    """height and width of an image, in pixels"""

    channels: int = 3
    """color channels"""

    num_classes: int = 1000
    """number of classes"""

    train_size: int = 1024
    """number of training images"""

    val_size: int = 128
    """number of validation images"""

    test_size: int = 128
    """number of test images"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "channels", "train_size", "val_size", "test_size"):
            at_least(f"data.{name}", getattr(self, name), 1)
        at_least("data.num_classes", self.num_classes, 2)


@dataclass
class TextDataConfig(DataConfig):
    context: int = 256
    """context length in tokens: of a packed block, or the maximum of a document"""

    batch_size: Any = 32
    """packed blocks (or, if max_tokens is null, documents) per step; auto: the largest that fits into memory, by the plan"""

    max_tokens: Any = 8192
    """largest batch of documents, in tokens with padding; replaces batch_size; auto: as for batch_size; null: use batch_size"""

    bucketing: bool = True
    """put documents of similar length into a batch; false: random documents"""

    pad_to_multiple_of: int = 1
    """pad documents to the longest of their batch, rounded up to a multiple of this"""

    tokenizer: str | None = None
    """byte, bpe (trained on the training set) or path of a tokenizer.json; null: that of model.pretrained, else byte"""

    vocab_size: int = 8192
    """vocabulary size of tokenizer=bpe"""

    unit: str | None = None
    """what a document is: file (or row), paragraph or line; null: depends on the task"""

    val_fraction: float = 0.01
    """fraction of the files that is used for validation"""

    test_fraction: float = 0.02
    """fraction of the files that is used for the test"""

    cache_dir: str = "data/text"
    """folder in which tokenized text is cached"""

    num_workers: int = 0
    """worker processes that load text; 0: load in the training process"""

    pin_memory: bool | None = None
    """pin batches in host memory for faster copies to a GPU; null: if a GPU is used"""

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
    """sequence_classification: number of classes, the packages with the most files"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("data.classes", self.classes, 2)


@dataclass
class TextFilesConfig(TextDataConfig):
    kind: str = "text_files"

    files: Any = MISSING
    """glob of files or list of globs: plain text, .jsonl or .parquet"""

    val_files: Any = field(default_factory=list)
    """the same for the validation set; []: use val_fraction"""

    test_files: Any = field(default_factory=list)
    """the same for the test set; []: use test_fraction"""

    text: str = "text"
    """field (.jsonl) or column (.parquet) of the text"""

    label: str | None = None
    """sequence_classification: field or column of the class; folder: the name of a file's folder"""

    on_error: str = "error"
    """what to do with an unreadable file or row: error (end the run) or skip (count it and leave it out)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("data.on_error", self.on_error, ("error", "skip"))
        for name in ("files", "val_files", "test_files"):
            patterns = getattr(self, name)
            patterns = [patterns] if isinstance(patterns, str) else patterns
            if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
                raise UserError(f"data.{name}: {patterns!r} is not valid; give a glob of files or a list of globs")


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
