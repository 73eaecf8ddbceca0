"""A tree as the rules see it: each leaf with its bias, and whether it is one of repeated layers."""

import collections
import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition.names import LeafName, Meaning, is_index, leaf_name, tokens, word_set

__all__ = ["TRANSPOSED", "Described", "Leaf", "Role", "Shape", "read_tree"]

Shape = tuple[int, ...]
Described = Sequence[tuple[Segments, Shape]]

Role = Literal[
    "vector",
    "bias",
    "thin",
    "norm",
    "depthwise",
    "one_channel",
    "quantisation",
    "lora",
    "embedding",
    "table",
    "tall_table",
    "head",
    "output",
    "wide_output",
    "few_outputs",
    "stacked_vector",
    "unconnected",
    "undeclared",
    "matrix",
    "inner_head",
    "data_output",
    "bare_parameter",
    "possible_table",
    "possible_head",
    "unnamed",
    "transposed_matrix",
    "transposed_inner_head",
    "transposed_data_output",
    "transposed_bare_parameter",
    "transposed_possible_table",
    "transposed_possible_head",
    "transposed_unnamed",
    "matrix_of_unknown_order",
]

# Matrices kept as [out, in], as PyTorch and Equinox do, by their role where they are [in, out].
TRANSPOSED: Mapping[Role, Role] = {
    "matrix": "transposed_matrix",
    "inner_head": "transposed_inner_head",
    "data_output": "transposed_data_output",
    "bare_parameter": "transposed_bare_parameter",
    "possible_table": "transposed_possible_table",
    "possible_head": "transposed_possible_head",
    "unnamed": "transposed_unnamed",
}

