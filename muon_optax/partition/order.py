"""Which axis of a weight is its output: Flax keeps [in, out], PyTorch and Equinox [out, in]."""

import collections
import itertools
import math
from collections.abc import Iterator, Sequence

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition.names import word_set
from muon_optax.partition.tree import TRANSPOSED, Leaf, Role

__all__ = ["Order", "layers_in_sequence"]

_LARGEST_WINDOW = 64  # of a convolution; what is longer is an axis of a stack
_TALL = 8  # so many times longer than wide, a matrix is a table or a head, whose rows are no width
# Layers that go from the model's width, and back to it.
_FROM_WIDTH = word_set("q k v kv qkv query key value up gate fc1 wi w1 intermediate input head")
_TO_WIDTH = word_set("o out output down fc2 wo w2")


class Order:
    """The order of axes, by a layer's bias, else as other weights of the same name have it.

    Attributes:
      is_told: whether anything in the tree tells the order of leaves called 'weight'.
    """

    def __init__(self, leaves: Sequence[Leaf], widths: set[int]) -> None:
        weights = [leaf for leaf in leaves if len(leaf.shape) == 2 and _kind(leaf) == "weight"]
        votes = collections.Counter(
            axis for leaf in weights if (axis := leaf.output_axis_by_bias) is not None
        )
        if not votes:
            votes.update(_votes_by_width(weights, widths))
            votes.update(_votes_by_chain(weights))
        if not votes and any("." in name for leaf in weights for name in leaf.path[-1:]):
            votes[0] += 1  # keys of a PyTorch state dict: 'encoder.0.weight'
        if not votes and any(_kind(leaf) == "kernel" for leaf in leaves):
            votes[1] += 1
        self.is_told = bool(votes)
        self._usual = {"kernel": 1, "weight": votes.most_common(1)[0][0] if votes else 0}

    def output_axis(self, leaf: Leaf) -> int | None:
        """The output axis, or None where nothing tells it."""
        if len(leaf.shape) > 2:
            return {"kernel": len(leaf.shape) - 1, "weight": 0}.get(_kind(leaf))
        by_bias = leaf.output_axis_by_bias
        return self._usual.get(_kind(leaf)) if by_bias is None else by_bias

    def role(self, leaf: Leaf, role: Role) -> Role:
        """The role of a leaf, of a matrix also by which of its axes is the output."""
        transposed = TRANSPOSED.get(role)
        if transposed is None or leaf.shape[0] == leaf.shape[1] or self.output_axis(leaf) != 0:
            return role
        if self.is_told or not leaf.name.is_weight:
            return transposed
        return "matrix_of_unknown_order" if role == "matrix" else role

    def inputs(self, leaf: Leaf) -> Iterator[int]:
        """Sizes that its inputs may have."""
        shape, axis = leaf.shape, self.output_axis(leaf)
        if axis is not None:
            yield from (size for a, size in enumerate(shape) if a != axis)
        elif len(shape) == 2 and max(shape) >= _TALL * min(shape):
            yield min(shape)
        else:
            yield from shape
        is_vector = shape[0] == 1 and not leaf.name.is_weight  # of each head, as GATv2's `att`
        if len(shape) > 2 and not is_vector:  # heads and their dims, or a window and channels
            pairs = itertools.pairwise(shape)
            yield from (m * n for m, n in pairs if m > 1 and n > 1)
            if axis is not None:
                yield math.prod(size for a, size in enumerate(shape) if a != axis)

    def channels(self, leaf: Leaf) -> tuple[int, ...]:
        """Input channels of a convolution; PyTorch's may be transposed."""
        is_kernel = _kind(leaf) == "kernel"
        return leaf.shape[-2:-1] if is_kernel else leaf.shape[:2]

    def depthwise_channels(self, leaf: Leaf) -> int:
        """Channels of a kernel with one input a filter, 0 for others."""
        is_torch = _kind(leaf) == "weight"
        shape = leaf.shape
        inputs, outputs = (shape[1], shape[0]) if is_torch else shape[-2:]
        window = shape[2:] if is_torch else shape[:-2]
        is_window = 1 < max(window) <= _LARGEST_WINDOW
        return outputs if inputs == 1 and is_window else 0


def _kind(leaf: Leaf) -> str:
    """The convention that a leaf's name stands for: 'kernel', 'weight' or its own."""
    own = leaf.name.own
    if own == "w" or own.endswith("kernel"):
        return "kernel"
    return "weight" if leaf.name.is_weight else own


def _votes_by_width(weights: Sequence[Leaf], widths: set[int]) -> Iterator[int]:
    """Where no bias tells: queries and heads come from the model's width, others go back to it."""
    for leaf in weights:
        fits = [axis for axis, size in enumerate(leaf.shape) if size in widths]
        if len(fits) != 1:
            continue
        near = "_".join((leaf.name.layer_name, *leaf.name.parent[-1:]))
        words = set(near.lower().split("_"))
        if words & _FROM_WIDTH:
            yield 1 - fits[0]
        elif words & _TO_WIDTH:
            yield fits[0]


def _votes_by_chain(weights: Sequence[Leaf]) -> Iterator[int]:
    """In a sequence of layers the outputs of one are the inputs of the next."""
    for sequence in _sequences(weights):
        fits = [_is_chain(sequence, output) for output in (0, 1)]
        if len(sequence) > 1 and sum(fits) == 1:
            yield fits.index(True)


def layers_in_sequence(leaves: Sequence[Leaf]) -> set[Segments]:
    """Paths of weights [out, in], each of which takes what the one before gives.

    Tables beside each other, as those of several codebooks, have no reason to fit so.
    """
    weights = [x for x in leaves if len(x.shape) == 2 and x.name.is_plain and not x.name.is_kernel]
    return {
        leaf.path
        for sequence in _sequences(weights)
        if len({leaf.shape for leaf in sequence}) > 1 and _is_chain(sequence, 0)
        for leaf in sequence
    }


def _sequences(weights: Sequence[Leaf]) -> Iterator[list[Leaf]]:
    """The weights whose names are places in one sequence, in their order."""
    found: dict[Segments, list[tuple[int, Leaf]]] = collections.defaultdict(list)
    for leaf in weights:
        name = leaf.name
        if name.is_numbered:
            place = next(int(n) for n in reversed(name.names) if n.isdigit())
            found[(*name.parent, name.layer_name)].append((place, leaf))
    for places in found.values():
        yield [leaf for _, leaf in sorted(places, key=lambda place: place[0])]


def _is_chain(sequence: Sequence[Leaf], output: int) -> bool:
    pairs = itertools.pairwise(leaf.shape for leaf in sequence)
    return all(first[output] == second[1 - output] for first, second in pairs)
