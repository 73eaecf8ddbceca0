"""The pieces of Muon as optax transformations.

`scale_by_muon` is `scale_by_momentum` followed by `orthogonalize`, as one transformation with one
state, so that the momentum mix is formed and rounded where the exchange between devices begins.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_optax.checks import check_decay, check_float_dtype
from muon_optax.dtypes import compute_dtype, wide_dtype
from muon_optax.matrix_view import BoundView, MuonDimensionNumbers
from muon_optax.momentum import (
    Momentum,
    MomentumForm,
    MuonState,
    check_belongs,
    combine,
)
from muon_optax.partition import Views, assign
from muon_optax.polar import Coefficients, Method, PrecisionName, Preconditioning
from muon_optax.scaling import Scale, Scaling, resolve_scaling
from muon_optax.sharding.buffers import Elementwise
from muon_optax.sharding.cost import DeviceModel
from muon_optax.sharding.distribute import Distribution, StrategyRules
from muon_optax.sharding.local import Orthogonalizer, make_solver
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.placement import (
    check_fits,
    check_stays,
    in_its_place,
    place,
    to_declared_memory,
    to_device,
    to_memory_of,
)
from muon_optax.sharding.specs import Layout, read_layouts, whole_shapes
from muon_optax.tree_paths import cast_like, graft, raise_together
from muon_optax.wrappers import passing_over

__all__ = [
    "MuonState",
    "orthogonalize",
    "scale_by_momentum",
    "scale_by_muon",
    "scale_by_shape",
]


def scale_by_momentum(
    beta: jax.typing.ArrayLike = 0.95,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    bias_correction: bool = True,
    momentum: MomentumForm = "ema",
) -> optax.GradientTransformation:
    """Replaces updates by their momentum mix, what Muon orthogonalises.

    Args:
      beta: decay rate, in [0, 1).
      mu_dtype: dtype of the buffer; None keeps the parameter's.
      nesterov: mix the next step's momentum in.
      bias_correction: divide by 1 - beta^t (by 1 - beta^(t+1) for the buffer under Nesterov), as
        optax does; False is the convention of torch, Keller Jordan, Dion and Megatron.
      momentum: 'ema', m = beta m + (1 - beta) g, or 'sum', m = beta m + g.

    Returns:
      A transformation with a `MuonState`. Updates keep their dtype.

    Raises:
      ValueError, TypeError: for options out of range.

    Example:
      >>> tx = scale_by_momentum(0.5, nesterov=False, bias_correction=False)
      >>> updates, state = tx.update(jnp.ones(2), tx.init(jnp.zeros(2)))
      >>> updates.tolist()
      [0.5, 0.5]
    """
    buffer = Momentum(beta, mu_dtype, nesterov, bias_correction, momentum)

    def update(updates, state, params=None):
        del params
        check_belongs(state, updates)
        count = jnp.asarray(optax.safe_increment(state.count))
        weights = buffer.weights(count)
        mu = graft(state.mu, updates)
        new = jax.tree.map(functools.partial(combine, weights.keep), mu, updates)
        mixed = jax.tree.map(functools.partial(combine, weights.mix), mu, updates)
        return cast_like(mixed, updates), MuonState(count, cast_like(new, state.mu))

    return in_its_place(passing_over(optax.GradientTransformation(buffer.init_state, update)))


def orthogonalize(
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    *,
    adaptive: bool = False,
    preconditioning: Preconditioning | None = None,
    ns_method: Method = "auto",
    ns_dtype: Any = None,
    ns_precision: PrecisionName | None = None,
    orthogonalizer: Orthogonalizer | None = None,
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
) -> optax.GradientTransformation:
    """Replaces each matrix of the updates by (nearly) its polar factor.

    Args:
      ns_coeffs: a schedule's name, one triple, or a table of triples; see `newton_schulz`.
      ns_steps: number of Newton-Schulz steps; None is the schedule's own.
      adaptive: multiply each matrix by its inner product with the input, the dual norm (arXiv
        2409.20325).
      preconditioning: how the matrix is brought into range; None is the schedule's own.
      ns_method: 'standard', 'gram', or 'auto', the one with fewer operations.
      ns_dtype: dtype to compute in; None is the update's.
      ns_precision: precision of the products, as in `jax.lax.dot`.
      orthogonalizer: a function on (batch, m, n), used instead of Newton-Schulz.
      weight_dimension_numbers: a view, a tree of views, or a function that returns one; None takes
        every leaf for a [fan-in, fan-out] matrix.
      param_shardings: how the parameters are sharded: a tree (or a prefix of one) of NamedSharding,
        PartitionSpec or arrays, or a function of the parameters that returns one. None reads Flax's
        metadata. Explicit meshes don't need it.
      strategy: how sharded matrices are brought together: 'auto', 'gather', 'all_to_all', 'gram'
        or 'local', or (pattern, strategy) pairs with patterns as in `Rule`.
      max_workspace_bytes: bound of one exchange's workspace on a device; None is the larger of
        256 MiB and six times the largest matrix.
      device: an accelerator's name or a `DeviceModel`, for the choice of strategies.

    Returns:
      A stateless transformation. Updates keep their dtype.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix.

    Example:
      >>> tx = orthogonalize("polar_express", 8)
      >>> updates, _ = tx.update(5 * jnp.eye(2), tx.init(jnp.zeros((2, 2))))
      >>> updates.round(3).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    check_float_dtype("ns_dtype", ns_dtype)
    solver = make_solver(
        ns_coeffs,
        ns_steps,
        preconditioning=preconditioning,
        method=ns_method,
        precision=ns_precision,
        orthogonalizer=orthogonalizer,
        adaptive=adaptive,
    )
    declared = ShardingOptions(param_shardings)
    spread = Distribution(strategy, max_workspace_bytes, device)

    def init(params):
        spread.check_patterns(params)
        whole = whole_shapes(params, declared.of(params).params)
        _bound_views(whole, weight_dimension_numbers)
        return optax.EmptyState()

    def update(updates, state, params=None):
        where = declared.of(updates if params is None else params).params
        views = _bound_views(whole_shapes(updates, where), weight_dimension_numbers)
        arrays = jax.tree.leaves(updates)
        dtypes = [compute_dtype(ns_dtype, x.dtype) for x in arrays]
        leaves = spread.leaves(updates, views, dtypes, where)
        one = np.float32(1)
        found = spread.run(leaves, solver, _AS_THEY_ARE, one, [(x,) for x in arrays])
        results = jax.tree.structure(updates).unflatten([result for (result,) in found])
        return cast_like(results, updates), state

    return in_its_place(optax.GradientTransformation(init, update))


