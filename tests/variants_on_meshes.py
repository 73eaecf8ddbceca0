"""Runs a piece on one device and on meshes, on leaves of every layout, beside its oracle."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
import reference
import sharded
import variants_oracle as oracle
from jax.sharding import PartitionSpec as P
from running import side_by_side

from muon_optax import MatrixView, MuonDimensionNumbers, state_shardings

# The kind of the axes outside of a shard_map, if there is one.
KINDS = {"explicit": "explicit", "auto": "auto", "manual": "auto"}
# Data parallelism: all leaves are replicated over an axis of data.
DDP = {f"ddp, {kind}": kind for kind in KINDS}
AXES = {"a": 2, "b": 4}
# Shape, spec and view of leaves. Where only one axis shards a leaf, the other has replicas (HSDP).
LEAVES = {
    "rows": ((16, 6), P(("a", "b")), MuonDimensionNumbers(0, 1)),
    "columns": ((4, 8), P(None, "b"), MuonDimensionNumbers(0, 1)),
    "both": ((8, 12), P("a", "b"), MuonDimensionNumbers(0, 1)),
    "transposed": ((4, 12), P("b", "a"), MuonDimensionNumbers(1, 0)),
    "stack": ((3, 6, 8), P(None, "a", "b"), MuonDimensionNumbers(1, 2)),
    "experts": ((2, 2, 8, 6), P("a", None, "b"), MuonDimensionNumbers(2, 3)),
    "replicated": ((4, 6), P(), MuonDimensionNumbers(0, 1)),
    "merged": ((8, 4, 2), P("a", "b"), MuonDimensionNumbers(0, (1, 2))),
    "qkv": ((8, 16), P("a", "b"), MatrixView(0, 1, split=(8, 4, 4))),
    "grouped": ((4, 24), P(None, "b"), MatrixView(0, 1, split=(4, 1, 1), groups=4)),
    "heads": ((2, 4, 12), P("a", None, "b"), MatrixView(1, 2, heads=3)),
    "input_blocks": ((16, 6), P(("a", "b")), MatrixView(0, 1, split=(4, 12), axis="reduction")),
}
SHAPES = {name: shape for name, (shape, _, _) in LEAVES.items()}
VIEWS: dict[str, Any] = {name: view for name, (_, _, view) in LEAVES.items()}
# What the first add is how sums are masked, which the tests of `MatrixSums` try on meshes; what the
# second add is how they are sharded.
ON_ONE_DEVICE = {"merged", "grouped", "heads"}
ON_MESHES = {"both", "experts", "replicated", "rows"}
ON_DDP = {"qkv", "stack"}

Tree = dict[str, Any]
Make = Callable[..., optax.GradientTransformation]


def shapes_on(kind: str) -> dict[str, tuple[int, ...]]:
    """The leaves of one device, or of meshes."""
    if kind in DDP:
        return {name: SHAPES[name] for name in ON_DDP}
    others = ON_MESHES if kind == "one" else ON_ONE_DEVICE
    return {name: shape for name, shape in SHAPES.items() if name not in others}


def arrays(seed: int, shapes: Any, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Normal entries, in rows and columns of unequal size."""
    return dict(_arrays(seed, tuple(shapes.items()), scale))


