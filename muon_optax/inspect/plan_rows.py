"""The work of an update, as rows: read from a trace like its own, and planned by the same code."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax

from muon_optax._internal.tree_paths import leaves_with_segments, path_name, raise_all
from muon_optax.config import MuonConfig
from muon_optax.inspect.plan_moves import Move, matrix_sizes, moves_of, spec_text
from muon_optax.inspect.plan_owners import owners_of, owners_text
from muon_optax.inspect.tables import quantity
from muon_optax.partition import Assignment, assign, check_rules
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.declared import Axes, bare_spec, declared_specs, mesh_of
from muon_optax.sharding.execution import Prepared
from muon_optax.sharding.options import Shardings
from muon_optax.sharding.partitioner import partitioner_cost
from muon_optax.sharding.placement import (
    check_manual_blocks_stay,
    check_mu_shardings_divide,
    place,
    to_device,
)
from muon_optax.sharding.planning.buckets import WorkSlice
from muon_optax.sharding.planning.costs import Cost
from muon_optax.sharding.planning.device_models import DeviceModel
from muon_optax.sharding.reductions import summed
from muon_optax.sharding.runtime.orthogonalizer import loop_turns
from muon_optax.sharding.specs import LeafSharding, read_sharding
from muon_optax.transforms.binding import bound_leaves

__all__ = ["PlanRow", "Planned", "plan_rows"]


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """Matrices that are handled together.

    Attributes:
      leaves: paths of the leaves they come from.
      count: number of matrices, as one device counts them.
      matrix: sizes of the leaves' matrix axes, in the leaf's own order.
      spec: how these axes are sharded.
      dtype: of collectives and matmuls.
      strategy: how the matrices are brought together; 'partitioner' where that is left to XLA, and
        'reshard' where gradients or results move between the shardings of parameters and momentum.
      share_axes: replicating mesh axes that divide the work.
      chunks: number of parts they are cut into, of which each is sent at once.
      bytes: bytes that a device receives.
      flops: FLOPs of the device that does most of them.
      added_flops: their part of the FLOPs of the device that does most of all.
      seconds: on the device model.
      reason: why this strategy.
      steps: in how many of `period` updates this is done: fewer with `block_periodic`, where steps
        on blocks and steps on whole matrices have rows of their own.
      period: see `steps`.
      round: a number that it has in common with rows whose matrices are sent at once, in one round
        of owners; the first of them counts the bytes that all share. None where that isn't so.
      owners: where there are fewer matrices than owners, those of each, numbered along
        `share_axes` and then along the mesh axes in `spec`, in the mesh's order; of a group, the
        first device.
      group_size: how many devices own a matrix together, each of them a part of its long side.
      repeats: how many replicas work on the same matrix, where there are fewer matrices than
        replicas; each sends a part of the result to all.
    """

    leaves: tuple[str, ...]
    count: int
    matrix: tuple[int, ...]
    spec: str
    dtype: str
    strategy: str
    share_axes: tuple[str, ...]
    chunks: int
    bytes: int
    flops: int
    added_flops: int
    seconds: float
    reason: str
    steps: int = 1
    period: int = 1
    round: int | None = None
    owners: tuple[int, ...] = ()
    group_size: int = 1
    repeats: int = 1

    @property
    def share(self) -> Fraction:
        """The share of updates in which this is done."""
        return Fraction(self.steps, self.period)


class Planned(NamedTuple):
    """The plan for the leaves of one `muon`.

    Attributes:
      model: the device model.
      rows: costliest matrices first.
      prepared: the leaves, as a trace of an update prepares them.
    """

    model: DeviceModel
    rows: tuple[PlanRow, ...]
    prepared: Prepared

    @property
    def bytes(self) -> Fraction:
        """Bytes that a device receives in an update, on average."""
        return sum((row.bytes * row.share for row in self.rows), Fraction())


def plan_rows(config: MuonConfig, params: Any) -> Planned:
    """The plan of a traced update of these parameters.

    Args:
      config: the optimizer's configuration.
      params: arrays or shape structs; gradients are taken to be sharded like them.

    Returns:
      The plan. With `block_periodic` the rows of whole steps come before those of block
      steps; rows that are in both come once.

    Raises:
      ValueError, TypeError: as `init` and `update` do.
    """
    assignment = assign(params, config.views, config.partition)
    check_rules(config.partition, params)
    ours, _ = assignment.muon_part(params)
    prepared = _traced(config, params, assignment)
    arrays = jax.tree.leaves(ours)
    hidden = _hidden(arrays, prepared.leaves)
    dion2, periodic = config.direction.dion2, config.direction.block_periodic
    planned_as = dion2.planned if dion2 is not None else list
    model, whole = _rows(config, arrays, prepared, hidden, planned_as)
    if periodic is None or not periodic.alternates(prepared.leaves):
        return Planned(model, tuple(whole), prepared)
    # Blocks go back as they came, and only then to where the parameters are.
    apart = [
        b.whole if b.is_whole else dataclasses.replace(b.whole, result_sharding=None)
        for b in periodic.blocked(prepared.leaves)
    ]
    _, of_blocks = _rows(
        config,
        arrays,
        prepared._replace(leaves=apart),
        hidden,
        lambda leaves: [b.leaf for b in periodic.blocked(leaves)],
    )
    return Planned(model, _alternating(whole, of_blocks, periodic.period), prepared)


def _rows(
    config: MuonConfig,
    arrays: Sequence[Any],
    prepared: Prepared,
    hidden: Mapping[int, LeafSharding],
    planned_as: Callable[[Sequence[BoundLeaf]], Sequence[BoundLeaf]],
) -> tuple[DeviceModel, list[PlanRow]]:
    """The rows of one kind of step.

    Args:
      config: the optimizer's configuration.
      arrays: Muon's leaves.
      prepared: the leaves, as a trace prepares them.
      hidden: how leaves are sharded whose sharding no trace can see.
      planned_as: the leaves that are planned for these.

    Returns:
      The device model and the rows.
    """
    leaves = prepared.leaves
    seen = planned_as([leaf for i, leaf in enumerate(leaves) if i not in hidden])
    declared = [dataclasses.replace(leaves[i], sharding=x) for i, x in hidden.items()]
    model, planned = _planned_rows(config, seen, _notes(arrays, prepared))
    rows = [row for row, _ in planned]
    rows += _partitioner_rows(config, planned_as(declared), model)
    moves = moves_of(arrays, prepared, config.direction.dion2)
    rows += [_move_row(move, moved, model) for move, moved in moves.items()]
    return model, rows


def _alternating(
    whole: Sequence[PlanRow], of_blocks: Sequence[PlanRow], period: int
) -> tuple[PlanRow, ...]:
    """The rows of whole steps, one in `period`, and of block steps; those of both come once."""
    both = [row for row in whole if row in of_blocks]
    once = [dataclasses.replace(row, steps=1, period=period) for row in whole if row not in both]
    rest = [
        dataclasses.replace(row, steps=period - 1, period=period)
        for row in of_blocks
        if row not in both
    ]
    return (*once, *rest, *both)


def _traced(config: MuonConfig, params: Any, assignment: Assignment) -> Prepared:
    """The leaves as an update prepares them, from tracers: concrete arrays would show more."""
    treedef = jax.tree.structure(params)
    found: list[Prepared] = []
    errors: list[Exception] = []

    def trace(arrays):
        try:
            found.append(_prepared(config, treedef.unflatten(arrays), assignment))
        except (TypeError, ValueError) as error:  # JAX would add its frames to the message
            errors.append(error)
        return ()

    jax.eval_shape(trace, jax.tree.leaves(params))
    for error in errors:
        raise error
    return found[0]


def _prepared(config: MuonConfig, params: Any, assignment: Assignment) -> Prepared:
    """The leaves as an update of traced parameters prepares them; gradients are like these."""
    where = config.declared.of(params, config.views)
    ours, views = assignment.muon_part(to_device(summed(params)))
    _check_meshes(ours, where)
    leaves = bound_leaves(ours, views, where)
    direction = config.direction
    direction.execution.check_patterns(leaves)
    if direction.block_periodic is not None:
        direction.block_periodic.check(leaves)
    check_manual_blocks_stay(ours, leaves)
    check_mu_shardings_divide(ours, leaves)
    zeros = jax.tree.map(direction.momentum.init, ours)
    mu = place(zeros, [leaf.mu_sharding for leaf in leaves])
    return direction.execution.prepare(ours, mu, ours, leaves, direction.ns_dtype)


def _check_meshes(tree: Any, where: Shardings) -> None:
    """A spec whose axes have no sizes would be planned as if the leaf were replicated."""
    leaves = leaves_with_segments(tree)
    problems = [
        f"{path_name(path)}: got {spec}"
        for declared in where
        for (path, leaf), spec in zip(leaves, declared_specs(declared, tree), strict=True)
        if spec is not None and any(bare_spec(spec)) and mesh_of(leaf, spec) is None
    ]
    raise_all(
        list(dict.fromkeys(problems)),
        "a PartitionSpec needs a mesh; give a NamedSharding, or plan within jax.set_mesh(mesh):",
    )


def _hidden(arrays: Sequence[Any], leaves: Sequence[BoundLeaf]) -> dict[int, LeafSharding]:
    """How leaves are sharded whose sharding no trace can see, where the arrays at hand say it."""
    unknown = [i for i, leaf in enumerate(leaves) if not leaf.sharding.is_known]
    found = {i: read_sharding(summed(arrays[i])) for i in unknown}
    return {i: sharding for i, sharding in found.items() if sharding.is_known}


def _notes(arrays: Sequence[Any], prepared: Prepared) -> dict[str, str]:
    """Notes on a leaf for the reader of a plan, by its path."""
    notes = {}
    for x, leaf, result in zip(arrays, prepared.leaves, prepared.result_shardings, strict=True):
        if result is None or not leaf.sharding.is_known:
            continue
        if not result.is_known:
            notes[leaf.path] = (
                "results stay sharded like the momentum, as traced arrays hide how parameters are: "
                "give param_shardings"
            )
        elif unseen := _unseen_axes(read_sharding(summed(x)), result):
            notes[leaf.path] = (
                f"the partitioner adds collectives over the Auto axes {', '.join(unseen)}, which "
                "traced arrays hide: give param_shardings"
            )
    return notes


def _unseen_axes(actual: LeafSharding, seen: LeafSharding) -> Axes:
    """Mesh axes that shard a leaf, though the trace can't see it."""
    dims = range(len(actual.shape))
    return tuple(a for a in actual.axes_of(dims) if a not in seen.known)


