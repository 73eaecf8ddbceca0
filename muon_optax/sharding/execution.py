"""From leaves to results: reads how they are sharded, plans, and runs the plan."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer

from muon_optax._internal.checks import check_choice, check_static
from muon_optax._internal.dtypes import compute_dtype
from muon_optax._internal.tree_paths import Segments
from muon_optax._internal.warnings import warn_about
from muon_optax.partition import check_patterns, first_match
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.placement import place, to_types_of
from muon_optax.sharding.planning.buckets import Bucket, WorkSlice
from muon_optax.sharding.planning.device_models import DeviceModel, device_model
from muon_optax.sharding.planning.planner import plan_leaves
from muon_optax.sharding.runtime.buffers import Arrays, Elementwise
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.runtime.pipeline import run_buckets
from muon_optax.sharding.specs import LeafSharding, read_sharding
from muon_optax.sharding.strategies import STRATEGIES
from muon_optax.sharding.trace_context import mapped_axes
from muon_optax.views.matrix_view import BoundView

__all__ = ["ExecutionOptions", "Prepared", "StrategyRules"]

StrategyRules = str | Sequence[tuple[str, str]]


class Prepared(NamedTuple):
    """An update's leaves where they are worked on.

    Attributes:
      updates: the gradients, sharded like the momentum.
      leaves: the planner's records, in flattening order.
      result_shardings: how each leaf's parameter, and so its result, is sharded; None where blocks
        stay as they are.
    """

    updates: Any
    leaves: list[BoundLeaf]
    result_shardings: list[LeafSharding | None]

    @property
    def moves(self) -> list[LeafSharding | None]:
        """Where results still have to be moved to; None where they are sharded as they should."""
        return [
            result if result and result.type_key != leaf.sharding.type_key else None
            for result, leaf in zip(self.result_shardings, self.leaves, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class ExecutionOptions:
    """How an update is planned and run, as the user asks for it.

    Attributes:
      strategy: 'auto', a strategy, or (pattern, strategy) pairs, the first match winning.
      max_workspace_bytes: bound of the workspace of one round of collectives on a device.
      device: a name or a model, for the cost model.
    """

    strategy: StrategyRules = "auto"
    max_workspace_bytes: int | None = None
    device: str | DeviceModel = "auto"

    def __post_init__(self) -> None:
        for name in self._asked:
            check_choice("strategy", name, ("auto", *STRATEGIES))
        limit = self.max_workspace_bytes
        check_static("max_workspace_bytes", limit)
        is_count = isinstance(limit, Integral) and not isinstance(limit, bool) and limit > 0
        if limit is not None and not is_count:
            raise ValueError(
                f"max_workspace_bytes must be a positive integer or None, got {limit!r}"
            )
        device_model(self.device, "cpu")  # raises for an unknown name; JAX isn't asked for devices

    @property
    def _asked(self) -> list[str]:
        """Every strategy that is asked for, whatever its pattern."""
        return _strategy_names(self.strategy)

    def check_orthogonalizer(self, orthogonalizer: Orthogonalizer) -> None:
        """Raises for a strategy that can't be had with a function of the user's."""
        if orthogonalizer.newton_schulz is not None:
            return
        apart = {name for name, s in STRATEGIES.items() if s.needs_newton_schulz}
        if asked := sorted(apart.intersection(self._asked)):
            allowed = ("auto", *(name for name in STRATEGIES if name not in apart))
            raise ValueError(
                f"strategy {asked[0]!r} multiplies slices of matrices by the Gram iteration's "
                f"result, but orthogonalizer={orthogonalizer.function!r} needs whole matrices; "
                f"allowed with a function are {allowed}"
            )

    def check_patterns(self, leaves: Sequence[BoundLeaf]) -> None:
        """Raises for patterns of `strategy` that match no leaf, as a mistyped name does."""
        if not isinstance(self.strategy, str):
            patterns = (pattern for pattern, _ in self.strategy)
            check_patterns("strategy", patterns, [leaf.segments for leaf in leaves])

    def prepare(
        self, updates: Any, mu: Any, like: Any, leaves: Sequence[BoundLeaf], ns_dtype: Any
    ) -> Prepared:
        """Moves gradients to where the momentum is, and plans with how they are sharded there.

        Args:
          updates: the gradients.
          mu: the momentum, in the containers of `updates`.
          like: the tree that the leaves were bound from, in these too: parameters, or the
            gradients.
          leaves: one record for each leaf.
          ns_dtype: as given to `muon`.

        Returns:
          The prepared leaves, which can be planned and run.
        """
        moved = to_types_of(mu, place(updates, [leaf.mu_sharding for leaf in leaves]))
        mapped = functools.cache(mapped_axes)  # for now: another call may be in another vmap
        rows = zip(leaves, jax.tree.leaves(moved), jax.tree.leaves(like), strict=True)
        shardings = [_working_sharding(*row, mapped) for row in rows]
        dtypes = [compute_dtype(ns_dtype, m.dtype) for m in jax.tree.leaves(mu)]
        is_manual = bool(jax.sharding.get_abstract_mesh().manual_axes)
        # The blocks of a shard_map stay on their devices.
        result_shardings = [None if is_manual else leaf.sharding for leaf in leaves]
        return Prepared(
            moved, self.planned(leaves, dtypes, shardings, result_shardings), result_shardings
        )

    def planned(
        self,
        leaves: Sequence[BoundLeaf],
        dtypes: Sequence[Any],
        shardings: Sequence[LeafSharding] | None = None,
        result_shardings: Sequence[LeafSharding | None] | None = None,
    ) -> list[BoundLeaf]:
        """The records that the planner takes.

        Args:
          leaves: as they are bound.
          dtypes: a dtype for each, of collectives and matmuls.
          shardings: how each is sharded where it is worked on; None is as it is bound.
          result_shardings: how each result will be sharded, if otherwise.

        Returns:
          The records, with all that the planner needs.
        """
        shardings = shardings or [leaf.sharding for leaf in leaves]
        result_shardings = result_shardings or [None] * len(leaves)
        return [
            dataclasses.replace(
                leaf,
                sharding=sharding,
                dtype=jnp.dtype(dtype).name,
                strategy=self._strategy_of(leaf.segments),
                result_sharding=result and _result_sharding(leaf.view, sharding, result),
                param_sharding=None,
                mu_sharding=None,
            )
            for leaf, dtype, sharding, result in zip(
                leaves, dtypes, shardings, result_shardings, strict=True
            )
        ]

    def plan(
        self, leaves: Sequence[BoundLeaf], orthogonalizer: Orthogonalizer
    ) -> tuple[DeviceModel, tuple[Bucket, ...]]:
        """The device model, and the buckets of the leaves."""
        kinds = {_device_kind(leaf.sharding) for leaf in leaves} - {None}
        device = device_model(self.device, next(iter(kinds), None))
        limit = self.max_workspace_bytes
        return device, plan_leaves(
            tuple(leaves),
            orthogonalizer.newton_schulz,
            device,
            limit,
            adaptive=orthogonalizer.adaptive,
        )

    def exceeded_by(self, work_slice: WorkSlice, leaf: BoundLeaf) -> int | None:
        """Bytes of workspace that one matrix at a time takes, where that exceeds the bound."""
        matrix_bytes = leaf.view.fan_in * leaf.view.fan_out * jnp.dtype(leaf.dtype).itemsize
        least = work_slice.strategy.least_workspace(matrix_bytes)
        limit = self.max_workspace_bytes
        return least if limit is not None and least > limit else None

    def run(
        self,
        leaves: Sequence[BoundLeaf],
        orthogonalizer: Orthogonalizer,
        elementwise: Elementwise,
        scalars: Any,
        operands: Sequence[Arrays],
    ) -> list[Arrays]:
        """The arrays that replace the operands of each leaf; see `run_buckets`."""
        warn_about(
            "on an Auto mesh the sharding of traced arrays can't be seen, so the partitioner "
            "places collectives inside every Newton-Schulz step; give param_shardings to avoid "
            "that",
            [leaf for leaf in leaves if not leaf.sharding.is_known],
        )
        device, buckets = self.plan(leaves, orthogonalizer)
        self._warn_of_workspace(leaves, buckets)
        return run_buckets(
            buckets,
            leaves,
            dataclasses.replace(orthogonalizer, batch_elements=device.batch_elements),
            elementwise,
            scalars,
            operands,
            is_ordered=device.overlaps,
        )

    def _warn_of_workspace(self, leaves: Sequence[BoundLeaf], buckets: Sequence[Bucket]) -> None:
        found = {
            i: least
            for bucket in buckets
            for work_slice in bucket.slices
            if (least := self.exceeded_by(work_slice, bucket.leaf)) is not None
            for i in bucket.members
        }
        if found:
            warn_about(
                f"max_workspace_bytes={self.max_workspace_bytes:,} is exceeded: handled one at a "
                f"time, these matrices take up to {max(found.values()):,} bytes on a device",
                [leaves[i] for i in found],
            )

    def _strategy_of(self, path: Segments) -> str:
        if isinstance(self.strategy, str):
            return self.strategy
        return first_match(self.strategy, path) or "auto"


def _strategy_names(strategy: Any) -> list[str]:
    if isinstance(strategy, str):
        return [strategy]
    if not isinstance(strategy, Sequence) or not all(map(_is_pair_of_strings, strategy)):
        raise TypeError(
            f"strategy must be a name or a sequence of (pattern, name) pairs, got {strategy!r}"
        )
    return [name for _, name in strategy]


def _is_pair_of_strings(x: Any) -> bool:
    return isinstance(x, tuple | list) and [type(s) for s in x] == [str, str]


def _device_kind(sharding: LeafSharding) -> str | None:
    """JAX's name of the devices of a mesh, where the mesh knows."""
    device = getattr(sharding.mesh, "abstract_device", None)
    return getattr(device, "device_kind", None)


