"""Trees of shapes, and the axes that `flax_matrix_views` finds in them."""

from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict

from muon_optax import flax_matrix_views
from muon_optax._internal.tree_paths import leaves_with_segments, path_name
from muon_optax.views.matrix_view import bind_view, is_view

Shapes = dict[str, tuple[int, ...]]
Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def tree(shapes: Shapes) -> Any:
    """{'a/b': (2, 3)} as nested shape structs."""
    leaves = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    return unflatten_dict(leaves, sep="/")


def axes_of(shapes: Shapes, **options: Any) -> dict[str, Axes]:
    """Batch, reduction and output axes of the leaves that have a view."""
    views = flax_matrix_views(tree(shapes), **options)
    found = leaves_with_segments(views, lambda x: x is None or is_view(x))
    bound = {path_name(p): bind_view(v, shapes[path_name(p)]) for p, v in found if v is not None}
    return {p: (v.batch_axes, v.reduction_axes, v.output_axes) for p, v in bound.items()}


def matrices_of(shapes: Shapes) -> dict[str, tuple]:
    views = flax_matrix_views(tree(shapes))
    found = leaves_with_segments(views, lambda x: x is None or is_view(x))
    return {path_name(p): bind_view(v, shapes[path_name(p)]).matrices for p, v in found if v}


def under(module: str, shapes: Shapes) -> Shapes:
    return {f"{module}/{path}": shape for path, shape in shapes.items()}


MLP: Shapes = {"wi/kernel": (64, 96), "wo/kernel": (96, 64)}
HEADS: Shapes = {
    "query/kernel": (64, 4, 24),
    "key/kernel": (64, 2, 24),
    "value/kernel": (64, 2, 24),
    "out/kernel": (4, 24, 64),
}
NORM: Shapes = {"norm/scale": (64,)}
HEADS_AXES: dict[str, Axes] = {
    "query/kernel": ((), (0,), (1, 2)),
    "key/kernel": ((), (0,), (1, 2)),
    "value/kernel": ((), (0,), (1, 2)),
    "out/kernel": ((), (0, 1), (2,)),
}
MLP_AXES: dict[str, Axes] = {"wi/kernel": ((), (0,), (1,)), "wo/kernel": ((), (0,), (1,))}


def stack(shapes: Shapes, place: int, size: int) -> Shapes:
    """What nn.scan makes of the parameters of one layer."""
    cut = {path: min(place, len(shape)) for path, shape in shapes.items()}
    return {p: (*s[: cut[p]], size, *s[cut[p] :]) for p, s in shapes.items()}


def stacked_axes(axes: dict[str, Axes], place: int) -> dict[str, Axes]:
    def moved(group: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a + (a >= place) for a in group)

    return {p: ((place, *moved(b)), moved(i), moved(o)) for p, (b, i, o) in axes.items()}
