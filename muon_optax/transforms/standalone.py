"""A stage as a public piece: it binds its own leaves, and takes them from a tree by path."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.tree_paths import (
    leaves_with_segments,
    path_name,
    raise_all,
    restructured_like,
)
from muon_optax.partition import Views
from muon_optax.sharding.declared import sharding_of_sums
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.placement import is_abstract, is_on_host, to_device, to_host
from muon_optax.transforms.binding import binder
from muon_optax.transforms.matrix_sums import Sums
from muon_optax.transforms.moments import zeros_like_parameter
from muon_optax.transforms.stage import MatrixTransformation, Stage, matrix_transformation

__all__ = [
    "check_state_type",
    "moments_of",
    "moving_average",
    "restored",
    "standalone",
    "summed_struct",
    "value_at",
    "weights_of",
    "zero_moments",
    "zero_sums",
]


def standalone(
    stage: Stage, views: Views, param_shardings: Any, mu_shardings: Any = None
) -> MatrixTransformation:
    """A stage as a piece of an optax chain, which keeps state and updates in their memory.

    Args:
      stage: the stage.
      views: a view, a tree of views, or a function that returns one; None takes every leaf for a
        [fan-in, fan-out] matrix.
      param_shardings: how the leaves are sharded, where their types don't say it.
      mu_shardings: how momentum is sharded, where it differs.

    Returns:
      The transformation, which carries the stage.
    """
    return matrix_transformation(
        stage, binder(views, ShardingOptions(param_shardings, mu_shardings))
    )


def weights_of(params: Any, updates: Any, name: str) -> list[jax.Array]:
    """The parameters of the updates, met by path, in the order of the updates' leaves.

    Raises:
      ValueError: without parameters, or listing the leaves that only one of the trees has.
    """
    if params is None:
        raise ValueError(f"{name} needs the parameters: call update(updates, state, params)")
    return jax.tree.leaves(restructured_like(params, updates))


def value_at(value: optax.ScalarOrSchedule, count: Any) -> jax.typing.ArrayLike:
    """The value of a number or schedule at an update.

    Example:
      >>> value_at(0.5, 3), value_at(lambda count: 2 * count, 3)
      (0.5, 6)
    """
    return value(count) if callable(value) else value


def check_state_type(state: Any, kind: type) -> None:
    """Raises TypeError for another transformation's state."""
    if not isinstance(state, kind):
        raise TypeError(
            f"the state must be a {kind.__name__} of muon_optax, got {type(state).__name__}; make "
            "one with init"
        )


def moving_average(beta: jax.typing.ArrayLike, average: jax.Array, value: jax.Array) -> jax.Array:
    """The next average, in the dtype of the last."""
    of_average, of_value = (jnp.asarray(x, average.dtype) for x in (beta, 1 - beta))
    return of_average * average + of_value * value.astype(average.dtype)


def zero_moments(param: Any) -> Any:
    """Zeros of a parameter's shape, sharded like it; real, and float32 at least."""
    return zeros_like_parameter(param, jnp.finfo(wide_dtype(param.dtype)).dtype)


def zero_sums(sums: Sums, param: Any) -> Any:
    """Zeros of the shape of some sums over a parameter, sharded as those are.

    They are summed, since `jit` keeps the sharding of values computed from a parameter.
    """
    if is_abstract(param):
        return summed_struct(sums, zero_moments(param))
    zeros = sums.of(to_device(zero_moments(param)))
    return to_host(zeros) if is_on_host(param) else zeros


def summed_struct(sums: Sums, struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The shape of some sums over a leaf of which only the shape is known, sharded as they are."""
    shape, sharding = sums.shape(struct.shape), struct.sharding
    if isinstance(sharding, NamedSharding):
        sharding = sharding_of_sums(shape, struct.shape, sharding)
    return jax.ShapeDtypeStruct(shape, struct.dtype, sharding=sharding)


def moments_of(moments: Any, updates: Any, shapes: Sequence[tuple[int, ...] | None]) -> list[Any]:
    """A state's arrays for each leaf of the updates, met by path; None where it has none.

    Args:
      moments: a tree like the updates, in which leaves without an array are `optax.MaskedNode`.
      updates: the updates.
      shapes: of the array of each leaf; None where there should be none.

    Returns:
      One entry for each leaf of the updates.

    Raises:
      ValueError: listing the leaves whose array is missing, unexpected or of another shape.
    """
    have = dict(leaves_with_segments(moments))
    paths = [path for path, _ in leaves_with_segments(updates)]
    want = {path: s for path, s in zip(paths, shapes, strict=True) if s is not None}
    problems = [
        f"{path_name(path)}: {_shape_of(have.get(path))} in the state, "
        f"{want.get(path, 'none')} wanted"
        for path in {**want, **have}
        if path not in have or have[path].shape != want.get(path)
    ]
    raise_all(
        problems, "the state doesn't belong to these updates (was a leaf's optimizer changed?):"
    )
    return [have.get(path) for path in paths]


def _shape_of(x: Any) -> Any:
    return "none" if x is None else x.shape


def restored(values: Sequence[Any], updates: Any, like: Any) -> Any:
    """New arrays for each leaf of the updates, in the containers of the old state.

    Args:
      values: an array for each leaf of the updates; None where there is none.
      updates: the updates.
      like: the old tree.

    Returns:
      The new tree.
    """
    filled = [optax.MaskedNode() if value is None else value for value in values]
    return restructured_like(jax.tree.structure(updates).unflatten(filled), like)
