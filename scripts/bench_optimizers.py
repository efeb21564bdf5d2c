"""Where a first moment matters, what each optimizer costs, and what an associative memory recalls.

    python scripts/bench_optimizers.py --json scripts/results/optimizers_cpu.json   # all; over an hour on one core
    python scripts/bench_optimizers.py --study momentum --seeds 1
    python scripts/bench_optimizers.py --study recall --tasks rev_vit_tiny --methods "SGD with momentum" associative

momentum     AdamW against Adafactor, which has no first moment, at batches of 8 to 512
control      the same second moment with and without a first moment
optimizers   AdamW, the optimizers of torch and torchao with less state, SGD and holograms: score, state, time of a step
recall       keys of an associative memory, in the place of momentum

Tasks: a small reversible vision transformer on scikit-learn's digits in 16 patches (``digits``) or 4 (``coarse digits``),
scored by accuracy in per cent; byte-level language models on the source of Python's standard library (``causal``, ``masked``),
by bits per (hidden) byte; ``rev_vit_tiny`` of bench_training.py. Needs torch, scikit-learn, and torchao for its optimizers.

Rates are chosen by the validation score of seed 0 from three; where the best is at an edge, the grid grows up to six. They warm
up over a tenth of the steps and follow a cosine to zero; gradients are clipped to norm 1. Each training is a piece of the JSON
and is not run again; seed 0 of everything comes first, so a measurement that was stopped has a table too, and goes on.
"""

from __future__ import annotations

import importlib
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import torch
from bench_common import alternating, arguments, machine, median_ratio, save, timed
from bench_training import ByteModel, Bytes, Digits
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models import RevViT
from holotrain.optimizers.low_bit import parts_of
from holotrain.optimizers.stepping import CombinedOptimizer
from holotrain.synthesis import HolographicSynthesis
from holotrain.synthesis.binding import folded, units


class SmallDigits(Digits):
    """Two blocks of width 64, on patches of 2 x 2 or 4 x 4 pixels."""

    def __init__(self, patch: int) -> None:
        super().__init__(flat=False)
        sizes = {"image_size": 8, "patch_size": patch, "channels": 1, "classes": 10, "dim": 64, "depth": 2, "heads": 2}
        self.model = partial(RevViT, **sizes, backward="autograd")


class Causal(Bytes):
    window = 32


class Masked(Causal):
    """15 % of the bytes are hidden behind a byte 0, which no source file has."""

    def model(self) -> nn.Module:
        return ByteModel(self.window, causal=False)

    def _loss(self, model: nn.Module, part: str, starts: Tensor) -> Tensor:
        rows = self.text[part][starts[:, None] + torch.arange(self.window)]
        always = torch.Generator().manual_seed(0)
        hidden = torch.rand(rows.shape, generator=None if part == "train" else always) < 0.15
        return F.cross_entropy(model(rows.masked_fill(hidden, 0))[hidden], rows[hidden])


TASKS: dict[str, tuple[Callable, dict[int, int]]] = {
    "digits": (partial(SmallDigits, 2), {8: 800, 64: 300, 512: 40}),
    "coarse digits": (partial(SmallDigits, 4), {32: 600}),
    "causal": (Causal, {8: 400, 64: 250, 512: 40}),
    "masked": (Masked, {8: 400, 64: 250, 512: 40}),
    "rev_vit_tiny": (partial(Digits, flat=False), {32: 1600}),
}
"""Each with the steps that a training takes at a batch size."""


@cache
def task_of(name: str) -> Digits | Bytes:
    return TASKS[name][0]()


