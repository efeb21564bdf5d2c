"""A package of a user's: models, data, tasks, an optimizer, a schedule, a callback and a logger that holotrain has never
heard of."""

import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from holotrain.data.loader import ResumableLoader
from holotrain.reversible import ReversibleBlock, ReversibleSequence


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023."""

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        if lr <= 0:
            raise ValueError(f"lr {lr} must be above 0")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                step = torch.lerp(weight.grad, momentum, group["betas"][0]).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=group["lr"])
                momentum.lerp_(weight.grad, 1 - group["betas"][1])
        return loss


def halving(optimizer: Optimizer, steps: int, times: int = 2) -> LambdaLR:
    """Halves the learning rate at equal distances."""
    return LambdaLR(optimizer, lambda step: 0.5 ** (step * (times + 1) // max(steps, 1)))


class Diary(pl.Callback):
    """Counts the batches of the training, also over a resumption."""

    count = 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.count += 1

    def on_train_epoch_end(self, trainer, module) -> None:
        module.log("diary/count", float(self.count))

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]


class Journal(Logger):
    """Metrics as lines of JSON. A resumed run appends, so that the last line of a step counts."""

    def __init__(self, save_dir: str, file: str = "journal.jsonl", digits: int = 6) -> None:
        super().__init__()
        self.path, self.digits = Path(save_dir, file), digits

    name, version = "journal", None

    def log_hyperparams(self, params: dict, *others, **more) -> None:
        self._write({"options": params})

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._write({"step": step} | {name: round(float(value), self.digits) for name, value in metrics.items()})

    def _write(self, line: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line, default=str) + "\n")


class Stripes(pl.LightningDataModule):
    """Images with horizontal or vertical stripes, 8 x 8 pixels, one channel."""

    num_classes, image_shape = 2, (1, 8, 8)

    def __init__(self, count: int = 60, batch_size: int = 12, seed: int = 0) -> None:
        super().__init__()
        self.count, self.batch_size, self.seed = count, batch_size, seed

    def images(self, count: int, first: int) -> TensorDataset:
        random = torch.Generator().manual_seed(first)
        labels = torch.randint(2, (count,), generator=random)
        stripes = torch.zeros(count, 1, 8, 8)
        stripes[labels == 0, :, ::2] = 1.0
        stripes[labels == 1, :, :, ::2] = 1.0
        return TensorDataset(stripes + 0.3 * torch.randn(stripes.shape, generator=random), labels)

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(Numbered(*self.images(self.count, 1).tensors), self.batch_size, self.seed)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.images(24, 2), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.images(24, 3), self.batch_size)

    def predict_dataloader(self) -> DataLoader:
        return self.test_dataloader()


class Numbered(TensorDataset):
    """Takes the keys (epoch, index) of a ResumableLoader."""

    def __getitem__(self, key: tuple[int, int]):
        return super().__getitem__(key[1])


def mlp(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class Net(nn.Module):
    """Two streams through reversible blocks."""

    def __init__(self, classes: int, image_size: int, channels: int, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        if width < 1:
            raise ValueError(f"width must be at least 1, not {width}")
        self.embed = nn.Linear(channels * image_size, width)
        self.blocks = ReversibleSequence([ReversibleBlock(mlp(width), mlp(width)) for _ in range(depth)])
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.transpose(1, 2).flatten(2))
        return self.head(sum(self.blocks(x, x)).mean(1))


class Denoising(pl.LightningModule):
    """A task of its own: everything that training needs is in this class."""

    def __init__(self, image_size: int, noise: float = 0.5, lr: float = 1e-2) -> None:
        super().__init__()
        self.noise, self.lr = noise, lr
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(image_size**2, image_size**2))

    def error(self, batch) -> Tensor:
        images = batch[0]
        return (self.net(images + self.noise * torch.randn_like(images)) - images.flatten(1)).square().mean()

    def training_step(self, batch, batch_idx) -> Tensor:
        loss = self.error(batch)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx) -> None:
        self.log("val/error", self.error(batch))

    def test_step(self, batch, batch_idx) -> None:
        self.log("test/error", self.error(batch))

    def predict_step(self, batch, batch_idx) -> dict[str, Tensor]:
        return {"brightness": self.net(batch[0]).mean(1)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
