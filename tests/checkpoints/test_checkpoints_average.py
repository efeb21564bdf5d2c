"""The average of the weights: as torch's, with a few operators and without a wait for the device."""

from functools import partial
from types import SimpleNamespace

import lightning.pytorch as pl
import torch
from compared import assert_close, assert_equal
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from paper_gpu import paper_gpu
from small_trainings import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader

from holotrain.callbacks import WeightAverage


class Normalised(pl.LightningModule):
    """With a buffer of whole numbers, others of means, weights of two dtypes, and one that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.net[0].bias.requires_grad_(False)

    def training_step(self, batch):
        return (self.net[2](self.net[:2](batch) * self.scale.float())).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


DATA = DataLoader([torch.randn(5, 4, generator=torch.Generator().manual_seed(number)) for number in range(8)], batch_size=None)


class Torchs(EMAWeightAveraging):
    """Lightning's callback and torch's arithmetic, tensor by tensor, under the name by which checkpoints know ours."""

    def __init__(self, **options):
        super().__init__(**options)
        average = self._kwargs["avg_fn"]
        self._kwargs["avg_fn"] = lambda old, new, count: average(old, new, count) if old.is_floating_point() else new

    @property
    def state_key(self):
        return WeightAverage().state_key


def averaged(callback, folder, **options):
    """The weights after two epochs; leaves a checkpoint of each."""
    module = Normalised()
    saving = ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True, save_top_k=-1)
    quiet_trainer(max_epochs=2, callbacks=[callback, saving], enable_checkpointing=True).fit(module, DATA, **options)
    return module.state_dict()


def test_the_average_is_torchs_and_goes_on_from_a_checkpoint_of_it(tmp_path):
    ours = partial(WeightAverage, decay=0.9, update_every_n_steps=3, warmup=False)
    expected = averaged(Torchs(decay=0.9, update_every_n_steps=3), tmp_path / "torch")
    found = averaged(ours(), tmp_path / "ours")
    assert_close(found, expected, rtol=1e-6)
    assert_equal(found["net.0.bias"], Normalised().state_dict()["net.0.bias"])  # torch's drifts by rounding
    files = [tmp_path / name / "epoch=0.ckpt" for name in ("torch", "ours")]
    counts = [torch.load(file, weights_only=True)["averaging_state"]["n_averaged"] for file in files]
    assert_equal(counts[1], counts[0])
    assert_close(averaged(ours(), tmp_path, ckpt_path=files[0]), expected, rtol=1e-6)
    assert_equal(averaged(ours(), tmp_path, ckpt_path=files[1]), found)
    whole = averaged(WeightAverage(), tmp_path / "warm")
    assert_equal(averaged(WeightAverage(), tmp_path / "again", ckpt_path=tmp_path / "warm/epoch=0.ckpt"), whole)


def test_an_update_is_an_operator_for_each_dtype_and_does_not_wait(monkeypatch):
    average = WeightAverage(decay=0.5, warmup=False)
    with paper_gpu(monkeypatch) as machine:
        module = Normalised().to(torch.device("cuda", 0))
        average.setup(None, module, "fit")
        update = lambda step: average.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, 0)  # noqa: E731
        update(1)
        module.net[2].weight.data.zero_()
        machine.log.clear(), machine.waits.clear()
        update(2)
        ran = [name for name, _ in machine.log]
        assert sorted(ran) == ["aten._foreach_copy_", *["aten._foreach_lerp_"] * 2] and not machine.waits
        due = Normalised().net[2].weight.detach() / 2
        assert_equal(average._average_model.module.net[2].weight.detach().cpu(), due)


def test_the_first_weights_fade_from_a_short_training():
    """As in TensorFlow's ExponentialMovingAverage with num_updates."""
    average, module = WeightAverage(decay=0.3), Normalised()
    average.setup(None, module, "fit")
    weight, expected = module.net[2].weight, None
    for step in range(1, 8):
        with torch.no_grad():
            weight.fill_(step)
        average.on_train_batch_end(SimpleNamespace(global_step=step), module, None, None, 0)
        share = min(0.3, step / (9 + step))
        expected = step if expected is None else share * expected + (1 - share) * step
    torch.testing.assert_close(average._average_model.module.net[2].weight, torch.full_like(weight, expected))
