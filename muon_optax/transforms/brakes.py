"""Radial brakes: how much of a step's change of the weights' norm remains."""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.checks import check_choice, check_number
from muon_optax._internal.dtypes import widened
from muon_optax.partition import Views
from muon_optax.transforms.block_sums import all_sums
from muon_optax.transforms.matrix_sums import MatrixSums, products, quotient, squares
from muon_optax.transforms.stage import Leaves, MatrixTransformation, Stage
from muon_optax.transforms.standalone import standalone, weights_of

__all__ = ["BrakeForm", "radial_brake"]

BrakeForm = Literal["norm", "component", "pinned"]
_SMALLEST_NORM = 1e-15  # Emerging-Optimizers takes smaller ones for zero


def radial_brake(
    outward: jax.typing.ArrayLike = 0.5,
    inward: jax.typing.ArrayLike = 1.0,
    *,
    form: BrakeForm = "norm",
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
) -> MatrixTransformation:
    """Lets a part of each step's change of the weights' norm through.

    Stands last, after weight decay and the learning rate: updates are added to the weights as they
    are.

    Args:
      outward: the part that remains of a growth of the norm.
      inward: the part that remains of a shrinkage.
      form: 'norm' scales the new weights, so that this part of the change of their norm remains
        (Emerging-Optimizers); weights with a norm below 1e-15 become zero. 'component' scales the
        component of the step along the weights; the part across them still makes the norm grow.
        'pinned' also scales the new weights to the norm that the component alone would have made
        (modded-nanogpt's optimization track); weights that are zero then stay zero.
      weight_dimension_numbers: as in `orthogonalize`.
      param_shardings: as in `orthogonalize`; needed inside a shard_map.

    Returns:
      A stateless transformation. Updates keep their dtype, and are formed in float32 at least. The
      norms are those of each matrix, and each fused block is one.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix; at
        an update without parameters.

    Example:
      >>> tx = radial_brake()
      >>> weights = jnp.array([[3.0, 4.0]])
      >>> updates, _ = tx.update(weights, tx.init(weights), weights)
      >>> float(jnp.linalg.norm(weights + updates))
      7.5
    """
    for name, part in {"outward": outward, "inward": inward}.items():
        check_number(name, part)
    check_choice("form", form, get_args(BrakeForm))
    brake = _Brake(outward, inward, form)
    return standalone(Stage(brake.init, brake.update), weight_dimension_numbers, param_shardings)


@dataclasses.dataclass(frozen=True)
class _Brake:
    """The arguments of `radial_brake`, once checked."""

    outward: jax.typing.ArrayLike
    inward: jax.typing.ArrayLike
    form: BrakeForm

    def init(self, params: Any, leaves: Leaves) -> optax.EmptyState:
        del params, leaves
        return optax.EmptyState()

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Leaves, **extra_args: Any
    ) -> tuple[Any, Any]:
        del extra_args
        arrays, treedef = jax.tree.flatten(updates)
        weights = weights_of(params, updates, "radial_brake")
        rows = [
            (MatrixSums(leaf), *widened(w, x))
            for leaf, w, x in zip(leaves, weights, arrays, strict=True)
        ]
        summed = all_sums([(sums, y) for sums, w, x in rows for y in self._summed(w, x)])
        results = []
        for i, ((sums, w, x), old) in enumerate(zip(rows, arrays, strict=True)):
            by = self._by_norm if self.form == "norm" else self._by_component
            of_weights, of_step = by(*summed[3 * i : 3 * i + 3])
            new = sums.broadcast(of_weights) * w + sums.broadcast(of_step) * x
            results.append(new.astype(old.dtype))
        return treedef.unflatten(results), state

    def _summed(self, weights: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        """The entries whose sums are needed of each matrix."""
        if self.form == "norm":
            # |W + u|^2 - |W|^2, without the cancellation of the difference.
            grown = products(step, 2 * weights + step)
            return squares(weights), squares(weights + step), grown
        return squares(weights), products(weights, step), squares(step)

    def _part(self, change: jax.Array) -> jax.Array:
        dtype = change.dtype
        return jnp.where(
            change > 0, jnp.asarray(self.outward, dtype), jnp.asarray(self.inward, dtype)
        )

    def _by_norm(
        self, of_weights: jax.Array, of_new: jax.Array, grown: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The factors of weights and step, so that the norm changes by its part."""
        before, after = map(_norm_or_zero, (of_weights, of_new))
        change = quotient(grown, before + after)
        shrinks = quotient((self._part(change) - 1) * change, after)
        # Weights that end at zero have no direction to be scaled along.
        shrinks = jnp.where(after == 0, -1, shrinks)
        return shrinks, shrinks + 1

    def _by_component(
        self, of_weights: jax.Array, of_both: jax.Array, of_steps: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The factors of weights and step, so that the component changes by its part."""
        along = quotient(of_both, of_weights)
        part = self._part(along)
        added = (part - 1) * along  # W times this makes the component part * along
        if self.form == "component":
            return added, jnp.ones_like(added)
        across = jnp.maximum(of_steps - along * of_both, 0)  # makes the norm grow too much
        wanted = jnp.sqrt(of_weights) * jnp.maximum(1 + part * along, 0)
        norm = jnp.sqrt(wanted**2 + across)
        shrinks = jnp.where(wanted == 0, -1, quotient(-across, norm * (norm + wanted)))
        return shrinks * (1 + added) + added, shrinks + 1


def _norm_or_zero(squared: jax.Array) -> jax.Array:
    norm = jnp.sqrt(squared)
    return jnp.where(norm < _SMALLEST_NORM, 0, norm)
