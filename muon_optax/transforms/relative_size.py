"""Updates sized by the weights: not below a share of their norm, or exactly their norm."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.checks import check_choice, check_number
from muon_optax._internal.dtypes import scaled
from muon_optax.partition import Views
from muon_optax.transforms.block_sums import all_sums
from muon_optax.transforms.matrix_sums import (
    MatrixSums,
    Role,
    WholeSums,
    quotient,
    squares,
    sums_across,
)
from muon_optax.transforms.stage import Leaves, MatrixTransformation, Stage
from muon_optax.transforms.standalone import standalone, weights_of

__all__ = ["Sized", "floor_update", "relative_update"]

Sized = Literal["matrix", "output"]
_SUMMED: dict[str, tuple[Role, ...]] = {"matrix": ("reduction", "output"), "output": ("reduction",)}
# Emerging-Optimizers takes smaller norms for zero.
_SMALLEST_NORM = 1e-15


def floor_update(
    target: jax.typing.ArrayLike = 0.35,
    *,
    each: Sized = "matrix",
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
) -> MatrixTransformation:
    """Brings updates that are small beside their weights up to a share of the weights' norm.

    Multiplies each update U of weights W by max(1, target |W| / |U|), in Frobenius norms, as the
    records of modded-nanogpt's optimization track do in place of weight decay (0.35, later 0.3825).
    Stands after the scale by shape, before the learning rate. Zero updates stay zero.

    Args:
      target: the least |U| / |W|.
      each: whether norms are those of each 'matrix' (each fused block is one), or of the weights of
        each 'output' neuron.
      weight_dimension_numbers: as in `orthogonalize`.
      param_shardings: as in `orthogonalize`; needed inside a shard_map.

    Returns:
      A stateless transformation. Updates keep their dtype, and are formed in float32 at least.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix; at
        an update without parameters.

    Example:
      >>> tx = floor_update(0.5)
      >>> weights, direction = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 0.0]])
      >>> tx.update(direction, tx.init(weights), weights)[0].tolist()
      [[2.5, 0.0]]
    """
    check_number("target", target)
    check_choice("each", each, get_args(Sized))

    def factor(of_weights: jax.Array, of_update: jax.Array) -> jax.Array:
        ratio = jnp.sqrt(quotient(of_weights, of_update))
        return jnp.maximum(1, jnp.asarray(target, ratio.dtype) * ratio)

    return _sized("floor_update", factor, each, weight_dimension_numbers, param_shardings)


def relative_update(
    *, weight_dimension_numbers: Views = None, param_shardings: Any = None
) -> MatrixTransformation:
    """Gives each update the Frobenius norm of its weights: the learning rate is the relative step.

    The `RelativeUpdateHook` of Emerging-Optimizers. Stands after the scale by shape, which it
    undoes, and before weight decay and the learning rate. Where weights or updates have a norm
    below 1e-15, updates become zero: weights that are zero never move.

    Args:
      weight_dimension_numbers: as in `orthogonalize`.
      param_shardings: as in `orthogonalize`; needed inside a shard_map.

    Returns:
      A stateless transformation. Updates keep their dtype, and are formed in float32 at least.

    Raises:
      ValueError: at `init`, for leaves that make no matrix; at an update without parameters.

    Example:
      >>> tx = relative_update()
      >>> weights, direction = jnp.array([[3.0, 4.0]]), jnp.array([[1.0, 0.0]])
      >>> tx.update(direction, tx.init(weights), weights)[0].tolist()
      [[5.0, 0.0]]
    """

    def factor(of_weights: jax.Array, of_update: jax.Array) -> jax.Array:
        smallest = jnp.minimum(of_weights, of_update)
        is_zero = smallest < _SMALLEST_NORM**2
        return jnp.where(is_zero, 0, jnp.sqrt(quotient(of_weights, of_update)))

    return _sized("relative_update", factor, "matrix", weight_dimension_numbers, param_shardings)


def _sized(
    name: str,
    factor: Callable[[jax.Array, jax.Array], jax.Array],
    each: Sized,
    views: Views,
    param_shardings: Any,
) -> MatrixTransformation:
    """Multiplies updates by a factor of two sums of squares: of the weights, of the update."""

    def init(params: Any, leaves: Leaves) -> optax.EmptyState:
        del params, leaves
        return optax.EmptyState()

    def update(updates, state, params, leaves, **extra_args):
        del extra_args
        arrays, treedef = jax.tree.flatten(updates)
        weights = weights_of(params, updates, name)
        found = [MatrixSums(leaf, _SUMMED[each]) for leaf in leaves]
        asked = found if each == "matrix" else sums_across(found, of_norms=False)
        squared = all_sums(
            [
                (sums, squares(x))
                for tree in (weights, arrays)
                for sums, x in zip(asked, tree, strict=True)
            ]
        )
        pairs = zip(squared[: len(found)], squared[len(found) :], strict=True)
        results = []
        for whole, sums, x, pair in zip(asked, found, arrays, pairs, strict=True):
            by = factor(*pair)
            by = whole.blocks_of(by) if isinstance(whole, WholeSums) else by
            results.append(scaled(x, sums.broadcast(by)))
        return treedef.unflatten(results), state

    return standalone(Stage(init, update), views, param_shardings)
