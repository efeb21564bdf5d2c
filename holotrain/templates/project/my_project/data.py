"""scikit-learn's handwritten digits, which need no download."""

import lightning.pytorch as pl
import torch
from holotrain.data.loader import Loader, ResumableLoader, SeededDataset
from sklearn.datasets import load_digits
from torch.utils.data import TensorDataset, random_split
from torchvision.transforms import v2


class Digits(pl.LightningDataModule):
    """Images (B, 1, 8, 8), float32 from -1 to 1, and labels (B,), int64.

    ``num_classes`` and ``image_shape`` tell the model its arguments ``classes``, ``channels`` and ``image_size``.

    Args:
        batch_size: images per step
        rotation: training images are turned by up to this angle, in degrees
        seed: of the order of the batches and of the rotations; it is the option ``seed`` of the command line
    """

    num_classes = 10
    image_shape = (1, 8, 8)

    def __init__(self, batch_size: int = 32, rotation: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.seed = batch_size, seed
        self.augmentation = v2.RandomRotation((-rotation, rotation), v2.InterpolationMode.BILINEAR, fill=-1)

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.from_numpy(digits.images).float().unsqueeze(1) / 8 - 1
        whole = TensorDataset(images, torch.from_numpy(digits.target).long())
        self.train, self.val, self.test = random_split(whole, [0.8, 0.1, 0.1], torch.Generator().manual_seed(0))

    def train_dataloader(self) -> ResumableLoader:
        """Continues in the middle of an epoch when a run is resumed."""
        return ResumableLoader(SeededDataset(self.train, self.augmentation, self.seed), self.batch_size, self.seed)

    def val_dataloader(self) -> Loader:
        return Loader(self.val, self.batch_size)

    def test_dataloader(self) -> Loader:
        return Loader(self.test, self.batch_size)

    def predict_dataloader(self) -> Loader:
        return self.test_dataloader()
