"""Evidence from the shapes of a tree about leaves whose names tell nothing."""

import collections
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from muon_optax._internal.tree_paths import has_unnamed, path_name, unnumbered
from muon_optax.partition import names
from muon_optax.partition.connections import unconnected
from muon_optax.partition.stacks import Stacks
from muon_optax.partition.tree import Leaf, Role
from muon_optax.partition.widths import IMAGE_CHANNELS, VOCABULARY, Widths, is_multiple

__all__ = ["Evidence", "is_attention", "is_modulation", "sequence_of"]

_MANY_OUTPUTS = 4096  # of a head whose outputs are taken again, as by a loss between layers
_HEADS = ((("head",),), (("classifier",),))
_SURE: tuple[Role, ...] = ("head", "output", "few_outputs", "tall_table")
_LAST: tuple[Role, ...] = (*_SURE, "wide_output")
_FEW_OUTPUTS = 32  # of a small head, whose number others may have by chance
_FEWEST = 4  # outputs of a box, a score, a mean and a deviation: no hidden layer is so narrow
_OUTPUTS = {"out", "output", "outputs"}
_LAYERS = {"dense", "linear", "fc"}  # of a recurrent cell, those that are no gate's
_PIXELS = {"pixel", "pixels", "image", "images", "rgb"}  # what `to_pixels` gives is no width
_SKIPS = {"residual", "skip", "shortcut"}
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
        if role != "matrix" or axis is None or self._is_alone or _is_gate(leaf):
            return role
        size, width = _outputs_first(leaf, axis)
        is_of_head = size != width and size in heads.sizes and self.widths.is_free(size)
        if leaf.is_repeated and is_of_head:
            return "output"
        is_last = not leaf.is_repeated and not _is_called_hidden(leaf)
        is_slim = size * VOCABULARY <= width and size not in heads.led_on
        if is_last and is_slim and self.widths.is_taken(size) and size not in self.widths.norms:
            return "data_output"  # only tables without names have rows of that size
        is_data = is_last and size != width and self.widths.is_data(size)
        # What takes the rows of a table and leads back to them is a bottleneck beside them.
        is_beside_table = self.widths.is_embedded(width)
        is_data &= not heads.sizes or (self.widths.leads_back(size) and not is_beside_table)
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
        if not _multiplies(leaf) and self._stacks.has_vector(leaf):
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
        is_image = size <= IMAGE_CHANNELS and _is_called_output(leaf)
        is_last = is_image or (size not in others and not self.widths.is_taken(size))
        is_fed = self._order.channels(leaf)[-1] in self.widths.given_maps
        is_output = is_last and is_fed and size not in self.widths.norms
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
        is_head = _is_called_head(leaf)
        if _is_narrow(leaf, axis):
            return "head" if is_head or _is_called_output(leaf) else "few_outputs"
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
        if is_head or _is_called_output(leaf) or _is_in_head(leaf, size, width):
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
        if self._is_alone or size == width or (size > width and self._is_gated(leaf, size)):
            return None
        is_tall = size >= max(_MANY_OUTPUTS, VOCABULARY * width) and leaf.bias is None
        if is_tall and self.widths.is_free(size):
            return "tall_table"  # of users or items, whose rows are concatenated with others
        is_free = self.widths.is_free(size)
        if is_free and size in self.widths.rows and size > width:
            return "output"
        if not self.widths.is_given(width):
            return None
        if not is_free:
            is_called_so = names.RECONSTRUCTION.is_in(leaf.name.near(1))
            return self._reconstruction(leaf, size) if is_called_so else None
        is_beside_table = leaf.bias is not None and self.widths.is_embedded(size)
        if self.widths.is_feature_map(size) or is_beside_table:
            return None
        if _is_called_hidden(leaf):  # projections for a loss end the model too, as `ctc_proj`
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
        if not self._is_alone and _is_unnamed(leaf):
            return "unnamed"
        is_inner_head = _is_inner_head(leaf, self._order.output_axis(leaf))
        return "inner_head" if is_inner_head else "matrix"


def _kind(leaf: Leaf) -> tuple[str, int]:
    """The leaf's path without numbers, and its longer side."""
    return unnumbered(path_name(leaf.path)), max(leaf.shape)


def sequence_of(leaf: Leaf) -> str:
    """The leaf's path without the last of its numbers, which is its place among the layers."""
    return _LAST_NUMBER.sub("*", path_name(leaf.path))


def _multiplies(leaf: Leaf) -> bool:
    """Whether its name says that it is no vector: a router is beside the stack of its experts."""
    layer = leaf.name.layer
    return leaf.name.is_kernel or names.PROJECTION.is_in(layer) or "router" in layer


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


def _is_called_head(leaf: Leaf) -> bool:
    layer = leaf.name.layer
    is_called_so = names.HEAD.is_in(layer) and "pre" not in layer
    is_unembedding = any(token.startswith("unembed") for token in layer)
    return is_called_so and (is_unembedding or not names.EMBEDDING.is_in(layer))


