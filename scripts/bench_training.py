"""Test scores with holographic synthesis (none, bind, associative, shared) and SGD, SGD with momentum and AdamW.

    python scripts/bench_training.py                                       # all tasks; about 45 minutes on two cores
    python scripts/bench_training.py --tasks mlp --json scripts/results/training.json

Tasks: ``mlp`` and ``rev_vit`` classify scikit-learn's digits (a 64-256-256-10 network; the tiny reversible vision transformer);
``bytes`` models the source of Python's standard library byte by byte with a small causal transformer. ``mlp`` and ``rev_vit``
need torch and scikit-learn.

All pairs of optimizer and synthesis are treated equally: the learning rate is chosen from grids of equal size by the
validation score of ``--tuning-seeds``. Then it trains with ``--seeds`` other seeds; the test score is reported as mean and
standard deviation. A star marks a rate at the edge of its grid. Gradients are clipped to norm 1 after synthesis, as in
Lightning; updates that accumulate gradients reach this norm earlier than plain gradients. The learning rate warms up over a
tenth of the steps and follows a cosine to zero. The last part measures accuracy against the state size of a shared hologram,
with SGD.
"""

from __future__ import annotations

import math
import statistics
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import torch
from bench_common import arguments, begin, save
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models import RevViT
from holotrain.models.layers.blocks import MLPBranch
from holotrain.synthesis import HolographicSynthesis

OPTIMIZERS = {
    "sgd": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
    "adamw": lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
}
RATES = {
    "sgd": (0.1, 0.3, 1.0, 3.0),
    "momentum": (0.01, 0.03, 0.1, 0.3),
    "adamw": (3e-4, 1e-3, 3e-3, 1e-2),
}
REMEMBERING = {"associative": RATES["momentum"], "shared": RATES["sgd"]}
"""Learning rates of SGD with a synthesis that replaces momentum, fully or in part."""
MODES = ("none", "bind", "associative", "shared")
EVERY = [(optimizer, mode) for optimizer in OPTIMIZERS for mode in MODES]
INSTEAD_OF_MOMENTUM = [("momentum", "none"), ("sgd", "associative"), ("sgd", "shared")]
CAREFUL_RATES = {"none": (0.01, 0.02, 0.04), "associative": (0.03, 0.06, 0.12), "shared": (0.1, 0.2, 0.4)}
"""Learning rates for the transformer, which SGD trains only in a narrow range."""
STATES = (2, 4, 16, 32)
"""Rows per hologram, in addition to the default of 8."""
FIRST_TUNING_SEED = 100


class Digits:
    """1,200 training, 237 validation and 360 test images."""

    batch, better, unit = 32, max, "accuracy"

    def __init__(self, flat: bool) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(images, dtype=torch.float32)[order] / 16
        images = images if flat else images.view(-1, 1, 8, 8)
        self.images, self.labels = images, torch.tensor(labels)[order]
        self.parts = {"train": slice(0, 1200), "val": slice(1200, 1437), "test": slice(1437, None)}
        self.steps = 1200 if flat else 1600
        self.settings = EVERY if flat else INSTEAD_OF_MOMENTUM
        self.rates = rates if flat else careful_rates

    def model(self) -> nn.Module:
        if self.images.ndim == 2:
            return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        return RevViT(image_size=8, patch_size=2, channels=1, classes=10, dim=96, depth=6, heads=3, backward="autograd")

    def loss(self, model: nn.Module) -> Tensor:
        chosen = torch.randint(0, self.parts["train"].stop, (self.batch,))
        return F.cross_entropy(model(self.images[chosen]), self.labels[chosen])

    def score(self, model: nn.Module, part: str) -> float:
        part = self.parts[part]
        return (model(self.images[part]).argmax(-1) == self.labels[part]).float().mean().item()


