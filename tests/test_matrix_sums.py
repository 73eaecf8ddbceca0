"""Sums and means over matrices, on every kind of mesh axis, against a loop over the matrices."""

import itertools

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


def by_loop(leaf, x: np.ndarray, over) -> np.ndarray:
    """The mean that belongs to each entry of the leaf."""
    view = leaf.view
    axes = tuple({"reduction": 1, "output": 2}[role] for role in over)
    means = [
        np.broadcast_to(np.mean(m, axes, keepdims=True), m.shape)
        for m in map(np.asarray, view.split(jnp.asarray(x)))
    ]
    return np.asarray(view.merge([jnp.asarray(m) for m in means]))


def means(leaf, x, over):
    sums = MatrixSums(leaf, over)
    mean = sums.of(x) / jnp.asarray(sums.counts, x.dtype)
    return jnp.broadcast_to(sums.broadcast(mean), x.shape)


@pytest.mark.parametrize(("name", "over"), list(itertools.product(LEAVES, OVERS)))
@pytest.mark.parametrize("kind", ["one device", "explicit", "auto", "manual"])
def test_means_are_those_of_each_matrix(name, over, kind):
    shape, spec, view = LEAVES[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    (whole,) = bind_leaves(jnp.asarray(x), view)
    want = by_loop(whole, x, over)
    if kind == "one device":
        got = means(whole, jnp.asarray(x), over)
    else:
        mesh = sharded.make_mesh({"x": 2, "y": 4}, "auto" if kind == "manual" else kind)
        where = jax.NamedSharding(mesh, spec)

        def run(x):
            (leaf,) = bind_leaves(x, view, where)
            return means(leaf, x, over)

        if kind == "manual":
            run = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
        got = jax.jit(run)(jax.device_put(x, where))
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-7)


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
