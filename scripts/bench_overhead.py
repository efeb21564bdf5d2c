"""Overhead of the framework: step time of ``holotrain fit`` relative to a plain loop, and the time of ``--help``.

    python scripts/bench_overhead.py
    python scripts/bench_overhead.py --json scripts/results/overhead_cpu.json

Both train the default model on the default data with the default recipe (AdamW, clipping, cosine schedule), alternating in one
process. The time of ``fit`` is ``step_seconds`` in its summary.json, with all default features: TensorBoard, memory and
throughput monitors, checkpoints. Needs holotrain to be installed.
"""

import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, sizes_of

from holotrain.cli import main as command_line
from holotrain.data import Digits
from holotrain.models import RevViT
from holotrain.tasks import optimizer_functions, schedules

BATCH, WARMUP_EPOCHS, EPOCHS = 32, 1, 3


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    result = begin(options)

    seconds = alternating({"fit": fit_step, "bare loop": bare_step}, options.rounds)
    ratio = median_ratio(seconds["fit"], seconds["bare loop"])
    for name, values in seconds.items():
        print(f"{name:<12}{statistics.median(values) * 1e3:8.2f} ms per step")
    print(f"fit / bare loop  {ratio:.3f}")

    times = [help_seconds() for _ in range(options.rounds)]
    print(f"holotrain fit --help  {statistics.median(times):.2f} s (median of {len(times)})")
    result |= {"step_seconds": seconds, "ratio": ratio, "help_seconds": times}
    save(result, options.json)


def fit_step() -> float:
    """Seconds per step of one short ``holotrain fit``."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        try:
            words = [f"trainer.max_epochs={WARMUP_EPOCHS + EPOCHS}", f"data.batch_size={BATCH}", "test=false"]
            status = command_line(["fit", *words, "hydra.run.dir=run"])
            assert status == 0
            return json.loads(Path("run/summary.json").read_text())["step_seconds"]
        finally:
            os.chdir(here)


def bare_step() -> float:
    """Seconds per step of a hand-written loop over the same batches."""
    torch.manual_seed(0)
    device = DEVICE
    data = Digits(batch_size=BATCH, augment=False)
    data.setup()
    loader = data.train_dataloader()
    model = RevViT(image_size=8, patch_size=2, channels=1, classes=10, **sizes_of("vit")["tiny"]).to(device)
    optimizer = optimizer_functions.adamw(model, lr=1e-3)
    scheduler = schedules.cosine(optimizer, (WARMUP_EPOCHS + EPOCHS) * len(loader), warmup=0.1)
    total, steps = 0.0, 0
    for epoch in range(WARMUP_EPOCHS + EPOCHS):
        loader.batch_sampler.set_epoch(epoch)
        started = time.perf_counter()
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
        if device == "cuda":
            torch.cuda.synchronize()
        if epoch >= WARMUP_EPOCHS:
            total += time.perf_counter() - started
            steps += len(loader)
    return total / steps


def help_seconds() -> float:
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "holotrain", "fit", "--help"], check=True, capture_output=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