def _planned_rows(
    config: MuonConfig, leaves: Sequence[BoundLeaf], notes: Mapping[str, str]
) -> tuple[DeviceModel, list[tuple[PlanRow, BoundLeaf]]]:
    """The device model, and the rows of leaves, with the leaf that stands for each row's."""
    model, buckets = config.direction.execution.plan(leaves, config.direction.orthogonalizer)
    rows = []
    for bucket in buckets:
        members = [leaves[i] for i in bucket.members]
        for work_slice in bucket.slices:
            said = {notes[leaf.path]: None for leaf in members if leaf.path in notes}
            least = config.direction.execution.exceeded_by(work_slice, bucket.leaf)
            if least is not None:
                said[f"more than max_workspace_bytes: {least:,} B for one at a time"] = None
            if bucket.leaf.view.tiles != (1, 1):
                blocks = " x ".join(map(str, bucket.leaf.view.tiles))
                said[f"each is cut in {blocks} blocks, which aren't whole on a device"] = None
            if bucket.leaf.view.nonzero:
                said["slices that aren't chosen are sent as zeros"] = None
            owners = owners_of(work_slice, bucket.leaf)
            reasons = [work_slice.reason, *said]
            if work_slice.repeats > 1:
                reasons.insert(1, f"each on {work_slice.repeats} replicas")
            if work_slice.round is not None:
                reasons.insert(1, owners_text(owners, work_slice.strategy.group_size))
            rows.append((_row(work_slice, members, owners, "; ".join(reasons)), bucket.leaf))
    return model, rows


