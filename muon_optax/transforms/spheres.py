"""Hyperball: weights stay on a sphere, and steps are a share of its radius."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax._internal.checks import check_choice, check_number
from muon_optax._internal.dtypes import widened
from muon_optax._internal.tree_paths import raise_all
from muon_optax.partition import Views
from muon_optax.sharding.placement import is_abstract, is_on_host, to_device, to_host
from muon_optax.transforms.block_sums import all_sums
from muon_optax.transforms.matrix_sums import (
    AxisSums,
    MatrixSums,
    Sums,
    products,
    quotient,
    squares,
)
from muon_optax.transforms.moments import holds_moments
from muon_optax.transforms.stage import Leaves, MatrixTransformation, Stage
from muon_optax.transforms.standalone import (
    check_state_type,
    moments_of,
    standalone,
    summed_struct,
    value_at,
    weights_of,
    zero_moments,
)

__all__ = ["HyperballState", "Radius", "Spans", "hyperball"]

Radius = Literal["initial", "current"] | float
Spans = Literal["matrix", "leaf"] | tuple[int, ...]


@holds_moments("radius")
class HyperballState(NamedTuple):
    """State of `hyperball`.

    Attributes:
      count: number of updates so far, an int32 scalar.
      radius: for each leaf the norms at `init`, in float32 at least: an array with the leaf's dims,
        those that a sphere spans as 1; where blocks are fused along those, a last dim has an entry
        for each block. None where the radius isn't the initial norm.

    Example:
      >>> state = hyperball(0.01).init({"w": jnp.array([[3.0, 4.0]])})
      >>> int(state.count), state.radius["w"].tolist()
      (0, [[5.0]])
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    radius: optax.Updates | None


def hyperball(
    learning_rate: optax.ScalarOrSchedule,
    *,
    radius: Radius = "initial",
    spans: Spans = "matrix",
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
) -> MatrixTransformation:
    """Hyperball (arXiv 2606.16899): steps of a given relative size along a sphere.

    Makes updates such that the weights become R unit(W - learning_rate R unit(U)), where unit(X) is
    X divided by its Frobenius norm. Stands last in a chain, without scale by shape, weight decay
    and learning rate: the first two change sizes only, and this applies the last. After Muon's
    direction it is MuonH; after `optax.scale_by_adam`, AdamH.

    Weights that are zero have no direction and stay zero; train them with another optimizer. Those
    of less than float32 drift off the sphere by their rounding.

    Args:
      learning_rate: a number, an array or a schedule of the update count: the step's norm as a
        share of the weights'.
      radius: R: the 'initial' norm, which is kept in the state; the 'current' one; or a number.
      spans: each of these has a radius: each 'matrix' (each fused block is one), each 'leaf', or
        axes of the leaf, as (1, 2, 3) for all experts of a layer in a stack [layers, experts, in,
        out].
      weight_dimension_numbers: as in `orthogonalize`.
      param_shardings: as in `orthogonalize`; needed inside a shard_map.

    Returns:
      A transformation with a `HyperballState`. Updates keep their dtype, and are formed in float32
      at least.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix, or
        have not the axes; at `init` outside of `jit`, listing the leaves with weights that are
        zero; at an update without parameters.

    Example:
      >>> tx = hyperball(0.5)
      >>> weights, direction = jnp.array([[3.0, 0.0]]), jnp.array([[0.0, 7.0]])
      >>> updates, _ = tx.update(direction, tx.init(weights), weights)
      >>> float(jnp.linalg.norm(weights + updates).round(4))
      3.0
    """
    check_number("learning_rate", learning_rate, schedule=True)
    if isinstance(radius, str):
        check_choice("radius", radius, ("initial", "current"))
    else:
        check_number("radius", radius)
        if not isinstance(radius, Tracer) and float(radius) == 0:
            raise ValueError(f"radius must be positive, got {radius!r}")
    if isinstance(spans, str):
        check_choice("spans", spans, ("matrix", "leaf"))
    elif not (spans and isinstance(spans, tuple) and all(isinstance(a, int) for a in spans)):
        raise TypeError(f"spans must be 'matrix', 'leaf' or a tuple of axes, got {spans!r}")
    steps = _Steps(learning_rate, radius, spans)
    stage = Stage(steps.init, steps.update, makes_steps=True)
    return standalone(stage, weight_dimension_numbers, param_shardings)


