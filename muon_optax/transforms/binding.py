"""The door: one pass that makes a record for each leaf of a tree."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax._internal.tree_paths import leaves_with_segments, raise_all
from muon_optax.partition import Views, assign
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.declared import declared_specs
from muon_optax.sharding.options import ShardingOptions, Shardings
from muon_optax.sharding.placement import declared_on_host
from muon_optax.sharding.specs import read_shardings, whole_shapes
from muon_optax.views.matrix_view import BoundView, MuonDimensionNumbers

__all__ = ["bind_leaves", "binder", "bound_leaves"]


def binder(views: Views, declared: ShardingOptions) -> Callable[[Any, Any], list[BoundLeaf]]:
    """The door of a piece that stands alone: binds leaves by the piece's own arguments.

    Args:
      views: a view, a tree of views, or a function that returns one; None takes every leaf for a
        [fan-in, fan-out] matrix.
      declared: the shardings that the user declares.

    Returns:
      A function of the leaves, and of the parameters that metadata and functions are asked about,
      that returns a record for each leaf.
    """

    def bind(tree: Any, params: Any) -> list[BoundLeaf]:
        shardings = declared.of(tree if params is None else params, views)
        bound = _views(whole_shapes(tree, shardings.working), views)
        return bound_leaves(tree, bound, shardings)

    return bind


def bind_leaves(tree: Any, views: Views = None, param_shardings: Any = None) -> list[BoundLeaf]:
    """Binds each leaf to its view and its sharding.

    Args:
      tree: parameters or updates.
      views: as in `binder`.
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
    return binder(views, ShardingOptions(param_shardings))(tree, None)


def bound_leaves(tree: Any, views: Sequence[BoundView], shardings: Shardings) -> list[BoundLeaf]:
    """A record for each leaf.

    Args:
      tree: parameters, or updates in their places.
      views: a view for each leaf.
      shardings: the declared shardings of parameters and momentum.

    Returns:
      The records.

    Raises:
      ValueError: listing the leaves whose sharding can't be known.
    """
    of_params = declared_specs(shardings.params, tree)
    of_momentum = declared_specs(shardings.momentum, tree)
    on_host = declared_on_host(shardings.momentum, tree)
    # Inside a shard_map nothing can be moved along its axes, where momentum is sharded like the
    # parameters; of both, only one may be declared.
    is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
    pairs = zip(of_params, of_momentum, strict=True)
    seen = [mu if is_manual and mu is not None else own for own, mu in pairs]
    found = read_shardings(tree, seen)
    declared = zip(of_params, of_momentum, on_host, strict=True)
    rows = zip(leaves_with_segments(tree), views, found, declared, strict=True)
    return [
        BoundLeaf(path, view, sharding, jnp.dtype(x.dtype).name, "auto", None, *where)
        for (path, x), view, sharding, where in rows
    ]


def _views(tree: Any, declared: Views) -> list[BoundView]:
    """A view for each leaf, all of which must make matrices, from the user's declaration.

    Raises:
      ValueError: listing the leaves that make none.
    """
    views = MuonDimensionNumbers() if declared is None else declared
    decisions = assign(tree, views).decisions
    problems = [f"{d.path}: {d.reason}" for d in decisions if d.view is None]
    raise_all(problems, "Muon needs a matrix view for each of its leaves:")
    return [d.view for d in decisions if d.view is not None]
