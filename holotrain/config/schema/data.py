"""What is learned from."""

from dataclasses import dataclass

from omegaconf import MISSING

from holotrain.config.checks import at_least, one_of, within


@dataclass
class DataConfig:
    kind: str = MISSING


@dataclass
class ImageDataConfig(DataConfig):
    batch_size: int = 128
    """images a step"""

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
        at_least("data.batch_size", self.batch_size, 1)
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


DATA = {
    "digits": DigitsConfig,
    "mnist": TorchvisionConfig,
    "cifar10": TorchvisionConfig,
    "cifar100": TorchvisionConfig,
    "imagefolder": ImageFolderConfig,
    "fake": FakeConfig,
}
