"""The model, the data and the experiment."""

from pathlib import Path

import pytest
import torch
from holotrain.cli import main

from my_project.data import Digits
from my_project.model import Net

CONF = Path(__file__).parents[1] / "conf"


@pytest.fixture
def batch() -> list[torch.Tensor]:
    data = Digits(batch_size=4)
    data.setup("fit")
    return next(iter(data.train_dataloader()))


def test_the_model_fits_the_data(batch):
    images, labels = batch
    channels, image_size, _ = Digits.image_shape
    net = Net(image_size, channels, Digits.num_classes)
    assert net(images).shape == (len(labels), Digits.num_classes)


def test_recomputed_activations_give_the_same_gradients(batch):
    images, labels = batch
    net, gradients = Net(8, 1, 10), {}
    for backward in ("autograd", "reversible"):
        net.blocks.backward = backward
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        gradients[backward] = [weight.grad for weight in net.parameters()]
    torch.testing.assert_close(gradients["reversible"], gradients["autograd"], rtol=1e-3, atol=1e-5)


def test_the_experiment_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["fit", "--config-dir", str(CONF), "experiment=my_experiment", "trainer.fast_dev_run=true"]) == 0
