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


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], "clipping by norm needs all gradients; use trainer.gradient_clip_val=null"),
        (["trainer.accumulate_grad_batches=2"], "accumulation adds gradients up after it"),
        (["trainer=ddp"], "trainer=ddp averages gradients after it"),
        (["trainer=fsdp"], "trainer=fsdp averages gradients after it"),
        (["trainer.precision=16-mixed"], "16-mixed unscales gradients after it"),
        (["synthesis=shared", "optimizer=sgd"], "synthesis rewrites gradients after it"),
        (["backward.cuda_graph=true"], "a CUDA graph holds all gradients"),
        (["task=error_diffusion"], "error diffusion is measured between backward and step"),
        (["optimizer._target_=torch.optim.Adafactor"], None),
    ],
    ids=lambda of: "-".join(of) if isinstance(of, list) else "",
)
def test_what_needs_all_gradients_is_refused(holotrain, words, refusal):
    clip = [] if not words else ["trainer.gradient_clip_val=null"]
    sizes = [word for word in SMALL if words != ["task=error_diffusion"] or not word.startswith("model.")]
    status, _, err = holotrain("fit", *sizes, "test=false", *words, *clip, ON)
    if refusal is None:
        assert (status, err) == (0, "")
        return
    assert status == 2 and refusal in err and err.count("\n") == 1, err


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
    words = ["device=cpu", "data=fake", "data.image_size=8", "memory=2MiB", *SMALL, "trainer.gradient_clip_val=null", ON]
    assert holotrain("plan", *words)[0] == 0
    status, _, err = holotrain("plan", *words, "devices=4")
    assert status == 2 and "plan without devices" in err
