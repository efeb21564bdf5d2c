"""What a user gives as ``backward``, ``store`` and ``keep``, as the schedule of each block."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from holotrain.numeric import counted
from holotrain.reversible.kept_results import KeptResults
from holotrain.schedules import REBUILDING, SCHEDULES, Schedule, kind_of


def schedule_of(schedule: str) -> Schedule:
    """The schedule of a name, which results to keep may follow after plus signs: ``"reversible+attention"``.

    Raises:
        ValueError: an unknown schedule, or one that cannot keep results.
    """
    named, *keep = schedule.split("+")
    name = kind_of(named)
    if name not in SCHEDULES:
        raise ValueError(f"backward must be one of {', '.join(SCHEDULES)}, not {name!r}")
    if keep and SCHEDULES[name].kind != "rebuilt":
        raise ValueError(f"backward={schedule!r}: {name} cannot keep results; {' and '.join(REBUILDING)} can")
    found = SCHEDULES[name]
    return _keeping(found if name == named else replace(found, input=named), keep)


def schedules_of(
    backward: str | Sequence[str], depth: int, store: int | Collection[int] = 0, keep: str | Collection[str] = ()
) -> list[Schedule]:
    """The schedule of each of ``depth`` blocks, from the arguments of :class:`~holotrain.reversible.ReversibleSequence`."""
    if not isinstance(backward, Sequence):
        raise ValueError(f"backward must be one of {', '.join(SCHEDULES)}, or a list of them, not {backward!r}")
    if not isinstance(backward, str) and len(backward) != depth:
        raise ValueError(f"backward lists {counted(len(backward), 'schedule')} for {counted(depth, 'block')}")
    stored = frozenset(range(depth - store, depth) if isinstance(store, int) else store)
    if not stored <= set(range(depth)) or isinstance(store, bool) or (isinstance(store, int) and store < 0):
        raise ValueError(f"store must be a number of blocks up to {depth} or indices below {depth}, not {store!r}")
    schedules = [schedule_of(each) for each in ([backward] * depth if isinstance(backward, str) else backward)]
    results = [keep] if isinstance(keep, str) else keep
    return [SCHEDULES["autograd"] if i in stored else _keeping(schedule, results) for i, schedule in enumerate(schedules)]


def _keeping(schedule: Schedule, results: Collection[str]) -> Schedule:
    if results:
        KeptResults(results)  # which refuses unknown ones
    return replace(schedule, keep=(*schedule.keep, *results)) if schedule.kind == "rebuilt" else schedule


def stores_everything(backward: str | Sequence[str]) -> bool:
    """Whether all blocks store all activations; also where there are no blocks."""
    return all(schedule_of(each).kind == "stored" for each in ([backward] if isinstance(backward, str) else backward))


class Shorthand:
    """``backward``, ``store`` or ``keep`` of an object with blocks. Setting one makes its ``schedules`` anew."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type) -> Any:
        return of._shorthands[self._name]

    def __set__(self, of: Any, value: Any) -> None:
        shorthands = of._shorthands | {self._name: value}
        of.schedules = schedules_of(depth=len(of.blocks), **shorthands)
        of._shorthands = shorthands
