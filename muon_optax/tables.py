"""What each parameter gets and what its update looks like: data first, tables second."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from muon_optax.matrix_view import BoundView
from muon_optax.partition import Decision, Partition, Views, assign, check_rules
from muon_optax.scaling import Scale, Scaling, resolve_scaling
from muon_optax.sharding.auto import partitioned

__all__ = ["ParameterReport", "ParameterRow", "UpdateStats", "report", "update_stats"]


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

    Attributes:
      rows: one for each leaf, in flattening order.

    Example:
      >>> found = report({"mlp": {"kernel": jnp.ones((4, 16)), "bias": jnp.zeros(16)}})
      >>> [(row.path, row.optimizer) for row in found.rows]
      [('mlp/bias', 'adam'), ('mlp/kernel', 'muon')]
      >>> found.totals
      {'adam': (1, 16), 'muon': (1, 64)}
    """

    rows: tuple[ParameterRow, ...]

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Leaves and elements for each optimizer."""
        names = dict.fromkeys(row.optimizer for row in self.rows)
        groups = {n: [row.size for row in self.rows if row.optimizer == n] for n in names}
        return {n: (len(sizes), sum(sizes)) for n, sizes in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Rows and totals as plain data for JSON."""
        return {"rows": [dataclasses.asdict(row) for row in self.rows], "totals": self.totals}

    def __str__(self) -> str:
        return format_table(_HEADER, [_cells(row) for row in self.rows]) + "\n" + self._summary()

    def __rich__(self) -> Any:
        return rich_table(
            "Parameters", _HEADER, [_cells(row) for row in self.rows], self._summary()
        )

    def _summary(self) -> str:
        parts = [
            f"{n}: {leaves} {'leaf' if leaves == 1 else 'leaves'}, {size:,} elements"
            for n, (leaves, size) in self.totals.items()
        ]
        return "; ".join(parts) or "no parameters"


_HEADER = ("path", "shape", "matrices", "optimizer", "scale", "reason")


def _cells(row: ParameterRow) -> tuple[str, ...]:
    shape = " x ".join(map(str, row.shape)) or "scalar"
    matrices = ", ".join(f"{c} of {m} x {n}" for c, m, n in row.matrices)
    scales = ", ".join(f"{s:.4g}" for s in row.scales)
    return row.path, shape, matrices, row.optimizer, scales, row.reason


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
      >>> print(report({"mlp": {"kernel": jnp.ones((4, 16)), "bias": jnp.zeros(16)}}))
      path        shape   matrices     optimizer  scale  reason
      mlp/bias    16                   adam              fewer than two dims
      mlp/kernel  4 x 16  1 of 4 x 16  muon       2      weight matrix
      adam: 1 leaf, 16 elements; muon: 1 leaf, 64 elements
    """
    assignment = assign(params, muon_weight_dimension_numbers, partition)
    check_rules(partition, params)
    scaling = resolve_scaling(scale, scale_factor, consistent_rms)
    return ParameterReport(tuple(_row(d, scaling) for d in assignment.decisions))


def _row(d: Decision, scaling: Scaling) -> ParameterRow:
    matrices = () if d.view is None else d.view.matrices
    factor = float(np.asarray(scaling.multiplier))
    scales = tuple(scaling.base(m, n) * factor for _, m, n in matrices)
    return ParameterRow(d.path, d.shape, d.dtype, d.label, d.reason, matrices, scales)


class UpdateStats(NamedTuple):
    """Size and shape of one leaf's update, as float32 scalars.

    Attributes:
      rms: root mean square of the elements.
      sigma_min: smallest singular value of any of its matrices.
      sigma_max: largest one.

    Example:
      >>> update_stats({"w": jnp.eye(4)})["w"].sigma_max.round(3).item()
      1.0
    """

    rms: jax.Array
    sigma_min: jax.Array
    sigma_max: jax.Array


def update_stats(
    updates: Any,
    *,
    muon_weight_dimension_numbers: Views = None,
    partition: Partition = None,
    steps: int = 16,
) -> dict[str, UpdateStats]:
    """RMS and range of singular values of Muon's updates, to be logged in training.

    The range comes from a few Lanczos steps on each matrix's Gram matrix, cheaper than one
    Newton-Schulz product: both ends are estimates from inside, exact (to rounding) for matrices
    with no more than `steps` rows or columns.

    Args:
      updates: updates as `muon` gives them (or any tree of its structure); jit-compatible.
      muon_weight_dimension_numbers: as given to `muon`.
      partition: as given to `muon`.
      steps: Lanczos steps, 1 or more.

    Returns:
      The figures of each Muon leaf, by path. All are 0 for an empty leaf, and NaN where an update
      holds NaN or infinity.

    Raises:
      ValueError: for steps out of range, or as `report` does.

    Example:
      >>> stats = update_stats({"w": jnp.diag(jnp.array([3.0, 4.0]))})["w"]
      >>> [round(float(x), 4) for x in stats]
      [2.5, 3.0, 4.0]
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an integer of 1 or more, got {steps!r}")
    decisions = assign(updates, muon_weight_dimension_numbers, partition).decisions
    pairs = zip(decisions, jax.tree.leaves(updates), strict=True)
    return {d.path: _stats(x, d.view, steps) for d, x in pairs if d.view is not None}


