"""Growth: tells a leak from the ups and downs of a training's memory."""

from itertools import pairwise
from statistics import median

CAPACITY = 96
CHECKED_AT = (CAPACITY // 4, CAPACITY // 2, CAPACITY)
LEAST_BYTES = 16 * 2**20
LEAST_SHARE = 1 / 16
EVENNESS = 0.75


class Growth:
    """Memory by label over the steps of a training, in a bounded number of samples.

    What an allocator keeps and what longer batches add comes early and fades. A leak goes on: over the last two thirds of the
    run, each quarter adds as much as the others. When samples are full, every other one is dropped and the rest stand for twice
    as many steps, so slow leaks are found later than fast ones. Medians of quarters do not see single peaks.
    """

    def __init__(self) -> None:
        self.level: int | None = None
        self._grown: dict[str, int] = {}
        self._samples: list[tuple[int, dict[str, int]]] = []
        self._steps, self._stride = 0, 1

    def mark(self, label: str, level: int) -> None:
        """Counts for ``label`` what the level in bytes has changed since the last mark."""
        self._grown[label] = self._grown.get(label, 0) + level - (level if self.level is None else self.level)
        self.level = level

    def step(self) -> tuple[str, float] | None:
        """Ends a step. Returns the label that grows and the bytes per step, if memory grows steadily."""
        self._steps += 1
        if self._steps % self._stride:
            return None
        self._samples.append((self.level, dict(self._grown)))
        if len(self._samples) not in CHECKED_AT:
            return None
        window = self._samples[len(self._samples) // 3 :]
        size, stride = len(window) // 4, self._stride
        levels = _by_quarter([level for level, _ in window])
        rises = [after - before for before, after in pairwise(levels)]
        if len(self._samples) == CAPACITY:
            self._samples, self._stride = self._samples[1::2], 2 * stride
        if sum(rises) < max(LEAST_BYTES, LEAST_SHARE * levels[0]) or min(rises) < EVENNESS * max(rises):
            return None
        changes = {label: _by_quarter([grown.get(label, 0) for _, grown in window]) for label in self._grown}
        label = max(changes, key=lambda name: changes[name][-1] - changes[name][0])
        return label, sum(rises) / (3 * size * stride)


def _by_quarter(values: list[int]) -> list[float]:
    size = len(values) // 4
    return [median(values[part * size : (part + 1) * size]) for part in range(4)]