def _row(
    work_slice: WorkSlice, leaves: Sequence[BoundLeaf], owners: tuple[int, ...], reason: str
) -> PlanRow:
    first, cost = leaves[0], work_slice.cost
    return PlanRow(
        leaves=tuple(leaf.path for leaf in leaves),
        count=work_slice.count,
        matrix=matrix_sizes(first),
        spec=spec_text(first.sharding, first.view.stack_axes),
        dtype=first.dtype,
        strategy=work_slice.strategy.name,
        share_axes=work_slice.replica_axes,
        chunks=len(list(work_slice.chunks)),
        bytes=cost.bytes,
        flops=cost.flops,
        added_flops=work_slice.added,
        seconds=cost.seconds,
        reason=reason,
        round=work_slice.round,
        owners=owners,
        group_size=work_slice.strategy.group_size,
        repeats=work_slice.repeats,
    )


def _partitioner_rows(
    config: MuonConfig, declared: Sequence[BoundLeaf], model: DeviceModel
) -> Iterator[PlanRow]:
    """Rows of leaves whose sharding the trace can't see, and those that declaring it would give."""
    iteration = config.direction.orthogonalizer.newton_schulz
    for row, leaf in _planned_rows(config, declared, {})[1]:
        elements = leaf.view.fan_in * leaf.view.fan_out
        turns = loop_turns(leaf.view.batch, elements, model.batch_elements)
        cost = partitioner_cost(leaf, row.count, turns, iteration, model)
        yield dataclasses.replace(
            row,
            strategy="partitioner",
            share_axes=(),
            chunks=1,
            bytes=cost.bytes,
            flops=cost.flops,
            added_flops=cost.flops,
            seconds=cost.seconds,
            reason=_hidden_reason(cost, row),
        )


def _hidden_reason(cost: Cost, declared: PlanRow) -> str:
    does = "the partitioner adds collectives to every step" if cost.bytes else "all devices do all"
    return (
        f"traced arrays hide their sharding on Auto axes, so {does}; with param_shardings: "
        f"{declared.strategy}, {quantity(declared.bytes, 'B')}"
    )


def _move_row(move: Move, leaves: Sequence[BoundLeaf], model: DeviceModel) -> PlanRow:
    mesh = leaves[0].sharding.mesh
    sizes = {} if mesh is None else dict(mesh.shape)
    received = len(leaves) * move.bytes
    return PlanRow(
        leaves=tuple(leaf.path for leaf in leaves),
        count=sum(leaf.count for leaf in leaves),
        matrix=move.matrix,
        spec=move.spec,
        dtype=move.dtype,
        strategy="reshard",
        share_axes=(),
        chunks=1,
        bytes=received,
        flops=0,
        added_flops=0,
        seconds=received / model.bandwidth_over(move.axes, sizes) + model.latency,
        reason=move.reason,
    )
