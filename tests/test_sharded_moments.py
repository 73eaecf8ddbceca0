"""Moments that are sharded over replicas: a collective brings gradients, and one sends updates."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import first_update
from sharded import FAST, SLOW, STACK, assert_sharded, make_mesh
from shown import plan

import muon_optax
from benchmarks.compiled import read_program
from muon_optax import MuonWarning, muon, scale_by_muon, state_shardings
from muon_optax.sharding.moments import over_axes
from muon_optax.sharding.specs import read_sharding
from muon_optax.transforms.namo import Namo

RATE, DECAY = 0.1, 0.01
LINE, HSDP = {"data": 8}, {"replica": 2, "fsdp": 4}
MATRICES = [f"layer_{i}" for i in range(8)]
BIG = [*MATRICES, "embed"]  # `mix` has no dim that a mesh divides


@functools.cache
def model() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    host = {name: rng.normal(size=(16, 16)) / 4 for name in MATRICES}
    host |= {"embed": rng.normal(size=(64, 16)), "mix": rng.normal(size=(3, 3))}
    return {k: v.astype("float32") for k, v in host.items()}, rng.normal(size=(8, 64))


def loss(params: Any, x: jax.Array) -> jax.Array:
    h = x @ params["embed"]
    for name in MATRICES:
        h = jnp.tanh(h @ params[name])
    return jnp.sum((h[:, :3] @ params["mix"]) ** 2)


@functools.cache
def gradient() -> dict[str, np.ndarray]:
    host, x = model()
    return jax.device_get(jax.jit(jax.grad(loss))(host, x.astype("float32")))


@functools.cache
def wanted(name: str) -> np.ndarray:
    """The first update of a leaf: the float64 oracle's, or optax's."""
    host, grad = model()[0][name], gradient()[name]
    if name == "embed":
        adamw = optax.adamw(RATE, weight_decay=DECAY, nesterov=True)
        return np.asarray(first_update(adamw, grad, host, jit=True))
    return reference.muon(host, [grad], learning_rate=RATE, rows=FAST, weight_decay=DECAY)[0]


def optimizer(**options: Any) -> Any:
    return muon(RATE, FAST, weight_decay=DECAY, adam_weight_decay=DECAY, **options)


def over(*axes: str) -> Any:
    return frozenset(axes)


def shape(sizes: tuple[int, ...], sharding: Any, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def gathered(params: Any, mesh: Any) -> Any:
    """The weights whole on each device, of a type that leaves their gradients unreduced."""
    where = NamedSharding(mesh, P(reduced=over(*mesh.axis_names)))
    return jax.tree.map(lambda w: jax.sharding.reshard(w, where), params)


def placed(mesh: Any, spec: P) -> Any:
    where = {k: spec if k in BIG else P(reduced=spec.reduced) for k in model()[0]}
    return jax.device_put(model()[0], {k: NamedSharding(mesh, v) for k, v in where.items()})


def batch(mesh: Any, axes: Any) -> jax.Array:
    return jax.device_put(model()[1].astype("float32"), NamedSharding(mesh, P(axes)))


def assert_right(updates: Any) -> None:
    for name in updates:
        assert reference.relative_error(updates[name], wanted(name)) <= 1e-5, name


# name: mesh, spec and reduced axes of the parameters, options, spec of the moments
TYPED = {
    "ddp": (LINE, P(reduced=over("data")), {}, P("data")),
    "hsdp": (HSDP, P("fsdp", reduced=over("replica")), {}, P(("fsdp", "replica"))),
    "columns": (HSDP, P(None, "fsdp", reduced=over("replica")), {}, P(None, ("fsdp", "replica"))),
    "whole gradients": (
        HSDP,
        P("fsdp"),
        {"shard_moments_over": "replica"},
        P(("fsdp", "replica")),
    ),
}


@pytest.mark.parametrize("case", TYPED)
def test_each_gradient_goes_by_one_reduce_scatter(case):
    sizes, spec, options, there = TYPED[case]
    mesh, axes = make_mesh(sizes), tuple(sizes)
    params, x, tx = placed(mesh, spec), batch(mesh, axes), optimizer(**options)

    def step(params, state, x):
        grads = jax.grad(loss)(gathered(params, mesh), x)
        if case == "whole gradients":
            return tx.update(grads, state, params)
        summed = {k: jax.typeof(w).sharding.spec for k, w in params.items()}  # over fsdp alone
        summed = {k: P(*s.partitions, unreduced=s.reduced) for k, s in summed.items()}
        back = {k: NamedSharding(mesh, s) for k, s in summed.items()}
        return tx.update(jax.tree.map(jax.sharding.reshard, grads, back), state, params)

    state = jax.jit(tx.init)(params)
    found = [state.inner_states[half].inner_state[0].mu for half in ("muon", "adam")]
    for moment in (*map(found[0].get, MATRICES), found[1]["embed"]):
        assert_sharded(moment, NamedSharding(mesh, there))
    compiled = jax.jit(step).lower(params, state, x).compile()
    updates, new = compiled(params, state, x)
    assert_right(updates)
    assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
    assert jax.tree.map(jax.typeof, new) == jax.tree.map(jax.typeof, state)
    counts = read_program(compiled).counts
    assert counts["reduce-scatter"] >= len(BIG)
    if case in ("ddp", "whole gradients"):
        assert counts["reduce-scatter"] == len(BIG)
        assert counts["all-reduce"] == 1  # of `mix`, which can't be cut


@pytest.mark.parametrize("case", ["ddp", "hsdp", "columns"])
def test_a_compiled_update_receives_what_is_planned(case):
    """Each leaf's reduce-scatter is in the plan's rows; results come at once, for all leaves."""
    sizes, spec, options, _ = TYPED[case]
    mesh, tx = make_mesh(sizes), optimizer(device=SLOW, **options)
    back = P(*spec.partitions, unreduced=spec.reduced)
    params, grads = (
        dict.fromkeys(MATRICES, shape((16, 16), NamedSharding(mesh, s))) for s in (spec, back)
    )
    program = read_program(jax.jit(tx.update).lower(grads, tx.init(params), params).compile())
    counts = dict(program.counts)
    assert counts.pop("reduce-scatter") == len(MATRICES)
    assert counts == {"all-to-all": 1 if case == "ddp" else 2, "all-gather": 1}
    assert program.received == muon_optax.plan(tx, params).bytes


@pytest.mark.parametrize(
    ("sizes", "spec", "exchanges"),
    [
        (LINE, P(reduced=over("data")), {}),  # whole layers are on a device
        (HSDP, P(None, "fsdp", reduced=over("replica")), {"all-to-all": 2}),
    ],
)
def test_stacks_are_sharded_over_layers(sizes, spec, exchanges):
    mesh, stack = make_mesh(sizes), {"muon_weight_dimension_numbers": STACK}
    tx, back = optimizer(device=SLOW, **stack), P(*spec.partitions, unreduced=spec.reduced)
    params, grads = ({"w": shape((8, 16, 16), NamedSharding(mesh, s))} for s in (spec, back))
    program = read_program(jax.jit(tx.update).lower(grads, tx.init(params), params).compile())
    assert program.counts == {"reduce-scatter": 1, "all-gather": 1, **exchanges}
    assert program.received == muon_optax.plan(tx, params).bytes


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_plain_gradients_of_replicas(kind):
    """Values are those of one device, moments are sharded, and updates are as their parameters."""
    mesh = make_mesh(HSDP, kind)
    params = placed(mesh, P("fsdp"))
    where = jax.tree.map(lambda x: x.sharding, params)
    declared = where if kind == "auto" else None
    tx = optimizer(param_shardings=declared, shard_moments_over="replica")
    grads = jax.device_put(gradient(), where)
    state = jax.jit(tx.init)(params)
    updates, new = jax.jit(tx.update)(grads, state, params)
    assert_right(updates)
    for name, sharding in where.items():
        assert_sharded(updates[name], sharding)
    for tree in (state, new):
        shardings = jax.tree.leaves(state_shardings(tx, params))
        for x, sharding in zip(jax.tree.leaves(tree), shardings, strict=True):
            assert_sharded(x, sharding)
    nu = new.inner_states["adam"].inner_state[0].nu["embed"]
    assert_sharded(nu, NamedSharding(mesh, P(("fsdp", "replica"))))


def test_a_state_of_another_sharding_goes_on():
    mesh = make_mesh(LINE)
    params = placed(mesh, P())
    state = jax.jit(optimizer().init)(params)
    tx = optimizer(shard_moments_over="data")
    updates, new = jax.jit(tx.update)(params, state, params)
    assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)
    shardings = jax.tree.leaves(state_shardings(tx, params))
    for x, sharding in zip(jax.tree.leaves(new), shardings, strict=True):
        assert_sharded(x, sharding)


def test_shapes_get_the_shardings_that_are_declared_of_them():
    mesh = make_mesh(LINE)
    structs = {k: shape(x.shape, None) for k, x in model()[0].items()}
    tx = optimizer(shard_moments_over=("data",))
    found = state_shardings(tx, structs, NamedSharding(mesh, P()))
    muons, adams = (found.inner_states[half].inner_state[0] for half in ("muon", "adam"))
    assert muons.mu["layer_0"].spec[0] == adams.mu["embed"].spec[0] == "data"
    assert muons.mu["mix"].spec == muons.count.spec == P()


@pytest.mark.parametrize(
    ("option", "value"), [("weight_decay_kind", "l2"), ("bias_correction", False)]
)
def test_other_stages_take_gradients_that_are_where_the_momentum_is(option, value):
    mesh = make_mesh(HSDP)
    params, x = placed(mesh, P("fsdp", reduced=over("replica"))), batch(mesh, ("replica", "fsdp"))
    namo = {"namo": Namo(each="input")} if option == "bias_correction" else {}
    tx = optimizer(**{option: value}, **namo)

    def step(params, x):
        grads = jax.grad(loss)(gathered(params, mesh), x)
        return tx.update(grads, tx.init(params), params)[0]

    host = model()[0]
    want = first_update(tx, gradient(), host, jit=True)
    found = jax.jit(step)(params, x)
    for name in host:
        assert reference.relative_error(found[name], want[name]) <= 1e-5, name


def test_a_table_that_is_looked_up_gets_the_update_of_one_device():
    """On GPUs its gradient may be wrong before it gets here: openxla#42481."""
    mesh, rng = make_mesh(HSDP), np.random.default_rng(0)
    table, ids = rng.normal(size=(32, 16)).astype("float32"), rng.integers(0, 8, size=16)
    rows = NamedSharding(mesh, P(("replica", "fsdp")))

    def looked_up(params: Any, ids: Any, where: Any = None) -> Any:
        found = params["embed"].at[ids].get(out_sharding=where)
        return jnp.sum(jnp.tanh(found) ** 2)

    def step(params, ids):
        grads = jax.grad(looked_up)(gathered(params, mesh), ids, rows)
        return tx.update(grads, tx.init(params), params)[0]

    tx = optimizer(shard_moments_over="replica")
    params = jax.device_put({"embed": table}, NamedSharding(mesh, P("fsdp")))
    with pytest.warns(MuonWarning, match="no leaf gets Muon"):
        found = jax.jit(step)(params, jax.device_put(ids, rows))
    adamw: Any = optax.adamw(RATE, weight_decay=DECAY, nesterov=True)
    whole: Any = {"embed": table}
    want = first_update(adamw, jax.jit(jax.grad(looked_up))(whole, ids), whole, jit=True)
    assert reference.relative_error(found["embed"], want["embed"]) <= 1e-5


