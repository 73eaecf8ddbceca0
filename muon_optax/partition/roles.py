"""What each leaf of a tree is: a table, a head, a norm, a hidden matrix, by names and by evidence.

Names come first where they are plain. Evidence of the tree decides where they aren't, and may
contradict them: the outputs of a head feed no other layer, a table has no bias, a norm has one of
its own shape.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import names
from muon_optax.partition.doubtful import Doubtful
from muon_optax.partition.evidence import Evidence
from muon_optax.partition.order import layers_in_sequence
from muon_optax.partition.tree import Described, Leaf, Role, Shape, read_tree

__all__ = ["roles_of"]

_MOST_HEADS = 128  # of an attention
_MOST_LAYERS = 256  # of a stack of vectors; a `scale_bias` of [1536, 3072] multiplies
_WINDOW = 8  # the longest of a depthwise convolution of two dims


def roles_of(leaves: Described) -> tuple[Role, ...]:
    """The role of each leaf.

    Args:
      leaves: paths and shapes of the whole tree; evidence is what these show.

    Returns:
      A role a leaf, in order.

    Example:
      >>> tree = [(("tok", "weight"), (50, 8)), (("up", "kernel"), (8, 32)), (("fc", "w"), (32, 8))]
      >>> roles_of([*tree, (("out", "kernel"), (8, 10))])
      ('embedding', 'matrix', 'matrix', 'head')
    """
    return _roles(tuple((path, tuple(shape)) for path, shape in leaves))


@functools.lru_cache(maxsize=64)
def _roles(leaves: tuple[tuple[Segments, Shape], ...]) -> tuple[Role, ...]:
    tree = read_tree(leaves)
    norms = {x.shape[0] for x in tree if len(x.shape) == 1 and not x.is_bias}
    widths = norms | _repeated_widths(tree)
    shown = _Shown(_lora_bases(tree), norms, widths, layers_in_sequence(tree))
    named: list[Role | None] = [_by_name(leaf, shown) for leaf in tree]
    rest = [leaf for leaf, role in zip(tree, named, strict=True) if role is None]
    evidence = Evidence(tree, named, rest)
    doubtful = Doubtful(tree, rest, evidence.widths)
    pairs = zip(rest, evidence.roles(rest), strict=True)
    order = evidence.widths.order
    found: list[Role] = [order.role(leaf, doubtful.role(leaf, role)) for leaf, role in pairs]
    others = iter(found)
    return tuple(next(others) if role is None else role for role in named)


class _Shown(NamedTuple):
    """Evidence against names.

    Attributes:
      bases: leaves in a module called after LoRA that aren't its factors.
      norms: sizes of all norms.
      widths: these, and sizes of the repeated layers.
      chained: weights in sequences of layers, also where these are called embeddings.
    """

    bases: set[Segments]
    norms: set[int]
    widths: set[int]
    chained: set[Segments]


# By name


def _by_name(leaf: Leaf, shown: _Shown) -> Role | None:
    """The role that names tell, where a bias beside doesn't contradict."""
    name, shape = leaf.name, leaf.shape
    if len(shape) < 2:
        return "vector"
    is_lora = names.LORA.is_in(token for n in name.names for token in names.tokens(n))
    if is_lora and leaf.path not in shown.bases:
        return "lora"
    if _is_companion(leaf):
        return "quantisation"
    if not name.is_plain and (_is_vector(leaf) or _is_per_channel(leaf, shown.norms)):
        return "bias"
    if _is_bias_table(leaf):
        return "table"
    if _is_norm(leaf):
        return "norm"
    if _is_temporal(leaf):
        return "depthwise"
    table = None if leaf.path in shown.chained else _table(leaf, shown.widths)
    return "thin" if table is None and not name.is_plain and _is_thin(leaf) else table


_COMPANIONS = {("scale", "inv"), ("zero", "point"), ("zero", "points"), ("quant", "map")}


def _is_companion(leaf: Leaf) -> bool:
    """Whether it scales a quantised weight: `weight_scale_inv`, `qzeros`, `weight_scale`."""
    name = leaf.name
    is_of_weight = name.is_weight and not name.is_plain and "scale" in name.layer
    known = names.QUANTISATION.is_in(name.layer) or name.layer[-2:] in _COMPANIONS
    return is_of_weight or known


def _lora_bases(tree: Sequence[Leaf]) -> set[Segments]:
    """Leaves in a module called after LoRA that aren't its factors, which have own names.

    So `lora/kernel` is the base matrix beside `lora/lora_a`, or `lora/lora/lora_a`.
    """
    depths: dict[Segments, int] = {}
    lasts: dict[Segments, tuple[Segments, int]] = {}
    for leaf in tree:
        found = [i for i, n in enumerate(leaf.name.names) if names.LORA.is_in(names.tokens(n))]
        if not found:
            continue
        lasts[leaf.path] = leaf.name.names[: found[-1] + 1], len(found)
        for i in found[:-1]:
            depths[leaf.name.names[: i + 1]] = len(found)
    return {path for path, (module, count) in lasts.items() if depths.get(module, 0) > count}


def _is_vector(leaf: Leaf) -> bool:
    """Whether an array of its own is called a bias, a scale or the like."""
    layer = leaf.name.layer
    return bool({"bias", "biases", "log"} & set(layer)) or names.VECTOR.is_in(layer[-1:])