def _stats(x: jax.Array, view: BoundView, steps: int) -> UpdateStats:
    x = jnp.asarray(x)
    x = x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)
    if x.size == 0:
        return UpdateStats(*[jnp.zeros((), x.real.dtype)] * 3)
    return partitioned(functools.partial(_stats_of_whole, view=view, steps=steps), x)


@functools.partial(jax.jit, static_argnames=("view", "steps"))  # compiled once, eager calls too
def _stats_of_whole(x: jax.Array, view: BoundView, steps: int) -> UpdateStats:
    ranges = [_sigma_range(matrices, steps) for matrices in view.split(x)]
    low = jnp.min(jnp.stack([low for low, _ in ranges]))
    high = jnp.max(jnp.stack([high for _, high in ranges]))
    size = _scale_of(x)
    return UpdateStats(size * jnp.sqrt(jnp.mean(jnp.abs(x / size) ** 2)), low, high)


def _scale_of(x: jax.Array, axis: tuple[int, ...] | None = None) -> jax.Array:
    """The largest absolute value, kept as dims of 1 for a given axis; 1 where all are zero."""
    size = jnp.max(jnp.abs(x), axis=axis, keepdims=axis is not None)
    return jnp.where(size == 0, jnp.ones_like(size), size)


def _sigma_range(x: jax.Array, steps: int) -> tuple[jax.Array, jax.Array]:
    """Smallest and largest singular value in a stack (batch, m, n), by Lanczos."""
    x = x if x.shape[1] <= x.shape[2] else x.mT
    size = _scale_of(x, (1, 2))
    x = x / size  # squares neither overflow nor vanish
    batch, rows, _ = x.shape
    steps = min(steps, rows)
    directions = jax.random.normal(jax.random.key(0), (steps, rows), x.dtype)
    directions /= jnp.linalg.norm(directions, axis=-1, keepdims=True)

    def grow(k: jax.Array, basis: jax.Array) -> jax.Array:
        v = _gram_times(x, basis[:, k - 1])
        # A little of a fresh direction goes on where Lanczos would stop, as it does at once on a
        # polar factor.
        length = jnp.linalg.norm(v, axis=-1, keepdims=True)
        v = v + 1e-3 * jnp.where(length > 0, length, 1) * directions[k]
        for _ in range(2):  # twice is enough
            v = v - _einsum("bki,bk->bi", basis, _einsum("bki,bi->bk", basis.conj(), v))
        return basis.at[:, k].set(v / jnp.linalg.norm(v, axis=-1, keepdims=True))

    start = jnp.zeros((batch, steps, rows), x.dtype).at[:, 0].set(directions[0])
    basis = jax.lax.fori_loop(1, steps, grow, start)
    projected = _einsum("bki,bij->bkj", basis.conj(), x)
    values = jnp.linalg.svd(projected, compute_uv=False) * size[:, 0]
    return jnp.min(values), jnp.max(values)


def _gram_times(x: jax.Array, v: jax.Array) -> jax.Array:
    return _einsum("bij,bj->bi", x, _einsum("bij,bi->bj", x.conj(), v))


def _einsum(indices: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(indices, *operands, precision=jax.lax.Precision.HIGHEST)


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as plain text, columns aligned."""
    lines = [tuple(header), *map(tuple, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def rich_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> Any:
    """The same table for rich (the `report` extra)."""
    from rich.box import SIMPLE_HEAD  # rich is optional
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption=note, box=SIMPLE_HEAD, pad_edge=False)
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # names may hold what rich takes for markup
    return table