@dataclasses.dataclass(frozen=True)
class _Steps:
    """The arguments of `hyperball`, once checked."""

    learning_rate: optax.ScalarOrSchedule
    radius: Radius
    spans: Spans

    def init(self, params: Any, leaves: Leaves) -> HyperballState:
        arrays, treedef = jax.tree.flatten(params)
        rows = zip(self._sums(leaves), arrays, strict=True)
        norms = [_norms(sums, x) for sums, x in rows]
        raise_all(
            [
                f"{leaf.path}: shape {leaf.shape}"
                for leaf, x, norm in zip(leaves, arrays, norms, strict=True)
                if x.size
                and isinstance(norm, jax.Array)
                and not isinstance(norm, Tracer)
                and bool(jnp.any(norm == 0))
            ],
            "weights that are zero have no direction and would stay zero under hyperball; "
            "initialise them otherwise, or train them with another optimizer:",
        )
        kept = treedef.unflatten(norms) if self._is_initial else None
        return HyperballState(jnp.zeros([], jnp.int32), kept)

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Leaves, **extra_args: Any
    ) -> tuple[Any, HyperballState]:
        del extra_args
        check_state_type(state, HyperballState)
        arrays, treedef = jax.tree.flatten(updates)
        weights = weights_of(params, updates, "hyperball")
        rate = value_at(self.learning_rate, state.count)
        sums = self._sums(leaves)
        pairs = zip(sums, arrays, strict=True)
        shapes = [s.shape(x.shape) if self._is_initial else None for s, x in pairs]
        radii = moments_of(state.radius, updates, shapes)
        rows = [widened(*pair) for pair in zip(weights, arrays, strict=True)]
        entries = [
            (s, x)
            for s, (w, u) in zip(sums, rows, strict=True)
            for x in (squares(w), squares(u), products(w, u))
        ]
        summed = all_sums(entries)
        results = []
        for i, (s, (w, u), x) in enumerate(zip(sums, rows, arrays, strict=True)):
            of_weights, of_step = self._factors(rate, summed[3 * i : 3 * i + 3], radii[i])
            new = s.broadcast(of_weights) * w - s.broadcast(of_step) * u
            results.append(new.astype(x.dtype))
        count = jnp.asarray(optax.safe_increment(state.count))
        return treedef.unflatten(results), HyperballState(count, state.radius)

    @property
    def _is_initial(self) -> bool:
        return isinstance(self.radius, str) and self.radius == "initial"

    def _sums(self, leaves: Leaves) -> list[Sums]:
        """The reduction over the entries of each sphere."""
        if self.spans == "matrix":
            return [MatrixSums(leaf) for leaf in leaves]
        if self.spans == "leaf":
            return [AxisSums(leaf, tuple(range(len(leaf.shape)))) for leaf in leaves]
        bad = [
            f"{leaf.path}: shape {leaf.shape}"
            for leaf in leaves
            if not all(-len(leaf.shape) <= a < len(leaf.shape) for a in self.spans)
        ]
        raise_all(bad, f"these leaves don't have the axes {self.spans} of spans:")
        return [AxisSums(x, tuple(sorted({a % len(x.shape) for a in self.spans}))) for x in leaves]

    def _factors(
        self, rate: jax.typing.ArrayLike, summed: Sequence[jax.Array], initial: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Factors q - 1 and q c of W and -U in the update q (W - c U) - W.

        The step's c is rate R / |U|, and q makes the norm R.

        Args:
          rate: the step's share of the radius.
          summed: the sums of W^2, of U^2 and of W U.
          initial: the norm at `init`, if that is the radius.
        """
        of_weights, of_direction, of_both = summed
        real = of_weights.dtype
        if isinstance(self.radius, str) and initial is None:  # the current one
            radius, missing = jnp.sqrt(of_weights), jnp.zeros([], real)
        else:
            radius = jnp.asarray(self.radius if initial is None else initial, real)
            missing = radius**2 - of_weights
        # Weights that are zero stay so, whatever the radius.
        radius = jnp.where(of_weights == 0, 0, radius)
        size = quotient(jnp.asarray(rate, real) * radius, jnp.sqrt(of_direction))
        # |W - cU|^2 - |W|^2: small beside |W|^2, and so is q - 1 formed of it without cancellation.
        grown = size**2 * of_direction - 2 * size * of_both
        norm = jnp.sqrt(jnp.maximum(of_weights + grown, 0))
        shrinks = jnp.where(radius == 0, 0, quotient(missing - grown, norm * (norm + radius)))
        return shrinks, (shrinks + 1) * size


def _norms(sums: Sums, param: Any) -> Any:
    """The norm on each sphere, in the memory of the parameter."""
    if is_abstract(param):
        return summed_struct(sums, zero_moments(param))
    norms = jnp.sqrt(sums.of(squares(to_device(jnp.asarray(param)))))
    return to_host(norms) if is_on_host(param) else norms
