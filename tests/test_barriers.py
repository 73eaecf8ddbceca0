"""Values that wait for each other, with types of their own, and parts apart from their array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from jax.sharding import PartitionSpec as P

from muon_optax.sharding.runtime.barriers import barrier, materialized


def test_values_are_what_they_were():
    tree = {"a": jnp.arange(3), "b": (jnp.ones(()), None)}
    for function in (barrier, jax.jit(barrier)):
        found = function(tree)
        assert jax.tree.structure(found) == jax.tree.structure(tree)
        np.testing.assert_array_equal(found["a"], [0, 1, 2])
    assert barrier(()) == ()


def test_what_is_replicated_stays_so_beside_what_varies():
    mesh = sharded.make_mesh({"x": 2, "y": 4})

    def body(a, b, c):
        types = [jax.typeof(v) for v in (a, b, c)]
        a, b, c = barrier((a, b, c))
        assert [jax.typeof(v) for v in (a, b, c)] == types
        return a, b, c

    specs = (P("x"), P("y"), P())
    arrays = [jax.device_put(jnp.arange(8.0), jax.NamedSharding(mesh, spec)) for spec in specs]
    found = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs))(*arrays)
    for x in found:
        np.testing.assert_array_equal(x, np.arange(8))


def test_derivatives_and_batches_pass():
    value, slope = jax.jvp(lambda x: barrier((x, 2 * x))[1], (3.0,), (1.0,))
    assert (float(value), float(slope)) == (6.0, 2.0)
    assert float(jax.grad(lambda x: barrier((x**2, x))[0])(3.0)) == 6.0
    batched = jax.vmap(lambda x: barrier((x, jnp.ones(())))[0])(jnp.arange(4))
    np.testing.assert_array_equal(batched, [0, 1, 2, 3])


def test_one_barrier_holds_them_all():
    text = jax.jit(lambda a, b: barrier((a + 1, b))).lower(1.0, 2.0).as_text()
    (line,) = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert line.count("tensor<f32>") == 2


@pytest.mark.parametrize("columns", [28, 96, 120, 128, 224, 1792])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_a_part_stands_apart_on_tpus_only(platform, columns):
    traced = jax.jit(lambda x: materialized(2 * x)).trace(jnp.ones((2, 3, columns)))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    is_tpu, is_padded = platform == "tpu", columns in (28, 96, 224)
    assert ("optimization_barrier" in text) == is_tpu
    # XLA writes the minor dim first.
    assert ("result_layouts = [dense<[2, 1, 0]>" in text) == (is_tpu and not is_padded)


def test_a_part_apart_keeps_its_value_type_and_derivative():
    mesh = sharded.make_mesh({"x": 8})
    x = jax.device_put(jnp.arange(16.0).reshape(8, 2), jax.NamedSharding(mesh, P("x")))
    body = jax.shard_map(
        lambda x: materialized(3 * x), mesh=mesh, in_specs=P("x"), out_specs=P("x")
    )
    np.testing.assert_array_equal(jax.jit(body)(x), 3 * np.arange(16).reshape(8, 2))
    np.testing.assert_array_equal(jax.vmap(materialized)(x), x)
    slope = jax.grad(lambda x: materialized(x**2).sum())(jnp.array([3.0, 4.0]))
    np.testing.assert_array_equal(slope, [6, 8])
