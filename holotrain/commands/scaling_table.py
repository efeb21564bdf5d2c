"""Prints the predictions for several devices as a table."""

from collections.abc import Callable

from rich import box
from rich.table import Table

from holotrain.commands.plain import plain
from holotrain.commands.screen import console
from holotrain.planning import Band, Scaling
from holotrain.sizes import counted, in_words


def show_scaling(scaling: Scaling) -> None:
    """Prints the predictions and their assumptions."""
    link = f" over {scaling.link}" if scaling.devices > 1 else ""
    title = f"predicted, not measured: {counted(scaling.devices, 'device')}{link}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("strategy", no_wrap=True)
    for name in ("peak per rank", "ms per step", scaling.unit, "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for found in scaling.predictions:
        if found.memory is None:
            continue
        table.add_row(
            found.strategy,
            in_words(found.memory),
            _band(found.seconds, lambda seconds: f"{1e3 * seconds:.4g}"),
            _band(found.throughput, lambda rate: f"{rate:.4g}"),
            _band(found.efficiency, lambda share: f"{share:.0%}"),
        )
    plain(width=max(console.width, 120)).print(table)
    reasons: dict[str, list[str]] = {}
    for found in scaling.predictions:
        if found.reason:
            reasons.setdefault(found.reason, []).append(found.strategy)
    for reason, strategies in reasons.items():
        console.print(f"not possible: {'; '.join(strategies)}: {reason}")
    console.print("assumptions:")
    for line in scaling.assumptions:
        console.print(f"- {line}")


def _band(band: Band | None, said: Callable[[float], str]) -> str:
    if band is None:
        return "-"
    low, high = said(band.low), said(band.high)
    return low if low == high else f"{low} - {high}"