def scale_by_shape(
    weight_dimension_numbers: Views = None,
    consistent_rms: jax.typing.ArrayLike | None = None,
    *,
    scale: Scale | None = None,
    scale_factor: jax.typing.ArrayLike = 1.0,
    param_shardings: Any = None,
) -> optax.GradientTransformation:
    """Scales each matrix by a factor of its fan-in and fan-out, each fused block by its own.

    Args:
      weight_dimension_numbers: as in `orthogonalize`.
      consistent_rms: scale by this times sqrt(max(fan-in, fan-out)), as optax does.
      scale: 'shape_scaling' sqrt(max(1, out / in)), the default; 'match_rms_adamw' 0.2 sqrt(max(in,
        out)); 'spectral' sqrt(max(in, out)); 'unit_rms_norm' sqrt(out / in); 'none'.
      scale_factor: multiplies any mode.
      param_shardings: as in `orthogonalize`; only needed inside a shard_map.

    Returns:
      A stateless transformation. Updates keep their dtype.

    Raises:
      ValueError, TypeError: for an unknown mode, or both `scale` and `consistent_rms`.

    Example:
      >>> tx = scale_by_shape()
      >>> tx.update(jnp.ones((1, 4)), tx.init(jnp.zeros((1, 4))))[0].tolist()
      [[2.0, 2.0, 2.0, 2.0]]
    """
    scaling = resolve_scaling(scale, scale_factor, consistent_rms)
    declared = ShardingOptions(param_shardings)

    def update(updates, state, params=None):
        where = declared.of(updates if params is None else params).params
        views = _bound_views(whole_shapes(updates, where), weight_dimension_numbers)
        leaves, treedef = jax.tree.flatten(updates)
        layouts = [None] * len(leaves)
        if any(len(view.block_sizes) > 1 for view in views):  # else a factor serves the whole leaf
            layouts = read_layouts(updates, where)
        rows = zip(leaves, views, layouts, strict=True)
        return treedef.unflatten([_scaled(scaling, *row) for row in rows]), state

    return in_its_place(optax.GradientTransformation(optax.init_empty_state, update))


