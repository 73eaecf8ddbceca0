"""The busiest device over a whole transformer, counted at run time and in the plan."""

import collections

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
import sharded
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update
from sharded import make_mesh
from shown import plan

from benchmarks.shapes import gpt2_layers
from muon_optax import muon, orthogonalize
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.sharding.planning import planner
from muon_optax.sharding.planning.loads import Loads, rest_owners
from muon_optax.sharding.planning.workload import Workload

BAR = 1.1  # the busiest device, of the ideal at most
NEWTON_SCHULZ = NewtonSchulz(resolve_schedule("jordan"))


def llama(layers: int = 32) -> dict[str, tuple[int, int]]:
    block = {
        "q": (4096, 4096),
        "k": (4096, 1024),
        "v": (4096, 1024),
        "o": (4096, 4096),
        "gate": (4096, 14336),
        "up": (4096, 14336),
        "down": (14336, 4096),
    }
    return {f"layer_{i}_{k}": shape for i in range(layers) for k, shape in block.items()}


def ideal(shapes: dict[str, tuple[int, int]], devices: int = 8) -> float:
    """FLOPs of the busiest device where all is shared as well as can be."""
    flops = [NEWTON_SCHULZ.flops(*shape) for shape in shapes.values()]
    return max(sum(flops) / devices, max(flops))


LAYOUTS = {
    "rows": ({"f": 8}, P("f")),
    "columns": ({"f": 8}, P(None, "f")),
    "two_dims": ({"x": 2, "y": 4}, P("x", "y")),
    "hsdp": ({"r": 2, "f": 4}, P("f")),
    "ddp": ({"d": 8}, P()),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_real_matrices_are_shared_out_evenly_at_run_time(name):
    sizes, spec = LAYOUTS[name]
    shapes = gpt2_layers(12, width=16)
    mesh = make_mesh(sizes)
    calls: list[tuple[int, int]] = []  # each device's thread appends

    def record(device, count, flops):
        calls.append((int(device), int(count) * int(flops)))

    def orthogonalizer(x):
        real = (jnp.abs(x).max((1, 2)) > 0).sum()  # padding is zero
        index = jax.lax.axis_index(tuple(sizes))
        jax.debug.callback(record, index, real, NEWTON_SCHULZ.flops(*x.shape[1:]))
        return x

    where = {name: NamedSharding(mesh, spec) for name in shapes}
    where["bias"] = NamedSharding(mesh, P())
    params = {name: reference.matrix(i, *s) for i, (name, s) in enumerate(shapes.items())}
    params = jax.device_put({**params, "bias": np.zeros(32, np.float32)}, where)
    tx = muon(0.1, orthogonalizer=orthogonalizer, device=sharded.SLOW)
    jax.block_until_ready(first_update(tx, params, jit=True))
    jax.effects_barrier()
    done: dict[int, int] = collections.Counter()
    for device, flops in calls:
        done[device] += flops
    assert sum(done.values()) == sum(NEWTON_SCHULZ.flops(*s) for s in shapes.values())
    assert max(done.values()) <= BAR * ideal(shapes)


@pytest.mark.parametrize(("count", "offset"), [(5, 0), (6, 3), (7, 6)])
def test_the_owners_of_a_rest_are_those_of_the_plan(count, offset, monkeypatch):
    mesh, seen = make_mesh({"r": 2, "f": 4}), []
    monkeypatch.setattr(Loads, "best_first_owner", lambda *_: offset)
    planner.plan_leaves.cache_clear()

    def orthogonalizer(x):
        index = jax.lax.axis_index(("r", "f"))
        jax.debug.callback(lambda i, v: seen.append((int(i), int(v))), index, x[0, 0, 0])
        return x

    params = {f"w{i}": jnp.full((8, 8), float(i)) for i in range(count)}
    params = jax.device_put(params, NamedSharding(mesh, P("f")))
    tx = orthogonalize(orthogonalizer=orthogonalizer, strategy="all_to_all", device=sharded.SLOW)
    found, _ = jax.jit(tx.update)(params, tx.init(params))
    chex.assert_trees_all_equal(found, params)
    jax.effects_barrier()
    planner.plan_leaves.cache_clear()
    work = Workload(8, 8, 4, 0, ("f",), ("r",), (("r", 2), ("f", 4)))
    want = rest_owners(offset, count, work).tolist()
    assert sorted(seen) == sorted((owner, i) for i, owner in enumerate(want))


def planned(shapes, sizes, spec, device):
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    return plan(params, NamedSharding(mesh, spec), device=device)


@pytest.mark.parametrize("device", ["h100", "tpu_v5p", "cpu"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_of_a_llama_shares_the_work_evenly(name, device):
    shapes = llama()
    assert planned(shapes, *LAYOUTS[name], device).flops <= BAR * ideal(shapes)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_plan_of_a_gpt2_shares_the_work_evenly_where_products_are_slow(name):
    shapes = gpt2_layers(12)
    assert planned(shapes, *LAYOUTS[name], "cpu").flops <= BAR * ideal(shapes)
