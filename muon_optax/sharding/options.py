"""The options for shardings of parameters and moments, and their meaning for a tree."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from muon_optax._internal.tree_paths import is_function, leaves_with_segments, resolve
from muon_optax.sharding.declared import (
    as_declared,
    declared_entries,
    is_spec,
)
from muon_optax.sharding.metadata import Annotations, annotations_of, usable
from muon_optax.sharding.moments import check_moment_axes, moment_shardings
from muon_optax.views.matrix_view import shardings_in_views

__all__ = ["ShardingOptions", "Shardings"]


class Shardings(NamedTuple):
    """The shardings declared for a tree: trees as in `declared_specs`, or None.

    Attributes:
      params: the parameters' shardings.
      momentum: those of Muon's momentum, where they differ.
      moments: those of AdamW's moments, where they differ.
    """

    params: Any = None
    momentum: Any = None
    moments: Any = None

    @property
    def working(self) -> Any:
        """The shardings in which matrices are formed: the momentum's."""
        return self.params if self.momentum is None else self.momentum


class ShardingOptions:
    """The user's `param_shardings`, `mu_shardings` and `shard_moments_over`.

    Args:
      param_shardings: a tree (or a prefix of one) as in `declared_specs`, a function of the
        parameters that returns one, or None for those in matrix views or Flax's metadata.
      mu_shardings: the same of the momentum; None is the parameters'.
      shard_moments_over: mesh axes to shard all moments over, too, where `mu_shardings` says
        nothing; None is the axes that a parameter's type is reduced over.

    Raises:
      TypeError: for entries that say nothing of a sharding.
    """

    def __init__(
        self, param_shardings: Any = None, mu_shardings: Any = None, shard_moments_over: Any = None
    ):
        self._axes = check_moment_axes(shard_moments_over)
        for where in (param_shardings, mu_shardings):
            if not is_function(where):
                for entry in jax.tree.leaves(where, is_leaf=is_spec):
                    as_declared(entry)
        self._params, self._momentum = param_shardings, mu_shardings
        # `nnx.Optimizer` gives `init` its variables, but `update` bare arrays. What metadata says
        # moves nothing but where an update is computed, so it may be kept beside the state.
        self._annotations: dict[Any, Annotations] = {}

    @property
    def has_axes(self) -> bool:
        """Whether the user says over which axes moments are sharded."""
        return self._axes is not None

    def over(self, axes: Sequence[str]) -> "ShardingOptions":
        """The same options, with moments sharded over these axes."""
        return ShardingOptions(self._params, self._momentum, axes)

    def of(self, params: Any, views: Any = None, where: Any = None) -> Shardings:
        """The shardings declared for these parameters, or for updates in their places.

        Functions are called once, with `params`.

        Args:
          params: the leaves.
          views: a view, a tree of views or a function that returns one. Where there is no
            `param_shardings`, the shardings that views carry count, as MaxText's do.
          where: shardings of the parameters, in place of all that was declared.

        Returns:
          The shardings.
        """
        if not jax.tree.leaves(params):  # the placeholder of optax.tree_map_params
            return Shardings()
        momentum = resolve(self._momentum, params)
        if where is None:
            where = self._declared(params, views)
        moved = moment_shardings(params, where, self._axes)
        if not any(moved):
            return Shardings(where, momentum)
        treedef = jax.tree.structure(params)
        given = zip(declared_entries(momentum, params), moved, strict=True)
        own = treedef.unflatten([b if a is None else a for a, b in given])
        return Shardings(where, own, treedef.unflatten(moved))

    def _declared(self, params: Any, views: Any) -> Any:
        """The parameters' shardings: as declared, in their views, or in Flax's metadata."""
        if self._params is not None:
            return resolve(self._params, params)
        in_views = shardings_in_views(resolve(views, params))
        return self._annotated(params) if in_views is None else in_views

    def _annotated(self, params: Any) -> Any:
        """The shardings in Flax's metadata; None where it says none."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            return None  # it says how the model is meant to be sharded, nothing of blocks
        leaves = leaves_with_segments(params)
        key = tuple((path, getattr(leaf, "shape", ())) for path, leaf in leaves)
        if found := annotations_of(params):
            self._annotations[key] = found
        return usable(self._annotations.get(key, {}), params)