class Factored(torch.optim.Optimizer):
    """AdamW whose second moment of a matrix is kept as means over rows and columns (Adafactor, Shazeer and Stern 2018).

    Args:
        beta: decay of the first moment of the scaled gradient; 0: none.
    """

    def __init__(self, parameters: Iterable, lr: float, beta: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                state["step"] = state.get("step", 0) + 1
                decay = 1 - state["step"] ** -0.8
                scaled = gradient / self._root(state, gradient.square() + 1e-30, decay)
                scaled /= max(1.0, scaled.square().mean().sqrt().item())
                if beta := group["beta"]:
                    state.setdefault("mean", torch.zeros_like(scaled)).lerp_(scaled, 1 - beta)
                    scaled = state["mean"] / (1 - beta ** state["step"])
                parameter.mul_(1 - 0.01 * group["lr"]).sub_(group["lr"] * scaled)

    def _root(self, state: dict, squares: Tensor, decay: float) -> Tensor:
        if squares.ndim < 2:
            return state.setdefault("squares", torch.zeros_like(squares)).lerp_(squares, 1 - decay).sqrt()
        shape, squares = squares.shape, squares.flatten(1)
        rows = state.setdefault("rows", squares.new_zeros(len(squares), 1)).lerp_(squares.mean(1, True), 1 - decay)
        columns = state.setdefault("columns", squares.new_zeros(1, squares.shape[1]))
        columns.lerp_(squares.mean(0, True), 1 - decay)
        return (rows * columns / rows.mean()).sqrt().view(shape)


class Recall:
    """The mode ``associative``, with other keys. A hologram for each layer, transformed in blocks.

    Args:
        keys: ``mean``: of the layer's input, as in the product; ``phase``: the running mean of that key's phasors; ``random``:
            fixed; ``several``: the mean of four phasors, each of a quarter of the batch; ``last``: the memory is read through
            the key of the batch before, which bound what it got last; ``head``: a block has the key of the inputs that it
            multiplies.
        smoothing: decay of a running mean of the key.
        whole: scale the mean of phasors to magnitude 1. Otherwise the memory weakens where phases disagree, and what it does
            not hold of a gradient goes into the update directly.

    Its ``agreement`` has cosines of the update and momentum's.
    """

    def __init__(
        self, model: nn.Module, keys: str = "mean", smoothing: float = 0.0, whole: bool = True, block: int = 1024
    ) -> None:
        self.keys, self.smoothing, self.whole, self.block, self.decay = keys, smoothing, whole, block, 0.9
        self.layers = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
        self.inputs: dict[nn.Module, Tensor] = {}
        self.kept: dict[object, Tensor] = {}
        self.steps, self.agreement = 0, []
        for layer in self.layers:
            layer.register_forward_hook(self._see)

    @torch.no_grad()
    def _see(self, layer: nn.Module, given: tuple, returned: Tensor) -> None:
        if not layer.training:
            return
        x = next(x for x in (*given, returned) if x.is_floating_point())
        x = x.movedim(1, -1) if isinstance(layer, nn.Conv2d) else x
        sums = torch.stack([part.flatten(0, -2).sum(0) for part in x.chunk(4 if self.keys == "several" else 1)])
        if self.keys == "head" and sums.shape[-1] % self.block == 0:
            sums = sums.view(-1, self.block)
        self.inputs[layer] = folded(sums, self.block)

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        parameters = {layer: [p for p in layer.parameters(recurse=False) if p.grad is not None] for layer in self.layers}
        gradients = [p.grad for mine in parameters.values() for p in mine]
        velocity = self.kept.setdefault("velocity", [torch.zeros_like(gradient) for gradient in gradients])
        torch._foreach_mul_(velocity, self.decay)
        torch._foreach_add_(velocity, gradients)
        for (layer, mine), keys in zip(parameters.items(), self._keys_of_layers(), strict=True):
            flat = torch.cat([p.grad.flatten() for p in mine])
            blocks = F.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
            keys = keys[torch.arange(len(blocks)) % len(keys)] if len(keys) > 1 else keys
            read = self._recalled(layer, torch.fft.rfft(blocks, norm="ortho"), keys)
            update = torch.fft.irfft(read, n=self.block, norm="ortho").flatten()[: len(flat)]
            torch._foreach_copy_([p.grad.view(-1) for p in mine], list(update.split([p.numel() for p in mine])))
        if self.steps % 10 == 0:
            update, momentum = (torch.cat([part.flatten() for part in parts]) for parts in (gradients, velocity))
            self.agreement.append(torch.cosine_similarity(update, momentum, dim=0).item())

    def _recalled(self, layer: nn.Module, spectrum: Tensor, keys: Tensor) -> Tensor:
        memory = self.kept.setdefault(layer, torch.zeros_like(spectrum)).mul_(self.decay)
        if self.keys == "last":
            before, self.kept[layer, "key"] = self.kept.get((layer, "key"), 0), keys
            read = memory * before + spectrum
        memory.addcmul_(spectrum, keys.conj())
        if self.keys != "last":
            read = memory * keys if self.whole else memory * keys + (1 - keys.abs().square()) * spectrum
        return read

    def _keys_of_layers(self) -> list[Tensor]:
        """(1, bins) for all blocks of a layer, or more for its blocks in turn."""
        seen = [self.inputs[layer] for layer in self.layers]
        together = torch.cat(seen)
        if self.keys == "random":
            together = torch.randn(together.shape, generator=torch.Generator().manual_seed(0))
        if self.keys == "mean":
            together = self.kept.setdefault("mean", torch.zeros_like(together)).mul_(self.smoothing).add_(together)
        keys = units(torch.fft.rfft(together, norm="ortho"), empty=1, noise=2**-11.5)
        if self.keys == "phase":
            keys = self.kept.setdefault("mean", torch.zeros_like(keys)).mul_(self.smoothing).add_((1 - self.smoothing) * keys)
            keys = units(keys, empty=1) if self.whole else keys / (1 - self.smoothing**self.steps)
        of_layers = keys.split([len(rows) for rows in seen])
        return [mine.mean(0, keepdim=True) for mine in of_layers] if self.keys == "several" else list(of_layers)


class Method(NamedTuple):
    """How a method trains: its optimizer, of a model and a rate; the middle of the grid for digits and for text, and the factor
    between rates; what rewrites the gradients of a model."""

    optimizer: Callable[[nn.Module, float], torch.optim.Optimizer]
    rates: tuple[float, float, float]
    synthesis: Callable[[nn.Module], HolographicSynthesis | Recall] | None = None

    def made(self, model: nn.Module, rate: float) -> tuple[torch.optim.Optimizer, HolographicSynthesis | Recall | None]:
        return self.optimizer(model, rate), self.synthesis(model) if self.synthesis else None


def of_parameters(kind: Callable, **options: object) -> Callable[[nn.Module, float], torch.optim.Optimizer]:
    return lambda model, rate: kind(model.parameters(), lr=rate, **options)


def torchao(parameters: Iterable[nn.Parameter], lr: float, name: str) -> torch.optim.Optimizer:
    return getattr(importlib.import_module("torchao.optim"), name)(parameters, lr=lr, weight_decay=0.01)


def muon(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    """Muon for the Linear layers of the blocks, AdamW for the rest."""
    inside = (m for name, m in model.named_modules() if "blocks" in name or "branches" in name)
    linear = {module.weight for module in inside if isinstance(module, nn.Linear)}
    rest = [p for p in model.parameters() if p not in linear]
    matrices = torch.optim.Muon(list(linear), lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return CombinedOptimizer([matrices, torch.optim.AdamW(rest, lr=rate)])


ADAM, SGD, MOMENTUM = (3e-3, 1e-2, 3), (1.6, 3.2, 2), (0.4, 0.8, 2)
"""Grids of rates."""
KEYS = {
    "mean input over 10 steps": {"smoothing": 0.9},
    "mean input over 100 steps": {"smoothing": 0.99},
    "mean phase over 10 steps": {"keys": "phase", "smoothing": 0.9},
    "mean phase over 10 steps, magnitude kept": {"keys": "phase", "smoothing": 0.9, "whole": False},
    "four keys": {"keys": "several", "whole": False},
    "key of the batch before": {"keys": "last"},
    "key of each head": {"keys": "head", "block": 16},
    "fixed random keys": {"keys": "random"},
}
QUANTISED = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
plain_sgd = of_parameters(torch.optim.SGD)
METHODS = {
    "AdamW": Method(of_parameters(torch.optim.AdamW), ADAM),
    "factored, first moment": Method(of_parameters(Factored, beta=0.9), ADAM),
    "factored": Method(of_parameters(Factored), ADAM),
    "Adafactor": Method(of_parameters(torch.optim.Adafactor), (3e-2, 1e-1, 3)),
    **{name: Method(of_parameters(torchao, name=name), ADAM) for name in QUANTISED},
    "Muon": Method(muon, ADAM),
    "SGD": Method(plain_sgd, SGD),
    "SGD with momentum": Method(of_parameters(torch.optim.SGD, momentum=0.9), MOMENTUM),
    "shared": Method(plain_sgd, SGD, partial(HolographicSynthesis, mode="shared")),
    "associative": Method(plain_sgd, MOMENTUM, partial(HolographicSynthesis, mode="associative", key_ema=0)),
    **{name: Method(plain_sgd, MOMENTUM, partial(Recall, **options)) for name, options in KEYS.items()},
}

OPTIMIZERS = ("AdamW", *QUANTISED, "Adafactor", "Muon", "SGD with momentum", "SGD", "shared")
STUDIES: dict[str, tuple[tuple[str, ...], dict[tuple[str, int], int]]] = {
    "recall": (("SGD with momentum", "SGD", "associative", *KEYS), {("coarse digits", 32): 5, ("causal", 8): 3}),
    "momentum": (("AdamW", "Adafactor"), {(t, b): 3 for b in (8, 64, 512) for t in ("digits", "causal", "masked")}),
    "control": (("factored, first moment", "factored"), {("causal", 8): 3, ("digits", 512): 3, ("causal", 512): 3}),
    "optimizers": (OPTIMIZERS, {("causal", 8): 3, ("coarse digits", 32): 3}),
}
"""Methods, and seeds at each task and batch size."""


class Cell(NamedTuple):
    """A row of a table at one task."""

    task: str
    batch: int
    method: str

    def key(self, rate: float, seed: int) -> str:
        return f"{self.task} {self.batch} x {TASKS[self.task][1][self.batch]} | {self.method} | {rate:.3g} | {seed}"


def train(cell: Cell, rate: float, seed: int) -> dict:
    """One training: scores on validation and test data, the loss of the last tenth, seconds."""
    task, steps = task_of(cell.task), TASKS[cell.task][1][cell.batch]
    task.batch = cell.batch
    torch.manual_seed(seed)
    model = task.model()
    optimizer, synthesis = METHODS[cell.method].made(model, rate)
    losses, begun = [], time.perf_counter()
    for step in range(steps):
        scale = min(1.0, (step + 1) / (0.1 * steps), (1 + math.cos(math.pi * step / steps)) / 2)
        for group in optimizer.param_groups:  # torchao keeps rates as tensors
            group["lr"].fill_(rate * scale) if isinstance(group["lr"], Tensor) else group.update(lr=rate * scale)
        optimizer.zero_grad()
        loss = task.loss(model)
        loss.backward()
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            return {"val": None, "test": None, "loss": None, "seconds": time.perf_counter() - begun}
        if synthesis is not None:
            synthesis.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        val, test = (task.score(model, part) * (100 if task.better is max else 1) for part in ("val", "test"))
    tail = statistics.mean(losses[-max(1, steps // 10) :])
    agreement = {"agreement": statistics.mean(synthesis.agreement)} if isinstance(synthesis, Recall) else {}
    return {"val": val, "test": test, "loss": tail, "seconds": time.perf_counter() - begun} | agreement


def quality(cell: Cell, piece: dict) -> tuple[float, float]:
    """Larger is better; equal accuracies are told apart by the loss."""
    if piece["val"] is None or not math.isfinite(piece["val"]):
        return -math.inf, -math.inf
    return piece["val"] if task_of(cell.task).better is max else -piece["val"], -piece["loss"]


class Measurement:
    """The pieces measured so far, kept in a JSON file, if a path is given. Those of another machine than the first name it."""

    MOST_RATES = 6

    def __init__(self, path: Path | None) -> None:
        self.path, self.found = path, {"machine": machine(), "costs": {}, "pieces": {}}
        if path is not None and path.exists():
            self.found = json.loads(path.read_text())
        self.elsewhere = {} if self.found["machine"] == machine() else {"machine": machine()}

    def piece(self, cell: Cell, rate: float, seed: int) -> dict:
        key = cell.key(rate, seed)
        if key not in self.found["pieces"]:
            found = self.found["pieces"][key] = train(cell, rate, seed) | self.elsewhere
            save(self.found, self.path)
            test = "diverged" if found["test"] is None else f"{found['test']:.4f}"
            print(f"  {time.strftime('%H:%M:%S')} {key}: {test}, {found['seconds']:.1f} s", file=sys.stderr, flush=True)
        return self.found["pieces"][key]

    def costs(self, methods: Iterable[str], rounds: int) -> dict[str, dict]:
        """What each method costs; those that have not been measured are, beside AdamW."""
        if missing := [name for name in methods if name not in self.found["costs"]]:
            measured = costs(dict.fromkeys(("AdamW", *missing)), rounds)
            self.found["costs"] = {name: row | self.elsewhere for name, row in measured.items()} | self.found["costs"]
            save(self.found, self.path)
        return self.found["costs"]

    def rate(self, cell: Cell) -> tuple[float, bool]:
        """The best rate of seed 0, and whether it is at the edge of the rates tried."""
        *middles, factor = METHODS[cell.method].rates
        middle = middles[0 if isinstance(task_of(cell.task), Digits) else 1]
        powers = [0, -1, 1]
        while True:
            tried = {power: quality(cell, self.piece(cell, middle * factor**power, 0)) for power in powers}
            best = max(tried, key=tried.get)
            at_edge = best in (min(powers), max(powers))
            if not at_edge or len(powers) == self.MOST_RATES:
                return middle * factor**best, at_edge
            powers.append(best + (1 if best == max(powers) else -1))

    def row(self, cell: Cell, seeds: int) -> tuple[str, str]:
        """The mean and deviation of the scores, with a star for a rate at the edge of its grid; the mean agreement, if any."""
        rate, at_edge = self.rate(cell)
        of_seeds = [self.piece(cell, rate, seed) for seed in range(seeds)]
        tests = [piece["test"] for piece in of_seeds if piece["test"] is not None]
        agreements = [piece["agreement"] for piece in of_seeds if "agreement" in piece]
        digits = 1 if task_of(cell.task).better is max else 3
        score = f"{statistics.mean(tests):.{digits}f}" if tests else "diverged"
        score += f" ± {statistics.stdev(tests):.{digits}f}" if len(tests) > 1 else ""
        score += "*" * at_edge + f" ({seeds - len(tests)} diverged)" * (len(tests) < seeds)
        return score, f"{statistics.mean(agreements):.2f}" if agreements else "-"


def costs(methods: Iterable[str], rounds: int) -> dict[str, dict[str, float]]:
    """Bytes of state for each parameter and time of a step of each, for a byte model of 24 blocks of width 64."""
    torch.manual_seed(0)
    model = ByteModel(32, depth=24)
    gradients = [torch.randn_like(parameter) * 1e-3 for parameter in model.parameters()]
    used = {name: METHODS[name].made(model, 0.0) for name in methods}
    model(torch.zeros(1, 8, dtype=torch.long))  # the keys

    def restore() -> None:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()

    def step(optimizer: torch.optim.Optimizer, synthesis: HolographicSynthesis | Recall | None) -> None:
        if synthesis is not None:
            synthesis.step()
        optimizer.step()

    def state(optimizer: torch.optim.Optimizer, synthesis: HolographicSynthesis | Recall | None) -> int:
        kept = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        kept += getattr(synthesis, "state_tensors", [])
        return sum(part.nbytes for tensor in kept for part in parts_of(tensor))

    seconds = alternating({name: timed(partial(step, *both), "cpu", restore) for name, both in used.items()}, rounds)
    return {
        name: {
            "state": state(*both) / sum(gradient.numel() for gradient in gradients),
            "over_adamw": median_ratio(seconds[name], seconds["AdamW"]),
            "milliseconds": statistics.median(seconds[name]) * 1e3,
        }
        for name, both in used.items()
    }


def show(cells: list[tuple[str, int]], rows: dict[str, list[tuple[str, str]]], costs: dict[str, dict]) -> None:
    """A Markdown table of methods; ``rows`` has what :meth:`Measurement.row` returns for each cell."""
    heads = [f"{task}, batch {batch}" for task, batch in cells]
    recall = any(agreement != "-" for mine in rows.values() for _, agreement in mine)
    heads += ["agreement"] * recall + ["state", "step"] * bool(costs)
    print(f"\n| | {' | '.join(heads)} |\n|{'---|' * (len(heads) + 1)}")
    for method, mine in rows.items():
        shown = [score for score, _ in mine] + [" / ".join(agreement for _, agreement in mine)] * recall
        shown += [f"{costs[method][name]:.2f}" for name in ("state", "over_adamw") if costs]
        print(f"| {method} | {' | '.join(shown)} |", flush=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--study", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--tasks", nargs="+", choices=TASKS, help="in the place of the study's own, at their first batch size")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="in the place of the study's own")
    parser.add_argument("--seeds", type=int, help="in the place of the study's own")
    parser.add_argument("--rounds", type=int, default=15, help="of the timing")
    parser.add_argument("--steps", type=int, help="the most that a training takes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    measurement = Measurement(options.json)
    print(json.dumps(measurement.found["machine"]))
    for _, steps in TASKS.values():
        steps.update({batch: min(number, options.steps or number) for batch, number in steps.items()})
    chosen = {(task, min(TASKS[task][1])): 3 for task in options.tasks or ()}
    studies = {}
    for name in options.study:
        methods, cells = STUDIES[name]
        studies[name] = options.methods or methods, {c: options.seeds or seeds for c, seeds in (chosen or cells).items()}
    for seeds in range(1, max(seeds for _, cells in studies.values() for seeds in cells.values()) + 1):
        for name, (methods, cells) in studies.items():
            if seeds > max(cells.values()):
                continue
            costs_of = measurement.costs(methods, options.rounds) if name == "optimizers" else {}
            rows = {m: [measurement.row(Cell(*cell, m), min(seeds, most)) for cell, most in cells.items()] for m in methods}
            print(f"\n{name}, up to {seeds} seed{'s' * (seeds > 1)}")
            show(list(cells), rows, costs_of)


if __name__ == "__main__":
    main()
