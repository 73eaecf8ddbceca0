"""The options `param_shardings` and `mu_shardings`, and what they say of a tree at hand."""

from typing import Any, NamedTuple

import jax

from muon_optax._internal.tree_paths import is_function, leaves_with_segments, resolve
from muon_optax.sharding.declared import as_declared, is_spec
from muon_optax.sharding.metadata import Annotations, annotations_of, usable
from muon_optax.views.matrix_view import shardings_in_views

__all__ = ["ShardingOptions", "Shardings"]


class Shardings(NamedTuple):
    """What is declared of a tree: trees as in `declared_specs`, or None.

    Attributes:
      params: the parameters' shardings.
      momentum: the momentum's, where they differ.
    """

    params: Any = None
    momentum: Any = None

    @property
    def working(self) -> Any:
        """The shardings in which matrices are formed: the momentum's."""
        return self.params if self.momentum is None else self.momentum


class ShardingOptions:
    """What the user gave as `param_shardings` and `mu_shardings`.

    Args:
      param_shardings: a tree (or a prefix of one) as in `declared_specs`, a function of the
        parameters that returns one, or None for what matrix views or Flax's metadata say.
      mu_shardings: the same of the momentum; None is the parameters'.

    Raises:
      TypeError: for entries that say nothing of a sharding.
    """

    def __init__(self, param_shardings: Any = None, mu_shardings: Any = None):
        for where in (param_shardings, mu_shardings):
            if not is_function(where):
                for entry in jax.tree.leaves(where, is_leaf=is_spec):
                    as_declared(entry)
        self._params, self._momentum = param_shardings, mu_shardings
        # `nnx.Optimizer` gives `init` its variables, but `update` bare arrays. What metadata says
        # moves nothing but where an update is computed, so it may be kept beside the state.
        self._annotations: dict[Any, Annotations] = {}

    def of(self, params: Any, views: Any = None) -> Shardings:
        """What is declared of these parameters, or of updates in their places.

        Functions are called once, with `params`.

        Args:
          params: the leaves.
          views: a view, a tree of views or a function that returns one. Where there is no
            `param_shardings`, the shardings that views carry count, as MaxText's do.

        Returns:
          The shardings.
        """
        if not jax.tree.leaves(params):  # the placeholder of optax.tree_map_params
            return Shardings()
        momentum = resolve(self._momentum, params)
        if self._params is not None:
            return Shardings(resolve(self._params, params), momentum)
        in_views = shardings_in_views(resolve(views, params))
        return Shardings(self._annotated(params) if in_views is None else in_views, momentum)

    def _annotated(self, params: Any) -> Any:
        """The shardings in Flax's metadata; None where it says none."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            return None  # it says how the model is meant to be sharded, not what a block is of
        leaves = leaves_with_segments(params)
        key = tuple((path, getattr(leaf, "shape", ())) for path, leaf in leaves)
        if found := annotations_of(params):
            self._annotations[key] = found
        return usable(self._annotations.get(key, {}), params)
