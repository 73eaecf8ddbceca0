"""Muon's direction: momentum, orthogonalised.

It is `scale_by_momentum` followed by `orthogonalize`, as one transformation with one state, so that
the momentum mix is formed and rounded on the shards, before any communication.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from muon_optax._internal.checks import (
    check_choice,
    check_decay,
    check_flag,
    check_float_dtype,
    check_instance,
)
from muon_optax._internal.dtypes import scaled, wide_dtype
from muon_optax._internal.tree_paths import cast_like, restructured_like
from muon_optax.orthogonalization import Coefficients, Method, PrecisionName, Preconditioning
from muon_optax.partition import Views
from muon_optax.sharding.blocks import BlockedLeaf
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.execution import ExecutionOptions, Prepared, StrategyRules
from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.placement import (
    check_manual_blocks_stay,
    check_mu_shardings_divide,
    momentum_to_host,
    place,
    to_device,
    to_memory_of,
)
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.runtime.buffers import Arrays, Elementwise
from muon_optax.sharding.runtime.orthogonalizer import (
    OrthogonalizeFunction,
    Orthogonalizer,
    make_orthogonalizer,
)
from muon_optax.sharding.trace_context import mapped_axes
from muon_optax.transforms.binding import binder
from muon_optax.transforms.block_periodic import BlockPeriodic
from muon_optax.transforms.dion2_slices import Dion2
from muon_optax.transforms.momentum import Momentum, MomentumForm, check_belongs, combine
from muon_optax.transforms.momentum_state import MuonState
from muon_optax.transforms.shape_scale import (
    Scale,
    Scaling,
    factor_of_leaf,
    resolve_scaling,
)
from muon_optax.transforms.stage import MatrixTransformation, Stage, matrix_transformation

__all__ = ["Direction", "scale_by_muon"]

_UNSCALED = Scaling("none", 1.0)


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
    orthogonalizer: OrthogonalizeFunction | None = None,
    param_shardings: Any = None,
    mu_shardings: Any = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
    update_dtype: Any = None,
    sign: bool = False,
    block_periodic: BlockPeriodic | None = None,
    block_scale: Scale | None = None,
) -> MatrixTransformation:
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
        memory: a tree or a function like `param_shardings`. Where it says nothing, momentum is
        sharded over the mesh axes that a parameter's type is reduced over, too.
      strategy: as in `orthogonalize`.
      max_workspace_bytes: as in `orthogonalize`.
      device: as in `orthogonalize`.
      update_dtype: dtype of the updates, at least; None is the gradient's.
      sign: orthogonalise the signs of the momentum mix, as AdaMuon does.
      block_periodic: orthogonalise blocks in most steps, as MuonBP does.
      block_scale: the `scale` of the `scale_by_shape` that follows. Since that scales by the shapes
        of whole matrices, block steps are multiplied by a block's scale over its matrix's.

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
    check_float_dtype("update_dtype", update_dtype)
    check_flag("sign", sign)
    if block_scale is not None:
        check_choice("block_scale", block_scale, get_args(Scale))
    direction = Direction(
        Momentum(beta, mu_dtype, nesterov, bias_correction, momentum),
        make_orthogonalizer(
            ns_coeffs,
            ns_steps,
            preconditioning=preconditioning,
            method=ns_method,
            precision=ns_precision,
            orthogonalizer=orthogonalizer,
            adaptive=adaptive,
        ),
        ExecutionOptions(strategy, max_workspace_bytes, device),
        ns_dtype,
        update_dtype,
        sign,
        block_periodic,
        resolve_scaling(block_scale, 1.0, None),
    )
    bind = binder(weight_dimension_numbers, ShardingOptions(param_shardings, mu_shardings))
    return matrix_transformation(direction.stage, bind)


@dataclasses.dataclass(frozen=True)
class Direction:
    """Momentum and orthogonalisation, as one stage with one state.

    Attributes:
      momentum: the buffer's form, and the mix with the gradient that is orthogonalised.
      orthogonalizer: how each matrix is orthogonalised.
      execution: strategies, workspace and device.
      ns_dtype: dtype to orthogonalise in; None is the momentum's.
      update_dtype: dtype of the updates, at least; None is the gradient's.
      sign: orthogonalise the signs of the momentum mix.
      block_periodic: orthogonalise blocks in most steps.
      scaling: the scale by shape that follows, for block steps.
      dion2: orthogonalise the largest slices of the momentum alone; its beta is then their decay.
    """

    momentum: Momentum
    orthogonalizer: Orthogonalizer
    execution: ExecutionOptions
    ns_dtype: Any = None
    update_dtype: Any = None
    sign: bool = False
    block_periodic: BlockPeriodic | None = None
    scaling: Scaling = _UNSCALED
    dion2: Dion2 | None = None

    def __post_init__(self) -> None:
        check_float_dtype("ns_dtype", self.ns_dtype)
        check_instance("block_periodic", self.block_periodic, BlockPeriodic)
        check_instance("dion2", self.dion2, Dion2)
        if self.dion2 is not None:
            others = {"sign": self.sign, "block_periodic": self.block_periodic}
            self.dion2.check_options(self.momentum, **others)
        self.execution.check_orthogonalizer(self.orthogonalizer)

    @property
    def stage(self) -> Stage:
        """Its two functions."""
        return Stage(self.init, self.update)

    def init(self, params: Any, leaves: Sequence[BoundLeaf]) -> MuonState:
        """A momentum of zeros, placed where it is declared to be."""
        self.execution.check_patterns(leaves)
        if self.block_periodic is not None:
            self.block_periodic.check(leaves)
        check_manual_blocks_stay(params, leaves)
        check_mu_shardings_divide(params, leaves)
        state = self.momentum.init_state(params)
        where = [leaf.mu_sharding for leaf in leaves]
        if all(declared is None for declared in where):
            return state
        placed = to_memory_of(state.mu, place(to_device(state.mu), where))
        return state._replace(mu=momentum_to_host(placed, leaves))

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Sequence[BoundLeaf], **extra_args: Any
    ) -> tuple[Any, MuonState]:
        """Forms the momentum mix, orthogonalises it, and sends results to the parameters."""
        del extra_args
        check_belongs(state, updates)
        check_manual_blocks_stay(updates, leaves)
        mu = restructured_like(state.mu, updates)
        like = updates if params is None else restructured_like(params, updates)
        ready = self.execution.prepare(updates, mu, like, leaves, self.ns_dtype)
        count = jnp.asarray(optax.safe_increment(state.count))
        weights = self.momentum.weights(count)
        pairs = list(zip(jax.tree.leaves(ready.updates), jax.tree.leaves(mu), strict=True))

        def step(blocks: list[BlockedLeaf] | None, weights: Any, pairs: Any) -> tuple[Any, Any]:
            found = self._formed(ready, blocks, weights, pairs)
            treedef = jax.tree.structure(updates)
            results = place(treedef.unflatten([result for result, _ in found]), ready.moves)
            cast = functools.partial(_cast_update, self.update_dtype)
            results = jax.tree.map(cast, results, updates)
            if blocks is not None:
                results = self._scaled_blocks(results, leaves)
            new = cast_like(treedef.unflatten([kept for _, kept in found]), state.mu)
            return results, place(new, [leaf.mu_sharding for leaf in leaves])

        whole, periodic = functools.partial(step, None), self.block_periodic
        if periodic is None or not periodic.alternates(leaves):
            results, new = whole(weights, pairs)
        else:
            of_blocks = functools.partial(step, periodic.blocked(ready.leaves))
            is_whole = state.count % periodic.period == 0  # as the first step is
            meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(pairs)}
            choose = _select if any(map(mapped_axes, meshes)) else _either
            results, new = choose(is_whole, whole, of_blocks, weights, pairs)
        return results, MuonState(count, new)

    def _formed(
        self, ready: Prepared, blocks: list[BlockedLeaf] | None, weights: Any, pairs: Any
    ) -> list[Arrays]:
        """The orthogonalised mix of each leaf and its new buffer."""
        step = _SIGNS if self.sign else _MOMENTUM
        run = functools.partial(self.execution.run, orthogonalizer=self.orthogonalizer)
        if self.dion2 is not None:
            return self.dion2.formed(run, ready, weights.keep[0], pairs)
        if blocks is None:
            return run(ready.leaves, elementwise=step, scalars=weights, operands=pairs)
        rows = list(zip(blocks, pairs, strict=True))
        operands = [tuple(map(leaf.split, pair)) for leaf, pair in rows]
        of_blocks = [leaf.leaf for leaf in blocks]
        found = run(of_blocks, elementwise=step, scalars=weights, operands=operands)
        rows = zip(blocks, found, strict=True)
        return [tuple(map(leaf.merge, arrays)) for leaf, arrays in rows]

    def _scaled_blocks(self, results: Any, leaves: Sequence[BoundLeaf]) -> Any:
        """Directions of a block step, which the scale by shape takes for those of matrices."""
        assert self.block_periodic is not None
        arrays, treedef = jax.tree.flatten(results)
        found = []
        for x, leaf in zip(arrays, leaves, strict=True):
            values = self.block_periodic.factors(leaf, self.scaling)
            is_one = set(values) == {1.0}
            wide = wide_dtype(x.dtype)
            factor = None if is_one else factor_of_leaf(values, leaf.view, leaf.sharding, wide)
            found.append(scaled(x, factor))
        return treedef.unflatten(found)


def _either(predicate: jax.Array, true: Callable, false: Callable, *operands: Any) -> Any:
    """`jax.lax.cond`, which outside of `jit` would compile both branches anew in each step."""
    if isinstance(predicate, Tracer):
        return jax.lax.cond(predicate, true, false, *operands)
    return (true if predicate else false)(*operands)


def _select(predicate: jax.Array, true: Callable, false: Callable, *operands: Any) -> Any:
    """As `jax.lax.cond` under a `vmap` that maps its predicate: computes both.

    Over an Explicit mesh axis it raises ShardingTypeError, since it broadcasts the predicate to
    arrays of a replicated type (JAX 0.10.2).
    """
    choose = functools.partial(jnp.where, predicate)
    return jax.tree.map(choose, true(*operands), false(*operands))


# A step of momentum on (gradient, buffer): the mix goes on, the new buffer is kept.
_MOMENTUM = Elementwise(
    prepare=lambda w, g, m: combine(w.mix, m, g),
    keep=lambda w, g, m: (combine(w.keep, m, g),),
)
_SIGNS = dataclasses.replace(_MOMENTUM, prepare=lambda w, g, m: jnp.sign(combine(w.mix, m, g)))


def _cast_update(update_dtype: Any, x: jax.Array, grad: jax.Array) -> jax.Array:
    """`x` in the gradient's dtype, or in `update_dtype` at least."""
    return x.astype(grad.dtype if update_dtype is None else wide_dtype(update_dtype, grad.dtype))
