"""The door: one pass that makes a record for each leaf of a tree."""

from typing import Any

import jax.numpy as jnp

from muon_optax.matrix_view import BoundView, MuonDimensionNumbers
from muon_optax.partition import Views, assign
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.specs import read_layouts, whole_shapes
from muon_optax.tree_paths import leaves_with_segments, path_name, raise_together

__all__ = ["bind_leaves", "bound_views"]


def bind_leaves(tree: Any, views: Views = None, param_shardings: Any = None) -> list[BoundLeaf]:
    """Binds each leaf to its view and its sharding.

    Args:
      tree: parameters or updates.
      views: a view, a tree of views, or a function that returns one; None takes every leaf for a
        [fan-in, fan-out] matrix.
      param_shardings: how the leaves are sharded, where their types don't say it.

    Returns:
      One record for each leaf.

    Raises:
      ValueError: listing the leaves that make no matrix, or whose sharding can't be known.

    Example:
      >>> (leaf,) = bind_leaves({"w": jnp.ones((2, 3, 4))}, MuonDimensionNumbers(1, 2))
      >>> leaf.path, leaf.view.matrices
      ('w', ((2, 3, 4),))
    """
    bound = bound_views(whole_shapes(tree, param_shardings), views)
    layouts = read_layouts(tree, param_shardings)
    rows = zip(leaves_with_segments(tree), bound, layouts, strict=True)
    return [
        BoundLeaf(path_name(path), view, layout, jnp.dtype(x.dtype).name)
        for (path, x), view, layout in rows
    ]


def bound_views(tree: Any, declared: Views) -> list[BoundView]:
    """A view for each leaf, all of which must make matrices, from what the user declares.

    Raises:
      ValueError: listing the leaves that make none.
    """
    views = MuonDimensionNumbers() if declared is None else declared
    decisions = assign(tree, views).decisions
    problems = [f"{d.path}: {d.reason}" for d in decisions if d.view is None]
    raise_together(problems, "Muon needs a matrix view for each of its leaves:")
    return [d.view for d in decisions if d.view is not None]
