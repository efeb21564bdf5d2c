"""The command line on a GPU: ``holotrain fit trainer=gpu``, with an automatic batch size, and without and with CUDA graphs.

    python scripts/bench_fit.py --json scripts/results/cuda/fit.json
    python scripts/bench_fit.py model=rev_vit_tiny memory=1GiB    # overrides come last

Random images, no logger. Expected: each ends well, the plan is the step's peak within 5 %, and steps of small images, which
wait for the host, are 1.3 times as fast with graphs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_common import arguments, begin, save, verdict

OVERRIDES = ["data=fake", "logger=none", "callbacks.progress=null", "trainer.max_epochs=1"]
GPU = ["trainer=gpu", "trainer.precision=bf16-mixed", "model=rev_vit_small"]
CPU = ["trainer=cpu", "model=rev_vit_tiny", "data.val_size=8", "data.test_size=8"]
AUTO = ["data.batch_size=auto"]
AUTO += ["memory=12GiB", "data.train_size=6000"] if torch.cuda.is_available() else ["memory=300MiB", "data.train_size=32"]
BATCH, STEPS = (64, 100) if torch.cuda.is_available() else (4, 3)
SMALL = [f"data.batch_size={BATCH}", "data.image_size=64", f"data.train_size={BATCH * STEPS}", "trainer.log_every_n_steps=20"]


def fitted(overrides: list[str]) -> tuple[int, dict[str, Any]]:
    """The exit status and the summary."""
    from holotrain.cli import main as holotrain  # needs Hydra

    common = [*OVERRIDES, *(GPU if torch.cuda.is_available() else CPU)]
    with tempfile.TemporaryDirectory() as folder:
        status = holotrain(["fit", *common, *overrides, f"hydra.run.dir={folder}/run"])
        written = Path(folder) / "run" / "summary.json"
        return status, json.loads(written.read_text()) if written.is_file() else {}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    result, summaries = begin(options), {}
    cases = {"graphs off": [*SMALL, "trainer.graphs=false"], "graphs on": [*SMALL, "trainer.graphs=auto"], "auto batch": AUTO}
    for name, overrides in cases.items():
        status, summaries[name] = fitted([*overrides, *options.overrides])
        verdict(result, f"exit status of holotrain fit, {name}", status, 0)
        save(result | {"summaries": summaries}, options.json)
    off, on, automatic = summaries.values()
    if off.get("step_seconds") and on.get("step_seconds"):
        verdict(result, "fit: speed with graphs / without", off["step_seconds"] / on["step_seconds"], 1.3, least=True)
    if automatic.get("planned_step_bytes"):
        planned, taken = automatic["planned_step_bytes"], automatic["step_peak_bytes"]
        verdict(result, "error of the planned peak", abs(planned / taken - 1), 0.05)
        print(f"{automatic['samples_per_second']:.1f} samples a second, {taken / 2**20:.0f} MiB, planned {planned / 2**20:.0f}")
    save(result | {"summaries": summaries}, options.json)
    sys.exit(not all(summaries.values()))


if __name__ == "__main__":
    main()
