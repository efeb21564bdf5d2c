"""``optimizer.in_backward=true`` as a user meets it: the same numbers, and one line for what it excludes."""

from pathlib import Path

import pytest
from left_by_runs import assert_same_weights, scalars
from small_run import SMALL

LAST = Path("checkpoints/last.ckpt")
ON = "optimizer.in_backward=true"
RUN = [*SMALL, "test=false", "trainer.gradient_clip_algorithm=value", "trainer.gradient_clip_val=0.01"]


def test_a_run_is_the_same(holotrain):
    for folder, words in (("usual", []), ("ours", [ON])):
        assert holotrain("fit", *RUN, *words, f"hydra.run.dir={folder}")[0] == 0
    assert_same_weights("usual" / LAST, "ours" / LAST)
    seen, expected = scalars(Path("ours")), scalars(Path("usual"))
    for tag in ("train/loss", "optimization/gradient_norm", "optimization/update_ratio"):
        assert len(seen[tag]) == 6 and seen[tag] == pytest.approx(expected[tag], rel=1e-4), tag


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