class Bytes:
    """Bits per byte of the standard library's source, in windows of 64 bytes; whole files are held out."""

    batch, better, unit, steps, window = 16, min, "bits per byte", 400, 64
    settings = EVERY

    @staticmethod
    def rates(optimizer: str, mode: str) -> tuple[float, ...]:
        return rates(optimizer, mode)

    def __init__(self) -> None:
        import sysconfig

        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        held_out = {"test": files[::10], "val": files[5::10]}
        rest = [file for file in files if file not in held_out["test"] and file not in held_out["val"]]
        self.text = {
            part: torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8).long()
            for part, chosen in {"train": rest, **held_out}.items()
        }

    def model(self) -> nn.Module:
        return ByteModel(self.window)

    def loss(self, model: nn.Module) -> Tensor:
        return self._loss(model, "train", torch.randint(0, len(self.text["train"]) - self.window - 1, (self.batch,)))

    def score(self, model: nn.Module, part: str) -> float:
        starts = torch.arange(0, len(self.text[part]) - self.window - 1, len(self.text[part]) // 512)
        return self._loss(model, part, starts).item() / math.log(2)

    def _loss(self, model: nn.Module, part: str, starts: Tensor) -> Tensor:
        rows = self.text[part][starts[:, None] + torch.arange(self.window + 1)]
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal, self.norm = heads, causal, nn.LayerNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.project(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


class ByteModel(nn.Module):
    """Two pre-norm blocks of width 64 over bytes and positions."""

    def __init__(self, window: int, dim: int = 64, depth: int = 2, causal: bool = True) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, dim), nn.Embedding(window, dim)
        self.branches = nn.ModuleList(
            branch for _ in range(depth) for branch in (Attention(dim, 4, causal), MLPBranch(dim, 4 * dim))
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bytes(x) + self.positions(torch.arange(x.shape[1]))
        for branch in self.branches:
            x = x + branch(x)
        return self.head(self.norm(x))


TASKS = {"mlp": lambda: Digits(flat=True), "rev_vit": lambda: Digits(flat=False), "bytes": Bytes}


@cache
def task_of(name: str):
    return TASKS[name]()


@dataclass(frozen=True)
class Job:
    """Runs one training."""

    task: str
    optimizer: str
    mode: str
    rate: float
    seed: int
    options: tuple = field(default=())


@dataclass
class Result:
    val: float
    test: float
    cosine: float | None
    state: float
    """bytes of the hologram divided by the bytes of the parameters (the state of momentum)"""


def train(job: Job) -> Result:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    task = task_of(job.task)
    torch.manual_seed(job.seed)
    model = task.model()
    optimizer = OPTIMIZERS[job.optimizer](model.parameters(), job.rate)
    options = ({"key_ema": 0} if job.mode == "associative" else {}) | dict(job.options)  # keys of one batch
    synthesis = None if job.mode == "none" else HolographicSynthesis(model, job.mode, **options)
    cosines = []
    for step in range(task.steps):
        risen, done = (step + 1) / (0.1 * task.steps), step / task.steps
        optimizer.param_groups[0]["lr"] = job.rate * min(1.0, risen, (1 + math.cos(math.pi * done)) / 2)
        optimizer.zero_grad()
        task.loss(model).backward()
        if synthesis is not None:
            synthesis.measuring = step % 10 == 0
            if synthesis.step() and synthesis.measured is not None:
                cosines.append(synthesis.measured[0].item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val, test = task.score(model, "val"), task.score(model, "test")
    parameters = sum(p.nbytes for p in model.parameters())
    state = 0.0 if synthesis is None else sum(tensor.nbytes for tensor in synthesis.state_tensors) / parameters
    return Result(val, test, statistics.mean(cosines) if cosines else None, state)


def finite(score: float, task: str) -> float:
    return score if math.isfinite(score) else (-math.inf if task_of(task).better is max else math.inf)


def rates(optimizer: str, mode: str) -> tuple[float, ...]:
    return REMEMBERING.get(mode, RATES["sgd"]) if optimizer == "sgd" else RATES[optimizer]


def careful_rates(optimizer: str, mode: str) -> tuple[float, ...]:
    return CAREFUL_RATES[mode]


def run_all(jobs: list[Job], pool: ProcessPoolExecutor, what: str) -> dict[Job, Result]:
    futures = {pool.submit(train, job): job for job in jobs}
    results = {}
    for number, future in enumerate(as_completed(futures)):
        results[futures[future]] = future.result()
        print(f"\r  {what}: {number + 1} of {len(jobs)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return results


def compared(settings: list[Job], grids: list[tuple[float, ...]], seeds: int, tuning_seeds: int, pool) -> list[dict]:
    """Tunes the rate of each setting, then trains it on the seeds."""
    task = settings[0].task
    grid_of = dict(zip(settings, grids, strict=True))
    seeds_apart = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + tuning_seeds)
    tuning = [replace(s, rate=rate, seed=seed) for s in settings for rate in grid_of[s] for seed in seeds_apart]
    tuned = run_all(tuning, pool, f"{task}, learning rates")
    chosen = {}
    for s in settings:
        scores = {
            rate: statistics.mean(finite(tuned[replace(s, rate=rate, seed=seed)].val, task) for seed in seeds_apart)
            for rate in grid_of[s]
        }
        chosen[s] = task_of(task).better(scores, key=scores.get)
    final = [replace(s, rate=chosen[s], seed=seed) for s in settings for seed in range(seeds)]
    results = run_all(final, pool, f"{task}, seeds")
    rows = []
    for s, rate in chosen.items():
        of_seeds = [results[replace(s, rate=rate, seed=seed)] for seed in range(seeds)]
        cosines = [r.cosine for r in of_seeds if r.cosine is not None]
        row = {
            **{key: value for key, value in asdict(s).items() if key in ("task", "optimizer", "mode")},
            "options": dict(s.options),
            "rate": rate,
            "at the edge": rate in (min(grid_of[s]), max(grid_of[s])),
            "test": [r.test for r in of_seeds],
            "mean": statistics.mean(r.test for r in of_seeds),
            "deviation": statistics.stdev(r.test for r in of_seeds) if seeds > 1 else 0.0,
            "cosine": statistics.mean(cosines) if cosines else None,
            "state": of_seeds[0].state,
        }
        rows.append(row)
        show(row)
    return rows


def show(row: dict) -> None:
    cosine = "" if row["cosine"] is None else f"{row['cosine']:8.3f}"
    name = f"{row['mode']} {row['options'] or ''}"
    print(
        f"{row['task']:<9}{row['optimizer']:<10}{name:<28}{format(row['rate'], 'g') + '*' * row['at the edge']:<9}"
        f"{row['mean']:.4f} +- {row['deviation']:.4f}{cosine:>9}{row['state']:8.3f}",
        flush=True,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tuning-seeds", type=int, default=1, help="number of seeds for the choice of the learning rate")
    parser.add_argument("--workers", type=int, default=2, help="number of processes, with one thread each")
    options = parser.parse_args()
    begun = begin(options)
    print(f"{'task':<9}{'optimizer':<10}{'synthesis':<28}{'rate':<9}{'test':<18}{'cosine':>9}{'state':>8}")
    rows, states = [], []
    with ProcessPoolExecutor(options.workers) as pool:
        for task in options.tasks:
            jobs = [Job(task, optimizer, mode, 0, 0) for optimizer, mode in task_of(task).settings]
            grids = [task_of(task).rates(job.optimizer, job.mode) for job in jobs]
            rows += compared(jobs, grids, options.seeds, options.tuning_seeds, pool)
            if task_of(task).settings is EVERY:
                shared = [Job(task, "sgd", "shared", 0, 0, (("superpose", superpose),)) for superpose in STATES]
                states += [row for row in rows if (row["task"], row["optimizer"], row["mode"]) == (task, "sgd", "shared")]
                states += compared(shared, [RATES["sgd"]] * len(shared), options.seeds, options.tuning_seeds, pool)
                states.sort(key=lambda row: (row["task"], row["state"]))
            save(begun | {"rows": rows, "states": states}, options.json)


if __name__ == "__main__":
    main()
