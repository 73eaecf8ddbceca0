"""Leaves on meshes: their gradients, the float64 answer of one device, and the updates."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import reference
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from muon_optax import DeviceModel, MatrixView, MuonDimensionNumbers, scale_by_muon, state_shardings

# Two steps compile quickly; the iteration has tests of its own.
FAST = ((2.0, -1.5, 0.5),) * 2
ONE_STEP = FAST[:1]  # where only what is around the iteration is tested
KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
# A device whose matmuls take all the time: the cheapest plan then shares all work.
SLOW = DeviceModel("slow", 1e9, 1e9, 1e12, latency=0.0, overlaps=False)
OVERLAPPING = dataclasses.replace(SLOW, overlaps=True)  # one matrix for each owner at once
View = MuonDimensionNumbers | MatrixView
MATRIX = MuonDimensionNumbers(0, 1)
STACK = MuonDimensionNumbers(1, 2)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of matrices, and how it is sharded."""

    shape: tuple[int, ...]
    spec: P
    view: View = MATRIX

    @property
    def axes(self) -> tuple[list[int], list[int], list[int]]:
        """Batch, reduction and output axes."""
        reduction, output = (
            [a] if isinstance(a, int) else list(a)
            for a in (self.view.reduction_axis, self.view.output_axis)
        )
        batch = [a for a in range(len(self.shape)) if a not in (*reduction, *output)]
        return batch, reduction, output

    @property
    def widths(self) -> list[int]:
        """Widths of the fused blocks along the output."""
        width = int(np.prod([self.shape[a] for a in self.axes[2]]))
        if not isinstance(self.view, MatrixView):
            return [width]
        if self.view.heads:
            return [width // self.view.heads] * self.view.heads
        return list(self.view.split or [width])

    def blocks(self, x: Any) -> list[np.ndarray]:
        """All matrices [fan-in, fan-out] of a leaf."""
        batch, reduction, output = self.axes
        x = np.asarray(x).transpose(*batch, *reduction, *output)
        sizes = [[self.shape[a] for a in axes] for axes in self.axes]
        x = x.reshape([int(np.prod(group)) for group in sizes])
        return [b for y in x for b in np.split(y, np.cumsum(self.widths)[:-1], axis=1)]

    def join(self, blocks: Sequence[np.ndarray]) -> np.ndarray:
        """Undoes `blocks`."""
        step = len(self.widths)
        rows = [np.concatenate(blocks[i : i + step], 1) for i in range(0, len(blocks), step)]
        order = [a for axes in self.axes for a in axes]
        x = np.stack(rows).reshape([self.shape[a] for a in order])
        return x.transpose(np.argsort(order))

    def gradient(self, seed: int, kappa: float = 50.0) -> np.ndarray:
        blocks = self.blocks(np.zeros(self.shape))
        return self.join(
            [reference.matrix(seed + i, *b.shape, kappa=kappa) for i, b in enumerate(blocks)]
        )


Leaves = Mapping[str, Leaf]


def make_mesh(sizes: Mapping[str, int], kind: str | Mapping[str, str] = "explicit") -> Mesh:
    """A mesh whose axes are all of one kind, or of the kinds given by name."""
    kinds = dict.fromkeys(sizes, kind) if isinstance(kind, str) else kind
    types = tuple(KINDS[kinds[axis]] for axis in sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def shardings(leaves: Leaves, mesh: Mesh) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, leaf.spec) for name, leaf in leaves.items()}


def views(leaves: Leaves) -> dict[str, View]:
    return {name: leaf.view for name, leaf in leaves.items()}


def gradients(leaves: Leaves, seed: int = 0) -> dict[str, np.ndarray]:
    return {k: leaf.gradient(seed + 1000 * i) for i, (k, leaf) in enumerate(leaves.items())}


def answers(
    leaves: Leaves, grads: Mapping[str, Any], rows: reference.Rows = FAST
) -> dict[str, list[np.ndarray]]:
    """What the first update of each matrix is, in float64."""
    return {
        name: [
            reference.newton_schulz(reference.mixes([b])[0], rows) for b in leaf.blocks(grads[name])
        ]
        for name, leaf in leaves.items()
    }


def worst_error(leaf: Leaf, got: Any, want: Sequence[np.ndarray]) -> float:
    """The largest relative error of one matrix; NaN if any is, which `max` would pass over."""
    pairs = zip(leaf.blocks(got), want, strict=True)
    return float(np.max([reference.relative_error(g, w) for g, w in pairs]))


def assert_right(leaves: Leaves, grads: Mapping[str, Any], updates: Mapping[str, Any]) -> None:
    """Asserts that first updates are those of whole matrices in float64."""
    want = answers(leaves, grads)
    for name, leaf in leaves.items():
        assert worst_error(leaf, updates[name], want[name]) <= 1e-5, name


def assert_sharded(x: Any, sharding: NamedSharding) -> None:
    assert x.sharding.is_equivalent_to(sharding, x.ndim), f"{x.sharding} is not {sharding}"


def check(leaves: Leaves, mesh: Mesh, **options: Any) -> Any:
    """The first update on a mesh is that of whole matrices, and keeps the shardings.

    Returns:
      The compiled program.
    """
    return check_each(leaves, mesh, [options])


