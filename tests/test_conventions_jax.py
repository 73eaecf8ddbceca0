"""JAX's transformations, modes and memories around an update, on one device and on meshes."""

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from battery import (
    GRADS,
    OPTIONS,
    PARAMS,
    Place,
    assert_close,
    assert_right,
    everywhere,
    momentum,
    plain,
    train,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import apply_compiled, apply_updates

from muon_optax import scale_by_muon, state_shardings


def started(place: Place, tx: Any) -> tuple[Any, Any, Any]:
    params = place.put(PARAMS)
    return params, jax.jit(tx.init)(params), place.put(GRADS[0])


@everywhere
def test_a_scan_carry(place):
    tx = place.muon()

    def train(params, grads):
        def step(carry, grad):
            params, state = carry
            updates, state = tx.update(grad, state, params)
            return (apply_updates(params, updates), state), updates

        return jax.lax.scan(step, (params, tx.init(params)), grads)

    stack = jax.jit(lambda *trees: jax.tree.map(lambda *x: jnp.stack(x), *trees))
    stacked = stack(*map(place.put, GRADS))
    (last, _), updates = jax.jit(train)(place.put(PARAMS), stacked)
    assert_close(updates, jax.tree.map(lambda *x: np.stack(x), *plain()))
    jax.tree.map(sharded.assert_sharded, last, place.where)


@everywhere
def test_one_trace_no_weak_types_and_types_that_stay(place):
    chex.clear_trace_counter()
    tx = place.muon(learning_rate=optax.linear_schedule(0.1, 0.1, 9))
    params, updates = place.put(PARAMS), []
    state = tx.init(params)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, jax.jit(tx.init)(params))
    step = jax.jit(chex.assert_max_traces(tx.update, n=1))
    for grad in GRADS:
        new, after = step(place.put(grad), state, params)
        assert not any(x.weak_type for x in jax.tree.leaves((state, new)))
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
        params, state = apply_compiled(params, new), after
        updates.append(new)
    assert_right(place, updates, plain())


