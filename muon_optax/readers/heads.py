"""Which weights make the logits, where neither the framework nor a traced call says so."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from muon_optax.readers.names import named_head
from muon_optax.rules import Shape
from muon_optax.tree_paths import Segments

__all__ = ["Layer", "heads_by_name", "heads_by_shape"]

_NUMBER = re.compile(r"\d+")


class Layer(NamedTuple):
    """A weight matrix, or a stack of them.

    Attributes:
      segments: its path.
      shape: its leaf's shape.
      fan_in: size of its input.
      fan_out: size of its output.
      is_stacked: whether a transform stacked it.
    """

    segments: Segments
    shape: Shape
    fan_in: int
    fan_out: int
    is_stacked: bool


def heads_by_name(layers: Sequence[Layer], widths: frozenset[int]) -> set[Segments]:
    """The layers below a head's name: the only one, or the last ones, whose outputs nothing takes.

    Args:
      layers: in the order in which the model defines them.
      widths: sizes of norms and embeddings, which are inputs of layers too.

    Example:
      >>> first = Layer(("classifier", "0", "kernel"), (512, 64), 512, 64, False)
      >>> last = Layer(("classifier", "1", "kernel"), (64, 10), 64, 10, False)
      >>> heads_by_name([first, last], frozenset())
      {('classifier', '1', 'kernel')}
    """
    groups: dict[Segments, list[Layer]] = {}
    for layer in layers:
        name = named_head(layer.segments, layer.shape)
        if name is not None:
            groups.setdefault(name, []).append(layer)
    alone = {group[0].segments for group in groups.values() if len(group) == 1}
    return alone.union(*(_last(g, layers, widths) for g in groups.values() if len(g) > 1))


def heads_by_shape(layers: Sequence[Layer], widths: frozenset[int]) -> set[Segments]:
    """The layers at the model's end whose outputs nothing else in the model takes.

    Args:
      layers: as in `heads_by_name`.
      widths: as in `heads_by_name`.

    Example:
      >>> sizes = [(16, 64), (64, 64), (64, 10)]
      >>> layers = [Layer((str(i),), size, *size, False) for i, size in enumerate(sizes)]
      >>> heads_by_shape(layers, frozenset())
      {('2',)}
    """
    found = _last(layers, layers, widths)
    return found if len(found) < len(layers) else set()


def _last(group: Sequence[Layer], layers: Sequence[Layer], widths: frozenset[int]) -> set[Segments]:
    """The last ones of a group that take what the model has made, and whose outputs nothing takes.

    A layer that takes what no other makes, as a bias of relative positions, isn't at the end.
    """
    found: set[Segments] = set()
    for layer in reversed(group):
        others = [x for x in layers if x.segments != layer.segments]
        is_taken = layer.fan_out in widths or any(layer.fan_out == x.fan_in for x in others)
        is_made = layer.fan_in in widths or any(layer.fan_in == x.fan_out for x in others)
        if is_taken or not is_made or layer.is_stacked or any(_is_alike(layer, x) for x in others):
            break
        found.add(layer.segments)
    return found


def _is_alike(a: Layer, b: Layer) -> bool:
    """Whether two layers have one shape and paths that differ in numbers alone."""
    paths = ["/".join(_NUMBER.sub("*", s) for s in layer.segments) for layer in (a, b)]
    return a.shape == b.shape and paths[0] == paths[1]
