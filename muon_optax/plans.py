"""The plan of an update, to be read before the run: buckets, strategies, bytes and FLOPs."""

import dataclasses
from typing import Any

import jax

from muon_optax.checks import check_float_dtype
from muon_optax.dtypes import compute_dtype
from muon_optax.partition import Partition, Views, assign, check_rules
from muon_optax.polar import Coefficients, Method, Preconditioning
from muon_optax.sharding.buckets import Leaf, Share
from muon_optax.sharding.cost import DeviceModel, Strategy
from muon_optax.sharding.distribute import Distribution, StrategyRules
from muon_optax.sharding.local import Orthogonalizer, make_solver
from muon_optax.sharding.specs import bare_spec, declared_specs, mesh_of
from muon_optax.tables import format_table, rich_table
from muon_optax.tree_paths import leaves_with_segments, path_name, raise_together

__all__ = ["Plan", "PlanRow", "plan", "quantity"]


@dataclasses.dataclass(frozen=True)
class PlanRow:
    """Matrices that are handled together.

    Attributes:
      leaves: paths of the leaves they come from.
      count: number of matrices, as one device counts them.
      matrix: sizes of the leaves' matrix axes, in the leaf's own order.
      spec: how these axes lie.
      dtype: of exchange and products.
      strategy: how they are brought together.
      share_axes: replicating mesh axes that divide the work.
      chunks: number of exchanges they are cut into.
      bytes: bytes that a device receives.
      flops: FLOPs of the device that does most of them.
      added_flops: what they add to the device that does most of all.
      seconds: on the device model.
      reason: why this strategy.
    """

    leaves: tuple[str, ...]
    count: int
    matrix: tuple[int, ...]
    spec: str
    dtype: str
    strategy: Strategy
    share_axes: tuple[str, ...]
    chunks: int
    bytes: int
    flops: int
    added_flops: int
    seconds: float
    reason: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an update does on each device; `print` it, give it to rich, or read `rows`.

    Attributes:
      rows: costliest matrices first.
      device: name of the device model.

    Example:
      >>> found = plan({"w": jax.ShapeDtypeStruct((64, 256), "float32")}, device="h100")
      >>> [(row.leaves, row.strategy, row.reason) for row in found.rows]
      [(('w',), 'local', 'matrices are whole here')]
      >>> found.bytes, found.flops == found.to_dict()["totals"]["flops"]
      (0, True)
    """

    rows: tuple[PlanRow, ...]
    device: str

    @property
    def bytes(self) -> int:
        """Bytes that a device receives in an update."""
        return sum(row.bytes for row in self.rows)

    @property
    def flops(self) -> int:
        """FLOPs of the busiest device in an update."""
        return sum(row.added_flops for row in self.rows)

    @property
    def seconds(self) -> float:
        """Time of an update on the device model, with nothing overlapped."""
        return sum(row.seconds for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Rows and totals as plain data for JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        totals = {"bytes": self.bytes, "flops": self.flops, "seconds": self.seconds}
        return {"device": self.device, "rows": rows, "totals": totals}

    def __str__(self) -> str:
        return format_table(_HEADER, [_cells(row) for row in self.rows]) + "\n" + self._summary()

    def __rich__(self) -> Any:
        return rich_table("Plan", _HEADER, [_cells(row) for row in self.rows], self._summary())

    def _summary(self) -> str:
        return (
            f"a device receives {quantity(self.bytes, 'B')} and the busiest computes "
            f"{quantity(self.flops, 'FLOP')}: {quantity(self.seconds, 's')} on {self.device}"
        )


_HEADER = ("leaves", "matrices", "spec", "strategy", "bytes", "FLOPs", "time", "reason")


def _cells(row: PlanRow) -> tuple[str, ...]:
    first, *others = row.leaves
    more = f" + {len(others)}" if others else ""
    shared = f" / {', '.join(row.share_axes)}" if row.share_axes else ""
    cut = f" in {row.chunks}" if row.chunks > 1 else ""
    return (
        first + more,
        f"{row.count} of {' x '.join(map(str, row.matrix))} {row.dtype}",
        row.spec,
        row.strategy + shared + cut,
        quantity(row.bytes, "B"),
        quantity(row.flops, "FLOP"),
        quantity(row.seconds, "s"),
        row.reason,
    )


def quantity(value: float, unit: str) -> str:
    """A number with three digits and a decimal prefix.

    Example:
      >>> quantity(763_000_000, "B"), quantity(0.00025, "s"), quantity(0, "B")
      ('763 MB', '250 us', '0 B')
    """
    for power, prefix in zip(range(15, -10, -3), "PTGMk mun", strict=True):
        if value >= 10.0**power:
            return f"{value / 10.0**power:.3g} {prefix.strip()}{unit}"
    return f"{value:.3g} {unit}"


def plan(
    params: Any,
    param_shardings: Any = None,
    *,
    ns_coeffs: Coefficients = "jordan",
    ns_steps: int | None = None,
    mu_dtype: Any = None,
    preconditioning: Preconditioning | None = None,
    muon_weight_dimension_numbers: Views = None,
    ns_method: Method = "auto",
    ns_dtype: Any = None,
    orthogonalizer: Orthogonalizer | None = None,
    partition: Partition = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
) -> Plan:
    """What `muon` with these arguments will do on each device, before any training.

    Args:
      params: the parameters, as arrays or shape structs.
      param_shardings: how they lie, as given to `muon`; read off `params` where it isn't given.
        With ZeRO-1, give what `mu_shardings` says.
      ns_coeffs: as given to `muon`.
      ns_steps: as given to `muon`.
      mu_dtype: as given to `muon`.
      preconditioning: as given to `muon`.
      muon_weight_dimension_numbers: as given to `muon`.
      ns_method: as given to `muon`.
      ns_dtype: as given to `muon`.
      orthogonalizer: as given to `muon`.
      partition: as given to `muon`.
      strategy: as given to `muon`.
      max_workspace_bytes: as given to `muon`.
      device: as given to `muon`.

    Returns:
      The plan, a hashable value.

    Raises:
      ValueError, TypeError: as `muon(...).init(params)` and its update do.

    Example:
      >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
      >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
      >>> shape = jax.ShapeDtypeStruct((4096, 14336), "bfloat16")
      >>> chosen = plan({f"mlp_{i}": shape for i in range(8)}, rows, device="h100")
      >>> chosen.rows[0].strategy, chosen.bytes == 2 * 4096 * 14336 * 2 * 7 // 8
      ('all_to_all', True)
    """
    check_float_dtype("mu_dtype", mu_dtype)
    check_float_dtype("ns_dtype", ns_dtype)
    spread = Distribution(param_shardings, strategy, max_workspace_bytes, device)
    solver = make_solver(
        ns_coeffs,
        ns_steps,
        preconditioning=preconditioning,
        method=ns_method,
        orthogonalizer=orthogonalizer,
        strategies=spread.strategies,
    )
    check_rules(partition, params)
    assignment = assign(params, muon_weight_dimension_numbers, partition)
    ours, views = assignment.muon_part(params)
    _check_meshes(ours, param_shardings)
    dtypes = [compute_dtype(ns_dtype, mu_dtype or x.dtype) for x in jax.tree.leaves(ours)]
    leaves = spread.leaves(ours, views, dtypes)
    model, buckets = spread.plan(leaves, solver)
    rows = [
        _row(share, [leaves[i] for i in bucket.members])
        for bucket in buckets
        for share in bucket.shares
    ]
    return Plan(tuple(rows), model.name)


def _check_meshes(tree: Any, declared: Any) -> None:
    """A spec whose axes have no sizes would be planned as if the leaf were whole."""
    pairs = zip(leaves_with_segments(tree), declared_specs(declared, tree), strict=True)
    problems = [
        f"{path_name(path)}: got {spec}"
        for (path, leaf), spec in pairs
        if spec is not None and any(bare_spec(spec)) and mesh_of(leaf, spec) is None
    ]
    raise_together(
        problems,
        "a PartitionSpec needs a mesh; give a NamedSharding, or plan within jax.set_mesh(mesh):",
    )


def _row(share: Share, leaves: list[Leaf]) -> PlanRow:
    first, cost = leaves[0], share.cost
    axes = first.view.stack_axes
    spec = first.layout.spec or ((),) * len(first.view.shape)
    return PlanRow(
        leaves=tuple(leaf.path for leaf in leaves),
        count=share.count,
        matrix=tuple(first.view.shape[a] for a in axes),
        spec=", ".join("*".join(spec[a]) or "-" for a in axes),
        dtype=first.dtype,
        strategy=share.strategy,
        share_axes=share.axes,
        chunks=len(list(share.chunks)),
        bytes=cost.bytes,
        flops=cost.flops,
        added_flops=share.added,
        seconds=cost.seconds,
        reason=share.reason,
    )
