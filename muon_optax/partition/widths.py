"""The sizes of a tree: inputs and outputs of its layers, and widths of its norms."""

import collections
import functools
import math
from collections.abc import Iterable, Mapping, Sequence

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import names
from muon_optax.partition.order import Order
from muon_optax.partition.tree import Leaf, Role

__all__ = ["IMAGE_CHANNELS", "VOCABULARY", "Widths", "is_multiple"]

VOCABULARY = 8  # a table or head of so many times its width is that of a vocabulary
IMAGE_CHANNELS = 4  # a first convolution's inputs are no other layer's outputs
_OF_OUTPUTS = {"slope", "std", "logstd", "stddev"}  # vectors beside a last layer, no norms
_BLOCKS = (2, 3, 4, 6)  # of fused outputs: shift and scale, queries, keys and values, gates


class Widths:
    """Sizes by what they are.

    Attributes:
      order: which axis of a weight is its output.
      rows: of the tables.
      columns: of the tables, as wide as what goes through the layers.
      norms: of the norms, as wide as what goes through the layers.
      given: what layers, tables and norms give to other layers.
      given_maps: what convolutions and norms give to other convolutions.
      outputs: how many layers give so much.
    """

    def __init__(
        self, tree: Sequence[Leaf], named: Sequence[Role | None], rest: Sequence[Leaf]
    ) -> None:
        """Reads the tree.

        Args:
          tree: all of it.
          named: the role of each leaf, as far as names tell.
          rest: the leaves of which they don't.
        """
        roles = list(zip(tree, named, strict=True))
        tables = [x for x, r in roles if r in ("embedding", "table") and len(x.shape) == 2]
        vectors = [x for x, r in roles if r == "vector" and x.shape and _has_width(x)]
        # A head gives as many outputs as there are tokens, never as there are positions.
        of_tokens = [leaf for leaf in tables if not names.POSITION.is_in(leaf.name.layer)]
        self.rows = {leaf.shape[0] for leaf in of_tokens}
        self.norms = {leaf.shape[0] for leaf in vectors}
        self.columns = {leaf.shape[1] for leaf in tables}
        self.order = Order(rest, self.norms | self.columns)
        maps = [leaf for leaf in rest if len(leaf.shape) > 3]
        others = [leaf for leaf in rest if len(leaf.shape) < 4]
        like_tables = {tuple(sorted(leaf.shape)) for leaf in of_tokens}
        bare = collections.Counter(tuple(sorted(x.shape)) for x in others if not x.name.is_weight)
        heads = {shape for shape in like_tables if bare[shape] == 1}  # of an order nothing tells
        others = [x for x in others if x.name.is_weight or tuple(sorted(x.shape)) not in heads]
        self._inputs = {size for leaf in others for size in self.order.inputs(leaf)}
        self._entries = {x for leaf in rest if _is_entry(leaf) for x in self.order.inputs(leaf)}
        self._map_inputs = {size for leaf in maps for size in self.order.inputs(leaf)}
        self._channels = {size for leaf in maps for size in self.order.channels(leaf)}
        self.outputs = collections.Counter(self._outputs(rest))
        self.given_maps = {*self._outputs(maps), *self.norms}
        self.given = {*self.outputs, *self.columns, *self.norms, *self._hidden_sizes(rest)}
        self._rest = rest

    @functools.cached_property
    def _fused(self) -> set[tuple[Segments, int]]:
        """Modules and sizes of fused outputs in them."""
        found = set()
        for leaf in (x for x in self._rest if x.name.parent):  # at the root all are beside
            axis = self.order.output_axis(leaf) if len(leaf.shape) == 2 else None
            if axis is not None and self.is_fused(leaf.shape[axis], leaf.shape[1 - axis]):
                found.add((leaf.name.parent, leaf.shape[axis]))
        return found

    def is_added_to_fused(self, leaf: Leaf, size: int) -> bool:
        """Whether a layer beside has as many outputs, which are fused, as in recurrent cells."""
        return (leaf.name.parent, size) in self._fused

    def leads_back(self, size: int) -> bool:
        """Whether layers lead from one that takes so many inputs to one that gives as many.

        So do those of an autoencoder; from a hidden layer of a funnel they lead on to the head.
        """
        found, open_sizes = set[int](), [size]
        while open_sizes:
            new = self._following[open_sizes.pop()] - found
            found |= new
            open_sizes.extend(new)
        return size in found

    @functools.cached_property
    def _following(self) -> Mapping[int, set[int]]:
        """For each size, those that layers make of it."""
        found: dict[int, set[int]] = collections.defaultdict(set)
        for leaf in self._rest:
            axis = self.order.output_axis(leaf)
            if axis is None:
                continue
            given = leaf.shape[axis]
            blocks = {given // k for k in (1, *_BLOCKS) if given % k == 0}  # a mean and a deviation
            for taken in self.order.inputs(leaf):
                found[taken] |= blocks
        return found

    def _outputs(self, leaves: Iterable[Leaf]) -> Iterable[int]:
        axes = ((leaf, self.order.output_axis(leaf)) for leaf in leaves)
        return [leaf.shape[axis] for leaf, axis in axes if axis is not None]

    def _hidden_sizes(self, leaves: Iterable[Leaf]) -> Iterable[int]:
        """All sizes of recurrent cells, and of matrices of which nothing tells the output."""
        for leaf in leaves:
            is_told = len(leaf.shape) > 2 or self.order.output_axis(leaf) is not None
            is_squat = not is_told and max(leaf.shape) < VOCABULARY * min(leaf.shape)
            if is_squat or names.CELL.is_in(leaf.name.all_tokens):
                yield from leaf.shape

    def is_given(self, size: int) -> bool:
        """Whether layers give so much, or outputs of several layers, concatenated, are so many."""
        parts = {size // k for k in _BLOCKS if size % k == 0}
        return size in self.given or any(self.outputs[part] > 1 for part in parts)

    def is_taken(self, size: int) -> bool:
        """Whether a layer takes so many inputs."""
        return size in self._inputs or size in self._map_inputs

    def is_free(self, size: int) -> bool:
        """Whether no layer takes so many inputs, and no norm is so wide."""
        is_map = size in self._map_inputs and size > IMAGE_CHANNELS
        return size not in self.norms and size not in self._inputs and not is_map

    def is_data(self, size: int) -> bool:
        """Whether layers take so many inputs and only one gives them, as the data's features."""
        is_given = size in self.norms or size in self.columns or self.outputs[size] > 1
        is_taken = size in self._inputs or size in self._entries
        return is_taken and not is_given

    def is_embedded(self, size: int) -> bool:
        """Whether a table's rows are so wide: what gives as much goes on beside them."""
        return size in self.columns

    def is_input(self, size: int) -> bool:
        """Whether a layer that is called an input, or embeds patches, takes so many."""
        return size in self._entries

    def is_fused(self, size: int, width: int) -> bool:
        """Whether so many outputs may be blocks that others take: gates, or a shift and a scale."""
        blocks = [size // k for k in _BLOCKS if size % k == 0]
        return any(block == width or block in self.norms for block in blocks)

    def is_taken_in_halves(self, size: int) -> bool:
        """Whether a layer takes half as many inputs: of a mean and a deviation, a sample."""
        return size % 2 == 0 and size > IMAGE_CHANNELS and self.is_taken(size // 2)

    def is_flattened(self, size: int) -> bool:
        """Whether a layer takes a square map of so many channels, flattened."""
        maps = [n // size for n in self._inputs if 0 < size < n and n % size == 0]
        return any(math.isqrt(n) ** 2 == n for n in maps)

    def is_feature_map(self, size: int) -> bool:
        """Whether so many outputs may be the square feature map that a convolution takes."""
        maps = [size // c for c in self._channels if 1 < c < size and size % c == 0]
        return any(math.isqrt(n) ** 2 == n for n in maps)


def _has_width(leaf: Leaf) -> bool:
    """Whether a vector may be as wide as what goes through the layers: norms of heads are not.

    Nor are slopes of an activation, which may follow the last layer too, scales of the logits, nor
    deviations, as the `log_std` of a policy, one for each action.
    """
    layer = leaf.name.layer
    is_of_head = names.NORM.is_in(layer) and names.QUERY_KEY.is_in(layer)
    is_of_logits = names.HEAD.is_in(layer) and not leaf.name.is_weight
    is_after_last = not _OF_OUTPUTS.isdisjoint(layer) or is_of_logits
    return not leaf.is_bias and not is_of_head and not is_after_last


def _is_entry(leaf: Leaf) -> bool:
    """Whether its name is that of a first layer."""
    near = leaf.name.near(1)
    is_called_so = any(m.is_in(near) for m in (names.EMBEDDING, names.PIXELS, names.ENTRY))
    return is_called_so and not leaf.is_repeated


def is_multiple(size: int, width: int) -> bool:
    """Whether it is a few blocks of the width, as the shift and scale before a last layer are."""
    return any(size == k * width for k in _BLOCKS)
