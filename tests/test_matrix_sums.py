"""Sums and means over matrices, on every kind of mesh axis, against a loop over the matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from jax.sharding import PartitionSpec as P

from benchmarks.compiled import read_program
from muon_optax import MatrixView, MuonDimensionNumbers
from muon_optax.transforms.binding import bind_leaves
from muon_optax.transforms.matrix_sums import MatrixSums, squares

OVERS = [("reduction", "output"), ("reduction",), ("output",)]
# Shape, spec on a mesh of x = 2 and y = 4, and view: plain, stacked, fused, with merged axes.
LEAVES = {
    "plain": ((8, 16), P("x", "y"), MuonDimensionNumbers(0, 1)),
    "transposed": ((8, 16), P("y", None), MuonDimensionNumbers(1, 0)),
    "stack": ((2, 8, 4, 8), P("x", None, None, "y"), MuonDimensionNumbers(1, 3)),
    "merged": ((8, 4, 6), P("x", "y"), MuonDimensionNumbers((0,), (1, 2))),
    "qkv": ((4, 32), P("x", "y"), MatrixView(0, 1, split=(16, 8, 8))),
    "grouped": ((4, 24), P(None, "y"), MatrixView(0, 1, split=(4, 1, 1), groups=4)),
    "heads": ((3, 8, 16), P(None, "y", "x"), MatrixView(1, 2, heads=4)),
    "input_heads": ((32, 8), P(("x", "y")), MatrixView(0, 1, split=(8, 24), axis="reduction")),
    "merged_fused": ((4, 2, 16), P(None, "x", "y"), MatrixView(0, (1, 2), split=(24, 8))),
}


INPUTS = {
    name: np.random.default_rng(0).normal(size=shape).astype(np.float32)
    for name, (shape, _, _) in LEAVES.items()
}
VIEWS = {name: view for name, (_, _, view) in LEAVES.items()}
SPECS = {name: spec for name, (_, spec, _) in LEAVES.items()}


@functools.cache
def by_loop():
    """For each leaf and kind of mean, the mean that belongs to each entry."""
    views = {leaf.path: leaf.view for leaf in bind_leaves(INPUTS, VIEWS)}
    matrices = jax.jit(lambda: {name: view.split(INPUTS[name]) for name, view in views.items()})()
    means = {name: [_means(matrices[name], over) for over in OVERS] for name in views}
    merge = lambda means: {k: [views[k].merge(m) for m in each] for k, each in means.items()}  # noqa: E731
    return jax.jit(merge)(means)


def _means(matrices, over):
    axes = tuple({"reduction": 1, "output": 2}[role] for role in over)
    means = [np.mean(m, axes, keepdims=True) for m in map(np.asarray, matrices)]
    return [np.broadcast_to(mean, m.shape) for mean, m in zip(means, matrices, strict=True)]


def means(inputs, where=None):
    """The same, by the sums."""
    leaves = bind_leaves(inputs, VIEWS, where)
    return {leaf.path: [_mean(leaf, inputs[leaf.path], over) for over in OVERS] for leaf in leaves}


def _mean(leaf, x, over):
    sums = MatrixSums(leaf, over)
    mean = sums.of(x) / jnp.asarray(sums.counts, x.dtype)
    return jnp.broadcast_to(sums.broadcast(mean), x.shape)


@pytest.mark.parametrize("kind", ["one device", "explicit", "auto", "manual"])
def test_means_are_those_of_each_matrix(kind):
    inputs, run = INPUTS, means
    if kind != "one device":
        mesh = sharded.make_mesh({"x": 2, "y": 4}, "auto" if kind == "manual" else kind)
        where = {name: jax.NamedSharding(mesh, spec) for name, spec in SPECS.items()}
        inputs, run = jax.device_put(INPUTS, where), functools.partial(means, where=where)
        if kind == "manual":
            run = jax.shard_map(run, mesh=mesh, in_specs=(SPECS,), out_specs=SPECS)
    got, want = jax.jit(run)(inputs), by_loop()
    for name in LEAVES:
        for over, g, w in zip(OVERS, got[name], want[name], strict=True):
            case = f"{name}, means over {over}"
            np.testing.assert_allclose(g, w, rtol=2e-6, atol=2e-7, err_msg=case)


def test_a_norm_on_a_mesh_is_one_all_reduce_of_the_matrix_axes():
    mesh = sharded.make_mesh({"replica": 2, "fsdp": 4})
    where = jax.NamedSharding(mesh, P(None, "fsdp"))
    x = jax.device_put(jnp.ones((8, 16)), where)

    def norm(x):
        (leaf,) = bind_leaves(x)
        return MatrixSums(leaf).of(squares(x))

    (found,) = read_program(jax.jit(norm).lower(x).compile()).collectives
    assert (found.kind, found.size) == ("all-reduce", 4)
    groups = {frozenset(group) for group in found.groups}
    assert groups == {frozenset(range(4)), frozenset(range(4, 8))}


def test_squares_are_real_and_wide():
    assert squares(jnp.ones(2, "bfloat16")).dtype == jnp.float32
    assert squares(jnp.array([3 + 4j], "complex64")).tolist() == [25.0]
