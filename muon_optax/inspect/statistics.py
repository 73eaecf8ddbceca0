"""Statistics of updates: their size, and the range of their singular values."""

import collections
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax.config import find_configs
from muon_optax.partition import Decision, assign
from muon_optax.sharding.partitioned import partitioned
from muon_optax.views.matrix_view import BoundView

__all__ = ["UpdateStats", "update_stats"]


# Leaves of one shape are measured side by side, as each program costs an eighth of a second to
# compile: so many elements of them at once, which is the size of their copies.
_ELEMENTS_AT_ONCE = 2**22


class UpdateStats(NamedTuple):
    """Size and shape of one leaf's update, as float32 scalars, whatever the leaf's dtype.

    Attributes:
      rms: root mean square of the elements.
      sigma_min: smallest singular value of any of its matrices.
      sigma_max: largest one.

    Example:
      >>> from muon_optax import muon
      >>> update_stats(muon(0.02), {"w": jnp.eye(4)})["w"].sigma_max.round(3).item()
      1.0
    """

    rms: jax.Array
    sigma_min: jax.Array
    sigma_max: jax.Array


def update_stats(
    tx: optax.GradientTransformation, updates: Any, *, steps: int = 16
) -> dict[str, UpdateStats]:
    """RMS and range of singular values of Muon's updates, to be logged in training.

    The range comes from a few Lanczos steps on each matrix's Gram matrix, cheaper than one
    Newton-Schulz matmul: both ends are estimates from inside, exact (to rounding) for matrices
    with no more than `steps` rows or columns. It is computed in float32, in float64 for leaves of
    that.

    Args:
      tx: `muon`, or any optax transformation around it.
      updates: updates as it gives them (or any tree of their structure); jit-compatible.
      steps: Lanczos steps, 1 or more.

    Returns:
      The figures of each Muon leaf, by path. All are 0 for an empty leaf, and NaN where an update
      holds NaN or infinity.

    Raises:
      ValueError: for steps out of range, or as `report` does.

    Example:
      >>> from muon_optax import muon
      >>> stats = update_stats(muon(0.02), {"w": jnp.diag(jnp.array([3.0, 4.0]))})["w"]
      >>> [round(float(x), 4) for x in stats]
      [2.5, 3.0, 4.0]
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an integer of 1 or more, got {steps!r}")
    ours: list[tuple[Decision, jax.Array]] = []
    for config, tree, _ in find_configs(tx, updates):
        decisions = assign(tree, config.views, config.partition).decisions
        pairs = zip(decisions, jax.tree.leaves(tree), strict=True)
        ours += [(d, jnp.asarray(x)) for d, x in pairs if d.view is not None]
    equal = collections.defaultdict(list)
    for decision, x in ours:
        # Arrays of other devices can't be in one program.
        where = None if isinstance(x, Tracer) else x.sharding
        equal[jax.typeof(x), where, decision.view].append((decision.path, x))
    found = {}
    for (_, _, view), named in equal.items():
        paths, arrays = zip(*named, strict=True)
        found |= zip(paths, _stats_of_equal(arrays, view, steps), strict=True)
    return {decision.path: found[decision.path] for decision, _ in ours}


def _stats_of_equal(
    arrays: Sequence[jax.Array], view: BoundView, steps: int
) -> Sequence[UpdateStats]:
    """The figures of leaves of one shape, dtype and sharding."""
    if arrays[0].size == 0:
        return [UpdateStats(*[jnp.zeros((), jnp.float32)] * 3)] * len(arrays)
    # In two groups or more: a loop's results are cut by programs that all figures share.
    at_once = min(-(-len(arrays) // 2), max(1, _ELEMENTS_AT_ONCE // arrays[0].size))
    options = {"view": view, "steps": steps, "at_once": at_once}
    return partitioned(functools.partial(_stats_side_by_side, **options), *arrays)


# Compiled once, for eager calls too.
@functools.partial(jax.jit, static_argnames=("view", "steps", "at_once"))
def _stats_side_by_side(
    *arrays: jax.Array, view: BoundView, steps: int, at_once: int
) -> list[UpdateStats]:
    groups = [arrays[i : i + at_once] for i in range(0, len(arrays), at_once)]
    groups[-1] += groups[-1][:1] * (at_once - len(groups[-1]))  # whose figures aren't used
    stacks = [functools.partial(jnp.stack, group) for group in groups]

    def figures(i: jax.Array) -> UpdateStats:
        stack = jax.lax.switch(i, stacks) if len(stacks) > 1 else stacks[0]()
        return jax.vmap(lambda x: _stats_of_leaf(x, view, steps))(stack)

    found = jax.lax.map(figures, jnp.arange(len(groups)))
    found = [figure.reshape(-1).astype(jnp.float32) for figure in found]
    return [UpdateStats(*(figure[i] for figure in found)) for i in range(len(arrays))]


def _stats_of_leaf(x: jax.Array, view: BoundView, steps: int) -> UpdateStats:
    x = x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)
    ranges = [_sigma_range(matrices, steps) for matrices in view.split(x)]
    low = jnp.min(jnp.stack([low for low, _ in ranges]))
    high = jnp.max(jnp.stack([high for _, high in ranges]))
    size = _scale_of(x)
    return UpdateStats(size * jnp.sqrt(jnp.mean(jnp.abs(x / size) ** 2)), low, high)


def _scale_of(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """The largest absolute value, kept as dims of 1 for a given axis; 1 where all are zero."""
    size = jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None)
    return jnp.where(size == 0, jnp.ones_like(size), size)


def _sigma_range(x: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest singular value in a stack (batch, m, n), by Lanczos."""
    x = x if x.shape[1] <= x.shape[2] else x.mT
    size = _scale_of(x, (1, 2))
    x = x / size  # squares neither overflow nor vanish
    batch, rows, _ = x.shape
    steps = min(steps, rows)
    directions = jax.random.normal(jax.random.key(0), (steps, rows), x.dtype)
    directions /= jnp.linalg.norm(directions, axis=-1, keepdims=True)

    def grow(k: jax.Array, basis: jax.Array) -> jax.Array:
        v = _gram_times(x, basis[:, k - 1])
        # A little of a fresh direction goes on where Lanczos would stop, as it does at once on a
        # polar factor.
        length = jnp.linalg.norm(v, axis=-1, keepdims=True)
        v = v + 1e-3 * jnp.where(length > 0, length, 1) * directions[None, k]
        for _ in range(2):  # twice is enough
            v = v - _einsum("bki,bk->bi", basis, _einsum("bki,bi->bk", basis.conj(), v))
        return basis.at[:, k].set(v / jnp.linalg.norm(v, axis=-1, keepdims=True))

    start = jnp.zeros((batch, steps, rows), x.dtype).at[:, 0].set(directions[0])
    basis = jax.lax.fori_loop(1, steps, grow, start)
    projected = _einsum("bki,bij->bkj", basis.conj(), x)
    values = jnp.linalg.svd(projected, compute_uv=False) * size[:, 0]
    return jnp.min(values), jnp.max(values)


def _gram_times(x: jax.Array, v: jax.Array) -> jax.Array:
    return _einsum("bij,bj->bi", x, _einsum("bij,bi->bj", x.conj(), v))


def _einsum(indices: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(indices, *operands, precision=jax.lax.Precision.HIGHEST)
