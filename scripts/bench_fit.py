"""The command line on a GPU: ``holotrain fit trainer=gpu`` with an automatic batch size, and what it then took.

    python scripts/bench_fit.py --json scripts/results/cuda/fit.json
    python scripts/bench_fit.py model=rev_vit_tiny memory=1GiB    # overrides come last

Random images, no logger. Expected: it ends well, and its plan is the step's peak within 5 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from bench_common import arguments, begin, save, verdict

OVERRIDES = ["data=fake", "data.batch_size=auto", "logger=none", "callbacks.progress=null", "trainer.max_epochs=1"]
GPU = ["trainer=gpu", "trainer.precision=bf16-mixed", "model=rev_vit_small", "memory=12GiB", "data.train_size=6000"]
CPU = ["trainer=cpu", "model=rev_vit_tiny", "memory=300MiB", "data.train_size=32", "data.val_size=8", "data.test_size=8"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    from holotrain.cli import main as holotrain  # needs Hydra

    overrides = [*OVERRIDES, *(GPU if torch.cuda.is_available() else CPU), *options.overrides]
    with tempfile.TemporaryDirectory() as folder:
        status = holotrain(["fit", *overrides, f"hydra.run.dir={folder}/run"])
        written = Path(folder) / "run" / "summary.json"
        summary = json.loads(written.read_text()) if written.is_file() else {}
    result = begin(options) | {"summary": summary}
    verdict(result, "exit status of holotrain fit", status, 0)
    if summary.get("planned_step_bytes"):
        planned, taken = summary["planned_step_bytes"], summary["step_peak_bytes"]
        verdict(result, "error of the planned peak", abs(planned / taken - 1), 0.05)
        print(f"{summary['samples_per_second']:.1f} samples a second, {taken / 2**20:.0f} MiB, planned {planned / 2**20:.0f}")
    save(result, options.json)
    sys.exit(status)


if __name__ == "__main__":
    main()
