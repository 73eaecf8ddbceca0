"""FLOPs of each device, as the planner gives out the work."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from muon_optax.sharding.planning.workload import Workload

__all__ = ["Loads", "rest_owners"]


class Loads:
    """FLOPs of each device of a mesh: float64, since matrices of any size may be asked about.

    Example:
      >>> workload = Workload(8, 8, 4, 100, ("f",), ("r",), (("r", 2), ("f", 4)))
      >>> loads = Loads(workload.sizes)
      >>> loads.add_to_rest(0, 5, workload)
      >>> loads.peak, loads.best_first_owner(2, workload), loads.peak_with(0, 2, workload)
      (100, 3, 200)
    """

    def __init__(self, sizes: tuple[tuple[str, int], ...]):
        self._flops = np.zeros([n for _, n in sizes])

    @property
    def peak(self) -> int:
        """FLOPs of the busiest device."""
        return int(self._flops.max())

    def add_to_all(self, flops: int) -> None:
        """Adds the same to every device."""
        self._flops += flops

    def add_to_rest(
        self, first_owner: int, count: int, workload: Workload, repeats: int = 1
    ) -> None:
        """Adds one matrix for each owner of a rest, on every device that is that owner."""
        order, others = _owner_order(workload)
        extra = np.zeros(workload.owners)
        extra[rest_owners(first_owner, count, workload, repeats)] = workload.flops
        sizes = [self._flops.shape[i] for i in order]
        self._flops.transpose(others + order)[...] += extra.reshape(sizes)

    def best_first_owner(self, count: int, workload: Workload, repeats: int = 1) -> int:
        """The first owner of a rest that keeps the highest load low."""
        owners = rest_owners(np.arange(workload.owners)[:, None], count, workload, repeats)
        return int(np.argmin(self._of_owners(workload)[owners].max(axis=1)))

    def peak_with(self, first_owner: int, count: int, workload: Workload, repeats: int = 1) -> int:
        """The highest load of the owners of a rest, with the rest."""
        owners = rest_owners(first_owner, count, workload, repeats)
        return int(self._of_owners(workload)[owners].max()) + workload.flops

    def _of_owners(self, workload: Workload) -> np.ndarray:
        """The highest load of each owner over the mesh axes that don't number owners."""
        order, others = _owner_order(workload)
        return self._flops.transpose(others + order).reshape(-1, workload.owners).max(axis=0)


class Owners(Protocol):
    """Devices that can each own a matrix: `shards` of each of so many replicas."""

    @property
    def shards(self) -> int: ...

    @property
    def replicas(self) -> int: ...


def rest_owners(
    first_owner: npt.ArrayLike, count: int, among: Owners, repeats: int = 1
) -> np.ndarray:
    """Owners of fewer matrices than owners: an even part for each replica, from `first_owner` on.

    So replicas send each other no padding. Owners are numbered replica by replica.

    Args:
      first_owner: the first of them.
      count: the number of matrices.
      among: the devices.
      repeats: how many replicas work on each matrix: more than one only of matrices that are so
        few that all their owners are in different replicas.

    Returns:
      The owners of each matrix, one after the other.

    Example:
      >>> workload = Workload(8, 8, 4, 0, ("f",), ("r",), (("r", 2), ("f", 4)))
      >>> rest_owners(3, 5, workload), rest_owners(3, 1, workload, repeats=2)
      (array([3, 0, 1, 7, 4]), array([3, 7]))
    """
    each = -(-count // among.replicas)
    replica_offset, shard_offset = np.divmod(np.arange(count * repeats), each)
    first_replica, first_shard = np.divmod(first_owner, among.shards)
    replica = (first_replica + replica_offset) % among.replicas
    return replica * among.shards + (first_shard + shard_offset) % among.shards


def _owner_order(workload: Workload) -> tuple[list[int], list[int]]:
    """Mesh dims that number the owners, replica axes first, and the others."""
    names = [name for name, _ in workload.sizes]
    order = [names.index(a) for a in (*workload.replica_axes, *workload.shard_axes)]
    return order, [i for i in range(len(names)) if i not in order]