@functools.cache
def _arrays(seed: int, shapes: Any, scale: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in shapes:
        sizes = [
            np.exp(rng.normal(size=[n if d == axis else 1 for d, n in enumerate(shape)]))
            for axis in range(len(shape))
        ]
        x = rng.normal(size=shape) * np.prod(np.broadcast_arrays(*sizes), axis=0)
        found[name] = (scale * x / np.sqrt(np.mean(x**2))).astype(np.float32)
        found[name].flags.writeable = False  # as all that ask for it get the same
    return found


def mesh_of(kind: str) -> Any:
    """The mesh; None on one device."""
    if kind in DDP:
        return sharded.make_mesh({"data": 8}, KINDS[DDP[kind]])
    return None if kind == "one" else sharded.make_mesh(AXES, KINDS[kind])


def step_of(w: Any, u: Any) -> Any:
    """The weights after a direction."""
    return w - 0.02 * u


def added(w: Any, u: Any) -> Any:
    """The weights after a step."""
    return w + u


@dataclasses.dataclass(frozen=True)
class Case:
    """A piece beside its oracle.

    Attributes:
      make: (views, shardings) -> transformation.
      oracle: makes the state of one matrix.
      moved: the weights after an update.
      scale: root mean square of what enters.
      steps: how many.
    """

    make: Make
    oracle: Callable[[], Any]
    moved: Callable[[Any, Any], Any] = step_of
    scale: float = 1.0
    steps: int = 10

    def state_of(self, leaf: str) -> Any:
        """The oracle's state of a matrix of a leaf."""
        del leaf
        return self.oracle()

    def inputs(self, t: int, kind: str) -> Tree:
        return arrays(100 + t, shapes_on(kind), self.scale)


Cases = Mapping[str, Case]


def expected(case: Case, kind: str) -> tuple[list[Tree], Tree]:
    """All updates and the last weights, in float64."""
    weights: Tree = {k: w.astype(np.float64) for k, w in arrays(1, shapes_on(kind)).items()}
    counts = {k: len(oracle.matrices(VIEWS[k], w)) for k, w in weights.items()}
    states = {k: [case.state_of(k) for _ in range(count)] for k, count in counts.items()}
    updates = []
    for t in range(case.steps):
        new = {}
        for k, u in case.inputs(t, kind).items():
            pairs = zip(*(oracle.matrices(VIEWS[k], x) for x in (u, weights[k])), strict=True)
            blocks = [s.update(*pair) for s, pair in zip(states[k], pairs, strict=True)]
            new[k] = oracle.joined(VIEWS[k], blocks, u)
        weights = {k: case.moved(weights[k], new[k]) for k in new}
        updates.append(new)
    return updates, weights


def run(cases: Cases, kind: str) -> dict[str, tuple[list[Tree], Tree]]:
    """All updates and the last weights of the library; one program updates for all cases."""
    start: Tree = arrays(1, shapes_on(kind))
    mesh = mesh_of(kind)
    specs: Any = {name: P() if kind in DDP else LEAVES[name][1] for name in start}
    where = mesh and {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    views = {name: VIEWS[name] for name in start}
    pieces = {k: case.make(views, where) for k, case in cases.items()}
    shardings = where and {k: state_shardings(tx, start, where) for k, tx in pieces.items()}
    together = side_by_side(pieces)
    init, update = together.init, together.update
    if kind in ("manual", "ddp, manual"):
        of_state, of_leaves = jax.tree.map(lambda s: s.spec, shardings), dict.fromkeys(cases, specs)
        init = jax.shard_map(init, mesh=mesh, in_specs=(of_leaves,), out_specs=of_state)
        ins, outs = (of_leaves, of_state, of_leaves), (of_leaves, of_state)
        update = jax.shard_map(update, mesh=mesh, in_specs=ins, out_specs=outs)
    place = lambda x: jax.device_put(x, where) if where else x  # noqa: E731
    weights: Any = dict.fromkeys(cases, place(start))
    updates, step = [], jax.jit(update)
    state = jax.jit(init)(weights)
    (steps,) = {case.steps for case in cases.values()}
    for t in range(steps):
        if where and t in (0, steps - 1):
            check_shardings(state, shardings)
        inputs = {k: place(case.inputs(t, kind)) for k, case in cases.items()}
        new, state = step(inputs, state, weights)
        weights = {k: compiled(case.moved)(weights[k], new[k]) for k, case in cases.items()}
        updates.append(new)
    return {k: ([new[k] for new in updates], weights[k]) for k in cases}


@functools.cache
def compiled(moved: Callable[[Any, Any], Any]) -> Callable[[Tree, Tree], Tree]:
    """The weights of all leaves after an update; one program for the cases that have it."""
    return jax.jit(lambda weights, updates: jax.tree.map(moved, weights, updates))


def check_shardings(state: Any, shardings: Any) -> None:
    """The state is sharded as `state_shardings` says."""
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        if x.ndim:  # JAX puts counts where it likes
            sharded.assert_sharded(x, sharding)


def check(case: Case, kind: str) -> None:
    """The library's updates and weights are those of the oracle, to 1e-5."""
    check_all({"the case": case}, kind)


def check_all(cases: Cases, kind: str) -> None:
    """Those of every case are those of its oracle."""
    for k, (got, weights) in run(cases, kind).items():
        want, want_weights = expected(cases[k], kind)
        for name in weights:
            pairs = [(g[name], w[name]) for g, w in zip(got, want, strict=True)]
            for t, pair in enumerate([*pairs, (weights[name], want_weights[name])]):
                for g, w in zip(*(oracle.matrices(VIEWS[name], x) for x in pair), strict=True):
                    error = reference.relative_error(g, w)
                    assert error <= 1e-5, f"{k}, {name}, step {t}: {error:.1e}"
