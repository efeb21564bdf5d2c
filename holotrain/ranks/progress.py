"""How far a process has come, in collectives that it has launched, and whom the others wait for.

The processes of a group launch the same collectives. When one of them hangs, the others launch the next and wait there. Those
who wait for these wait too, in groups of their own: the one that all wait for is behind somebody, and ahead of nobody.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class Position:
    """
    Args:
        jobs: that are over.
        launched: collectives of each group that the process has now, by its name.
    """

    jobs: int
    launched: Mapping[str, int] = field(default_factory=dict)

    def behind(self, other: "Position") -> bool:
        """Whether the other one has launched what this one has yet to."""
        if self.jobs != other.jobs:
            return self.jobs < other.jobs
        return any(count < other.launched.get(group, 0) for group, count in self.launched.items())


def launched() -> dict[str, int]:
    """Asks without waiting, from any thread."""
    try:
        return {group.group_name: group._get_sequence_number_for_group() for group in list(distributed_c10d._world.pg_map)}
    except Exception:  # a group is being made or let go, or torch has changed: then nobody is compared
        return {}


def waited_for(positions: Mapping[Any, Position]) -> list[Any]:
    """Those that others wait for, and who wait for nobody."""
    found = []
    for one, position in positions.items():
        others = [other for name, other in positions.items() if name != one]
        if any(map(position.behind, others)) and not any(other.behind(position) for other in others):
            found.append(one)
    return found
