"""Matrices whose sizes no other layer of the tree has."""

import collections
import itertools
from collections.abc import Sequence

from muon_optax._internal.tree_paths import Segments, path_name, unnumbered
from muon_optax.partition.tree import Leaf

__all__ = ["unconnected"]

_CONNECTED = 4  # so many matrices for each one whose sizes no other has


def unconnected(tree: Sequence[Leaf], rest: Sequence[Leaf]) -> set[Segments]:
    """Matrices without a bias, none of whose sizes another layer has.

    Tables beside each other, whose rows are concatenated, have rows of one size; layers that lead
    from one to the next have it on different axes.
    """
    places: dict[int, set[tuple[str, int]]] = collections.defaultdict(set)
    for leaf in tree:
        rank = len(leaf.shape)
        for axis, size in enumerate(leaf.shape):
            places[size].add((_module_of(leaf), axis if rank == 2 else -1))
        for m, n in itertools.pairwise(leaf.shape if rank > 2 else ()):
            places[m * n].add((_module_of(leaf), -1))
    matrices = [leaf for leaf in rest if len(leaf.shape) == 2]
    found = {
        leaf.path
        for leaf in matrices
        if leaf.bias is None
        and all(places[n] == {(_module_of(leaf), axis)} for axis, n in enumerate(leaf.shape))
    }
    return found if len(found) * _CONNECTED <= len(matrices) else set()


def _module_of(leaf: Leaf) -> str:
    """The module that holds the leaf's layer, or at the root the layer, without numbers."""
    return unnumbered(path_name(leaf.name.parent or leaf.name.names))
