"""From leaves to results: reads how they are sharded, plans, and runs the plan."""

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon_optax.checks import check_choice, check_static
from muon_optax.dtypes import compute_dtype
from muon_optax.matrix_view import BoundView
from muon_optax.notices import warn_about
from muon_optax.rules import first_match, unmatched
from muon_optax.sharding.buckets import Bucket, Leaf, Share
from muon_optax.sharding.buffers import Arrays, Elementwise
from muon_optax.sharding.cost import DeviceModel, device_model
from muon_optax.sharding.local import Solver
from muon_optax.sharding.options import Shardings
from muon_optax.sharding.pipeline import run_buckets
from muon_optax.sharding.placement import homes_of, place, to_types_of
from muon_optax.sharding.planner import STRATEGIES, least_workspace, plan_leaves
from muon_optax.sharding.specs import Layout, read_layouts
from muon_optax.tree_paths import Segments, leaves_with_segments, path_name, raise_together

__all__ = ["Distribution", "Prepared", "StrategyRules"]

StrategyRules = str | Sequence[tuple[str, str]]


class Prepared(NamedTuple):
    """An update's leaves where they are worked on.

    Attributes:
      updates: the gradients, sharded like the momentum.
      leaves: what the planner takes, in flattening order.
      homes: how each leaf's parameter, and so its result, is sharded; None where blocks stay as
        they are.
    """

    updates: Any
    leaves: list[Leaf]
    homes: list[Layout | None]

    @property
    def moves(self) -> list[Layout | None]:
        """Where results still have to be moved to; None where they are sharded as they should."""
        return [
            home if home and home.type_key != leaf.layout.type_key else None
            for home, leaf in zip(self.homes, self.leaves, strict=True)
        ]


