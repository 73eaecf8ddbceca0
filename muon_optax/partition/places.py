"""What the name of a layer says of its place: a head, a hidden layer, an attention, a gate."""

from collections.abc import Iterable

from muon_optax._internal.tree_paths import has_unnamed
from muon_optax.partition import names
from muon_optax.partition.tree import Leaf
from muon_optax.partition.widths import is_multiple

__all__ = [
    "is_alone_in_head",
    "is_attention",
    "is_called_head",
    "is_called_hidden",
    "is_called_output",
    "is_called_projection_alone",
    "is_gate",
    "is_in_head",
    "is_inner_head",
    "is_modulation",
    "is_unnamed",
    "multiplies",
]

_HEADS = ((("head",),), (("classifier",),))
_OUTPUTS = {"out", "output", "outputs"}
_LAYERS = {"dense", "linear", "fc"}  # of a recurrent cell, those that are no gate's
_PIXELS = {"pixel", "pixels", "image", "images", "rgb"}  # what `to_pixels` gives is no width
_SKIPS = {"residual", "skip", "shortcut"}


def multiplies(leaf: Leaf) -> bool:
    """Whether its name says that it is no vector: a router is beside the stack of its experts."""
    layer = leaf.name.layer
    return leaf.name.is_kernel or names.PROJECTION.is_in(layer) or "router" in layer


def is_called_head(leaf: Leaf) -> bool:
    """Whether its own name is that of a head or an unembedding, and not of what is before one."""
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


def is_gate(leaf: Leaf) -> bool:
    """Whether it is a gate, in an attention or of a cell, but for layers beside a cell's gates."""
    if names.GATE.is_in(leaf.name.layer):
        return True
    is_in_cell = names.CELL.is_in(leaf.name.all_tokens)
    return is_attention(leaf) and not (is_in_cell and _LAYERS & set(leaf.name.layer))


def is_modulation(leaf: Leaf) -> bool:
    """Whether it makes shifts and scales, which nothing multiplies with."""
    return bool({"norm", "modulation", "adaln"} & set(leaf.name.all_tokens))


def is_called_output(leaf: Leaf) -> bool:
    """Whether its name is that of a network's last layer."""
    is_fc = leaf.name.layer_name.lower() == "fc"  # fc1 and fc2 are those of a hidden MLP
    is_hidden = is_modulation(leaf) or names.HIDDEN.is_in(leaf.name.near(1))
    is_first = "decoder" in leaf.name.layer and names.EMBEDDING.is_in(leaf.name.layer)
    is_output = names.OUTPUT.is_in(leaf.name.layer) and not is_first
    return (is_fc or is_output) and not is_hidden


def is_in_head(leaf: Leaf, size: int, width: int) -> bool:
    """Whether its module, or its own name, is that of a network's last layers."""
    is_module = names.HEAD.is_in(leaf.name.all_above)
    is_called_so = is_module or names.HEAD_MODULE.is_in(leaf.name.all_tokens)
    return is_called_so and not is_modulation(leaf) and not is_multiple(size, width)


def is_alone_in_head(leaf: Leaf) -> bool:
    """Whether it is all that a module is made of whose name is that of a head.

    `lm_head/dense`, as BERT's, is before a last layer that is tied to the embedding.
    """
    is_in_head = names.HEAD.is_in(t for above in leaf.name.above[-1:] for t in above)
    is_alone = leaf.siblings == set(leaf.name.layer) and "dense" not in leaf.siblings
    return is_in_head and is_alone and not leaf.is_repeated


def is_inner_head(leaf: Leaf, axis: int | None) -> bool:
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


def is_called_hidden(leaf: Leaf) -> bool:
    """Whether its own name, or its module's, is that of a hidden layer or of a projection."""
    near = leaf.name.near(1)
    is_hidden = any(m.is_in(near) for m in (names.HIDDEN, names.NORM, names.EMBEDDING))
    return is_hidden or _is_projection(near) or is_modulation(leaf)


def _is_projection(words: Iterable[str]) -> bool:
    return any(token == "proj" or token.startswith("project") for token in words)


def is_called_projection_alone(leaf: Leaf) -> bool:
    """Whether its own name is that of a projection, and no word of a module is of hidden layers."""
    is_module = leaf.name.above and names.HIDDEN.is_in(leaf.name.above[-1])
    return _is_projection(leaf.name.layer) and not is_module and not is_modulation(leaf)


def is_unnamed(leaf: Leaf) -> bool:
    """Whether nothing on its path is a name."""
    return has_unnamed(leaf.path) or not any(names.tokens(n) for n in leaf.name.names)
