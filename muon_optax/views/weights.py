"""The records that views are inferred from, one for each floating-point leaf of a tree."""

import dataclasses
import functools
import math
import re
from typing import NamedTuple

from muon_optax._internal.tree_paths import Segments, path_name
from muon_optax.partition import Shape

__all__ = [
    "Roles",
    "Weight",
    "bias_names",
    "is_plain_name",
    "is_vector_name",
    "merged_size",
    "names_of",
    "sizes",
    "tokens_of",
]

_SEPARATOR = re.compile(r"[./]")
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN_NAMES = ("kernel", "w", "weight")
_VECTOR_NAMES = ("bias", "b", "scale", "offset", "gamma", "beta", "g")


class Roles(NamedTuple):
    """The axes of one layer's weight by their roles in the layer."""

    batch: tuple[int, ...]
    reduction: tuple[int, ...]
    output: tuple[int, ...]


@functools.lru_cache(maxsize=2**16)
def names_of(segments: Segments) -> tuple[str, ...]:
    """The path's names, with their case; a key 'a/b' or 'a.b' of a flat tree is two of them."""
    return tuple(name for segment in segments for name in _SEPARATOR.split(segment))


@functools.lru_cache(maxsize=2**16)
def tokens_of(name: str) -> frozenset[str]:
    """The words of a name, in lower case.

    Example:
      >>> sorted(tokens_of("MultiHeadAttention_0")), sorted(tokens_of("q_proj"))
      (['0', 'attention', 'head', 'multi'], ['proj', 'q'])
    """
    return frozenset(token.lower() for token in _TOKEN.findall(name))


def is_vector_name(name: str) -> bool:
    """Whether a leaf is named as biases and scales are."""
    return name in _VECTOR_NAMES or name.endswith(("_bias", "_scale"))


def is_plain_name(name: str) -> bool:
    """Whether the leaf's name doesn't say its role, as weight_v of a weight norm."""
    return name in _PLAIN_NAMES or name.startswith("weight_")


def bias_names(name: str) -> tuple[str, ...]:
    """How the bias beside a leaf may be called.

    Example:
      >>> bias_names("kernel"), bias_names("wi_0"), bias_names("in_proj_weight")
      (('bias', 'b'), ('wi_0_bias',), ('in_proj_bias',))
    """
    if is_plain_name(name):
        return ("bias", "b")
    return (f"{name.removesuffix('_weight')}_bias",)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A leaf without the axes that `nn.scan` or `nnx.vmap` added.

    Attributes:
      segments: the leaf's path.
      names: the path's names.
      axes: the leaf's own axes that are left; the others are batch axes.
      shape: their sizes.
      bias: the shape of the bias beside the leaf, without stacked axes, if there is one.
      is_doubtful: whether the leaf is stacked along an axis that nothing tells.
      stack_places: axes that may be stacked, as all the leaves around have their size there.
    """

    segments: Segments
    names: tuple[str, ...]
    axes: tuple[int, ...]
    shape: Shape
    bias: Shape | None = None
    is_doubtful: bool = False
    stack_places: frozenset[int] = frozenset()

    @property
    def path(self) -> str:
        """The path as text."""
        return path_name(self.segments)

    @property
    def rank(self) -> int:
        """Number of axes that are left."""
        return len(self.shape)

    @property
    def is_kernel(self) -> bool:
        """Whether a Flax layer made the leaf, not a module of the user's own."""
        return self.names[-1:] == ("kernel",)

    @property
    def is_of_torch(self) -> bool:
        """Whether the name is torch's, as in Equinox and Haliax, where weights are [out, in]."""
        return any(name.partition("_")[0] == "weight" for name in self.names[-2:])

    @property
    def layer_path(self) -> tuple[str, ...]:
        """Names down to the layer: its module, or the leaf itself where it has a telling name."""
        is_plain = bool(self.names) and is_plain_name(self.names[-1])
        return self.names[:-1] if is_plain else self.names

    @property
    def layer_tokens(self) -> frozenset[str]:
        """The words of the layer's name, and of the list that it is in."""
        names = self.layer_path
        listed = len(names) > 1 and names[-1].isdigit()
        return frozenset().union(*map(tokens_of, names[-2:] if listed else names[-1:]))

    @property
    def tokens(self) -> frozenset[str]:
        """The words of the whole path."""
        return frozenset().union(*map(tokens_of, self.names))


def sizes(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """The sizes of some axes."""
    return tuple(shape[axis] for axis in axes)


def merged_size(shape: Shape, axes: tuple[int, ...]) -> int:
    """The product of the sizes of some axes."""
    return math.prod(sizes(shape, axes))
