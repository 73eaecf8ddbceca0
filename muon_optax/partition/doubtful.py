"""Hidden matrices that may be tables or heads by the sizes around them, whatever they are called.

They keep Muon, and a warning names them. No word of a name makes such a doubt, since the next
library calls its last layer by a name that nobody thought of. Words only take it away: those of
attention, recurrent cells, gates, modulation, and of projections in repeated layers.
"""

import collections
from collections.abc import Sequence

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import names
from muon_optax.partition.evidence import sequence_of
from muon_optax.partition.places import is_attention, is_modulation
from muon_optax.partition.tree import Leaf, Role, Shape
from muon_optax.partition.widths import VOCABULARY, Widths, is_multiple

__all__ = ["Doubtful"]

_FEWEST_LAYERS = 3  # sizes of fewer tell nothing, as in an example
_FEWEST_BARE = 4  # nor do names of fewer
_FEWEST_OTHERS = 3  # so many times as many layers, for each that is doubtful by its name
_MATRICES = (names.PROJECTION, names.HIDDEN, names.ATTENTION, names.OF_BLOCK)
_OTHERS = 4  # so many matrices for each of a shape whose sizes no other has
_SLIM = 4  # so many times more inputs than outputs
_TIME = {"time", "timestep", "timesteps"}


class Doubtful:
    """Which hidden matrices of a tree are doubtful."""

    def __init__(self, tree: Sequence[Leaf], rest: Sequence[Leaf], widths: Widths) -> None:
        """Reads the tree.

        Args:
          tree: all of it.
          rest: the leaves of which names don't tell the role.
          widths: the sizes of the tree.
        """
        matrices = [leaf for leaf in rest if len(leaf.shape) == 2]
        self._has_few = len(rest) < _FEWEST_LAYERS
        self._parameters = _BareParameters(rest)
        self._tables = _Tables(tree, matrices)
        self._heads = _Heads(tree, rest, widths)

    def role(self, leaf: Leaf, role: Role) -> Role:
        """The role of a leaf, where that is a hidden matrix so far with its doubt, if any."""
        if role != "matrix" or self._has_few:
            return role
        if self._parameters.has(leaf):
            return "bare_parameter"
        if self._heads.give_data(leaf):
            return "data_output"
        if self._tables.may_have(leaf):
            return "possible_table"
        return "possible_head" if self._heads.may_have(leaf) else role


class _BareParameters:
    """Arrays whose own name isn't that of a layer's weight, where most others have one.

    Frameworks call what multiplies a weight or a kernel. What is a parameter of its own beside
    them is a table, mostly. Where many are arrays of their own, as in models that are written
    without a library, those whose names are no layer's are doubtful, unless most are such.
    """

    def __init__(self, rest: Sequence[Leaf]) -> None:
        bare = [leaf for leaf in rest if not _is_weight(leaf)]
        strange = sum(not _is_called_matrix(leaf) for leaf in bare)
        self._are_few = _FEWEST_OTHERS * len(bare) < len(rest)
        self._has_layers = 3 * strange <= 2 * len(rest) and len(rest) >= _FEWEST_BARE

    def has(self, leaf: Leaf) -> bool:
        if _is_weight(leaf) or names.CELL.is_in(leaf.name.all_tokens):
            return False
        return self._are_few or (self._has_layers and not _is_called_matrix(leaf))


class _Tables:
    """Matrices without a bias that other layers have, or of sizes that no other leaf has."""

    def __init__(self, tree: Sequence[Leaf], matrices: Sequence[Leaf]) -> None:
        self._count = len(matrices)
        self._of_shape = collections.Counter(map(_sorted, matrices))
        self._have_biases = 2 * sum(leaf.bias is None for leaf in matrices) < self._count
        self._shapes: dict[int, set[Shape]] = collections.defaultdict(set)
        for leaf in (x for x in tree if len(x.shape) > 1 or not x.is_bias):
            for size in _sizes(leaf):
                self._shapes[size].add(_sorted(leaf))

    def may_have(self, leaf: Leaf) -> bool:
        if leaf.bias is not None or leaf.name.is_kernel:
            return False
        return self._has_sizes_of_table(leaf) or self._lacks_bias(leaf)

    def _has_sizes_of_table(self, leaf: Leaf) -> bool:
        """Whether it has sizes that leaves of other shapes don't have.

        In repeated layers a projection that is far longer than wide goes on inside of its module.
        """
        size, width = max(leaf.shape), min(leaf.shape)
        is_usual = self._of_shape[_sorted(leaf)] * _OTHERS > self._count
        if size == width or is_usual or not self._is_alone(leaf, size):
            return False
        is_layer = leaf.is_repeated and names.PROJECTION.is_in(leaf.name.layer)
        return self._is_alone(leaf, width) or (size >= VOCABULARY * width and not is_layer)

    def _is_alone(self, leaf: Leaf, size: int) -> bool:
        return self._shapes[size] <= {_sorted(leaf)}

    def _lacks_bias(self, leaf: Leaf) -> bool:
        """Whether most layers have a bias and this one hasn't, outside of the repeated layers."""
        return self._have_biases and not leaf.is_repeated and not is_attention(leaf)


