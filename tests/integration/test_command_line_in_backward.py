"""``optimizer.in_backward=true`` as a user meets it: the same numbers, resumed or not, and one line for what it excludes."""

from pathlib import Path

import pytest
from left_by_runs import assert_same_weights, scalars
from small_run import SMALL

LAST = Path("checkpoints/last.ckpt")
ON = "optimizer.in_backward=true"
RUN = [*SMALL, "test=false", "trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=0.01"]


def test_a_run_is_the_same_and_is_resumed_with_it_and_without_it(holotrain):
    for folder, words in (("usual", []), ("ours", [ON])):
        assert holotrain("fit", *RUN, *words, f"hydra.run.dir={folder}")[0] == 0
    assert_same_weights("usual" / LAST, "ours" / LAST)
    seen, expected = scalars(Path("ours")), scalars(Path("usual"))
    for tag in ("train/loss", "optimization/gradient_norm", "optimization/update_ratio"):
        assert len(seen[tag]) == 6 and seen[tag] == pytest.approx(expected[tag], rel=1e-4), tag
    for folder, words in (("off", [f"{ON[:-4]}false"]), ("on", [])):
        more = ["ckpt_path=ours", "trainer.max_epochs=3", f"hydra.run.dir={folder}"]
        assert holotrain("fit", *more, *words)[0] == 0
    assert_same_weights("off" / LAST, "on" / LAST)


def test_an_optimizer_of_torch_steps_in_the_backward(holotrain):
    words = ["test=false", "optimizer._target_=torch.optim.Adafactor", "trainer.gradient_clip_val=null", ON]
    holotrain.done("fit", *SMALL, *words)


def test_an_optimizer_that_steps_all_parameters_together_is_refused(holotrain, monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("together.py").write_text(
        "import torch\n\n\n"
        "class Together(torch.optim.SGD):\n"
        "    def step(self, closure=None):\n"
        "        parameters = [p for group in self.param_groups for p in group['params']]\n"
        "        torch.nn.utils.clip_grad_norm_(parameters, 1.0)\n"
        "        return super().step(closure)\n"
    )
    words = ["optimizer._target_=together.Together", "+optimizer.lr=0.1", "trainer.gradient_clip_val=null", ON]
    err = holotrain.refused("fit", *SMALL, *words)
    assert "optimizer.in_backward: Together steps all parameters together" in err


def test_a_plan_counts_with_it(holotrain):
    words = ["device=cpu", "data=fake", "data.image_size=8", "memory=2MiB", *SMALL, "model.depth=1"]
    words += ["trainer.gradient_clip_val=null", ON]
    assert holotrain("plan", *words)[0] == 0
    assert "plan without devices" in holotrain.refused("plan", *words, "devices=4")