def _is_per_channel(leaf: Leaf, norms: set[int]) -> bool:
    """Whether an array of a layer's own has an entry a channel, [heads, head_dim], as RWKV's."""
    is_own = leaf.is_repeated and not leaf.name.is_weight and len(leaf.shape) == 2
    is_called_layer = names.PROJECTION.is_in(leaf.name.layer)
    return is_own and not is_called_layer and math.prod(leaf.shape) in norms


def _is_thin(leaf: Leaf) -> bool:
    """Whether an array of its own has one dim above 1, and a name."""
    return sum(n > 1 for n in leaf.shape) < 2 and bool(leaf.name.layer)


def _is_temporal(leaf: Leaf) -> bool:
    """Whether it is a convolution over time, a filter a channel.

    It is `conv_1d/w` [window, channels], or as an array of a layer's own also `conv1d_kernel`
    [channels, window].
    """
    name, shape = leaf.name, leaf.shape
    is_own = name.is_weight and not name.is_plain
    if len(shape) != 2 or not names.CONV.is_in(name.layer) or not (is_own or name.is_kernel):
        return False
    window, channels = sorted(shape) if is_own else shape
    return window <= _WINDOW and channels >= _WINDOW * window


def _is_bias_table(leaf: Leaf) -> bool:
    """Whether it is a table of biases, a column a head: `relative_attention_bias/weight`."""
    layer = leaf.name.layer
    is_called_so = "bias" in layer and not names.PROJECTION.is_in(layer)
    is_called_so &= not _makes_a_scale(leaf)
    is_small = len(leaf.shape) == 2 and min(leaf.shape) <= _MOST_HEADS
    return is_called_so and is_small and leaf.output_axis_by_bias is None


def _is_norm(leaf: Leaf) -> bool:
    """Whether it is elementwise: by its layer's name, or by a bias of its own shape."""
    name = leaf.name
    if leaf.bias is not None:
        return leaf.bias == leaf.shape
    if not name.is_weight or len(leaf.shape) != 2:
        return False
    is_stack = names.VECTOR.is_in(name.layer) and min(leaf.shape) <= _MOST_LAYERS
    is_stack &= not name.is_kernel  # but scanned norms may have a `kernel`, as EasyLM's
    is_called_so = names.NORM.is_in(name.layer) or is_stack
    is_layer = names.PROJECTION.is_in(name.layer) and not names.NORM.is_in(name.layer[-1:])
    multiplies = is_layer or names.CONDITION.is_in(name.layer)  # but an `ffn_norm` doesn't
    return is_called_so and not multiplies and not _makes_a_scale(leaf)


def _makes_a_scale(leaf: Leaf) -> bool:
    """Whether its module makes the shift and scale of a norm: `adaln/s_scale` multiplies."""
    return bool({"adaln", "modulation"} & set(leaf.name.all_above))


def _is_called_table(leaf: Leaf) -> bool:
    """Whether its words are a table's.

    `to_emb` and `atom_to_token` lead to what they are called after, and `memory_layer` is a layer.
    """
    layer = leaf.name.layer
    if leaf.name.is_weight and "to" in layer:
        return False
    # An EmbeddingBag a feature: the module that holds them has the name.
    in_module = names.EMBEDDING.is_in(t for a in leaf.name.above[-1:] for t in a)
    is_named = names.EMBEDDING.is_in(layer) or _has_table_word(layer) or in_module
    return is_named and not names.PROJECTION.is_in(layer)


def _has_table_word(layer: names.Tokens) -> bool:
    """Whether a word is that of a table; T5's is called `shared`, as many layers are beside."""
    return (names.TABLE.is_in(layer) and "layer" not in layer) or layer == ("shared",)


def _repeated_widths(tree: Sequence[Leaf]) -> set[int]:
    """Sizes of the repeated layers."""
    repeated = [x for x in tree if x.is_repeated and x.name.is_weight and len(x.shape) == 2]
    return {size for leaf in repeated for size in leaf.shape}


def _table(leaf: Leaf, widths: set[int]) -> Role | None:
    """An embedding or another table, if it is called so and nothing shows that it multiplies."""
    name, shape = leaf.name, leaf.shape
    if name.is_kernel:
        return None
    is_matrix = name.is_weight and (len(shape) > 2 or leaf.output_axis_by_bias is not None)
    if is_matrix or (leaf.bias is not None and len(leaf.bias) == 1):
        return None
    if _is_called_table(leaf):
        if not _has_table_word(name.layer) and _embeds_numbers(leaf, widths):
            return None
        return "embedding" if names.EMBEDDING.is_in(name.layer) else "table"
    return "table" if _is_learned_query(leaf, widths) else None


def _is_learned_query(leaf: Leaf, widths: set[int]) -> bool:
    """Whether it is a table of queries, not their projection: no key beside, and [rows, width]."""
    is_query = leaf.name.layer[-1:] in (("query",), ("queries",)) and len(leaf.shape) == 2
    letters = {"k", "v"} if leaf.name.is_weight else set()  # an array's own `query` is whole
    if not is_query or leaf.siblings & ({"key", "keys", "value", "values"} | letters):
        return False
    return leaf.shape[0] not in widths and leaf.shape[1] in widths


def _embeds_numbers(leaf: Leaf, widths: set[int]) -> bool:
    """Whether an 'embedding' multiplies features: those of pixels do, and some of other inputs.

    PyTorch keeps a layer as [width, features], and a table as [rows, width].
    """
    name, shape = leaf.name, leaf.shape
    is_layer = name.is_weight and shape[0] in widths and shape[1] not in widths
    is_input = names.INPUT.is_in(name.layer) and is_layer
    return len(shape) == 2 and (names.PIXELS.is_in(name.layer) or is_input)