_NUMBERED = re.compile(r"(.*?)_?(\d+)")
_NUMBER = re.compile(r"\d+")
# Modules that are made many times, also where a tree shows one of them: `DiTBlock_0`.
_REPEATED = Meaning(word_set("group groups h"), parts=("block", "layer", "stage", "stack"))
_STACKS = word_set("blocks layers stages stacked")
_LAST = word_set("final last head heads output out class cls classifier pred score logits")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf and the leaves beside it.

    Attributes:
      path: its path.
      shape: its shape.
      name: its path, read.
      bias: shape of its layer's bias, if there is one.
      is_bias: whether it is a bias: so called, or in a sequence without names the vector that
        follows a matrix.
      is_repeated: whether it is part of a layer that is there many times.
      siblings: layer tokens of the weights in the module that holds the leaf's layer.
    """

    path: Segments
    shape: Shape
    name: LeafName
    bias: Shape | None
    is_bias: bool
    is_repeated: bool
    siblings: frozenset[str]

    @property
    def output_axis_by_bias(self) -> int | None:
        """Of a matrix: the axis that its bias has, where that tells the two apart."""
        if self.bias is None or len(self.bias) != 1 or len(self.shape) != 2:
            return None
        fits = [axis for axis, size in enumerate(self.shape) if size == self.bias[0]]
        return fits[0] if len(fits) == 1 else None


def read_tree(leaves: Described) -> list[Leaf]:
    """Reads the paths and shapes of a whole tree, in linear time.

    Example:
      >>> kernel, bias = read_tree([(("fc", "kernel"), (4, 8)), (("fc", "bias"), (8,))])
      >>> kernel.bias, kernel.output_axis_by_bias, bias.bias
      ((8,), 1, None)
    """
    names = [leaf_name(path) for path, _ in leaves]
    biases = _Biases(leaves, names)
    counts = _sequence_sizes(names)
    words: dict[Segments, set[str]] = collections.defaultdict(set)
    for name in names:
        words[_lowered(name.parent)].update(name.layer)
    siblings = {parent: frozenset(found) for parent, found in words.items()}
    return [
        Leaf(
            path,
            shape,
            name,
            biases.of(place),
            name.is_bias or biases.follows_matrix(place),
            _is_repeated(name, counts),
            siblings[_lowered(name.parent)],
        )
        for place, ((path, shape), name) in enumerate(zip(leaves, names, strict=True))
    ]


def _lowered(names: Segments) -> Segments:
    return tuple(name.lower() for name in names)


class _Biases:
    """Finds the bias of each weight: 'bias' beside 'weight', 'in_proj_bias' beside its weight.

    Where layers that are alike are told once, `linear_1.bias` stands for that of `linear_2` too,
    unless `linear_1.weight` is there and the bias tells another axis of it. In a sequence without
    names the vector after a matrix is its bias.
    """

    def __init__(self, leaves: Described, names: Sequence[LeafName]) -> None:
        self._leaves, self._names = leaves, names
        self._exact: dict[Segments, Shape] = {}
        self._alike: dict[Segments, set[tuple[Shape, Shape | None]]] = collections.defaultdict(set)
        owners = {
            key: shape
            for (_, shape), name in zip(leaves, names, strict=True)
            for key in _bias_names(name)
        }
        for (_, shape), name in zip(leaves, names, strict=True):
            if name.is_bias:
                key = _lowered(name.names)
                self._exact[key] = shape
                self._alike[_unnumbered(key)].add((shape, owners.get(key)))

    def of(self, place: int) -> Shape | None:
        """The shape of the bias of the leaf at this place."""
        (_, shape), name = self._leaves[place], self._names[place]
        if len(shape) < 2:
            return None
        keys = list(_bias_names(name))
        exact = next((self._exact[key] for key in keys if key in self._exact), None)
        if exact is not None:
            return exact
        found = [x for key in keys for x in self._alike.get(_unnumbered(key), ())]
        alike = [bias for bias, owner in found if _is_alike(shape, bias, owner)]
        fitting = [s for s in alike if s == shape or (len(s) == 1 and s[0] in shape)]
        return fitting[0] if len(set(fitting)) == 1 else self._next(place)

    def follows_matrix(self, place: int) -> bool:
        """Whether the leaf at this place is the bias of the one before, without names."""
        return place > 0 and len(self._leaves[place - 1][1]) > 1 and bool(self._next(place - 1))

    def _next(self, place: int) -> Shape | None:
        """In a sequence without names, the vector that follows."""
        follows = self._leaves[place + 1 : place + 2]
        if self._names[place].own or not follows or self._names[place + 1].own:
            return None
        shape = follows[0][1]
        return shape if len(shape) == 1 and shape[0] in self._leaves[place][1] else None


def _is_alike(shape: Shape, bias: Shape, owner: Shape | None) -> bool:
    """Whether a bias may stand for that of a weight of this shape beside its own weight."""
    if owner in (None, shape) or bias == shape:
        return True
    axes = [axis for axis, size in enumerate(owner or ()) if bias == (size,)]
    return len(owner or ()) == len(shape) and len(axes) == 1 and bias == (shape[axes[0]],)


def _bias_names(name: LeafName) -> Iterator[Segments]:
    """The paths at which the bias of this weight may be."""
    if not name.is_weight:
        return
    names = _lowered(name.names)
    last = max(i for i, n in enumerate(names) if n == name.own)
    own = name.own
    for weight, bias in (("kernel", "bias"), ("weight", "bias"), ("w", "b"), ("w", "bias")):
        renamed = re.sub(rf"(?:^|(?<=_)){weight}(?=_|$)", bias, own)
        if renamed != own:
            yield (*names[:last], renamed, *names[last + 1 :])
    if not name.is_plain:  # as recurrent cells have it: `weight_hh`, `recurrent_kernel`
        yield (*names[:last], "bias", *names[last + 1 :])


def _unnumbered(names: Segments) -> Segments:
    return tuple(_NUMBER.sub("*", name) for name in names)


Counts = Mapping[tuple[Segments, str], set[int]]


def _sequence_sizes(names: Sequence[LeafName]) -> Counts:
    """The numbers that names of one beginning have, by where they are."""
    found: dict[tuple[Segments, str], set[int]] = collections.defaultdict(set)
    for name in names:
        for place, part in enumerate(name.parent):
            if numbered := _NUMBERED.fullmatch(part):
                found[name.parent[:place], numbered[1]].add(int(numbered[2]))
    return found


def _is_repeated(name: LeafName, counts: Counts) -> bool:
    for place, part in enumerate(name.parent):
        words = tokens(part) or (tokens(name.parent[place - 1]) if place else ())
        if _LAST.intersection(words):
            continue
        numbered = _NUMBERED.fullmatch(part)
        if is_index(part) or (numbered and len(counts[name.parent[:place], numbered[1]]) > 1):
            return True
        if numbered and _REPEATED.is_in(words):
            return True
        goes_on = [*name.parent[place + 1 :], *name.names[len(name.parent) :]]
        if _STACKS.intersection(words) and not any(is_index(n) for n in goes_on[:1]):
            return True  # scanned layers, in one stack
    return False
