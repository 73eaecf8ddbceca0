"""Matrices that may be tables or last layers by the leaves around them, whatever they are called.

They keep Muon: a warning names them. Names only take a doubt away here, where they are those of
attention, recurrent cells, modulation and projections in repeated layers; no word is needed for
one, since the next library calls its last layer by a name that nobody thought of.
"""

import collections
from collections.abc import Sequence

from muon_optax.partition import names
from muon_optax.partition.evidence import is_attention, is_modulation, sequence_of
from muon_optax.partition.tree import Leaf, Role, Shape
from muon_optax.partition.widths import VOCABULARY, Widths, is_multiple

__all__ = ["LooseEnds"]

_SLIM = 4  # so many times more inputs than outputs
_TIME = {"time", "timestep", "timesteps"}
_OTHERS = 4  # so many matrices for each of a shape whose sizes no other has
_WEIGHTS = 2  # so many matrices called weights or kernels for each that isn't
_DOUBTED: dict[tuple[str, Role], Role] = {
    ("array", "matrix"): "own_array",
    ("array", "transposed_matrix"): "transposed_own_array",
    ("table", "matrix"): "loose_table",
    ("table", "transposed_matrix"): "transposed_loose_table",
    ("last", "matrix"): "loose_end",
    ("last", "transposed_matrix"): "transposed_loose_end",
}


class LooseEnds:
    """Which hidden matrices of a tree are doubtful."""

    def __init__(self, tree: Sequence[Leaf], rest: Sequence[Leaf], widths: Widths) -> None:
        """Reads the tree.

        Args:
          tree: all of it.
          rest: the leaves of which names don't tell the role.
          widths: the sizes of the tree.
        """
        self._widths, self._order = widths, widths.order
        self._is_alone_in_tree = len(rest) == 1
        own = sum(not _is_weight(leaf) for leaf in rest)
        self._has_few_arrays = own * (_WEIGHTS + 1) < len(rest)
        matrices = [leaf for leaf in rest if len(leaf.shape) == 2]
        self._matrices = len(matrices)
        self._of_shape = collections.Counter(map(_sorted, matrices))
        bare = sum(leaf.bias is None for leaf in matrices)
        self._has_biases = 2 * bare < len(matrices)
        self._alike: dict[str, list[Leaf]] = collections.defaultdict(list)
        for leaf in rest:
            self._alike[sequence_of(leaf)].append(leaf)
        self._shapes: dict[int, set[Shape]] = collections.defaultdict(set)
        for leaf in (x for x in tree if len(x.shape) > 1 or not x.is_bias):
            for size in _sizes(leaf):
                self._shapes[size].add(_sorted(leaf))
        self._takers: dict[int, set[Shape]] = collections.defaultdict(set)
        for leaf in (x for x in rest if not x.is_repeated):
            for size in self._order.inputs(leaf):
                self._takers[size].add(leaf.shape)

    def role(self, leaf: Leaf, role: Role) -> Role:
        """The role of a leaf that is a hidden matrix so far, with a doubt where there is one."""
        kind = None if self._is_alone_in_tree else self._kind(leaf)
        return role if kind is None else _DOUBTED.get((kind, role), role)

    def _kind(self, leaf: Leaf) -> str | None:
        if self._is_own_array(leaf):
            return "array"
        if self._has_sizes_of_table(leaf) or self._lacks_bias(leaf):
            return "table"
        return "last" if self._is_last(leaf) else None

    def _is_own_array(self, leaf: Leaf) -> bool:
        """Whether its own name isn't that of a layer's weight, though most others have one.

        Frameworks call what multiplies a weight or a kernel. What is a parameter of its own beside
        them is a table, mostly.
        """
        is_cell = names.CELL.is_in(leaf.name.all_tokens)
        return self._has_few_arrays and not _is_weight(leaf) and not is_cell

    def _has_sizes_of_table(self, leaf: Leaf) -> bool:
        """Whether, without a bias, it has sizes that leaves of other shapes don't have.

        In repeated layers a projection that is far longer than wide goes on inside of its module.
        """
        size, width = max(leaf.shape), min(leaf.shape)
        if leaf.bias is not None or leaf.name.is_kernel or size == width:
            return False
        is_usual = self._of_shape[_sorted(leaf)] * _OTHERS > self._matrices
        if is_usual or not self._is_alone(leaf, size):
            return False
        is_layer = leaf.is_repeated and names.PROJECTION.is_in(leaf.name.layer)
        return self._is_alone(leaf, width) or (size >= VOCABULARY * width and not is_layer)

    def _is_alone(self, leaf: Leaf, size: int) -> bool:
        return self._shapes[size] <= {_sorted(leaf)}

    def _lacks_bias(self, leaf: Leaf) -> bool:
        """Whether it has no bias where most layers have one, outside of the repeated layers."""
        is_bare = leaf.bias is None and self._has_biases and not leaf.name.is_kernel
        return is_bare and not leaf.is_repeated and not is_attention(leaf)

    def _is_last(self, leaf: Leaf) -> bool:
        """Whether nothing shows that its outputs go on, outside of the repeated layers."""
        axis = self._order.output_axis(leaf)
        if axis is None or leaf.is_repeated or is_attention(leaf) or is_modulation(leaf):
            return False
        size, width = leaf.shape[axis], leaf.shape[1 - axis]
        if is_multiple(size, width) and not _TIME.isdisjoint(leaf.name.near(1)):
            return False  # shifts and scales of all layers
        norms = self._widths.norms
        if not norms or size in norms:
            return False  # without norms nothing tells the width that goes on
        goes_nowhere = self._takers[size] <= {leaf.shape}
        return goes_nowhere or (
            size * _SLIM <= width and self._alike[sequence_of(leaf)][-1] is leaf
        )


def _is_weight(leaf: Leaf) -> bool:
    return leaf.name.is_weight or leaf.name.own.endswith("kernel")


def _sorted(leaf: Leaf) -> Shape:
    return tuple(sorted(leaf.shape))


def _sizes(leaf: Leaf) -> set[int]:
    """Its sizes, and those of two dims together: heads and their dims."""
    pairs = zip(leaf.shape, leaf.shape[1:], strict=False) if len(leaf.shape) > 2 else ()
    return {*leaf.shape, *(m * n for m, n in pairs)}
