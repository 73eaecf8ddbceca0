"""Vectors of scanned layers, which look like matrices: [layers, width]."""

from collections.abc import Iterable, Sequence

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition.tree import Leaf

__all__ = ["Stacks"]


class Stacks:
    """Where a tree has stacks of layers, as leaves of three dims show."""

    def __init__(self, tree: Sequence[Leaf], stacked: Iterable[Leaf]) -> None:
        """Reads the tree.

        Args:
          tree: all of it.
          stacked: leaves of three dims or more that may be stacks of matrices.
        """
        first_dims: dict[Segments, set[int]] = {}
        with_vectors: set[Segments] = set()
        for leaf in tree:
            for above in _ancestors(leaf):
                first_dims.setdefault(above, set()).update(leaf.shape[:1])
                if len(leaf.shape) < 2:
                    with_vectors.add(above)
        found = list(stacked)
        self._beside = {(_ancestors(leaf)[0], leaf.shape[0]) for leaf in found}
        self._blocks = {
            (above, leaf.shape[0])
            for leaf in found
            for above in _ancestors(leaf)
            if len(first_dims[above]) == 1 and above not in with_vectors
        }

    def has_vector(self, leaf: Leaf) -> bool:
        """Whether a leaf of two dims is beside a stack, or in a block of nothing else.

        A scanned block gives all its leaves the number of layers as first dim.
        """
        places = [(above, leaf.shape[0]) for above in _ancestors(leaf)]
        return places[0] in self._beside or not self._blocks.isdisjoint(places)


def _ancestors(leaf: Leaf) -> list[Segments]:
    """The paths above a leaf, nearest first."""
    names = leaf.name.names
    return [names[:n] for n in range(max(len(names) - 1, 0), -1, -1)]