@dataclasses.dataclass(frozen=True)
class Distribution:
    """How the work is spread over devices, as the user asks for it.

    Attributes:
      strategy: 'auto', a strategy, or (pattern, strategy) pairs, the first match winning.
      max_workspace_bytes: bound of the workspace of one exchange on a device.
      device: a name or a model, for the cost model.
    """

    strategy: StrategyRules = "auto"
    max_workspace_bytes: int | None = None
    device: str | DeviceModel = "auto"

    def __post_init__(self) -> None:
        for name in _strategy_names(self.strategy):
            check_choice("strategy", name, ("auto", *STRATEGIES))
        limit = self.max_workspace_bytes
        check_static("max_workspace_bytes", limit)
        is_count = isinstance(limit, Integral) and not isinstance(limit, bool) and limit > 0
        if limit is not None and not is_count:
            raise ValueError(
                f"max_workspace_bytes must be a positive integer or None, got {limit!r}"
            )
        device_model(self.device, "cpu")  # raises for an unknown name; JAX isn't asked for devices

    def check_patterns(self, tree: Any) -> None:
        """Raises for patterns of `strategy` that match no leaf, as a mistyped name does."""
        if isinstance(self.strategy, str):
            return
        paths = [path for path, _ in leaves_with_segments(tree)]
        if not paths:  # an empty tree, or the placeholder of optax.tree_map_params
            return
        unused = unmatched((pattern for pattern, _ in self.strategy), paths)
        raise_together(
            list(map(repr, unused)), "these patterns of strategy match no leaf of Muon's:"
        )

    def prepare(
        self,
        updates: Any,
        mu: Any,
        like: Any,
        views: Sequence[BoundView],
        ns_dtype: Any,
        shardings: Shardings,
    ) -> Prepared:
        """Moves gradients to where the momentum is, and reads how all is sharded.

        Args:
          updates: the gradients.
          mu: the momentum, in the containers of `updates`.
          like: the parameters, in these too, or the gradients where nothing else is known.
          views: a view a leaf.
          ns_dtype: as given to `muon`.
          shardings: what is declared of parameters and momentum.

        Returns:
          What can be planned and run.
        """
        homes = homes_of(like, shardings.params)
        moved = to_types_of(mu, place(updates, shardings.momentum))
        dtypes = [compute_dtype(ns_dtype, m.dtype) for m in jax.tree.leaves(mu)]
        leaves = self.leaves(moved, views, dtypes, shardings.working, homes)
        return Prepared(moved, leaves, homes)

    def leaves(
        self,
        tree: Any,
        views: Sequence[BoundView],
        dtypes: Sequence[Any],
        declared: Any,
        homes: Sequence[Layout | None] | None = None,
    ) -> list[Leaf]:
        """What the planner takes.

        Args:
          tree: the leaves, as arrays or shape structs.
          views: a view a leaf.
          dtypes: a dtype a leaf, to exchange and compute in.
          declared: how they are sharded, as in `declared_specs`.
          homes: a layout a leaf, how the results will be sharded, if otherwise.

        Returns:
          One `Leaf` for each leaf of `tree`.
        """
        paths = [path for path, _ in leaves_with_segments(tree)]
        layouts = read_layouts(tree, declared)
        ends = [
            home and _whole_end(view, layout, home)
            for view, layout, home in zip(views, layouts, homes or [None] * len(views), strict=True)
        ]
        names = [jnp.dtype(dtype).name for dtype in dtypes]
        asked = [self._strategy_of(path) for path in paths]
        rows = zip(map(path_name, paths), views, layouts, names, asked, ends, strict=True)
        return [Leaf(*row) for row in rows]

    def plan(
        self, leaves: Sequence[Leaf], solver: Solver
    ) -> tuple[DeviceModel, tuple[Bucket, ...]]:
        """The device model, and the buckets of the leaves."""
        kinds = {_device_kind(leaf.layout) for leaf in leaves} - {None}
        device = device_model(self.device, next(iter(kinds), None))
        limit = self.max_workspace_bytes
        return device, plan_leaves(tuple(leaves), solver.newton_schulz, device, limit)

    def exceeded_by(self, share: Share, leaf: Leaf) -> int | None:
        """Bytes of workspace that one matrix at a time takes, where that exceeds the bound."""
        least = least_workspace(share.strategy, leaf)
        limit = self.max_workspace_bytes
        return least if limit is not None and least > limit else None

    def run(
        self,
        leaves: Sequence[Leaf],
        solver: Solver,
        elementwise: Elementwise,
        scalars: Any,
        operands: Sequence[Arrays],
    ) -> list[Arrays]:
        """What replaces the operands of each leaf; see `run_buckets`."""
        warn_about(
            "on an Auto mesh the layout of traced arrays can't be seen, so the partitioner places "
            "exchanges inside every Newton-Schulz step; give param_shardings to avoid that",
            [leaf for leaf in leaves if not leaf.layout.is_known],
        )
        device, buckets = self.plan(leaves, solver)
        self._warn_of_workspace(leaves, buckets)
        return run_buckets(
            buckets, leaves, solver, elementwise, scalars, operands, in_order=device.overlaps
        )

    def _warn_of_workspace(self, leaves: Sequence[Leaf], buckets: Sequence[Bucket]) -> None:
        found = {
            i: least
            for bucket in buckets
            for share in bucket.shares
            if (least := self.exceeded_by(share, bucket.leaf)) is not None
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
    """Every strategy that is asked for, whatever its pattern."""
    if isinstance(strategy, str):
        return [strategy]
    if not isinstance(strategy, Sequence) or not all(map(_is_pair_of_strings, strategy)):
        raise TypeError(
            f"strategy must be a name or a sequence of (pattern, name) pairs, got {strategy!r}"
        )
    return [name for _, name in strategy]


def _is_pair_of_strings(x: Any) -> bool:
    return isinstance(x, tuple | list) and [type(s) for s in x] == [str, str]


def _device_kind(layout: Layout) -> str | None:
    """What JAX calls the devices of a mesh, where the mesh knows."""
    device = getattr(layout.mesh, "abstract_device", None)
    return getattr(device, "device_kind", None)


def _whole_end(view: BoundView, layout: Layout, home: Layout) -> Layout | None:
    """How results lie that go whole to every device that had a slice; None if they don't.

    Axes of size 1 stay as they are, wherever the home has them: inside a shard_map, results vary
    over them.
    """
    if not (layout.known and home.known) or layout.mesh != home.mesh:
        return None
    same_batch = all(home.spec[a] == layout.spec[a] for a in view.batch_axes)
    cut_by = layout.axes_of(view.stack_axes)
    goes_whole = bool(cut_by) and same_batch and not home.axes_of(view.stack_axes)
    return layout.without(cut_by) if goes_whole else None