def check_each(leaves: Leaves, mesh: Mesh, cases: Sequence[Mapping[str, Any]]) -> Any:
    """So it is with each of several options; one program makes the updates of all."""
    where, grads = shardings(leaves, mesh), gradients(leaves)
    txs = [scale_by_muon(FAST, weight_dimension_numbers=views(leaves), **c) for c in cases]

    @jax.jit
    def first_steps(grads: Any) -> Any:
        starts = [tx.init(grads) for tx in txs]
        return [(s, *tx.update(grads, s)) for tx, s in zip(txs, starts, strict=True)]

    want, placed = answers(leaves, grads), jax.device_put(grads, where)
    compiled = first_steps.lower(placed).compile()
    for case, found in zip(cases, compiled(placed), strict=True):
        start, updates, state = found
        errors = {k: worst_error(leaf, updates[k], want[k]) for k, leaf in leaves.items()}
        assert all(error <= 1e-5 for error in errors.values()), (case, errors)
        for name, sharding in where.items():
            for x in (updates[name], start.mu[name], state.mu[name]):
                assert_sharded(x, sharding)
    return compiled


def check_steps(leaves: Leaves, mesh: Mesh, dtypes: tuple[str, str | None], **options: Any) -> None:
    """Two steps of one program are those of whole matrices in float64.

    Args:
      leaves: what is updated.
      mesh: where.
      dtypes: of leaves and momentum, and of the iteration, or None for the same.
      **options: of `scale_by_muon`.
    """
    own, where = dtypes[0], shardings(leaves, mesh)
    tx: Any = scale_by_muon(
        FAST, weight_dimension_numbers=views(leaves), ns_dtype=dtypes[1], **options
    )
    grads = [{k: g.astype(own) for k, g in gradients(leaves, seed).items()} for seed in (0, 7)]
    want = {k: _steps(leaf, [grad[k] for grad in grads]) for k, leaf in leaves.items()}
    update, state = jax.jit(tx.update, donate_argnums=(0, 1)), None
    for t, grad in enumerate(grads):
        placed = jax.device_put(grad, where)
        state = jax.jit(tx.init)(placed) if state is None else state
        got, state = update(placed, state)
        for name, leaf in leaves.items():
            mu, (momentum, updates) = state.mu[name], (x[t] for x in want[name])
            assert got[name].dtype == mu.dtype == own
            assert_sharded(mu, where[name])
            error = reference.relative_error(mu, leaf.join(momentum))
            assert error <= (1e-6 if own == "float32" else 2**-9)
            bar = 1e-5 if dtypes == ("float32", None) else 4e-2
            assert worst_error(leaf, got[name], updates) <= bar


def _steps(leaf: Leaf, grads: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """Momentum and update of each matrix of a leaf, for each step; the momentum is rounded."""
    rounded = lambda x: x.astype(grads[0].dtype)  # noqa: E731
    momenta, updates = [], []
    for steps in zip(*map(leaf.blocks, grads), strict=True):
        momenta.append(
            reference.mixes(steps, nesterov=False, bias_correction=False, rounded=rounded)
        )
        mixes = reference.mixes(steps, rounded=rounded)
        updates.append([reference.newton_schulz(mix, FAST) for mix in mixes])
    return [*zip(*momenta, strict=True)], [*zip(*updates, strict=True)]


def compile_update(leaves: Leaves, mesh: Mesh, dtype: str = "float32", **options: Any) -> Any:
    """The first update, compiled from shapes alone; nothing of it is run."""
    where = shardings(leaves, mesh)
    tx = scale_by_muon(weight_dimension_numbers=views(leaves), param_shardings=where, **options)
    return lower(tx, {name: leaf.shape for name, leaf in leaves.items()}, where, dtype).compile()


def lower(tx: Any, shapes: Mapping[str, Any], where: Mapping[str, Any], dtype: str) -> Any:
    """Lowers an update whose results are sharded like the parameters."""
    params = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=where[name])
        for name, shape in shapes.items()
    }
    state = jax.eval_shape(tx.init, params)
    shardings = state_shardings(tx, params, where)
    state = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), state, shardings
    )
    return jax.jit(tx.update, out_shardings=(dict(where), shardings)).lower(params, state, params)


def mapped_updates(leaves, tx, mesh, check_vma=True):
    """The first updates of `tx` as a function of gradients, in a shard_map over all of the mesh."""
    specs = {name: leaf.spec for name, leaf in leaves.items()}
    return jax.shard_map(
        lambda x: tx.update(x, tx.init(x), x)[0],
        mesh=mesh,
        in_specs=(specs,),
        out_specs=specs,
        check_vma=check_vma,
    )


def check_mapped(
    leaves: Leaves, tx: Any, mesh: Mesh, check_vma: bool, collective: str, times: int
) -> None:
    """First updates in a shard_map are right, and made with so many calls of a collective."""
    mapped, grads = mapped_updates(leaves, tx, mesh, check_vma), gradients(leaves)
    placed = jax.device_put(grads, shardings(leaves, mesh))
    assert str(jax.make_jaxpr(mapped)(placed)).count(f" {collective}[") == times
    assert_right(leaves, grads, jax.jit(mapped)(placed))
