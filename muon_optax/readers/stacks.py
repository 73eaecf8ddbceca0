"""Which axes of a leaf are layers: those that `vmap` or `scan` added to its module's shape.

Shapes tell where only one choice of axes leaves the declared shape. Where several do, as for square
matrices in a stack as deep as they are wide, the leaves beside it decide: one transform stacks them
all on one axis.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import Shape
from muon_optax.views.matrix_view import MatrixView, MuonDimensionNumbers

__all__ = ["Axes", "Declared", "choices", "shifted", "stacked_axes"]

Axes = tuple[int, ...]


class Declared(NamedTuple):
    """A leaf's shape in the tree, and the one that its module declares."""

    leaf: Shape
    module: Shape


def choices(declared: Declared) -> list[Axes]:
    """The choices of axes without which the leaf has its module's shape.

    Example:
      >>> choices(Declared((4, 16, 16), (16, 16)))
      [(0,)]
      >>> choices(Declared((16, 16, 16), (16, 16)))
      [(0,), (1,), (2,)]
    """
    rank = len(declared.leaf)
    count = rank - len(declared.module)
    found = itertools.combinations(range(rank), count) if count >= 0 else ()
    return [axes for axes in found if _without(declared.leaf, axes) == declared.module]


def _without(shape: Shape, axes: Sequence[int]) -> Shape:
    return tuple(n for axis, n in enumerate(shape) if axis not in axes)


def stacked_axes(
    leaves: Mapping[Segments, Declared], known: Mapping[Segments, Axes]
) -> dict[Segments, Axes | None]:
    """The stacked axes of each leaf; None where nothing tells them.

    Args:
      leaves: the leaves by path.
      known: evidence on some of them from elsewhere, as from their use.

    Example:
      >>> up, down = Declared((8, 8, 32), (8, 32)), Declared((32, 8, 8), (32, 8))
      >>> stacked_axes({("up",): up}, {})
      {('up',): None}
      >>> stacked_axes({("up",): up, ("down",): down}, {})
      {('up',): (1,), ('down',): (1,)}
    """
    options = {path: choices(declared) for path, declared in leaves.items()}
    options |= {path: [axes] for path, axes in known.items() if axes in options.get(path, ())}
    shapes = {path: declared.leaf for path, declared in leaves.items()}
    return {path: _chosen(path, options, shapes) for path in leaves}


def _chosen(
    path: Segments, options: Mapping[Segments, list[Axes]], shapes: Mapping[Segments, Shape]
) -> Axes | None:
    """The only choice, or the one that all leaves have in a subtree of nothing but stacked ones."""
    if len(options[path]) < 2:
        return options[path][0] if options[path] else None
    rank, count = len(shapes[path]), len(options[path][0])
    for depth in range(len(path) - 1, -1, -1):
        beside = [p for p in options if p[:depth] == path[:depth] and options[p]]
        if any(len(options[p][0]) != count for p in beside):
            return None  # another stack's axes say nothing of this one's
        front = set.intersection(*(_places(options[p], shapes[p]) for p in beside))
        back = set.intersection(*(_places(options[p], shapes[p], True) for p in beside))
        # One transform stacks on one axis, counted from the front or from the back.
        found = {axes for axes, _ in front} | {tuple(a + rank for a in axes) for axes, _ in back}
        if len(found) < 2:
            return found.pop() if found else None
    return None


def _places(
    options: Sequence[Axes], shape: Shape, is_from_back: bool = False
) -> set[tuple[Axes, Shape]]:
    """The choices of axes with their sizes."""
    shift = len(shape) if is_from_back else 0
    return {(tuple(a - shift for a in axes), tuple(shape[a] for a in axes)) for axes in options}


def shifted(
    view: MatrixView | MuonDimensionNumbers, stacked: Sequence[int], rank: int
) -> MatrixView | MuonDimensionNumbers:
    """A module's view for a leaf of this rank with stacked axes.

    Example:
      >>> shifted(MuonDimensionNumbers((0,), (1,)), (1,), 3)
      MuonDimensionNumbers(reduction_axis=(0,), output_axis=(2,))
    """
    kept = [axis for axis in range(rank) if axis not in stacked]
    axes = {
        name: tuple(kept[axis] for axis in getattr(view, name))
        for name in ("reduction_axis", "output_axis")
    }
    if isinstance(view, MatrixView):
        return dataclasses.replace(view, **axes)
    return view._replace(**axes)
