"""The plan of an update, to be read before the run: buckets, strategies, bytes and FLOPs."""

import dataclasses
from typing import Any

from muon_optax.checks import check_float_dtype
from muon_optax.momentum import Momentum
from muon_optax.partition import Partition, Views
from muon_optax.plan_rows import PlanRow, UpdateOptions, plan_rows
from muon_optax.polar import Coefficients, Method, Preconditioning
from muon_optax.sharding.cost import DeviceModel
from muon_optax.sharding.distribute import Distribution, StrategyRules
from muon_optax.sharding.local import Orthogonalizer, make_solver
from muon_optax.sharding.options import ShardingOptions
from muon_optax.tables import format_table, quantity, rich_table

__all__ = ["Plan", "PlanRow", "plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an update does on each device; `print` it, give it to rich, or read `rows`.

    Attributes:
      rows: costliest matrices first.
      device: name of the device model.

    Example:
      >>> import jax
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
    mu_shardings: Any = None,
    strategy: StrategyRules = "auto",
    max_workspace_bytes: int | None = None,
    device: str | DeviceModel = "auto",
) -> Plan:
    """What `muon` with these arguments will do on each device, before any training.

    That of a jitted update, to whose tracers concrete arrays on Auto mesh axes don't show how they
    are sharded. Gradients are taken to be sharded like the parameters.

    Args:
      params: the parameters, as arrays or shape structs.
      param_shardings: as given to `muon`.
      ns_coeffs: as given to `muon`.
      ns_steps: as given to `muon`.
      mu_dtype: as given to `muon`.
      preconditioning: as given to `muon`.
      muon_weight_dimension_numbers: as given to `muon`.
      ns_method: as given to `muon`.
      ns_dtype: as given to `muon`.
      orthogonalizer: as given to `muon`.
      partition: as given to `muon`.
      mu_shardings: as given to `muon`.
      strategy: as given to `muon`.
      max_workspace_bytes: as given to `muon`.
      device: as given to `muon`.

    Returns:
      The plan, a hashable value.

    Raises:
      ValueError, TypeError: as `muon(...).init(params)` and its update do.

    Example:
      >>> import jax
      >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
      >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
      >>> shape = jax.ShapeDtypeStruct((4096, 14336), "bfloat16")
      >>> chosen = plan({f"mlp_{i}": shape for i in range(8)}, rows, device="h100")
      >>> chosen.rows[0].strategy, chosen.bytes == 2 * 4096 * 14336 * 2 * 7 // 8
      ('all_to_all', True)
    """
    check_float_dtype("ns_dtype", ns_dtype)
    options = UpdateOptions(
        make_solver(
            ns_coeffs,
            ns_steps,
            preconditioning=preconditioning,
            method=ns_method,
            orthogonalizer=orthogonalizer,
        ),
        Momentum(0.0, mu_dtype, nesterov=False, bias_correction=False, form="ema"),
        ns_dtype,
        Distribution(strategy, max_workspace_bytes, device),
        ShardingOptions(param_shardings, mu_shardings),
        muon_weight_dimension_numbers,
        partition,
    )
    model, rows = plan_rows(options, params)
    return Plan(rows, model.name)
