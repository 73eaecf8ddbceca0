"""What each parameter gets: data first, a table second."""

import dataclasses
import math
from typing import Any

import numpy as np

from muon_optax.partition import (
    Decision,
    Partition,
    Views,
    assign,
    check_rules,
    find_warnings,
)
from muon_optax.scaling import Scale, Scaling, resolve_scaling
from muon_optax.tables import format_table, rich_table
from muon_optax.tree_paths import unnumbered

__all__ = ["ParameterReport", "ParameterRow", "report"]


@dataclasses.dataclass(frozen=True)
class ParameterRow:
    """One leaf of a report.

    Attributes:
      path: the leaf's path.
      shape: its shape.
      dtype: its dtype.
      optimizer: 'muon', 'adam' or 'frozen'.
      reason: why.
      matrices: shapes (count, fan-in, fan-out) of the matrices it makes; empty unless Muon's.
      scales: the factor of each of these.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    optimizer: str
    reason: str
    matrices: tuple[tuple[int, int, int], ...]
    scales: tuple[float, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ParameterReport:
    """What each leaf gets; `print` it, give it to rich, or read `rows`.

    In print, leaves that differ in the numbers of their paths alone, as those of equal layers do,
    share a row.

    Attributes:
      rows: one for each leaf, in flattening order.
      warnings: what `muon(...).init` warns of: what was probably not meant, and what to do.

    Example:
      >>> import jax.numpy as jnp
      >>> found = report({"mlp": {"kernel": jnp.ones((4, 16)), "bias": jnp.zeros(16)}})
      >>> [(row.path, row.optimizer) for row in found.rows]
      [('mlp/bias', 'adam'), ('mlp/kernel', 'muon')]
      >>> found.totals
      {'adam': (1, 16), 'muon': (1, 64)}
      >>> print(report({"layers": [{"kernel": jnp.ones((4, 16))}] * 3}))
      path                 shape   matrices     optimizer  scale  reason
      layers/*/kernel x 3  4 x 16  1 of 4 x 16  muon       2      weight matrix
      muon: 3 leaves, 192 elements
    """

    rows: tuple[ParameterRow, ...]
    warnings: tuple[str, ...] = ()

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Leaves and elements for each optimizer."""
        names = dict.fromkeys(row.optimizer for row in self.rows)
        groups = {n: [row.size for row in self.rows if row.optimizer == n] for n in names}
        return {n: (len(sizes), sum(sizes)) for n, sizes in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Rows, totals and warnings as plain data for JSON."""
        return {
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "totals": self.totals,
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        return format_table(_HEADER, self._cells) + "\n" + self._summary()

    def __rich__(self) -> Any:
        return rich_table("Parameters", _HEADER, self._cells, self._summary())

    @property
    def _cells(self) -> list[tuple[str, ...]]:
        groups: dict[tuple[str, ParameterRow], list[str]] = {}
        for row in self.rows:
            key = unnumbered(row.path), dataclasses.replace(row, path="")
            groups.setdefault(key, []).append(row.path)
        return [
            _cells(f"{pattern} x {len(paths)}" if len(paths) > 1 else paths[0], row)
            for (pattern, row), paths in groups.items()
        ]

    def _summary(self) -> str:
        parts = [
            f"{n}: {leaves} {'leaf' if leaves == 1 else 'leaves'}, {size:,} elements"
            for n, (leaves, size) in self.totals.items()
        ]
        totals = "; ".join(parts) or "no parameters"
        return "\n".join([totals, *(f"warning: {text}" for text in self.warnings)])


_HEADER = ("path", "shape", "matrices", "optimizer", "scale", "reason")


def _cells(name: str, row: ParameterRow) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.shape)) or "scalar"
    matrices = ", ".join(f"{c} of {m} x {n}" for c, m, n in row.matrices)
    scales = ", ".join(f"{s:.4g}" for s in row.scales)
    return name, shape, matrices, row.optimizer, scales, row.reason


def report(
    params: Any,
    *,
    muon_weight_dimension_numbers: Views = None,
    partition: Partition = None,
    scale: Scale | None = None,
    scale_factor: float = 1.0,
    consistent_rms: float | None = None,
) -> ParameterReport:
    """Says for each leaf which optimizer it gets and why, before any training.

    Args:
      params: the parameters, as arrays or shape structs.
      muon_weight_dimension_numbers: as given to `muon`.
      partition: as given to `muon`.
      scale: as given to `muon`.
      scale_factor: as given to `muon`.
      consistent_rms: as given to `muon`.

    Returns:
      The report.

    Raises:
      ValueError: as `muon(...).init(params)` does.

    Example:
      >>> import jax.numpy as jnp
      >>> print(report({"mlp": {"kernel": jnp.ones((4, 16)), "bias": jnp.zeros(16)}}))
      path        shape   matrices     optimizer  scale  reason
      mlp/bias    16                   adam              fewer than two dims
      mlp/kernel  4 x 16  1 of 4 x 16  muon       2      weight matrix
      adam: 1 leaf, 16 elements; muon: 1 leaf, 64 elements
    """
    assignment = assign(params, muon_weight_dimension_numbers, partition)
    check_rules(partition, params)
    scaling = resolve_scaling(scale, scale_factor, consistent_rms)
    views = muon_weight_dimension_numbers
    found = find_warnings(params, assignment, views, partition)
    return ParameterReport(tuple(_row(d, scaling) for d in assignment.decisions), found)


def _row(d: Decision, scaling: Scaling) -> ParameterRow:
    matrices = () if d.view is None else d.view.matrices
    factor = float(np.asarray(scaling.multiplier))
    scales = tuple(scaling.base(m, n) * factor for _, m, n in matrices)
    return ParameterRow(d.path, d.shape, d.dtype, d.label, d.reason, matrices, scales)