class _Heads:
    """Layers outside of the repeated ones of which nothing shows that their outputs go on."""

    def __init__(self, tree: Sequence[Leaf], rest: Sequence[Leaf], widths: Widths) -> None:
        self._widths = widths
        self._norms = widths.norms - _norms_of_convolutions(tree, rest)
        self._sequences: dict[str, list[Leaf]] = collections.defaultdict(list)
        self._takers: dict[int, set[Shape]] = collections.defaultdict(set)
        self._taken_inside: set[int] = set()
        for leaf in rest:
            self._sequences[sequence_of(leaf)].append(leaf)
            for size in widths.order.inputs(leaf):
                if leaf.is_repeated:
                    self._taken_inside.add(size)
                else:
                    self._takers[size].add(leaf.shape)

    def give_data(self, leaf: Leaf) -> bool:
        """Whether the last of a sequence in repeated layers gives what only a first layer takes.

        So do the boxes that each layer of a decoder refines, and the next one is told of.
        """
        axis, alike = self._widths.order.output_axis(leaf), self._sequences[sequence_of(leaf)]
        if axis is None or not leaf.is_repeated or len(alike) < 2 or alike[-1] is not leaf:
            return False
        size, width = leaf.shape[axis], leaf.shape[1 - axis]
        is_data = size in self._takers and size not in self._taken_inside | self._widths.norms
        return is_data and size * VOCABULARY <= width and not _goes_elsewhere(leaf)

    def may_have(self, leaf: Leaf) -> bool:
        axis = self._widths.order.output_axis(leaf)
        if axis is None or leaf.is_repeated or _goes_elsewhere(leaf):
            return False
        size, width = leaf.shape[axis], leaf.shape[1 - axis]
        if is_multiple(size, width) and not _TIME.isdisjoint(leaf.name.near(1)):
            return False  # shifts and scales of all layers
        goes_nowhere = self._takers[size] <= {leaf.shape}
        is_slim = size * _SLIM <= width and self._sequences[sequence_of(leaf)][-1] is leaf
        if not self._widths.norms:  # nothing tells the width that goes on
            is_last = goes_nowhere and size not in self._taken_inside
            leads_back = size not in self._widths.columns and self._widths.leads_back(size)
            return is_slim and (is_last or leads_back)
        return size not in self._norms and (goes_nowhere or is_slim)


def _norms_of_convolutions(tree: Sequence[Leaf], rest: Sequence[Leaf]) -> set[int]:
    """Sizes of norms that are in modules of convolutions alone: no width between layers.

    So a network that refines spectrograms ends in a norm of their channels.
    """
    with_matrices = {above for x in rest if len(x.shape) == 2 for above in _modules(x)}
    with_maps = {above for x in rest if len(x.shape) > 2 for above in _modules(x)}
    norms = [x for x in tree if len(x.shape) == 1 and not x.is_bias]
    of_maps = with_maps - with_matrices
    others = {x.shape[0] for x in norms if of_maps.isdisjoint(_modules(x))}
    return {x.shape[0] for x in norms} - others


def _modules(leaf: Leaf) -> list[Segments]:
    parent = leaf.name.parent
    return [parent[:n] for n in range(len(parent) + 1)]


def _goes_elsewhere(leaf: Leaf) -> bool:
    """Whether no layer need take its outputs: attention's, a gate's, shifts and scales."""
    return is_attention(leaf) or is_modulation(leaf) or names.GATE.is_in(leaf.name.layer)


def _is_called_matrix(leaf: Leaf) -> bool:
    """Whether its own name is one of what multiplies: `wq`, `w_up`, `q_einsum`, `U`, `gate`."""
    words = leaf.name.layer
    known = any(m.is_in(words) for m in _MATRICES)
    is_layer = any(len(word) < 3 or word[0] == "w" or word == "layer" for word in words)
    return known or is_layer or not words


def _is_weight(leaf: Leaf) -> bool:
    return leaf.name.is_weight or leaf.name.own.endswith("kernel")


def _sorted(leaf: Leaf) -> Shape:
    return tuple(sorted(leaf.shape))


def _sizes(leaf: Leaf) -> set[int]:
    """Its sizes, and those of two dims together: heads and their dims."""
    pairs = zip(leaf.shape, leaf.shape[1:], strict=False) if len(leaf.shape) > 2 else ()
    return {*leaf.shape, *(m * n for m, n in pairs)}