def is_attention(leaf: Leaf) -> bool:
    """Whether it is in an attention or a recurrent cell, whose outputs need not feed a layer."""
    name = leaf.name
    letters = {"q", "k", "v", "query", "key", "value"}
    is_projection = len(name.layer) == 1 and name.layer[0] in letters | {"o"}
    has_others = len(leaf.siblings & letters) > 1
    in_module = names.ATTENTION.is_in(name.near(2)) or names.CELL.is_in(name.all_tokens)
    return in_module or (is_projection and has_others)


def _is_tall(leaf: Leaf, role: Role) -> bool:
    """Whether a last layer may be a table: their sizes are alike, but a table has no bias."""
    return role in _LAST and leaf.bias is None and not leaf.name.is_kernel


def _is_gate(leaf: Leaf) -> bool:
    """Whether it is a gate, in an attention or of a cell, but for layers beside a cell's gates."""
    if names.GATE.is_in(leaf.name.layer):
        return True
    is_in_cell = names.CELL.is_in(leaf.name.all_tokens)
    return is_attention(leaf) and not (is_in_cell and _LAYERS & set(leaf.name.layer))


def is_modulation(leaf: Leaf) -> bool:
    """Whether it makes shifts and scales, which nothing multiplies with."""
    return bool({"norm", "modulation", "adaln"} & set(leaf.name.all_tokens))


def _is_called_output(leaf: Leaf) -> bool:
    """Whether its name is that of a network's last layer."""
    is_fc = leaf.name.layer_name.lower() == "fc"  # fc1 and fc2 are those of a hidden MLP
    is_hidden = is_modulation(leaf) or names.HIDDEN.is_in(leaf.name.near(1))
    is_first = "decoder" in leaf.name.layer and names.EMBEDDING.is_in(leaf.name.layer)
    is_output = names.OUTPUT.is_in(leaf.name.layer) and not is_first
    return (is_fc or is_output) and not is_hidden


def _is_in_head(leaf: Leaf, size: int, width: int) -> bool:
    """Whether its module, or its own name, is that of a network's last layers."""
    is_module = names.HEAD.is_in(leaf.name.all_above)
    is_called_so = is_module or names.HEAD_MODULE.is_in(leaf.name.all_tokens)
    return is_called_so and not is_modulation(leaf) and not is_multiple(size, width)


def _is_inner_head(leaf: Leaf, axis: int | None) -> bool:
    """Whether names say 'head' and shapes say 'hidden', with nothing to decide between them."""
    above = leaf.name.all_above
    is_plain = bool({"fc", "logits", "out"} & set(leaf.name.layer))
    is_plain |= leaf.name.layer == ("proj",) and leaf.name.above[-1:] in _HEADS
    is_inner = leaf.is_repeated or is_attention(leaf)
    is_inner |= bool({"mlp", "ffn"} & set(leaf.name.all_tokens))
    is_in_head = names.HEAD.is_in(above) and is_plain
    is_pixels = leaf.name.layer[:1] == ("to",) and bool(_PIXELS & set(leaf.name.layer))
    return (is_in_head or is_pixels or _is_called_last(leaf, axis)) and not is_inner


def _is_called_last(leaf: Leaf, axis: int | None) -> bool:
    """Whether its own name, or its module's, is that of a last layer: `final_proj`, `last/fc`.

    Outputs that are a few blocks of the inputs are a shift and a scale, and hidden.
    """
    layer = leaf.name.layer
    near = {"final", "last"} & {*leaf.name.layer, *(t for a in leaf.name.above[-1:] for t in a)}
    is_output = bool(_OUTPUTS & set(layer)) or bool(
        _SKIPS & set(layer) and _OUTPUTS & leaf.siblings  # added to an output
    )
    is_hidden = is_modulation(leaf) or names.HIDDEN.is_in(leaf.name.near(1))
    if any(token.startswith("recon") for token in layer):
        return True
    is_shrinking = is_output and axis is not None and leaf.shape[axis] < leaf.shape[1 - axis]
    is_fused = is_multiple(max(leaf.shape), min(leaf.shape)) and not is_shrinking
    is_hidden |= names.EMBEDDING.is_in(layer) or is_fused
    return (bool(near) or is_output) and not is_hidden


def _is_called_hidden(leaf: Leaf) -> bool:
    near = leaf.name.near(1)
    is_hidden = any(m.is_in(near) for m in (names.HIDDEN, names.NORM, names.EMBEDDING))
    is_projection = "proj" in near or any(token.startswith("project") for token in near)
    return is_hidden or is_projection or is_modulation(leaf)


def _is_unnamed(leaf: Leaf) -> bool:
    """Whether nothing on its path is a name."""
    return has_unnamed(leaf.path) or not any(names.tokens(n) for n in leaf.name.names)
