"""task=error_diffusion on the command line, and what it learns."""

from pathlib import Path

import pytest
import torch
from compared import assert_equal
from covering import long
from left_by_runs import only, scalars, summary, weights

import holotrain as package

TASK = ["task=error_diffusion", "trainer.accelerator=cpu"]
SMALL = [
    *TASK, "model.width=8", "model.depth=3", "trainer.max_epochs=2", "trainer.limit_train_batches=6",
    "trainer.limit_val_batches=1", "trainer.log_every_n_steps=2",
]  # fmt: skip
QUICK = [*SMALL, "test=false", "logger=none", "callbacks.progress=null"]


@pytest.mark.parametrize(("depth", "epochs", "accuracy"), [(1, 10, 0.97), long(17, 40, 0.95)])
def test_ten_classes_of_digits(holotrain, depth, epochs, accuracy):
    holotrain.done("fit", *TASK, f"model.depth={depth}", f"trainer.max_epochs={epochs}")
    folder = only(Path("runs/fit"))
    assert summary(folder)["metrics"]["test/accuracy"] >= accuracy
    assert all((tensor >= 0).all() for name, tensor in weights(folder / "checkpoints/last.ckpt").items() if "model." in name)
    found = scalars(folder)
    assert set(found["error_diffusion/sign_violations"]) == {0.0}
    assert all(-1 <= value <= 1 for value in found["error_diffusion/alignment"])
    assert len(found["error_diffusion/dead_cells"]) == len(found["error_diffusion/alignment"]) == 40 * epochs // 20


def test_the_published_form_trains_in_bf16(holotrain):
    holotrain.done("fit", *QUICK, "experiment=error_diffusion_published", "model.rule=article", "trainer.precision=bf16-mixed")


@pytest.mark.slow
def test_a_checkpoint_is_exported_and_read_again(holotrain):
    checkpoint = Path("run/checkpoints/last.ckpt")
    holotrain.done("fit", *QUICK, "hydra.run.dir=run")
    holotrain.done("export", f"ckpt_path={checkpoint}", "to=mine", "format=program")
    images = torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    loaded, program = package.load("mine"), torch.export.load("mine/model.pt2").module()
    with torch.no_grad():
        expected = loaded(images)
        torch.testing.assert_close(program(images), expected)
    trained = {name.removeprefix("model."): tensor for name, tensor in weights(checkpoint).items() if name.startswith("model.")}
    assert_equal(trained, loaded.state_dict())