def scale_by_muon(
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    beta: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    mu_dtype: Any = None,
    *,
    nesterov: bool = True,
    adaptive: bool = False,
    preconditioning: Preconditioning | None = None,
    weight_dimension_numbers: Views = None,
    bias_correction: bool = True,
    momentum: MomentumForm = "ema",
    ns_method: Method = "auto",
    ns_dtype: Any = None,
    ns_precision: PrecisionName | None = None,
    orthogonalizer: Orthogonalizer | None = None,
    param_shardings: Any = None,
    mu_shardings: Any = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
    update_dtype: Any = None,
) -> optax.GradientTransformation:
    """Muon's direction: momentum, orthogonalised. Drop-in for `optax.contrib.scale_by_muon`.

    Args:
      ns_coeffs: as in `orthogonalize`.
      ns_steps: as in `orthogonalize`.
      beta: as in `scale_by_momentum`.
      eps: kept for optax's signature; the normalisation here is scale-invariant and needs none.
      mu_dtype: as in `scale_by_momentum`.
      nesterov: as in `scale_by_momentum`.
      adaptive: as in `orthogonalize`.
      preconditioning: as in `orthogonalize`.
      weight_dimension_numbers: as in `orthogonalize`.
      bias_correction: as in `scale_by_momentum`.
      momentum: as in `scale_by_momentum`.
      ns_method: as in `orthogonalize`.
      ns_dtype: dtype to orthogonalise in; None is the momentum's.
      ns_precision: as in `orthogonalize`.
      orthogonalizer: as in `orthogonalize`; it gets the momentum mix.
      param_shardings: as in `orthogonalize`.
      mu_shardings: how the momentum is sharded, if not like the parameter, as in ZeRO-1 or in host
        memory: a tree or a function like `param_shardings`.
      strategy: as in `orthogonalize`.
      max_workspace_bytes: as in `orthogonalize`.
      device: as in `orthogonalize`.
      update_dtype: dtype of the updates, at least; None is the gradient's.

    Returns:
      A transformation with a `MuonState`.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix.

    Example:
      >>> tx = scale_by_muon("tight")
      >>> grad = jnp.diag(jnp.array([1.0, 100.0]))
      >>> update, state = tx.update(grad, tx.init(jnp.zeros((2, 2))))
      >>> bool(jnp.allclose(update, jnp.eye(2), atol=0.05))
      True
    """
    check_decay("eps", eps, below=math.inf)
    buffer = Momentum(beta, mu_dtype, nesterov, bias_correction, momentum)
    check_float_dtype("ns_dtype", ns_dtype)
    check_float_dtype("update_dtype", update_dtype)
    solver = make_solver(
        ns_coeffs,
        ns_steps,
        preconditioning=preconditioning,
        method=ns_method,
        precision=ns_precision,
        orthogonalizer=orthogonalizer,
        adaptive=adaptive,
    )
    declared = ShardingOptions(param_shardings, mu_shardings)
    spread = Distribution(strategy, max_workspace_bytes, device)

    def init(params):
        where = declared.of(params)
        spread.check_patterns(params)
        _bound_views(whole_shapes(params, where.params), weight_dimension_numbers)
        check_stays(params, where.params, where.momentum)
        check_fits(params, where.momentum)
        state = buffer.init_state(params)
        if where.momentum is None:
            return state
        placed = to_memory_of(state.mu, place(to_device(state.mu), where.momentum))
        return state._replace(mu=to_declared_memory(placed, where.momentum))

    def update(updates, state, params=None):
        check_belongs(state, updates)
        like = updates if params is None else graft(params, updates)
        where = declared.of(updates if params is None else params)
        check_stays(updates, where.params, where.momentum)
        views = _bound_views(whole_shapes(updates, where.working), weight_dimension_numbers)
        mu = graft(state.mu, updates)
        ready = spread.prepare(updates, mu, like, views, ns_dtype, where)
        count = jnp.asarray(optax.safe_increment(state.count))
        operands = zip(jax.tree.leaves(ready.updates), jax.tree.leaves(mu), strict=True)
        found = spread.run(ready.leaves, solver, _MOMENTUM, buffer.weights(count), list(operands))
        treedef = jax.tree.structure(updates)
        results = place(treedef.unflatten([result for result, _ in found]), ready.moves)
        results = jax.tree.map(functools.partial(_cast_update, update_dtype), results, updates)
        new = cast_like(treedef.unflatten([kept for _, kept in found]), state.mu)
        return results, MuonState(count, place(new, where.momentum))

    return in_its_place(passing_over(optax.GradientTransformation(init, update)))


# A step of momentum on (gradient, buffer): the mix goes on, the new buffer is kept.
_MOMENTUM = Elementwise(
    prepare=lambda w, g, m: combine(w.mix, m, g),
    keep=lambda w, g, m: (combine(w.keep, m, g),),
)
# The factor of one changes nothing: a chunk that isn't due yet is held back by it.
_AS_THEY_ARE = Elementwise(prepare=lambda one, x: one.astype(x.dtype) * x, keep=lambda *_: ())


def _cast_update(update_dtype: Any, x: jax.Array, grad: jax.Array) -> jax.Array:
    """`x` in the gradient's dtype, or in `update_dtype` at least."""
    return x.astype(grad.dtype if update_dtype is None else wide_dtype(update_dtype, grad.dtype))


def _scaled(scaling: Scaling, x: jax.Array, view: BoundView, layout: Layout | None) -> jax.Array:
    """A leaf, or a block of one, times the factor of each of its matrices."""
    base = [scaling.base(m, n) for _, m, n in view.matrices]
    if set(base) == {1.0} and scaling.is_bare:
        return x
    wide = wide_dtype(x.dtype)
    real = jnp.finfo(wide).dtype
    factor = jnp.asarray(view.per_block(base), real)
    if layout is not None:
        factor = layout.block_of(factor)
    factor = factor * jnp.asarray(scaling.multiplier, real)
    return (factor * x.astype(wide)).astype(x.dtype)


def _bound_views(tree: Any, declared: Views) -> list[BoundView]:
    """A view a leaf, all of which must make matrices, from what the user declares.

    Raises:
      ValueError: listing the leaves that make none.
    """
    views = MuonDimensionNumbers() if declared is None else declared
    decisions = assign(tree, views).decisions
    problems = [f"{d.path}: {d.reason}" for d in decisions if d.view is None]
    raise_together(problems, "Muon needs a matrix view for each of its leaves:")
    return [d.view for d in decisions if d.view is not None]
