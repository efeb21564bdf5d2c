"""Shared by the benchmarks: options, a description of the machine, timing, medians, JSON. Needs no package but torch.

It also makes the checkout's ``holotrain`` the one that is imported.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.append(str(Path(__file__).parents[1] / "tests"))  # for what tests and benches share

from holotrain.files import write_json

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

NOTHING_FITS = "not even one sample fits"
"""Why bench_budget.py leaves out an engine that works."""


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser that shows the description as it stands, and has ``--json``, the file for the results."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    return parser


def begin(options: argparse.Namespace) -> dict[str, object]:
    """Prints the machine, and returns what the results begin with: the machine, and the options without paths of this one."""
    paths = ("json", "picture", "measure", "planned", "draw", "folder", "as_rank")
    others = {key: each for key, each in vars(options).items() if key not in paths and not isinstance(each, Path)}
    begun = {"machine": machine(), "options": others}
    print(json.dumps(begun["machine"]))
    return begun


def sizes_of(family: str) -> dict[str, dict[str, Any]]:
    """The arguments of each size of a family of models, such as ``vit``, as ``model=vit_tiny`` has them."""
    models = json.loads((Path(__file__).parents[1] / "conf" / "_options.json").read_text(encoding="utf-8"))
    named = [(*name.lower().split("_", 1), arguments) for name, arguments in models["sizes"].items()]
    return {size: arguments for name, size, arguments in named if name == family}


def machine() -> dict[str, object]:
    """The hardware and software versions of a measurement."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def alternating(contestants: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs all candidates alternately, ``rounds`` times after one warm-up round; each returns its seconds."""
    for contestant in contestants.values():
        contestant()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, contestant in contestants.items():
            seconds[name].append(contestant())
        print(f"  round {number + 1} of {rounds}", file=sys.stderr)
    return seconds


def those_that_work(makers: dict[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the makers return, and why the others failed: a library that is not installed, too little memory, no compiler."""
    made, left_out = {}, {}
    for name, make in makers.items():
        try:
            made[name] = make()
        except Exception as error:
            left_out[name] = in_short(error)
            print(f"  {name} left out: {left_out[name]}", file=sys.stderr)
    return made, left_out


def in_short(error: Exception) -> str:
    """Its kind and its first two lines; what follows in torch's errors is advice."""
    return " ".join(f"{type(error).__name__}: {error}".split("\n")[:2])[:400]


def timed(work: Callable[[], object], device: str, before: Callable[[], object] = lambda: None, repeats: int = 1) -> Callable:
    """A function that runs ``before`` untimed, then ``work``, and returns the seconds of one repetition."""

    def run() -> float:
        before()
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(repeats):
                work()
            end.record()
            torch.cuda.synchronize()
            return begin.elapsed_time(end) / 1e3 / repeats
        started = time.perf_counter()
        for _ in range(repeats):
            work()
        return (time.perf_counter() - started) / repeats

    return run


def waited(work: Callable[[], object], device: str, before: Callable[[], object] = lambda: None) -> Callable[[], float]:
    """A function that runs ``before`` untimed, then ``work``, and returns the host's seconds until the device has finished."""

    def run() -> float:
        before()
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return run


def median_ratio(over: list[float], under: list[float]) -> float:
    """The median over rounds of the ratio of two times, which is robust against drift of the machine's speed."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def fine_tune(model: torch.nn.Module, losses: Iterable[torch.Tensor], steps: int, rate: float) -> None:
    """AdamW with gradients clipped to a norm of 1, a linear warm-up of a tenth of the steps and a linear decay.

    Args:
        losses: one for each step, computed when it is asked for.
    """
    weights, warm = [weight for weight in model.parameters() if weight.requires_grad], max(steps // 10, 1)
    optimizer = torch.optim.AdamW(weights, rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min((k + 1) / warm, (steps - k) / max(steps - warm, 1)))
    model.train()
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()


def verdict(result: dict[str, Any], what: str, found: float, expected: float, least: bool = False) -> None:
    """Prints a figure beside the number that was written beforehand, and adds both to the results.

    Args:
        expected: the most that was expected, or the least.
    """
    good, bound = (found >= expected, "least") if least else (found <= expected, "most")
    row = {"what": what, "expected": f"at {bound} {expected:g}", "found": found}
    result.setdefault("verdicts", []).append(row | {"as_expected": good})
    print(f"{what}: expected {row['expected']}, found {found:.4g}" + ("" if good else ": NOT AS EXPECTED"), flush=True)


def plotter():
    """matplotlib's pyplot, which draws to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_to(path: Path, figure: Any, dpi: int) -> None:
    """Writes a figure of matplotlib to a file, and says so."""
    figure.tight_layout()
    figure.savefig(path, dpi=dpi)
    print(f"drawn to {path}")


def save(result: dict, path: Path | None) -> None:
    """Writes the results, the date and the commit as JSON, if a path is given, and never half of them."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result | {"date": date.today().isoformat(), "commit": commit()})


def commit() -> str | None:
    """That of the checkout, with ``-dirty`` if files differ from it; None where git or its folder is missing."""
    try:
        words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(words, capture_output=True, text=True).stdout.strip() or None
    except OSError:
        return None