def _result_sharding(
    view: BoundView, sharding: LeafSharding, result: LeafSharding
) -> LeafSharding | None:
    """How results are sharded that strategies send to where the parameter is; else None.

    Every strategy can where the parameter's slices are made of slices of the momentum that follow
    one another: where it is sharded over the first of the mesh axes of each dim of the matrices.
    Elsewhere results come back as the momentum is sharded, and are moved after.

    Axes of size 1 stay as they are, wherever the parameter has them: inside a shard_map, results
    vary over them.
    """
    if not (sharding.known and result.known) or sharding.mesh != result.mesh:
        return None
    dims = list(zip(sharding.spec, result.spec, strict=True))
    same_batch = all(dims[a][0] == dims[a][1] for a in view.batch_axes)
    are_joined = all(own[: len(end)] == end for own, end in dims)
    gathered = tuple(a for own, end in dims for a in own[len(end) :])
    return sharding.without(gathered) if gathered and same_batch and are_joined else None


def _working_sharding(
    leaf: BoundLeaf, x: Any, like: Any, mapped: Callable[[Any], frozenset[str]]
) -> LeafSharding:
    """How a leaf is sharded where it is worked on: mostly as it was read when it was bound."""
    if leaf.mu_sharding is not None:
        return read_sharding(x, leaf.mu_sharding, mapped)
    if _sharding_of(x) == _sharding_of(like):
        return leaf.sharding
    return read_sharding(x, leaf.param_sharding, mapped)


def _sharding_of(x: Any) -> Any:
    """All that can be read off an array: its type's sharding if traced, else its own."""
    return jax.typeof(x).sharding if isinstance(x, Tracer) else getattr(x, "sharding", None)
