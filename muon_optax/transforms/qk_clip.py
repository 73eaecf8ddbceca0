"""QK-clip: query and key weights of heads whose attention logits grow too large are scaled down.

Kimi K2, arXiv 2507.20534. The logits are the user's: the largest of each head in the step's own
forward pass, scaled by 1 / sqrt(head_dim), over all pairs that aren't masked, over the batch and
over all devices that have a part of it.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from muon_optax._internal.checks import check_choice, check_number, check_static
from muon_optax._internal.dtypes import canonical, wide_dtype
from muon_optax._internal.tree_paths import (
    leaves_with_segments,
    path_name,
    raise_all,
    restructured_like,
)
from muon_optax.sharding.declared import declared_specs
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.placement import keeping_placement
from muon_optax.sharding.specs import read_shardings
from muon_optax.transforms.wrappers import passing_over, summing

__all__ = ["Attention", "HeadRole", "HeadWeight", "clip_qk", "qk_clip"]

HeadRole = Literal["query", "key", "query_rope", "none"]


@dataclasses.dataclass(frozen=True)
class HeadWeight:
    """How one weight, or bias, holds the heads of an attention.

    Attributes:
      role: 'query' is scaled by g^alpha and 'key' by g^(1 - alpha). A tuple of (role, size) says it
        of parts of each head's dims, in order, as in MLA: (('query', 128), ('query_rope', 64)) and
        (('key', 128), ('none', 128)), where 'query_rope' is scaled by g, since the rotary key is
        shared, and 'none', as values are, stays. With parts of queries and of keys, as where a
        kernel has query, key and value of each head side by side, there are as many as heads of
        keys: (('query', 4 * 128), ('key', 128), ('none', 128)) with four queries for each key.
      axis: the axis of heads; negative ones count from the end. Its size is the number of heads, or
        that times a head's dims, a head's dims side by side.
      dim_axis: the axis of a head's dims, where they have one of their own and `role` has parts.
      within: (axis, start, stop), where only these entries of a fused weight are meant: the keys of
        a [width, 3 * heads * dims] kernel are within (1, heads * dims, 2 * heads * dims), those of
        [width, 3, heads, dims] within (1, 1, 2). None is the whole weight.

    Example:
      >>> HeadWeight((("key", 128), ("none", 128)), axis=-1).is_of_keys
      True
    """

    role: HeadRole | tuple[tuple[HeadRole, int], ...]
    axis: int
    dim_axis: int | None = None
    within: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        for role in self._roles:
            check_choice("role", role, get_args(HeadRole))
        if self.within is not None and not 0 <= self.within[1] < self.within[2]:
            raise ValueError(f"within must be (axis, start, stop), got {self.within!r}")

    @property
    def is_of_keys(self) -> bool:
        """Whether it has an entry for each head of keys, of which GQA has fewer."""
        return "key" in self._roles

    @property
    def _roles(self) -> tuple[str, ...]:
        return (self.role,) if isinstance(self.role, str) else tuple(r for r, _ in self.role)

    def powers(self, size: int, alpha: float) -> np.ndarray:
        """The power of g for each dim of a head with so many dims."""
        power = {"query": alpha, "key": 1 - alpha, "query_rope": 1.0, "none": 0.0}
        if isinstance(self.role, str):
            return np.full(size, power[self.role])
        return np.repeat([power[role] for role, _ in self.role], [n for _, n in self.role])


@dataclasses.dataclass(frozen=True)
class Attention:
    """The weights of one attention, or of a stack of them, that its logits are formed with.

    Attributes:
      heads: the number of heads of the queries.
      weights: by their paths below the attention's: 'query/kernel'. Weights that aren't named stay,
        as values, down projections and the shared rotary key of MLA. A fused weight has several,
        each `within` entries of its own.
      key_heads: the number of heads of the keys; None is `heads`. Each serves as many heads of the
        queries, side by side.

    Example:
      >>> weights = {"q/kernel": HeadWeight("query", -2), "k/kernel": HeadWeight("key", -2)}
      >>> Attention(8, weights, key_heads=2).groups
      4
    """

    heads: int
    weights: Mapping[str, HeadWeight | Sequence[HeadWeight]]
    key_heads: int | None = None

    def __post_init__(self) -> None:
        for name in ("heads", "key_heads"):
            count = getattr(self, name)
            is_count = isinstance(count, int | np.integer) and count > 0
            if not (is_count or (name == "key_heads" and count is None)):
                raise ValueError(f"{name} must be a positive integer, got {count!r}")
        if self.heads % (self.key_heads or self.heads):
            raise ValueError(f"{self.heads} heads can't share {self.key_heads} heads of keys")
        raise_all(
            [f"{name}: {self.weights[name]}" for name in self.weights if self._overlap(name)],
            "the parts of a fused weight must each be within other entries of one axis:",
        )

    def parts(self, name: str) -> tuple[HeadWeight, ...]:
        """The contents of a weight, in one or in several parts."""
        given = self.weights[name]
        return (given,) if isinstance(given, HeadWeight) else tuple(given)

    def _overlap(self, name: str) -> bool:
        """Whether parts of a weight may have entries in common."""
        parts = self.parts(name)
        ranges = sorted(part.within for part in parts if part.within is not None)
        if len(parts) == 1:
            return False
        return len(ranges) < len(parts) or any(
            one[0] != other[0] or one[2] > other[1] for one, other in itertools.pairwise(ranges)
        )

    @property
    def groups(self) -> int:
        """How many heads of queries share one of the keys."""
        return self.heads // (self.key_heads or self.heads)


def clip_qk(
    params: Any,
    max_logits: Mapping[str, jax.typing.ArrayLike],
    tau: jax.typing.ArrayLike = 100.0,
    alpha: float = 0.5,
    *,
    heads: Mapping[str, Attention],
    param_shardings: Any = None,
) -> Any:
    """Scales down queries and keys of heads whose largest logit is above a bound (MuonClip).

    A head with the largest logit S above tau gets g = tau / S, others 1; weights of queries are
    multiplied by g^alpha and those of keys by g^(1 - alpha), so that the same inputs give logits
    that are g times as large. Where heads of queries share one of the keys, all take the g of
    the largest among them. Weights with a normalisation behind them, as in QK norm, need none of
    this. Call it after `optax.apply_updates`; a momentum stays as it is.

    Args:
      params: the parameters.
      max_logits: for each attention an array (*stack, heads), where leaves have the same leading
        dims. Logits that are negative, zero or not finite change nothing.
      tau: the bound.
      alpha: the part of the scaling that queries take, in [0, 1].
      heads: the attentions by their paths in `params`, as 'layers/attn'; '' is the root.
      param_shardings: as in `orthogonalize`; only needed inside a shard_map, where `max_logits` are
        those of all heads.

    Returns:
      The parameters, in their dtypes.

    Raises:
      ValueError, TypeError: for options out of range; listing attentions without logits, weights
        that aren't there, and those whose axes don't hold the heads.

    Example:
      >>> params = {"q": jnp.ones((2, 3)), "k": jnp.ones((2, 3))}  # one dim a head
      >>> attention = Attention(3, {"q": HeadWeight("query", 1), "k": HeadWeight("key", 1)})
      >>> new = clip_qk(params, {"": jnp.array([400.0, 50.0, -1.0])}, heads={"": attention})
      >>> new["q"][0].tolist(), new["k"][0].tolist()
      ([0.5, 1.0, 1.0], [0.5, 1.0, 1.0])
    """
    _check(tau, alpha, heads)
    params = canonical(params)
    factors = _factors(params, max_logits, tau, alpha, heads, ShardingOptions(param_shardings))
    leaves, treedef = jax.tree.flatten(params)
    return treedef.unflatten(
        [x if f is None else _scaled(x, f) for x, f in zip(leaves, factors, strict=True)]
    )


def qk_clip(
    tau: jax.typing.ArrayLike = 100.0,
    alpha: float = 0.5,
    *,
    heads: Mapping[str, Attention],
    param_shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """`clip_qk` as the last transformation of a chain: of the weights that updates lead to.

    Behind `moonlight` it is MuonClip: `optax.chain(recipes.moonlight(2e-4), qk_clip(heads=heads))`,
    with `tx.update(grads, state, params, max_logits=logits)`. Not behind `hyperball`, which would
    scale the weights up again.

    Args:
      tau: as in `clip_qk`.
      alpha: as in `clip_qk`.
      heads: as in `clip_qk`.
      param_shardings: as in `clip_qk`.

    Returns:
      A stateless transformation, whose update takes `max_logits`.

    Raises:
      ValueError, TypeError: as `clip_qk`; for an update without parameters or `max_logits`.

    Example:
      >>> params = {"q": jnp.ones((2, 1)), "k": jnp.ones((2, 1))}
      >>> attention = Attention(1, {"q": HeadWeight("query", 1), "k": HeadWeight("key", 1)})
      >>> tx = optax.chain(optax.sgd(0.0), qk_clip(heads={"": attention}))
      >>> logits = {"": jnp.array([400.0])}
      >>> updates, _ = tx.update(params, tx.init(params), params, max_logits=logits)
      >>> updates["q"].tolist()
      [[-0.5], [-0.5]]
    """
    _check(tau, alpha, heads)
    declared = ShardingOptions(param_shardings)

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None, *, max_logits=None, **extra_args):
        del extra_args
        if params is None or max_logits is None:
            raise ValueError(
                "qk_clip needs the parameters and the largest logits: call update(updates, state, "
                "params, max_logits=...)"
            )
        params = restructured_like(params, updates)
        factors = _factors(params, max_logits, tau, alpha, heads, declared)
        leaves, treedef = jax.tree.flatten(updates)
        rows = zip(leaves, jax.tree.leaves(params), factors, strict=True)
        return treedef.unflatten([u if f is None else _led(u, w, f) for u, w, f in rows]), state

    tx = optax.GradientTransformationExtraArgs(init, update)
    return keeping_placement(passing_over(summing(tx)))


def _check(tau: Any, alpha: Any, heads: Any) -> None:
    check_number("tau", tau)
    check_static("alpha", alpha)
    check_number("alpha", alpha)
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha!r}")
    has_all = isinstance(heads, Mapping) and all(isinstance(x, Attention) for x in heads.values())
    if not has_all:
        raise TypeError(f"heads must have an Attention for each path, got {heads!r}")


def _factors(
    params: Any,
    max_logits: Mapping[str, jax.typing.ArrayLike],
    tau: jax.typing.ArrayLike,
    alpha: float,
    heads: Mapping[str, Attention],
    declared: ShardingOptions,
) -> list[jax.Array | None]:
    """The factor of each leaf, as an array that broadcasts against it; None for nothing."""
    paths = [path_name(path) for path, _ in leaves_with_segments(params)]
    index = {path: i for i, path in enumerate(paths)}
    shardings = read_shardings(params, declared_specs(declared.of(params).params, params))
    factors: list[jax.Array | None] = [None] * len(paths)
    problems = []
    for at, attention in heads.items():
        for name in attention.weights:
            path = f"{at}/{name}" if at else name
            try:
                i = _index_of(path, index)
                if factors[i] is not None:
                    raise ValueError("two attentions name it")
                scales = _scales(at, max_logits, attention, tau)
                whole = math.prod(
                    _factor(shardings[i].shape, scales[part.is_of_keys], part, alpha)
                    for part in attention.parts(name)
                )
                # Inside a shard_map the leaf is a block.
                factors[i] = shardings[i].block_of(jnp.asarray(whole))
            except ValueError as error:
                problems.append(f"{path}: {error}")
    raise_all(problems, "QK-clip can't find the heads:")
    return factors


def _index_of(path: str, index: Mapping[str, int]) -> int:
    if path not in index:
        raise ValueError("no such parameter, or one without a gradient")
    return index[path]


def _scales(
    at: str, max_logits: Mapping[str, Any], attention: Attention, tau: jax.typing.ArrayLike
) -> dict[bool, jax.Array]:
    """G of each head of the queries (False) and of the keys (True), (*stack, heads).

    Raises:
      ValueError: for no logits, or logits of another number of heads.
    """
    if at not in max_logits:
        raise ValueError(f"no max_logits for {at!r}, only for {[*max_logits]}")
    logits = jnp.asarray(max_logits[at])
    if not logits.ndim or logits.shape[-1] != attention.heads:
        raise ValueError(f"max_logits {logits.shape}, but {attention.heads} heads")
    logits = _replicated(logits).astype(wide_dtype(logits.dtype))
    grouped = logits.reshape(*logits.shape[:-1], -1, attention.groups)
    finite = jnp.where(jnp.isfinite(grouped), grouped, -jnp.inf)
    largest = jnp.max(finite, -1)
    # Only where S is above tau, so that no division is by zero, and no factor negative.
    tau = jnp.asarray(tau, largest.dtype)
    of_keys = jnp.where(largest > tau, tau / jnp.where(largest > tau, largest, 1), 1)
    return {True: of_keys, False: jnp.repeat(of_keys, attention.groups, -1)}


def _replicated(x: jax.Array) -> jax.Array:
    """Few numbers, which an Explicit mesh has by heads, on each device that multiplies by them."""
    sharding = jax.typeof(x).sharding
    if not any(sharding.spec):
        return x
    return jax.sharding.reshard(x, sharding.update(spec=PartitionSpec()))


def _factor(
    shape: tuple[int, ...], scales: jax.Array, weight: HeadWeight, alpha: float
) -> jax.Array:
    """The factor of a whole leaf, as an array that broadcasts against it.

    Raises:
      ValueError: where the axes don't hold the heads.
    """
    stack = scales.shape[:-1]
    if shape[: len(stack)] != stack:
        raise ValueError(f"shape {shape} doesn't begin with the max_logits' dims {stack}")
    if weight.within is None:
        return _unsliced_factor(shape, scales, weight, alpha)
    axis, start, stop = weight.within
    axis += len(shape) if axis < 0 else 0
    if not (len(stack) <= axis < len(shape) and stop <= shape[axis]):
        raise ValueError(f"shape {shape} doesn't have the entries of {weight}")
    part = (*shape[:axis], stop - start, *shape[axis + 1 :])
    factor = _unsliced_factor(part, scales, weight, alpha)
    factor = jnp.repeat(factor, part[axis] // factor.shape[axis], axis)
    widths = [(start, shape[axis] - stop) if a == axis else (0, 0) for a in range(len(shape))]
    return jnp.pad(factor, widths, constant_values=1)


def _unsliced_factor(
    shape: tuple[int, ...], scales: jax.Array, weight: HeadWeight, alpha: float
) -> jax.Array:
    """`_factor` of the entries that a weight is within."""
    *stack, count = scales.shape
    problem = f"shape {shape} doesn't hold {count} heads as {weight}"
    given = [weight.axis] if weight.dim_axis is None else [weight.axis, weight.dim_axis]
    if not all(-len(shape) <= axis < len(shape) for axis in given):
        raise ValueError(problem)
    axes = [axis % len(shape) for axis in given]
    if len({*range(len(stack)), *axes}) != len(stack) + len(axes):
        raise ValueError(problem)
    size = shape[axes[0]] // count if weight.dim_axis is None else shape[axes[1]]
    powers = weight.powers(size, alpha)
    heads = count if weight.dim_axis is not None else count * size
    if shape[axes[0]] != heads or len(powers) != size:
        raise ValueError(problem)
    powers = jnp.asarray(powers, scales.dtype).reshape(*[1] * scales.ndim, size)
    factor = scales[..., None] ** powers  # (*stack, heads, dims)
    if weight.dim_axis is not None and axes[1] < axes[0]:
        factor = factor.swapaxes(-1, -2)
    kept = {*range(len(stack)), *axes}
    return factor.reshape([n if axis in kept else 1 for axis, n in enumerate(shape)])


def _scaled(weights: jax.Array, factor: jax.Array) -> jax.Array:
    dtype = wide_dtype(weights.dtype)
    return (weights.astype(dtype) * factor.astype(jnp.finfo(dtype).dtype)).astype(weights.dtype)


def _led(update: jax.Array, weights: jax.Array, factor: jax.Array) -> jax.Array:
    """The update that leads to the clipped weights."""
    dtype = wide_dtype(update.dtype, weights.dtype)
    factor = factor.astype(jnp.finfo(dtype).dtype)
    # Not g (W + u) - W, whose rounding would move weights that aren't clipped.
    led = factor * update.astype(dtype) + (factor - 1) * weights.astype(dtype)
    return led.astype(update.dtype)
