"""The optimizer, view and scale of each parameter: data first, a table second."""

import dataclasses
import math
from typing import Any

import numpy as np
import optax
from jax.core import Tracer

from muon_optax._internal.tree_paths import unnumbered
from muon_optax.config import find_configs
from muon_optax.inspect.tables import format_table, rich_table
from muon_optax.partition import Decision, assign, check_rules, find_warnings
from muon_optax.transforms.shape_scale import Scaling

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
    """The optimizer of each leaf, and why; `print` it, give it to rich, or read `rows`.

    In print, leaves that differ in the numbers of their paths alone, as those of equal layers do,
    share a row.

    Attributes:
      rows: one for each leaf, in flattening order.
      warnings: those of `muon(...).init`: choices that were probably not meant, and the cure.

    Example:
      >>> import jax.numpy as jnp
      >>> from muon_optax import muon
      >>> found = report(muon(0.02), {"mlp": {"kernel": jnp.ones((4, 16)), "bias": jnp.zeros(16)}})
      >>> [(row.path, row.optimizer) for row in found.rows]
      [('mlp/bias', 'adam'), ('mlp/kernel', 'muon')]
      >>> found.totals
      {'adam': (1, 16), 'muon': (1, 64)}
      >>> print(report(muon(0.02), {"layers": [{"kernel": jnp.ones((4, 16))}] * 3}))
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


def report(tx: optax.GradientTransformation, params: Any) -> ParameterReport:
    """Says for each leaf which optimizer it gets and why, before any training.

    Args:
      tx: `muon`, or any optax transformation around it.
      params: the parameters, as arrays or shape structs.

    Returns:
      The report. Leaves that reach no `muon` in `tx` aren't in it.

    Raises:
      ValueError: as `tx.init(params)` does, where `tx` holds no `muon`, and where a wrapper hands
        other leaves to it, as `optax.lookahead` the fast parameters: those are to be given.

    Example:
      >>> import jax.numpy as jnp
      >>> from muon_optax import muon
      >>> params = {"mlp": {"kernel": jnp.ones((4, 16)), "bias": jnp.zeros(16)}}
      >>> print(report(muon(0.02), params))
      path        shape   matrices     optimizer  scale  reason
      mlp/bias    16                   adam              fewer than two dims
      mlp/kernel  4 x 16  1 of 4 x 16  muon       2      weight matrix
      adam: 1 leaf, 16 elements; muon: 1 leaf, 64 elements
    """
    rows: list[ParameterRow] = []
    found: list[str] = []
    for config, ours, _ in find_configs(tx, params):
        assignment = assign(ours, config.views, config.partition)
        check_rules(config.partition, ours)
        rows += [_row(d, config.scaling) for d in assignment.decisions]
        found += find_warnings(ours, assignment, config.views, config.partition)
    return ParameterReport(tuple(rows), tuple(found))


def _row(d: Decision, scaling: Scaling) -> ParameterRow:
    matrices = () if d.view is None else d.view.matrices
    # Under optax.inject_hyperparams the multiplier is known in the state alone.
    is_traced = isinstance(scaling.multiplier, Tracer)
    factor = 1.0 if is_traced else float(np.asarray(scaling.multiplier))
    scales = tuple(scaling.base(m, n) * factor for _, m, n in matrices)
    return ParameterRow(d.path, d.shape, d.dtype, d.label, d.reason, matrices, scales)
