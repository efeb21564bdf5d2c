"""Finds the process that the others wait for, by the numbers of collectives that each has launched.

The processes of a group launch the same collectives. If one hangs, the others launch the next collective and wait there.
Processes in other groups wait for those in turn. The process that hangs is behind at least one other and ahead of none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import distributed_c10d


@dataclass(frozen=True)
class Position:
    """
    Args:
        jobs: number of finished jobs.
        launched: number of collectives of each current process group, by its name.
    """

    jobs: int
    launched: Mapping[str, int] = field(default_factory=dict)

    def behind(self, other: "Position") -> bool:
        """Whether the other process has launched a collective that this one has not."""
        if self.jobs != other.jobs:
            return self.jobs < other.jobs
        return any(count < other.launched.get(group, 0) for group, count in self.launched.items())


def launched() -> dict[str, int]:
    """Numbers of launched collectives by group. Does not block; callable from any thread."""
    try:
        return {group.group_name: group._get_sequence_number_for_group() for group in list(distributed_c10d._world.pg_map)}
    except Exception:  # a group is being created or destroyed, or torch has changed: skip the comparison
        return {}


def waited_for(positions: Mapping[Any, Position]) -> list[Any]:
    """The processes that others wait for and that wait for no other."""
    found = []
    for one, position in positions.items():
        others = [other for name, other in positions.items() if name != one]
        if any(map(position.behind, others)) and not any(other.behind(position) for other in others):
            found.append(one)
    return found
