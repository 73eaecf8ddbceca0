"""Elementwise transformations whose moments are sharded otherwise than their parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import optax

from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.sharding.declared import Declared
from muon_optax.sharding.placement import place, to_device, to_memory_of
from muon_optax.sharding.specs import LeafSharding
from muon_optax.transforms.moments import map_moments

__all__ = ["MovedMoments", "with_moved_moments"]


class MovedMoments(NamedTuple):
    """How a leaf's moments are sharded, and its parameter."""

    moments: Declared
    param: LeafSharding


def with_moved_moments(
    inner: optax.GradientTransformation, where: Mapping[Segments, MovedMoments]
) -> optax.GradientTransformationExtraArgs:
    """Runs an elementwise transformation where its moments are, and sends updates to parameters.

    Args:
      inner: the transformation.
      where: by path, the leaves whose moments are sharded otherwise.

    Returns:
      The transformation, with the same state.
    """
    inner = optax.with_extra_args_support(inner)
    if not where:
        return inner

    def moved(tree: Any) -> Any:
        found = [where.get(path) for path, _ in leaves_with_segments(tree)]
        return place(tree, [to and to.moments for to in found])

    def init(params):
        return map_moments(
            lambda tree: to_memory_of(tree, moved(to_device(tree))), inner.init(params)
        )

    def update(updates, state, params=None, **extra_args):
        params = None if params is None else moved(params)
        state = map_moments(moved, state)
        new, state = inner.update(moved(updates), state, params, **extra_args)
        found = [where.get(path) for path, _ in leaves_with_segments(new)]
        return place(new, [to and to.param for to in found]), map_moments(moved, state)

    return optax.GradientTransformationExtraArgs(init, update)
