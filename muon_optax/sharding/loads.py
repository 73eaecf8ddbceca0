"""How many FLOPs each device has, as the planner gives work out."""

import numpy as np
import numpy.typing as npt

from muon_optax.sharding.cost import Work

__all__ = ["Loads", "rest_owners"]


class Loads:
    """FLOPs of each device of a mesh: float64, since matrices of any size may be asked about.

    Example:
      >>> work = Work(8, 8, 4, 100, ("f",), ("r",), (("r", 2), ("f", 4)))
      >>> loads = Loads(work.sizes)
      >>> loads.add_to_rest(0, 5, work)
      >>> loads.peak, loads.best_offset(2, work), loads.peak_with(0, 2, work)
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

    def add_to_rest(self, offset: int, count: int, work: Work) -> None:
        """Adds one matrix for each owner of a rest, on every device that is that owner."""
        order, others = _owner_order(work)
        extra = np.zeros(work.owners)
        extra[rest_owners(offset, count, work)] = work.flops
        sizes = [self._flops.shape[i] for i in order]
        self._flops.transpose(others + order)[...] += extra.reshape(sizes)

    def best_offset(self, count: int, work: Work) -> int:
        """The first owner of a rest that keeps the highest load low."""
        owners = rest_owners(np.arange(work.owners)[:, None], count, work)
        return int(np.argmin(self._of_owners(work)[owners].max(axis=1)))

    def peak_with(self, offset: int, count: int, work: Work) -> int:
        """The highest load of the owners of a rest, with the rest."""
        owners = rest_owners(offset, count, work)
        return int(self._of_owners(work)[owners].max()) + work.flops

    def _of_owners(self, work: Work) -> np.ndarray:
        """The highest load of each owner over the mesh axes that don't number owners."""
        order, others = _owner_order(work)
        return self._flops.transpose(others + order).reshape(-1, work.owners).max(axis=0)


def rest_owners(offset: npt.ArrayLike, count: int, work: Work) -> np.ndarray:
    """Owners of fewer matrices than owners: an even part for each replica, from `offset` on.

    So replicas send each other no padding. Owners are numbered replica by replica.

    Example:
      >>> work = Work(8, 8, 4, 0, ("f",), ("r",), (("r", 2), ("f", 4)))
      >>> rest_owners(3, 5, work)
      array([3, 0, 1, 7, 4])
    """
    each = -(-count // work.replicas)
    turn, place = np.divmod(np.arange(count), each)
    replica, shard = np.divmod(offset, work.shards)
    return (replica + turn) % work.replicas * work.shards + (shard + place) % work.shards


def _owner_order(work: Work) -> tuple[list[int], list[int]]:
    """Mesh dims that number the owners, share axes first, and the others."""
    names = [name for name, _ in work.sizes]
    order = [names.index(a) for a in (*work.share_axes, *work.shard_axes)]
    return order, [i for i in range(len(names)) if i not in order]
