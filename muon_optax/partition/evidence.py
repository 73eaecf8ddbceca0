"""Evidence from the shapes of a tree about leaves whose names tell nothing."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from muon_optax._internal.tree_paths import path_name, unnumbered
from muon_optax.partition import names
from muon_optax.partition.connections import unconnected
from muon_optax.partition.places import (
    is_alone_in_head,
    is_attention,
    is_called_head,
    is_called_hidden,
    is_called_output,
    is_called_projection_alone,
    is_gate,
    is_in_head,
    is_inner_head,
    is_unnamed,
    multiplies,
)
from muon_optax.partition.stacks import Stacks
from muon_optax.partition.tree import Leaf, Role
from muon_optax.partition.widths import IMAGE_CHANNELS, VOCABULARY, Widths, is_multiple

__all__ = ["Evidence", "sequence_of"]

_MANY_OUTPUTS = 4096  # of a head whose outputs are taken again, as by a loss between layers
_SURE: tuple[Role, ...] = ("head", "output", "few_outputs", "tall_table")
_LAST: tuple[Role, ...] = (*_SURE, "wide_output")
_FEW_OUTPUTS = 32  # of a small head, whose number others may have by chance
_FEWEST = 4  # outputs of a box, a score, a mean and a deviation: no hidden layer is so narrow
_MOST_LEVELS = 5  # of feature maps, with a head each, whose names differ in a number
_LAST_NUMBER = re.compile(r"\d+(?=\D*$)")
_PARALLEL = {"heads", "lm"}  # parallel heads: `lm_heads/0`


class _Heads(NamedTuple):
    """What is known of the tree once its last layers are found.

    Attributes:
      sizes: how many outputs heads give.
      sure: how many those give that aren't doubtful.
      led_on: inputs of what can't be a table.
    """

    sizes: set[int]
    sure: set[int]
    led_on: set[int]


class Evidence:
    """Decides about leaves of two dims or more by the leaves beside them.

    Attributes:
      widths: the sizes of the tree.
    """

    def __init__(
        self, tree: Sequence[Leaf], named: Sequence[Role | None], rest: Sequence[Leaf]
    ) -> None:
        """Reads the tree, as `Widths` does."""
        self.widths = Widths(tree, named, rest)
        self._order = self.widths.order
        stacked = [x for x in rest if len(x.shape) > 2 and not self._order.depthwise_channels(x)]
        self._stacks = Stacks(tree, stacked)
        self._is_alone = len(rest) == 1
        self._unconnected_paths = unconnected(tree, rest)
        self._alike: dict[str, list[Leaf]] = collections.defaultdict(list)
        self._called_alike = collections.Counter(leaf.name.all_tokens for leaf in stacked)
        self._sequences: dict[str, list[Leaf]] = collections.defaultdict(list)
        for leaf in rest:
            self._alike[unnumbered(path_name(leaf.path))].append(leaf)
            self._sequences[sequence_of(leaf)].append(leaf)

    def roles(self, rest: Sequence[Leaf]) -> list[Role]:
        """The roles of the rest: what each of them shows, and then what the heads found show."""
        found: list[Role] = [self._role(leaf) for leaf in rest]
        doubtful = [x for x, r in zip(rest, found, strict=True) if r == "wide_output"]
        last = {_kind(leaf) for leaf in doubtful if leaf.is_repeated}
        found = [self._beside_alike(x, role, last) for x, role in zip(rest, found, strict=True)]
        pairs = list(zip(rest, found, strict=True))
        heads = _Heads(
            self._output_sizes(leaf for leaf, role in pairs if role in _LAST),
            self._output_sizes(leaf for leaf, role in pairs if role in _SURE),
            {n for x, role in pairs if not _is_tall(x, role) for n in self._order.inputs(x)},
        )
        return [self._beside_heads(leaf, role, heads) for leaf, role in pairs]

    def _beside_alike(self, leaf: Leaf, role: Role, last: set[tuple[str, int]]) -> Role:
        """Of a matrix so far, whether one that is called alike and takes as much is a last layer.

        Of the heads of many frequency bands, some give as many as other layers take.
        """
        is_last = role == "matrix" and _kind(leaf) in last and self._ends_sequence(leaf)
        return "wide_output" if is_last and not is_attention(leaf) else role

    def _output_sizes(self, leaves: Iterable[Leaf]) -> set[int]:
        axes = ((leaf, self._order.output_axis(leaf)) for leaf in leaves)
        return {leaf.shape[axis] for leaf, axis in axes if axis is not None}

    def _beside_heads(self, leaf: Leaf, role: Role, heads: _Heads) -> Role:
        """Of a matrix so far, and of a doubtful head, what the outputs of the tree's heads tell.

        Auxiliary heads between layers give what the last one gives. A layer that gives what the
        first one takes may be a last one: where there is no head at all, as in sequence models with
        one-hot tokens, or where layers lead there and back, as in autoencoders.
        """
        axis = self._order.output_axis(leaf)
        if role == "wide_output" and leaf.is_repeated and self._output_sizes([leaf]) & heads.sure:
            return "output"
        if role != "matrix" or axis is None or self._is_alone or is_gate(leaf):
            return role
        if not heads.sizes and is_alone_in_head(leaf):
            return "inner_head"
        size, width = _outputs_first(leaf, axis)
        is_of_head = size != width and size in heads.sizes and self.widths.is_free(size)
        if leaf.is_repeated and is_of_head:
            return "output"
        is_last = not leaf.is_repeated and not is_called_hidden(leaf)
        is_slim = size * VOCABULARY <= width and size not in heads.led_on
        if is_last and is_slim and self.widths.is_taken(size) and size not in self.widths.norms:
            return "data_output"  # only tables without names have rows of that size
        is_data = size != width and self.widths.is_data(size)
        # What takes the rows of a table and leads back to them is a bottleneck beside them.
        is_back = self.widths.leads_back(size) and not self.widths.is_embedded(width)
        if not is_last:  # a projection to what a first layer reads, as embeddings or a time series
            is_projection = not leaf.is_repeated and is_called_projection_alone(leaf)
            is_back &= is_projection and self.widths.is_input(size)
        is_data &= is_back or (is_last and not heads.sizes)
        return "data_output" if is_data and not self._is_taken_alike(leaf, size) else role

    def _is_taken_alike(self, leaf: Leaf, size: int) -> bool:
        """Whether one whose name differs in a number, as `layers_0`, takes so many inputs.

        Order is lost among such names, and the first layer gives what the last one takes.
        """
        alike = self._alike[unnumbered(path_name(leaf.path))]
        return any(size in self._order.inputs(other) for other in alike if other is not leaf)

    def _role(self, leaf: Leaf) -> Role:
        if len(leaf.shape) > 2:
            return self._of_many_dims(leaf)
        if not multiplies(leaf) and self._stacks.has_vector(leaf):
            return "norm" if names.NORM.is_in(leaf.name.layer) else "stacked_vector"
        return self._head(leaf) or self._unconnected(leaf) or self._matrix(leaf)

    def _unconnected(self, leaf: Leaf) -> Role | None:
        """A table whose rows are concatenated with others: no layer elsewhere has its sizes.

        Of few layers, as in an example, nothing can be told.
        """
        return "unconnected" if leaf.path in self._unconnected_paths else None

    def _of_many_dims(self, leaf: Leaf) -> Role:
        if channels := self._order.depthwise_channels(leaf):
            return self._depthwise(leaf, channels)
        axis = self._order.output_axis(leaf)
        is_map = len(leaf.shape) > 3 or any("conv" in token for token in leaf.name.all_tokens)
        if axis is None or not is_map or leaf.is_repeated or is_attention(leaf):
            return "undeclared"
        size, others = leaf.shape[axis], leaf.shape[:axis] + leaf.shape[axis + 1 :]
        channels = self._order.channels(leaf)[-1]
        is_image = size <= IMAGE_CHANNELS and (is_called_output(leaf) or channels > _FEW_OUTPUTS)
        is_last = is_image or (size not in others and not self.widths.is_taken(size))
        is_fed = channels in self.widths.given_maps
        is_output = is_last and is_fed and size not in self.widths.norms
        # Outputs of many layers are concatenated, as in DenseNet, and maps are flattened.
        alike = self._called_alike[leaf.name.all_tokens]
        is_output &= alike <= _MOST_LEVELS and not self.widths.is_flattened(size)
        return "output" if is_output else "undeclared"

    def _depthwise(self, leaf: Leaf, channels: int) -> Role:
        """Of kernels with one input a filter: grey images have one channel too."""
        if names.DEPTHWISE.is_in(leaf.name.all_tokens) or leaf.is_repeated:
            return "depthwise"
        is_first = self.widths.outputs[channels] == 1 and self.widths.is_taken(channels)
        return "undeclared" if is_first else "one_channel"

    def _head(self, leaf: Leaf) -> Role | None:
        name = leaf.name
        axis = self._order.output_axis(leaf)
        is_head = is_called_head(leaf)
        if _is_narrow(leaf, axis):
            return "head" if is_head or is_called_output(leaf) else "few_outputs"
        if self._has_vocabulary(leaf):
            return "head"
        if is_attention(leaf):
            return None
        if leaf.is_repeated and not is_head:
            ends = self._output_sizes([leaf]) if self._ends_sequence(leaf) else set[int]()
            return "wide_output" if any(map(self.widths.is_free, ends)) else None
        if axis is None and not is_head:
            return self._tall(leaf)
        size, width = sorted(leaf.shape)[::-1] if axis is None else _outputs_first(leaf, axis)
        is_list = bool(_PARALLEL & set(name.layer))
        if leaf.is_repeated and not is_list:  # one for each of several tokens, or a gate
            return "head" if self._is_vocabulary(size, width) else None
        if is_head and (is_list or not name.is_numbered):
            return "head"
        if is_head or is_called_output(leaf) or is_in_head(leaf, size, width):
            is_last = not name.is_numbered or "class" in name.layer
            found = self._called_output(size, width, may_be_small=is_last)
            return found or self._reconstruction(leaf, size)
        return self._output(leaf, size, width)

    def _ends_sequence(self, leaf: Leaf) -> bool:
        """Whether it is the last of layers that differ in a number, and gives less than it takes.

        Graph networks count their last layer with the others: `convs.2.lin`. Of `box.1.layers.2`
        it is the last number that counts layers; the others count alike heads.
        """
        axis, alike = self._order.output_axis(leaf), self._sequences[sequence_of(leaf)]
        if axis is None or alike[-1] is not leaf or len(alike) < 2:
            return False
        size, width = _outputs_first(leaf, axis)
        return size < width and all(other.shape[axis] != size for other in alike[:-1])

    def _has_vocabulary(self, leaf: Leaf) -> bool:
        """Whether one of its sides, whichever, is the vocabulary of a table."""
        size, width = max(leaf.shape), min(leaf.shape)
        is_vocabulary = size >= max(_MANY_OUTPUTS, VOCABULARY * width) and size in self.widths.rows
        return is_vocabulary and not leaf.is_repeated

    def _reconstruction(self, leaf: Leaf, size: int) -> Role | None:
        """A last layer that gives what the model takes: pixels of patches, latents, features."""
        if not self.widths.is_data(size):
            return None
        return "output" if self.widths.is_input(size) else "data_output"

    def _is_vocabulary(self, size: int, width: int) -> bool:
        return size > width and (size in self.widths.rows or size >= VOCABULARY * width)

    def _tall(self, leaf: Leaf) -> Role | None:
        """A leaf of which nothing tells the output: a vocabulary shows by itself."""
        width, size = sorted(leaf.shape)
        is_last = self.widths.is_free(size) and width in self.widths.given
        is_tall = is_last and not self._is_alone and self._is_vocabulary(size, width)
        return "tall_table" if is_tall else None

    def _called_output(self, size: int, width: int, *, may_be_small: bool) -> Role | None:
        is_small = size <= _FEW_OUTPUTS and size * _FEW_OUTPUTS <= width and may_be_small
        is_large = size > width and (size in self.widths.rows or size >= _MANY_OUTPUTS)
        is_large &= size not in self.widths.norms
        is_last = self.widths.is_free(size) and size != width
        if is_last and is_multiple(size, width) and not is_large:
            return "wide_output"  # `proj_out_1` before `proj_out_2` makes a shift and a scale
        return "head" if is_small or is_large or is_last else None

    def _output(self, leaf: Leaf, size: int, width: int) -> Role | None:
        if size == width or (size > width and self._is_gated(leaf, size)):
            return None
        is_free = self.widths.is_free(size)
        # As many as a table has rows: a last layer, or without a bias a table of the same things.
        if is_free and size in self.widths.rows and (size > width or leaf.bias is None):
            return "output"
        if self._is_alone:
            return None
        is_tall = size >= max(_MANY_OUTPUTS, VOCABULARY * width) and leaf.bias is None
        if is_tall and is_free:
            return "tall_table"  # of users or items, whose rows are concatenated with others
        if not self.widths.is_given(width):
            return None
        if not is_free:
            is_called_so = names.RECONSTRUCTION.is_in(leaf.name.near(1))
            return self._reconstruction(leaf, size) if is_called_so else None
        is_beside_table = leaf.bias is not None and self.widths.is_embedded(size)
        if self.widths.is_feature_map(size) or is_beside_table:
            return None
        if "hidden" in leaf.name.layer and self._ends_sequence(leaf):
            return "output"  # Brax counts the last layer with the others: `hidden_3`
        if is_called_hidden(leaf):  # projections for a loss end the model too, as `ctc_proj`
            is_projection = leaf.name.layer[-1:] == ("proj",) or leaf.name.layer[:1] == ("to",)
            is_slim = size * VOCABULARY <= width and is_projection
            return "wide_output" if is_slim else None
        if size >= VOCABULARY * width:
            return "tall_table"
        if self.widths.is_fused(size, width) or self.widths.is_added_to_fused(leaf, size):
            return None
        is_doubtful = size > width or self.widths.is_taken_in_halves(size)
        return "wide_output" if is_doubtful else "output"

    def _is_gated(self, leaf: Leaf, size: int) -> bool:
        """Whether a layer of the same sequence takes half as many, as after a gated linear unit."""
        inputs = (n for x in self._sequences[sequence_of(leaf)] for n in self._order.inputs(x))
        return leaf.name.is_numbered and any(2 * n == size for n in inputs)

    def _matrix(self, leaf: Leaf) -> Role:
        if not self._is_alone and is_unnamed(leaf):
            return "unnamed"
        is_head = is_inner_head(leaf, self._order.output_axis(leaf))
        return "inner_head" if is_head else "matrix"


def _kind(leaf: Leaf) -> tuple[str, int]:
    """The leaf's path without numbers, and its longer side."""
    return unnumbered(path_name(leaf.path)), max(leaf.shape)


def sequence_of(leaf: Leaf) -> str:
    """The leaf's path without the last of its numbers, which is its place among the layers."""
    return _LAST_NUMBER.sub("*", path_name(leaf.path))


def _outputs_first(leaf: Leaf, axis: int) -> tuple[int, int]:
    return leaf.shape[axis], leaf.shape[1 - axis]


def _is_narrow(leaf: Leaf, axis: int | None) -> bool:
    """Whether it gives one to four numbers, as boxes and scores are, from many.

    Only a bias, or the name 'kernel', tells these from a first layer of so few inputs for sure.
    """
    if is_attention(leaf) or names.GATE.is_in(leaf.name.layer):
        return False
    name = leaf.name
    is_sure = name.is_kernel or name.is_numbered or leaf.output_axis_by_bias is not None
    size = leaf.shape[axis] if is_sure and axis is not None else min(leaf.shape)
    is_from_many = size == 1 or max(leaf.shape) > _FEW_OUTPUTS
    return size <= _FEWEST and name.is_weight and is_from_many


def _is_tall(leaf: Leaf, role: Role) -> bool:
    """Whether a last layer may be a table: their sizes are alike, but a table has no bias."""
    return role in _LAST and leaf.bias is None and not leaf.name.is_kernel
