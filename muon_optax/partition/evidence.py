"""What the shapes of a tree show of leaves whose names don't tell what they are."""

import collections
import math
from collections.abc import Sequence

from muon_optax.partition import names
from muon_optax.partition.order import Order
from muon_optax.partition.stacks import Stacks
from muon_optax.partition.tree import Leaf, Role
from muon_optax.tree_paths import has_unnamed

__all__ = ["Evidence"]

_VOCABULARY = 8  # a table or head of so many times its width is that of a vocabulary
_FEW_OUTPUTS = 32  # of a small head, whose number others may have by chance
_IMAGE_CHANNELS = 4  # what a first convolution takes is not what another layer gives
_BLOCKS = (2, 3, 4, 6)  # of fused outputs: shift and scale, queries, keys and values, gates


class Evidence:
    """The widths of a tree: what its layers take, what they give, and how wide its norms are."""

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
        tables = [leaf for leaf, role in roles if role in ("embedding", "table")]
        self._rows = {leaf.shape[0] for leaf in tables if len(leaf.shape) == 2}
        vectors = [leaf for leaf, role in roles if role == "vector" and leaf.shape]
        self._widths = {leaf.shape[0] for leaf in vectors if not leaf.name.is_bias}
        columns = {leaf.shape[1] for leaf in tables if len(leaf.shape) == 2}
        self._order = Order(rest, self._widths | columns)
        self._inputs = {s for x in rest if len(x.shape) < 4 for s in self._order.inputs(x)}
        self._maps = {s for x in rest if len(x.shape) > 3 for s in self._order.inputs(x)}
        outputs = ((leaf, self._order.output_axis(leaf)) for leaf in rest)
        self._outputs = collections.Counter(
            leaf.shape[axis] for leaf, axis in outputs if axis is not None
        )
        plain = [x for x in rest if len(x.shape) == 2 and self._order.output_axis(x) is None]
        squat = [x for x in plain if max(x.shape) < _VOCABULARY * min(x.shape)]
        cells = [x for x in rest if names.CELL.is_in(x.name.all_tokens)]
        self._given = self._widths | columns | set(self._outputs)
        self._given |= {n for x in (*squat, *cells) for n in x.shape}
        convolutions = [leaf for leaf in rest if len(leaf.shape) > 3]
        self._channels = {c for leaf in convolutions for c in self._order.channels(leaf)}
        map_axes = ((leaf, self._order.output_axis(leaf)) for leaf in convolutions)
        self._given_maps = {x.shape[axis] for x, axis in map_axes if axis is not None}
        self._given_maps |= self._widths
        stacked = [x for x in rest if len(x.shape) > 2 and not self._order.depthwise_channels(x)]
        self._stacks = Stacks(tree, stacked)
        self._is_alone = len(rest) == 1

    def role(self, leaf: Leaf) -> Role:
        """The role of a leaf of two dims or more."""
        if len(leaf.shape) > 2:
            return self._of_many_dims(leaf)
        if self._stacks.has_vector(leaf):
            return "stacked_vector"
        return self._head(leaf) or self._matrix(leaf)

    def _of_many_dims(self, leaf: Leaf) -> Role:
        if channels := self._order.depthwise_channels(leaf):
            return self._depthwise(leaf, channels)
        axis = self._order.output_axis(leaf)
        is_map = len(leaf.shape) > 3 or any("conv" in token for token in leaf.name.all_tokens)
        if axis is None or not is_map or leaf.is_repeated or _is_attention(leaf):
            return "undeclared"
        is_new = leaf.shape[axis] not in leaf.shape[:axis]
        size = leaf.shape[axis]
        is_last = is_new and self._is_free(size) and size not in self._maps
        is_fed = self._order.channels(leaf)[-1] in self._given_maps
        return "output" if is_last and is_fed else "undeclared"

    def _depthwise(self, leaf: Leaf, channels: int) -> Role:
        """Of kernels with one input a filter: grey images have one channel too."""
        if names.DEPTHWISE.is_in(leaf.name.all_tokens) or leaf.is_repeated:
            return "depthwise"
        is_taken = channels in self._inputs or channels in self._maps
        is_first = self._outputs[channels] == 1 and is_taken
        return "undeclared" if is_first else "one_channel"

    def _head(self, leaf: Leaf) -> Role | None:
        if leaf.is_repeated or _is_attention(leaf):
            return None
        name = leaf.name
        is_head = names.HEAD.is_in(name.layer) and "pre" not in name.layer
        if is_head and not name.is_numbered:
            return "head"
        axis = self._order.output_axis(leaf)
        if axis is None:
            return self._tall(leaf)
        size, width = leaf.shape[axis], leaf.shape[1 - axis]
        is_fused = any(size == k * width for k in _BLOCKS)  # shift and scale before the last layer
        if is_head or _is_called_output(leaf) or (_is_in_head(leaf) and not is_fused):
            is_last = not name.is_numbered or "class" in name.layer
            return self._called_output(size, width, may_be_small=is_last)
        return self._output(leaf, size, width)

    def _tall(self, leaf: Leaf) -> Role | None:
        """A leaf of which nothing tells the output: a vocabulary shows by itself."""
        width, size = sorted(leaf.shape)
        is_last = self._is_free(size) and width in self._given
        return "tall_table" if is_last and size >= _VOCABULARY * width else None

    def _called_output(self, size: int, width: int, *, may_be_small: bool) -> Role | None:
        is_small = size <= _FEW_OUTPUTS and size * _FEW_OUTPUTS <= width and may_be_small
        is_large = size > width and (size in self._rows or size >= _VOCABULARY * width)
        is_large &= size not in self._widths
        is_last = self._is_free(size) and size != width
        return "head" if is_small or is_large or is_last else None

    def _output(self, leaf: Leaf, size: int, width: int) -> Role | None:
        is_last = self._is_free(size) and size != width and width in self._given
        if self._is_alone or not is_last:
            return None
        if size in self._rows and size > width:
            return "output"
        if _is_called_hidden(leaf) or self._is_feature_map(size):
            return None
        if size >= _VOCABULARY * width:
            return "tall_table"
        if self._is_fused(size, width):
            return None
        return "output" if size <= width else "wide_output"

    def _is_free(self, size: int) -> bool:
        """Whether no other layer takes so many inputs, and no norm is so wide."""
        is_map = size in self._maps and size > _IMAGE_CHANNELS
        return size not in self._widths and size not in self._inputs and not is_map

    def _is_fused(self, size: int, width: int) -> bool:
        """Whether the outputs may be blocks that others take: gates, or a shift and a scale."""
        blocks = [size // k for k in _BLOCKS if size % k == 0]
        return any(block == width or block in self._widths for block in blocks)

    def _is_feature_map(self, size: int) -> bool:
        """Whether the outputs may be the square feature map that a convolution takes."""
        maps = [size // c for c in self._channels if 1 < c < size and size % c == 0]
        return any(math.isqrt(n) ** 2 == n for n in maps)

    def _matrix(self, leaf: Leaf) -> Role:
        if not self._is_alone and _is_unnamed(leaf):
            return "unnamed"
        if _is_inner_head(leaf):
            return "inner_head"
        if leaf.shape[0] == leaf.shape[1] or self._order.output_axis(leaf) != 0:
            return "matrix"
        is_told = self._order.is_told or not leaf.name.is_weight
        return "transposed_matrix" if is_told else "matrix_of_unknown_order"


def _is_inner_head(leaf: Leaf) -> bool:
    """Whether names say 'head' and shapes say 'hidden', with nothing to decide between them."""
    above = leaf.name.all_tokens[len(leaf.name.layer) :]
    is_plain = bool({"fc", "logits", "out"} & set(leaf.name.layer))
    is_inner = leaf.is_repeated or _is_attention(leaf) or bool({"mlp", "ffn"} & set(above))
    return names.HEAD.is_in(above) and is_plain and not is_inner


def _is_attention(leaf: Leaf) -> bool:
    """Whether it is in an attention or a recurrent cell, whose outputs need not feed a layer."""
    name = leaf.name
    near = (*name.layer, *(t for above in name.above[-2:] for t in above))
    is_letter = name.layer in (("q",), ("k",), ("v",), ("o",), ("query",), ("key",), ("value",))
    has_others = len(leaf.siblings & {"q", "k", "v", "query", "key", "value"}) > 1
    return (
        names.ATTENTION.is_in(near)
        or names.CELL.is_in(name.all_tokens)
        or (is_letter and has_others)
    )


def _is_called_output(leaf: Leaf) -> bool:
    layer = leaf.name.layer
    is_fc = leaf.name.layer_name.lower() == "fc"  # fc1 and fc2 are those of a hidden MLP
    is_hidden = _is_modulation(leaf) or names.HIDDEN.is_in(leaf.name.all_tokens)
    return (is_fc or names.OUTPUT.is_in(layer)) and not is_hidden


def _is_modulation(leaf: Leaf) -> bool:
    return bool({"norm", "modulation", "adaln"} & set(leaf.name.all_tokens))


def _is_in_head(leaf: Leaf) -> bool:
    """Whether its module's name, or its own, is that of a network's last layers."""
    near = leaf.name.all_tokens
    above = near[len(leaf.name.layer) :]
    is_called_so = names.HEAD.is_in(above) or names.HEAD_MODULE.is_in(near)
    return is_called_so and not _is_modulation(leaf)


def _is_called_hidden(leaf: Leaf) -> bool:
    near = (*leaf.name.layer, *(t for above in leaf.name.above[-1:] for t in above))
    is_hidden = any(m.is_in(near) for m in (names.HIDDEN, names.NORM, names.EMBEDDING))
    is_projection = "proj" in near or any(token.startswith("project") for token in near)
    return is_hidden or is_projection or _is_modulation(leaf)


def _is_unnamed(leaf: Leaf) -> bool:
    """Whether nothing on its path is a name."""
    return has_unnamed(leaf.path) or not any(names.tokens(n) for n in leaf.name.names)