def test_a_piece_sends_gradients_to_its_momentum_too():
    mesh = make_mesh(LINE)
    params, grads = (
        dict.fromkeys(MATRICES, shape((16, 16), NamedSharding(mesh, spec)))
        for spec in (P(reduced=over("data")), P(unreduced=over("data")))
    )
    tx: Any = scale_by_muon(FAST)
    compiled = jax.jit(tx.update).lower(grads, tx.init(params), params).compile()
    counts = read_program(compiled).counts
    assert (counts["reduce-scatter"], counts.get("all-reduce", 0)) == (len(MATRICES), 0)


def test_a_plan_says_what_sharding_moments_would_save():
    mesh = make_mesh(LINE)
    one = shape((2048, 2048), NamedSharding(mesh, P()), "bfloat16")
    whole = {f"w{i}": one for i in range(16)}
    weights = 16 * 2048 * 2048 * 2
    plain, moved = plan(whole, device="h100"), plan(whole, device="h100", shard_moments_over="data")
    assert plain.bytes == weights * 7 // 8
    assert moved.bytes == weights * 7 // 8 + weights * 7 // 64
    assert plain.advice == (
        "where gradients are summed over data, a device receives 352 MB for their sums and the "
        "update, and 250 MB with shard_moments_over='data'",
    )
    assert str(plain).endswith(plain.advice[0])
    assert plain.to_dict()["advice"] == plain.advice
    declined = plan(whole, device="h100", shard_moments_over=())
    assert (declined.rows, declined.advice, moved.advice) == (plain.rows, (), ())


