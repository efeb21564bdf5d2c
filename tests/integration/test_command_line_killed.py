"""kill -9 in the middle of an epoch: what is resumed ends with the weights of an uninterrupted run, bit for bit."""

import multiprocessing
import random
from pathlib import Path

import pytest
import torch
from left_by_runs import assert_same_weights, summary
from small_run import SMALL, fit_and_kill

LAST = Path("checkpoints/last.ckpt")
SHARED = ["trainer.accelerator=cpu", "trainer.log_every_n_steps=1", "test=false", "logger=none", "callbacks.progress=null"]
SIZES = ["model.dim=16", "model.depth=2", "model.heads=2"]
IMAGES = [
    *SMALL, *SHARED, "model.dropout=0.2", "data.mixup_alpha=0.3", "trainer.max_epochs=3", "trainer.limit_train_batches=5",
    "callbacks.checkpoint.every_n_train_steps=2", "trainer.accumulate_grad_batches=2",
]  # fmt: skip
TEXT = [
    *SHARED, *SIZES, "data=text_files", "data.files=texts/*.txt", "data.context=24", "data.batch_size=4", "model.dropout=0.1",
    "trainer.max_epochs=2", "trainer.limit_train_batches=8", "trainer.val_check_interval=6", "trainer.max_steps=14",
    "trainer.limit_val_batches=1", "callbacks.checkpoint.every_n_train_steps=2", "data.cache_dir=cache",
]  # fmt: skip
ERROR_DIFFUSION = [
    "task=error_diffusion", *SHARED, "model.width=8", "model.depth=3", "trainer.max_epochs=3", "trainer.limit_train_batches=6",
    "trainer.limit_val_batches=1", "trainer.log_every_n_steps=2", "callbacks.checkpoint.every_n_train_steps=4",
]  # fmt: skip
SAVED = [
    *SHARED, *SIZES, "data.name=saved", "data.cache_dir=cache", "data.val_fraction=0.2", "data.num_workers=2",
    "data.batch_size=4", "trainer.limit_val_batches=1", "trainer.max_epochs=2", "callbacks.checkpoint.every_n_train_steps=2",
]  # fmt: skip
SEVEN = ["trainer.limit_train_batches=7", "trainer.val_check_interval=7"]
SAVED_TEXT = [*SAVED, "task=causal_lm", "data=hub", "data.context=24", "data.test_fraction=0.1"]
CASES = {
    "averages": (9, [*IMAGES, "callbacks=ema", "trainer.precision=bf16-mixed", "synthesis=associative", "synthesis.ema=0.5"]),
    "a worker": (9, [*IMAGES, "synthesis=shared", "data.num_workers=1"]),
    "error diffusion": (18, ERROR_DIFFUSION),
    "causal_lm": (14, [*TEXT, "task=causal_lm"]),
    "masked_lm": (14, [*TEXT, "task=masked_lm", "data.max_tokens=120"]),
    "saved text": (14, [*SAVED_TEXT, *SEVEN]),
    "a stream": (14, [*SAVED_TEXT, "data.streaming=true", "data.epoch_batches=7"]),
    "saved images": (
        14,
        [*SAVED, *SEVEN, "data=hub_images", "data.image_size=16", "model=rev_vit_tiny", "data.mixup_alpha=0.2"],
    ),
}
"""Command lines, and the steps that they train."""


def write_data(kind: str) -> None:
    """Forty text files, and a data set saved to disk."""
    import datasets
    from PIL import Image

    draw = random.Random(1)
    texts = [" ".join(draw.choices("abcdefgh", k=60)) for _ in range(60)]
    Path("texts").mkdir()
    for number, text in enumerate(texts[:40]):
        Path(f"texts/{number}.txt").write_text(text)
    datasets.disable_progress_bars()
    rows = datasets.Dataset.from_dict({"text": texts})
    if kind == "saved images":
        images = [Image.new("RGB", (18, 20), (number * 6, 0, number % 3 * 99)) for number in range(40)]
        features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(3)})
        rows = datasets.Dataset.from_dict({"image": images, "label": [number % 3 for number in range(40)]}, features)
    rows.save_to_disk("saved")


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_killed_run_resumes_to_the_same_weights(holotrain, tmp_path, kind):
    """One of them is killed in the first epoch, the others in the second."""
    write_data(kind)
    steps, words = CASES[kind]
    holotrain.done("fit", *words, "hydra.run.dir=whole")
    assert multiprocessing.active_children() == []
    fit_and_kill(tmp_path, *words, "output_dir=killed", epoch=0 if kind == "causal_lm" else 1)
    (run,) = Path("killed/fit").iterdir()
    assert torch.load(run / LAST, weights_only=True)["global_step"] < steps and not (run / "summary.json").exists()
    later = Path("killed/fit/9999-12-31_00-00-00")
    later.mkdir()
    said = f"holotrain: resume=true: continuing {run}; {later} is later, but has no checkpoint\n"
    assert holotrain("fit", "resume=true", "output_dir=killed")[::2] == (0, said)
    assert summary(run)["steps"] == summary(Path("whole"))["steps"] == steps
    assert_same_weights(Path("whole") / LAST, run / LAST)