@everywhere
def test_donation_right_after_init(place):
    tx = place.muon()
    params, state, grad = started(place, tx)
    buffers = [
        {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
        for x in jax.tree.leaves((params, state))
    ]
    assert len(set.union(*buffers)) == sum(map(len, buffers))

    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return apply_updates(params, updates), state

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # JAX warns of donated buffers that it can't use
        new, _ = jax.jit(step, donate_argnums=(0, 1))(params, state, grad)
    assert all(x.is_deleted() for x in jax.tree.leaves((params, state)))
    assert_right(place, [new], [apply_compiled(PARAMS, plain()[0])])


@everywhere
def test_eval_shape(place):
    tx = place.muon(mu_dtype="bfloat16")
    params, state, grad = started(place, tx)
    abstract = jax.eval_shape(tx.init, params)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for other in (abstract, tx.init(structs)):
        chex.assert_trees_all_equal_shapes_and_dtypes(other, state)
    updates, after = jax.eval_shape(tx.update, grad, abstract, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, PARAMS)
    if place.name == "explicit":
        assert momentum(after)["mlp"]["kernel"].sharding.spec == P("f", None)


@everywhere
def test_vmap_over_hyperparameters(place):
    rates = np.array([0.1, 0.2], np.float32)

    def update(rate, params, grad):
        tx = place.muon(learning_rate=rate, weight_decay=0.0, adam_weight_decay=0.0)
        return tx.update(grad, tx.init(params), params)[0]

    batched = jax.jit(jax.vmap(update, (0, None, None)))
    got = batched(rates, place.put(PARAMS), place.put(GRADS[0]))
    one = plain(weight_decay=0.0, adam_weight_decay=0.0)[0]
    assert_close(got, jax.tree.map(lambda x: np.stack([x, 2 * np.asarray(x)]), one))


def other_member() -> tuple[Any, Any]:
    return jax.tree.map(np.negative, PARAMS), GRADS[1]


@functools.cache
def update_of_the_other() -> Any:
    params, grad = other_member()
    one = Place("one")
    return train(one.muon(), one, [grad], params)[0][0]


def of_members(spec: P) -> P:
    return P(None, *spec)


@everywhere
def test_vmap_over_members(place):
    tx = place.muon()
    where = place.where
    if place.name != "one":
        where = jax.tree.map(lambda s: NamedSharding(s.mesh, of_members(s.spec)), where)
    both = jax.tree.map(lambda *x: np.stack(x), (PARAMS, GRADS[0]), other_member())
    params, grads = (jax.device_put(tree, where) for tree in both)
    state = jax.jit(jax.vmap(tx.init))(params)
    updates, _ = jax.jit(jax.vmap(tx.update))(grads, state, params)
    for i, want in enumerate((plain()[0], update_of_the_other())):
        assert_close(jax.tree.map(lambda x, i=i: np.asarray(x)[i], updates), want)
    jax.tree.map(sharded.assert_sharded, updates, where)


@everywhere
def test_strict_promotion_of_muons_half(place):
    tx = scale_by_muon(OPTIONS["ns_coeffs"], **_declared(place))
    kernel, where = (tree["mlp"]["kernel"] for tree in (GRADS[0], place.where))
    x = jax.device_put(kernel, where)
    with jax.numpy_dtype_promotion("strict"):
        updates, _ = jax.jit(tx.update)(x, jax.jit(tx.init)(x))
    want = reference.newton_schulz(reference.mixes([kernel])[0], OPTIONS["ns_coeffs"])
    assert reference.relative_error(updates, want) <= 1e-5


def _declared(place: Place) -> dict[str, Any]:
    return {k: v["mlp"]["kernel"] for k, v in place.declared.items()}


def test_strict_promotion_fails_in_optax_alone():
    """Its bias correction raises a Python float to an int32 count."""
    tx: Any = optax.adamw(0.1)
    with (
        jax.numpy_dtype_promotion("strict"),
        pytest.raises(jax.dtypes.TypePromotionError),
    ):
        tx.update(np.ones(3), tx.init(np.ones(3)), np.ones(3))


@contextlib.contextmanager
def strict_promotion() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


MODES: dict[str, Any] = {
    "strict_promotion": strict_promotion,
    "debug_nans": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("mode", MODES)
@everywhere
def test_modes(place, mode):
    with MODES[mode]():
        updates, _ = train(place.muon(), place)
    assert_right(place, updates, plain())


@everywhere
def test_a_zero_gradient_under_debug_nans(place):
    zero = jax.tree.map(np.zeros_like, PARAMS)
    with jax.debug_nans(True):
        updates, _ = train(place.muon(weight_decay=0.0, adam_weight_decay=0.0), place, [zero])
    assert_right(place, updates, [zero])


@everywhere
def test_a_compiled_step_transfers_nothing(place):
    tx = place.muon(consistent_rms=0.2, learning_rate=optax.linear_schedule(0.1, 0.0, 9))
    params, state, grad = started(place, tx)
    step = jax.jit(tx.update)
    with jax.transfer_guard("disallow"):
        step(grad, state, params)


@everywhere
def test_double_precision(place):
    def mixed(tree):
        return {**tree, "mlp": {**tree["mlp"], "kernel": tree["mlp"]["kernel"].astype("float64")}}

    with jax.enable_x64(True):
        updates, state = train(place.muon(), place, list(map(mixed, GRADS)), mixed(PARAMS))
        rest = theirs()
    kernels = [u["mlp"]["kernel"] for u in updates]
    assert {x.dtype for x in (*kernels, momentum(state)["mlp"]["kernel"])} == {np.dtype("float64")}
    options = {"learning_rate": 0.1, "rows": OPTIONS["ns_coeffs"], "weight_decay": 0.02}
    want = reference.muon(PARAMS["mlp"]["kernel"], [g["mlp"]["kernel"] for g in GRADS], **options)
    assert_close(kernels, want, bound=1e-12)
    assert updates[0]["embed"]["embedding"].dtype == np.dtype("float32")
    assert_close([u["embed"] for u in updates], [u["embed"] for u in rest])


@functools.cache
def theirs() -> list[Any]:
    """AdamW's updates; in double precision optax's bias correction is more exact."""
    tx: Any = optax.adamw(0.1, weight_decay=0.01, nesterov=True)
    return train(tx, Place("one"))[0]


# Host memory


def offloaded(place: Place) -> Any:
    return jax.tree.map(lambda s: s.with_memory_kind("pinned_host"), place.where)


def kinds(tree: Any) -> set[str]:
    return {x.sharding.memory_kind for x in jax.tree.leaves(tree) if x.ndim}


def steps(place: Place, tx: Any, params: Any, state: Any) -> list[Any]:
    """Two updates of parameters in host memory or not; types stay."""
    updates, step = [], jax.jit(tx.update)
    for grad in GRADS:
        new, after = step(place.put(grad), state, params)
        assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, state)
        home = jax.tree.map(lambda x: x.sharding, params)
        params = jax.device_put(apply_compiled(place.put(params), new), home)
        state = after
        updates.append(new)
    return updates


@everywhere
def test_parameters_and_state_in_host_memory(place):
    tx = place.muon()
    params = jax.device_put(PARAMS, offloaded(place))
    state = jax.jit(tx.init)(params)
    assert kinds(state) == kinds(tx.init(params)) == {"pinned_host"}
    assert_right(place, steps(place, tx, params, state), plain())


@everywhere
def test_momentum_declared_in_host_memory(place):
    tx = place.muon(mu_shardings=offloaded(place))
    params = place.put(PARAMS)
    state = jax.jit(tx.init)(params)
    assert kinds(momentum(state)) == {"pinned_host"}
    assert kinds(state.inner_states["adam"]) == {"device"}
    assert_right(place, steps(place, tx, params, state), plain())


@everywhere
def test_a_state_moved_to_host_memory_stays_there(place):
    tx = optax.chain(optax.identity(), place.muon())
    params = place.put(PARAMS)
    host, born = jax.memory.Space.Host, jax.jit(tx.init)(params)
    state = jax.tree.map(lambda x: jax.device_put(x, host) if x.ndim else x, born)
    assert kinds(state) == {"pinned_host"}
    assert_right(place, steps(place, tx, params, state), plain())


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_state_shardings_know_host_memory(kind):
    place = Place(kind)
    params, on_host = place.put(PARAMS), jax.device_put(PARAMS, offloaded(place))
    whole = state_shardings(place.muon(), on_host)
    ours = state_shardings(place.muon(), params, mu_shardings=offloaded(place))
    assert {s.memory_kind for s in jax.tree.leaves(momentum(whole))} == {"pinned_host"}
    assert {s.memory_kind for s in jax.tree.leaves(momentum(ours))} == {"pinned_host"}
    born = jax.jit(place.muon().init, out_shardings=whole)(on_host)
    assert kinds(born) == {"pinned_host"}
    assert {s.memory_kind for s in jax.tree.leaves(ours.inner_states["adam"])} == {"device"}
