"""Trainings continue from checkpoints of versions that stacked queries, keys and values, as from those of this one."""

import lightning.pytorch as pl
import pytest
import torch
from compared import assert_equal
from earlier_layout import stacked_checkpoint
from small_models import IMAGE
from small_trainings import quiet_trainer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from holotrain.models import RevViT
from holotrain.optimizers import InBackward
from holotrain.tasks import ImageClassifier
from holotrain.tasks.optimizers import adamw, muon

OPTIMIZERS = {"adamw": adamw, "muon": muon}


def trained(optimizer, steps, ckpt_path=None) -> pl.Trainer:
    torch.manual_seed(0 if ckpt_path is None else 1)
    images, labels = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 5
    trainer = quiet_trainer(max_steps=steps, max_epochs=9)
    task = ImageClassifier(RevViT(**IMAGE), classes=5, optimizer=optimizer)
    trainer.fit(task, DataLoader(list(zip(images, labels, strict=True)), batch_size=4), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore")
def test_it_ends_with_the_same_weights(tmp_path, kind, in_backward):
    plain = OPTIMIZERS[kind]
    optimizer = (lambda model: InBackward(plain(model))) if in_backward else plain
    trainer = trained(optimizer, 4)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    model = RevViT(**IMAGE)
    earlier = stacked_checkpoint(torch.load(tmp_path / "new.ckpt", weights_only=True), model, plain(model))
    torch.save(earlier, tmp_path / "earlier.ckpt")
    ends = [trained(optimizer, 8, tmp_path / f"{name}.ckpt") for name in ("new", "earlier")]
    assert [end.global_step for end in ends] == [8, 8]
    new, old = ({"weights": end.model.state_dict(), "states": end.optimizers[0].state_dict()} for end in ends)
    tensors = [[leaf for leaf in tree_leaves(end) if isinstance(leaf, torch.Tensor)] for end in (old, new)]
    assert len(tensors[0]) > 80
    assert_equal(*tensors)