@pytest.mark.parametrize(
    ("sizes", "spec", "axes", "want"),
    [
        ((8, 12, 4), P(None, "fsdp"), ("replica",), (("replica",), ("fsdp",), ())),  # layers first
        ((7, 8, 4), P(None, "fsdp"), ("replica",), ((), ("fsdp", "replica"), ())),
        ((8, 16), P(None, "fsdp"), ("replica",), ((), ("fsdp", "replica"))),
        ((8, 4), P(None, "fsdp"), ("replica",), (("replica",), ("fsdp",))),  # the other dim
        ((8, 16), P("fsdp"), ("replica", "fsdp"), (("fsdp", "replica"), ())),
        ((8, 16), P(), ("replica", "fsdp"), (("replica", "fsdp"), ())),
        ((2, 4), P(), ("replica", "fsdp"), (("replica",), ("fsdp",))),
        ((3, 5), P(), ("replica",), ((), ())),
    ],
)
def test_an_axis_goes_to_the_first_dim_that_it_divides(sizes, spec, axes, want):
    x = shape(sizes, NamedSharding(make_mesh(HSDP), spec))
    assert over_axes(read_sharding(x), axes).spec == want


def test_what_cannot_be_is_an_error_that_names_the_leaves():
    mesh = make_mesh(LINE, "auto")
    params = placed(mesh, P())
    for option in (3, ["data", 1]):
        with pytest.raises(TypeError, match="shard_moments_over must be a mesh axis"):
            optimizer(shard_moments_over=option)
    with pytest.raises(ValueError, match=r"layer_0: got the axes \['fsdp'\](?s:.*)layer_7"):
        optimizer(shard_moments_over="fsdp", param_shardings=params).init(params)
    inside = optimizer(shard_moments_over="data", param_shardings=P())
    body = jax.shard_map(inside.init, mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"embed: inside a shard_map over \['data'\]"):
        jax.eval_shape(body, params)
    undeclared = optimizer(shard_moments_over="data")
    with pytest.raises(ValueError, match="give param_shardings"):
        jax.eval_shape(undeclared.init, params)
