"""Which weights make the logits, where neither the framework nor a traced call says so."""

import itertools
import re
from collections.abc import Sequence
from typing import NamedTuple

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import Shape
from muon_optax.readers.names import named_head

__all__ = ["Layer", "heads_by_name", "heads_by_shape"]

_NUMBER = re.compile(r"\d+")


class Layer(NamedTuple):
    """A weight matrix, or a stack of them.

    Attributes:
      segments: its path.
      shape: its leaf's shape.
      takes: sizes that its input may be said to have: the fan-in, and a convolution's channels.
      fan_out: size of its output.
      is_stacked: whether a transform stacked it.
      is_dense: whether its matrix has one axis of each kind, as a convolution's has not.
    """

    segments: Segments
    shape: Shape
    takes: frozenset[int]
    fan_out: int
    is_stacked: bool = False
    is_dense: bool = True


def heads_by_name(layers: Sequence[Layer], widths: frozenset[int]) -> set[Segments]:
    """The layers below a head's name: the only one, or the last ones, whose outputs nothing takes.

    Args:
      layers: in the order in which the model defines them.
      widths: sizes of norms and embeddings, which are inputs of layers too.

    Example:
      >>> first = Layer(("classifier", "0", "kernel"), (512, 64), frozenset({512}), 64)
      >>> last = Layer(("classifier", "1", "kernel"), (64, 10), frozenset({64}), 10)
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


def heads_by_shape(
    layers: Sequence[Layer], widths: frozenset[int], *, is_ordered: bool = True
) -> set[Segments]:
    """The layers at the model's end whose outputs nothing else in the model takes.

    With them go those that put out as much, as auxiliary classifiers do.

    Args:
      layers: as in `heads_by_name`.
      widths: as in `heads_by_name`.
      is_ordered: whether the layers' order is known. Without it only a layer that shares no part of
        the model with another can be told to be at its end.

    Example:
      >>> sizes = [(16, 64), (64, 64), (64, 10)]
      >>> layers = [Layer((f"{m} to {n}",), (m, n), frozenset({m}), n) for m, n in sizes]
      >>> heads_by_shape(layers, frozenset())
      {('64 to 10',)}
    """
    if is_ordered:
        found = _last(layers, layers, widths)
    else:
        parts = [layer.segments[0] for layer in layers]
        alone = [layer for layer in layers if parts.count(layer.segments[0]) == 1]
        found = {layer.segments for layer in alone if _is_end(layer, layers, widths)}
    sizes = {layer.fan_out for layer in layers if layer.segments in found}
    found |= {layer.segments for layer in layers if layer.fan_out in sizes and not layer.is_stacked}
    return found if len(found) < len(layers) else set()


def _last(group: Sequence[Layer], layers: Sequence[Layer], widths: frozenset[int]) -> set[Segments]:
    ends = itertools.takewhile(lambda layer: _is_end(layer, layers, widths), reversed(group))
    return {layer.segments for layer in ends}


def _is_end(layer: Layer, layers: Sequence[Layer], widths: frozenset[int]) -> bool:
    """Whether a layer takes other layers' output, and nothing takes its own.

    A layer that takes no other's output, as a bias of relative positions, isn't at the end.
    """
    others = [x for x in layers if x.segments != layer.segments]
    is_taken = layer.fan_out in widths.union(*(x.takes for x in others))
    is_taken |= any(_is_flattened(layer, x) for x in others)
    is_made = not layer.takes.isdisjoint({*widths, *(x.fan_out for x in others)})
    is_repeated = layer.is_stacked or any(_is_alike(layer, x) for x in others)
    return is_made and not is_taken and not is_repeated


def _is_flattened(layer: Layer, after: Layer) -> bool:
    """Whether a dense layer may take a convolution's outputs of all places at once."""
    is_pair = after.is_dense and not layer.is_dense
    return is_pair and any(size % layer.fan_out == 0 for size in after.takes)


def _is_alike(a: Layer, b: Layer) -> bool:
    """Whether two layers have one shape and paths that differ in numbers alone."""
    paths = ["/".join(_NUMBER.sub("*", s) for s in layer.segments) for layer in (a, b)]
    return a.shape == b.shape and paths[0] == paths[1]
