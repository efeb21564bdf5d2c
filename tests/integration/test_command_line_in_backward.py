"""``optimizer.in_backward=true`` as a user meets it: the same numbers, resumed or not, and one line for what it excludes."""

from pathlib import Path

import pytest
from left_by_runs import assert_same_weights, only, scalars
from small_run import SMALL

ON = "optimizer.in_backward=true"
RUN = [
    *SMALL,
    "test=false",
    "callbacks.progress=null",
    "trainer.gradient_clip_algorithm=value",
    "trainer.gradient_clip_val=0.01",
]


def test_a_run_is_the_same_and_is_resumed_with_it_and_without_it(holotrain):
    for folder, words in (("usual", []), ("ours", [ON])):
        assert holotrain("fit", *RUN, *words, f"output_dir={folder}")[0] == 0
    usual, ours = (only(Path(folder) / "fit") for folder in ("usual", "ours"))
    assert_same_weights(usual / "checkpoints/last.ckpt", ours / "checkpoints/last.ckpt")
    seen, expected = scalars(ours), scalars(usual)
    for tag in ("train/loss", "optimization/gradient_norm", "optimization/update_ratio"):
        assert len(seen[tag]) == 6 and seen[tag] == pytest.approx(expected[tag], rel=1e-4), tag
    for folder, words in (("off", [f"{ON[:-4]}false"]), ("on", [])):
        more = [f"ckpt_path={ours}", "trainer.max_epochs=3", f"output_dir={folder}"]
        assert holotrain("fit", *more, *words)[0] == 0
    off, on = (only(Path(folder) / "fit") / "checkpoints/last.ckpt" for folder in ("off", "on"))
    assert_same_weights(off, on)


def test_an_optimizer_of_torch_steps_in_the_backward(holotrain):
    words = ["test=false", "optimizer._target_=torch.optim.Adafactor", "trainer.gradient_clip_val=null", ON]
    assert holotrain("fit", *SMALL, *words)[::2] == (0, "")


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
    status, _, err = holotrain("fit", *SMALL, *words)
    assert status == 2 and "optimizer.in_backward: Together steps all parameters together" in err, err


def test_a_plan_counts_with_it(holotrain):
    words = ["device=cpu", "data=fake", "data.image_size=8", "memory=2MiB", *SMALL, "model.depth=1"]
    words += ["trainer.gradient_clip_val=null", ON]
    assert holotrain("plan", *words)[0] == 0
    status, _, err = holotrain("plan", *words, "devices=4")
    assert status == 2 and "plan without devices" in err
