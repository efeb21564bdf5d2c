"""Memory during a training step, drawn as SVG from the events of a profiler."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, TOP, ROW = 1120, 320, 90, 60, 26
"""Pixels: size of the curve, margins to its left and top, and height of a row of ranges below it."""

POINTS = 2 * WIDTH
"""Number of time intervals to which the curve is thinned."""

ROWS = {
    "step": ("#8c8c8c", ("training_step", "backward")),
    "forward": ("#4477aa", ("forward ",)),
    "recompute": ("#ee8833", ("recompute ",)),
    "gradients": ("#228855", ("gradients ",)),
}
"""The rows, with their colors and the prefixes of the names of their ranges."""


@dataclass(frozen=True)
class Range:
    """Times in microseconds."""

    row: str
    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Curve:
    """Bytes in use after each allocation and release; times in microseconds.

    Attributes:
        absolute: whether bytes count from zero (GPU allocator) or from the first event (CPU).
    """

    points: list[tuple[float, int]]
    device: str
    absolute: bool


def memory_picture(events: Iterable[dict], title: str) -> str:
    """Draws the memory curve, and below it the ranges that ran.

    Args:
        events: ``traceEvents`` of a Chrome trace from torch.profiler with ``profile_memory=True``.

    Returns:
        SVG; only a line of text if nothing was allocated.
    """
    events = list(events)
    curve, ranges = curve_of(events), ranges_of(events)
    rows = [row for row in ROWS if any(r.row == row for r in ranges)]
    height = TOP + HEIGHT + ROW * len(rows) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{height}" font-family="sans-serif" '
        'font-size="12" fill="#222"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    if not curve.points:
        return "\n".join([*lines, f'<text x="{LEFT}" y="60">no allocations</text></svg>\n'])
    times = [time for time, _ in curve.points] + [t for r in ranges for t in (r.begin, r.end)]
    begin, end = min(times), max(times)
    floor, peak = min(0, *(b for _, b in curve.points)), max(1, *(b for _, b in curve.points))

    def x(time: float) -> float:
        return LEFT + WIDTH * (time - begin) / ((end - begin) or 1)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - (value - floor) / (peak - floor))

    for value in _ticks(floor / 2**20, peak / 2**20):
        level = y(value * 2**20)
        lines.append(f'<path d="M{LEFT} {level:.1f}h{WIDTH}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{value:g} MiB</text>')
    bottom = TOP + HEIGHT + ROW * len(rows)
    for value in _ticks(0, (end - begin) / 1e3):
        place = x(begin + value * 1e3)
        lines.append(f'<path d="M{place:.1f} {TOP}V{bottom + 6}" stroke="#eee"/>')
        lines.append(f'<text x="{place:.1f}" y="{bottom + 20}" text-anchor="middle">{value:g} ms</text>')
    lines += [_rectangle(r, TOP + HEIGHT + ROW * rows.index(r.row), x) for r in ranges]
    lines += [
        f'<text x="{LEFT - 8}" y="{TOP + HEIGHT + ROW * i + 18}" text-anchor="end">{row}</text>' for i, row in enumerate(rows)
    ]
    path = "".join(f"H{x(time):.1f}V{y(value):.1f}" for time, value in thinned(curve.points))
    last, origin = curve.points[-1][1], f"M{LEFT} {y(0):.1f}"
    lines.append(f'<path d="{origin}{path}H{x(end):.1f}V{y(0):.1f}Z" fill="#aaccee" fill-opacity="0.6" stroke="none"/>')
    lines.append(f'<path d="{origin}{path}H{x(end):.1f}" fill="none" stroke="#224466"/>')
    when = next(time for time, value in curve.points if value == max(b for _, b in curve.points))
    during = [r.name for r in ranges if r.begin <= when <= r.end and r.row != "step"]
    lines.append(f'<circle cx="{x(when):.1f}" cy="{y(peak):.1f}" r="4" fill="#cc3311"/>')
    above = "in use" if curve.absolute else "above the start of the step"
    told = f"{curve.device}: peak {peak / 2**20:.1f} MiB {above} at {(when - begin) / 1e3:.1f} ms"
    told += f", during {' and '.join(during)}" if during else ""
    lines.append(f'<text x="{LEFT}" y="44">{escape(told)}; {last / 2**20:.1f} MiB at the end</text>')
    return "\n".join([*lines, "</svg>\n"])


def curve_of(events: Iterable[dict]) -> Curve:
    """Memory of the first accelerator with events, else of the CPU."""
    seen = [event for event in events if event.get("name") == "[memory]"]
    seen.sort(key=lambda event: event["ts"])
    device = max(((e["args"]["Device Type"], -e["args"]["Device Id"]) for e in seen), default=(0, 0))
    seen = [e["args"] | {"ts": e["ts"]} for e in seen if (e["args"]["Device Type"], -e["args"]["Device Id"]) == device]
    if device[0] != 0:
        return Curve([(e["ts"], e["Total Allocated"]) for e in seen], f"device {-device[1]}", True)
    points, now = [], 0
    for event in seen:
        now += event["Bytes"]
        points.append((event["ts"], now))
    return Curve(points, "CPU", False)


def ranges_of(events: Iterable[dict]) -> list[Range]:
    """The ranges of the host, by the names from the engine and from Lightning.

    Lightning runs training_step and backward inside the optimizer step; only the part after them counts as "optimizer".
    """
    found, around = [], []
    for event in events:
        if event.get("cat") != "user_annotation":
            continue
        name = event["name"].rpartition(".")[2] if event["name"].startswith("[") else event["name"]
        if name == "optimizer_step":
            around.append((event["ts"], event["ts"] + event["dur"]))
        for row, (_, beginnings) in ROWS.items():
            if name.startswith(beginnings):
                found.append(Range(row, name, event["ts"], event["ts"] + event["dur"]))
    for begin, end in around:
        own = max((r.end for r in found if r.name == "backward" and begin <= r.begin <= end), default=begin)
        found.append(Range("step", "optimizer", own, end))
    return found


def thinned(points: list[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Keeps the first, lowest, highest and last point of each time interval, so that no peak is lost."""
    begin, length = points[0][0], (points[-1][0] - points[0][0]) or 1
    places: dict[int, list[tuple[float, int]]] = {}
    for point in points:
        places.setdefault(int((point[0] - begin) / length * POINTS), []).append(point)
    for here in places.values():
        lowest, highest = min(here, key=lambda p: p[1]), max(here, key=lambda p: p[1])
        yield from sorted({here[0], lowest, highest, here[-1]})


def _rectangle(r: Range, top: int, x) -> str:
    width = max(x(r.end) - x(r.begin), 1)
    name = r.name.partition(" ")[2] or r.name
    label = f'<text x="{x(r.begin) + 3:.1f}" y="{top + 18}" font-size="10" fill="white">{escape(name)}</text>'
    return (
        f'<rect x="{x(r.begin):.1f}" y="{top + 4}" width="{width:.1f}" height="{ROW - 6}" fill="{ROWS[r.row][0]}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(r.name)}: {(r.end - r.begin) / 1e3:.2f} ms</title></rect>'
    ) + (label if width > 6 * len(name) + 4 else "")


def _ticks(low: float, high: float) -> Iterator[float]:
    """About six round numbers between two."""
    rough = (high - low) / 8 or 1
    size = 10.0 ** len(str(int(rough))) if rough >= 1 else 1.0
    while size > rough:
        size /= 10
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    number = -(-low // step)
    while number * step <= high:
        yield round(number * step, 10) + 0.0  # turns -0 into 0
        number += 1
