"""Joined: a cluster environment for processes that already run."""

from lightning.pytorch.plugins.environments import ClusterEnvironment

from holotrain.ranks.place import Place


class Joined(ClusterEnvironment):
    """Tells Lightning the rank and size of this process, independent of the launcher.

    Args:
        place: place of this process.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self.place.address

    @property
    def main_port(self) -> int:
        return self.place.port

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.place.size

    def set_world_size(self, size: int) -> None:
        assert size == self.place.size

    def global_rank(self) -> int:
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.place.rank

    def local_rank(self) -> int:
        return self.place.local_rank

    def node_rank(self) -> int:
        return self.place.node
