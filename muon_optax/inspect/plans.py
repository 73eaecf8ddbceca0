"""The plan of an update, to be read before the run: buckets, strategies, bytes and FLOPs."""

import dataclasses
from typing import Any

import optax

from muon_optax.config import find_configs
from muon_optax.inspect.plan_rows import PlanRow, plan_rows
from muon_optax.inspect.plan_savings import advice_on_moments
from muon_optax.inspect.tables import format_table, quantity, rich_table

__all__ = ["Plan", "PlanRow", "plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """The work of an update on each device; `print` it, give it to rich, or read `rows`.

    With `block_periodic` updates differ, and totals are averages over the period.

    Attributes:
      rows: costliest matrices first.
      device: name of the device model.
      advice: ways to save bytes in a whole step, as sentences.

    Example:
      >>> import jax
      >>> from muon_optax import muon
      >>> found = plan(muon(0.02, device="h100"), {"w": jax.ShapeDtypeStruct((64, 256), "float32")})
      >>> [(row.leaves, row.strategy, row.reason) for row in found.rows]
      [(('w',), 'local', 'matrices are whole here')]
      >>> found.bytes, found.flops == found.to_dict()["totals"]["flops"]
      (0, True)
    """

    rows: tuple[PlanRow, ...]
    device: str
    advice: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes that a device receives in an update."""
        return round(sum(row.bytes * row.share for row in self.rows))

    @property
    def flops(self) -> int:
        """FLOPs of the busiest device in an update."""
        return round(sum(row.added_flops * row.share for row in self.rows))

    @property
    def seconds(self) -> float:
        """Time of an update on the device model, with nothing overlapped."""
        return sum(row.seconds * float(row.share) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Rows and totals as plain data for JSON."""
        rows = [dataclasses.asdict(row) for row in self.rows]
        totals = {"bytes": self.bytes, "flops": self.flops, "seconds": self.seconds}
        return {"device": self.device, "rows": rows, "totals": totals, "advice": self.advice}

    def __str__(self) -> str:
        return format_table(_HEADER, [_cells(row) for row in self.rows]) + "\n" + self._summary()

    def __rich__(self) -> Any:
        return rich_table("Plan", _HEADER, [_cells(row) for row in self.rows], self._summary())

    def _summary(self) -> str:
        periods = sorted({row.period for row in self.rows} - {1})
        over = " or ".join(map(str, periods))
        average = f"on average over {over} updates, " if periods else ""
        total = (
            f"{average}a device receives {quantity(self.bytes, 'B')} and the busiest computes "
            f"{quantity(self.flops, 'FLOP')}: {quantity(self.seconds, 's')} on {self.device}"
        )
        return "\n".join([total, *self.advice])


_HEADER = ("leaves", "matrices", "spec", "strategy", "bytes", "FLOPs", "time", "reason")


def _cells(row: PlanRow) -> tuple[str, ...]:
    first, *others = row.leaves
    more = f" + {len(others)}" if others else ""
    shared = f" / {', '.join(row.share_axes)}" if row.share_axes else ""
    cut = f" in {row.chunks}" if row.chunks > 1 else ""
    often = f"; {row.steps} of {row.period} updates" if row.period > 1 else ""
    return (
        first + more,
        f"{row.count} of {' x '.join(map(str, row.matrix))} {row.dtype}",
        row.spec,
        row.strategy + shared + cut,
        quantity(row.bytes, "B"),
        quantity(row.flops, "FLOP"),
        quantity(row.seconds, "s"),
        row.reason + often,
    )


def plan(tx: optax.GradientTransformation, params: Any) -> Plan:
    """The work of an update on each device, before any training.

    That of a jitted update, to whose tracers concrete arrays on Auto mesh axes don't show how they
    are sharded. Gradients are taken to be sharded like the parameters.

    Args:
      tx: `muon`, or any optax transformation around it.
      params: the parameters, as arrays or shape structs.

    Returns:
      The plan, a hashable value. Where `tx` holds several `muon`, it has the rows of all.

    Raises:
      ValueError, TypeError: as `tx.init(params)` and an update do, and as `report` does.

    Example:
      >>> import jax
      >>> from muon_optax import muon
      >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
      >>> rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
      >>> shape = jax.ShapeDtypeStruct((4096, 14336), "bfloat16")
      >>> tx = muon(0.02, param_shardings=rows, device="h100")
      >>> chosen = plan(tx, {f"mlp_{i}": shape for i in range(8)})
      >>> chosen.rows[0].strategy, chosen.bytes == 2 * 4096 * 14336 * 2 * 7 // 8
      ('all_to_all', True)
    """
    found = find_configs(tx, params)
    planned = [plan_rows(one.config, one.params) for one in found]
    said = [
        advice_on_moments(one.config, one.params, each)
        for one, each in zip(found, planned, strict=True)
    ]
    return Plan(
        rows=tuple(row for each in planned for row in each.rows),
        device=", ".join(dict.fromkeys(each.model.name for each in planned)),
        advice=tuple(advice for advice in said if advice is not None),
    )
