"""Where the optimizer's state is born, shardings, and is moved to."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FAST, STACK, Leaf, make_mesh

from muon_optax import (
    muon,
    orthogonalize,
    scale_by_momentum,
    scale_by_muon,
    scale_by_shape,
    state_shardings,
)

SIZES = {"x": 2, "y": 4}
SPECS = {"kernel": P("x", "y"), "bias": P("y"), "embedding": P("y", "x")}
SHAPES = {"kernel": (16, 32), "bias": (32,), "embedding": (64, 16)}


def make(
    kind: str = "explicit", sizes: dict[str, int] = SIZES, specs: dict[str, P] = SPECS
) -> tuple[dict[str, NamedSharding], dict[str, Any]]:
    """Shardings and parameters of a small model: a matrix, and two leaves of AdamW."""
    mesh = make_mesh(sizes, kind)
    where = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}
    return where, jax.device_put(params, where)


def moments(state: Any) -> list[tuple[str, jax.Array]]:
    """The parameter's name and the array, for each moment in a state."""
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [(getattr(path[-1], "key", None), x) for path, x in flat]
    return [(name, x) for name, x in names if name in SHAPES]


@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_every_moment_is_born_where_its_parameter_lies(kind, declared, with_context):
    where, params = make(kind)
    tx = muon(0.1, param_shardings=where if declared else None)
    mesh = params["bias"].sharding.mesh
    context = jax.set_mesh(mesh) if with_context else contextlib.nullcontext()
    with context:
        state = jax.jit(tx.init)(params)
    found = moments(state)
    assert sorted(name for name, _ in found) == ["bias", "bias", "embedding", "embedding", "kernel"]
    for name, x in found:
        sharded.assert_sharded(x, where[name])
        assert not np.asarray(x).any()


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_every_moment_stays_where_its_parameter_lies(kind):
    where, params = make(kind)
    tx = muon(0.1, FAST, weight_decay=0.1, param_shardings=where)
    updates, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    assert len(moments(state)) == 5
    for name, x in (*moments(state), *updates.items()):
        sharded.assert_sharded(x, where[name])


@pytest.mark.parametrize("mu_dtype", [None, "bfloat16"])
def test_a_device_holds_its_part_of_the_moments_and_no_more(mu_dtype):
    _, params = make()
    state = jax.jit(muon(0.1, mu_dtype=mu_dtype).init)(params)
    mine = sum(s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards[:1])
    size = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    first = 4 if mu_dtype is None else 2
    kernel, bias = first * size["kernel"] // 8, (4 + first) * size["bias"] // 4
    embedding = (4 + first) * size["embedding"] // 8
    assert mine == kernel + bias + embedding + 2 * 4  # and two counts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_abstract_init_is_like_a_real_one(dtype):
    _, params = make()
    params = jax.tree.map(lambda x: x.astype(dtype), params)
    tx = muon(0.1, mu_dtype="float32")
    real = tx.init(params)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    for abstract in (jax.eval_shape(tx.init, params), tx.init(structs)):
        assert jax.tree.structure(abstract) == jax.tree.structure(real)
        same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), abstract, real)
        assert jax.tree.all(same)


HUGE = {"up": (2**22, 2**22), "embed": (2**22, 2**22), "bias": (2**22,)}  # 64 TiB each


def huge(spec: P | None = None, **sharding: Any) -> Any:
    where = None if spec is None else NamedSharding(make_mesh(SIZES), spec, **sharding)
    shapes = {n: jax.ShapeDtypeStruct(s, "bfloat16", sharding=where) for n, s in HUGE.items()}
    return {**shapes, "step": jax.ShapeDtypeStruct((), "int32")}


def test_abstract_parameters_have_an_abstract_state():
    tx: Any = muon(lambda count: 0.1, mu_dtype="float32", weight_decay=lambda count: 0.1)
    params = huge()
    state = tx.init(params)
    assert state == jax.eval_shape(tx.init, params)
    (mu,) = jax.tree.leaves(state.inner_states["muon"].inner_state[0].mu)
    assert mu == jax.ShapeDtypeStruct(HUGE["up"], "float32")
    first = state.inner_states["adam"].inner_state[0]
    assert first.nu["embed"] == jax.ShapeDtypeStruct(HUGE["embed"], "bfloat16")
    assert first.count == jax.ShapeDtypeStruct((), "int32")


def test_an_abstract_state_says_how_it_is_sharded():
    params = huge(P("x"))
    there = {name: NamedSharding(make_mesh(SIZES), P("x", "y")) for name in ("up", "embed")}
    there = {**there, "bias": None, "step": None}
    tx: Any = muon(lambda count: 0.1, mu_shardings=there)
    shardings = jax.tree.map(lambda x: x.sharding, tx.init(params))
    where = {
        **jax.tree.map(lambda x: x.sharding, params),
        "step": NamedSharding(make_mesh(SIZES), P()),
    }
    assert shardings == state_shardings(
        tx, params, where, mu_shardings={**where, "up": there["up"]}
    )
    mu = shardings.inner_states["muon"].inner_state[0].mu["up"]
    assert mu.spec == P("x", "y")


def test_an_abstract_state_in_host_memory():
    on_host = {"up": huge(P("x"), memory_kind="pinned_host")["up"]}
    in_place: Any = scale_by_muon().init(on_host)
    declared = NamedSharding(make_mesh(SIZES), P("x", "y"), memory_kind="pinned_host")
    moved: Any = scale_by_muon(mu_shardings=declared).init({"up": huge(P("x"))["up"]})
    assert in_place.mu["up"].sharding == on_host["up"].sharding
    assert moved.mu["up"].sharding == declared
    assert moved.count.sharding == NamedSharding(make_mesh(SIZES), P())


@pytest.mark.parametrize("piece", [scale_by_muon, scale_by_momentum, orthogonalize, scale_by_shape])
def test_pieces_are_abstract_too(piece):
    params = {"up": huge()["up"]}
    assert piece().init(params) == jax.eval_shape(piece().init, params)


def test_one_abstract_leaf_makes_its_moments_and_the_counts_abstract():
    tx: Any = scale_by_momentum()
    state = tx.init({"w": np.ones(3, np.float32), "v": jax.ShapeDtypeStruct((2,), "float32")})
    np.testing.assert_array_equal(state.mu["w"], 0)
    assert state.mu["v"] == jax.ShapeDtypeStruct((2,), "float32")
    assert state.count == jax.ShapeDtypeStruct((), "int32")


def optimizers():
    inner = muon(0.1, FAST)
    return {
        "muon": inner,
        "chain": optax.chain(optax.clip_by_global_norm(1.0), muon(0.1, FAST, mu_dtype="bfloat16")),
        "multi_steps": optax.MultiSteps(inner, 2).gradient_transformation(),
        "injected": optax.inject_hyperparams(muon, static_args=("ns_coeffs",))(0.1, FAST),
        "finite": optax.apply_if_finite(inner, 2),
    }


@pytest.mark.parametrize("name", optimizers())
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_state_shardings_is_where_the_state_lies(kind, name):
    where, params = make(kind)
    tx = optimizers()[name]
    found = state_shardings(tx, params)
    state = jax.jit(tx.init, out_shardings=found)(params)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        sharded.assert_sharded(x, sharding)
        assert x.ndim or sharding.is_fully_replicated
    assert len(moments(state)) >= 5
    for leaf, x in moments(state):
        sharded.assert_sharded(x, where[leaf])


@pytest.mark.parametrize("name", ["chain", "injected"])  # optax puts MultiSteps's sums elsewhere
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_state_shardings_is_where_init_puts_the_state(kind, name):
    _, params = make(kind)
    tx = optimizers()[name]
    state, found = jax.jit(tx.init)(params), state_shardings(tx, params)
    assert jax.tree.structure(state) == jax.tree.structure(found)
    for x, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(found), strict=True):
        if x.ndim:
            sharded.assert_sharded(x, sharding)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_state_shardings_of_shapes_alone(kind):
    where, params = make(kind)
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    tx = muon(0.1)
    assert state_shardings(tx, structs, where) == state_shardings(tx, params)
    assert state_shardings(tx, params, SPECS) == state_shardings(tx, params)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_state_shardings_of_abstract_parameters_can_hold_arrays(kind):
    where, params = make(kind)
    abstract = jax.eval_shape(lambda x: x, params)
    tx = muon(0.1)
    found = state_shardings(tx, abstract, where)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), jax.eval_shape(tx.init, abstract))
    restored = jax.device_put(zeros, found)
    for name, x in moments(restored):
        sharded.assert_sharded(x, where[name])


def test_state_shardings_names_the_leaves_it_knows_nothing_of():
    structs = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
    message = r"(?s)how these leaves are sharded.*  bias: give a NamedSharding.*embedding.*kernel"
    with pytest.raises(ValueError, match=message):
        state_shardings(muon(0.1), structs)


def test_a_state_moves_to_another_mesh():
    _, params = make()
    tx = muon(0.1, FAST)
    grads = jax.tree.map(lambda x: jax.device_put(np.sin(x), x.sharding), params)
    _, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    want, _ = jax.jit(tx.update)(grads, state, params)
    there, new = make(sizes={"f": 8}, specs=dict.fromkeys(SHAPES, P("f")))
    moved = jax.device_put(jax.device_get(state), state_shardings(tx, new))
    for (name, old), (_, x) in zip(moments(state), moments(moved), strict=True):
        sharded.assert_sharded(x, there[name])
        np.testing.assert_array_equal(x, old)
    got, _ = jax.jit(tx.update)(jax.device_put(jax.device_get(grads), there), moved, new)
    for name in SHAPES:
        assert reference.relative_error(got[name], want[name]) <= 1e-5


LEAVES = {
    "rows": Leaf((16, 32), P("x")),
    "columns": Leaf((16, 32), P(None, "y")),
    "both": Leaf((32, 16), P("x", "y")),
    "stack": Leaf((3, 16, 32), P(None, "y"), STACK),
}
MIXED = {"x": "auto", "y": "explicit"}


@pytest.mark.parametrize("with_context", [False, True])
@pytest.mark.parametrize("kind", ["explicit", "auto", MIXED])
def test_what_was_put_nowhere_meets_what_lies_on_the_mesh(kind, with_context):
    """A state made or read before the parameters were put on the mesh; gradients from elsewhere."""
    mesh = make_mesh(SIZES, kind)
    where, grads = sharded.shardings(LEAVES, mesh), sharded.gradients(LEAVES)
    views, placed = sharded.views(LEAVES), jax.device_put(grads, where)
    tx: Any = scale_by_muon(FAST, weight_dimension_numbers=views, param_shardings=where)
    born = {"on the mesh": jax.jit(tx.init)(placed), "elsewhere": tx.init(grads)}
    cases: Any = {
        "the state": (placed, born["elsewhere"]),
        "gradients": (grads, born["on the mesh"]),
        "both": (grads, born["elsewhere"]),
    }
    update = lambda cases, w: {off: tx.update(*x, w)[0] for off, x in cases.items()}  # noqa: E731
    with jax.set_mesh(mesh) if with_context else contextlib.nullcontext():
        found = jax.jit(update)(cases, placed)
    for off, updates in found.items():
        for name, want in sharded.answers(LEAVES, grads).items():
            assert sharded.worst_error(LEAVES[name], updates[name], want) <= 1e-5, off
            sharded.assert_sharded(updates[name], where[name])


@pytest.mark.parametrize("kind", ["explicit", "auto", MIXED])
def test_an_eager_update_of_leaves_that_say_how_they_lie(kind):
    mesh = make_mesh(SIZES, kind)
    where, grads = sharded.shardings(LEAVES, mesh), sharded.gradients(LEAVES)
    placed = jax.device_put(grads, where)
    tx = scale_by_muon(FAST, weight_dimension_numbers=sharded.views(LEAVES))
    updates: Any = tx.update(placed, tx.init(placed), placed)[0]
    for name, want in sharded.answers(LEAVES, grads).items():
        assert sharded.worst_error(LEAVES[name], updates[name], want) <= 1e-5
        sharded.assert_sharded(updates[name], where[name])


ZERO = {
    "wide": (Leaf((16, 32), P()), P("f")),
    "tall": (Leaf((32, 16), P()), P("f")),
    "stack": (Leaf((3, 16, 32), P(), STACK), P(None, None, "f")),
    "layers": (Leaf((8, 16, 32), P(), STACK), P("f")),
    "tensor_parallel": (Leaf((16, 32), P(None, "t")), P("f", "t")),
}


@pytest.mark.parametrize("strategy", ["auto", "gather", "all_to_all"])
@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_momentum_that_lies_elsewhere(kind, strategy):
    mesh = make_mesh({"f": 4, "t": 2}, kind)
    leaves = {name: leaf for name, (leaf, _) in ZERO.items()}
    where = sharded.shardings(leaves, mesh)
    there = {name: NamedSharding(mesh, spec) for name, (_, spec) in ZERO.items()}
    tx = scale_by_muon(
        FAST,
        weight_dimension_numbers=sharded.views(leaves),
        param_shardings=where,
        mu_shardings=there,
        strategy=strategy,
    )
    grads = sharded.gradients(leaves)
    placed = jax.device_put(grads, where)
    start = jax.jit(tx.init)(placed)
    updates, state = jax.jit(tx.update)(placed, start)
    want = sharded.answers(leaves, grads)
    for name, leaf in leaves.items():
        assert sharded.worst_error(leaf, updates[name], want[name]) <= 1e-5
        sharded.assert_sharded(updates[name], where[name])
        sharded.assert_sharded(start.mu[name], there[name])
        sharded.assert_sharded(state.mu[name], there[name])


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P(None, None, "x"), "has 3 entries for a leaf of 2 dims"),
        (P("z"), r"names the axes \['z'\]; the mesh has \('x', 'y'\)"),
        (P("x", "x"), "names an axis twice"),
        (P(None, ("x", "y")), r"dim 1 of shape \(16, 12\) must be a multiple of 8"),
    ],
)
def test_momentum_that_can_not_lie_there_is_an_error_at_init(spec, message, jit):
    mesh = make_mesh(SIZES)
    params = jax.device_put(
        {"mlp": {"up": np.ones((16, 12), np.float32)}}, NamedSharding(mesh, P())
    )
    tx = muon(0.1, mu_shardings=spec)
    with pytest.raises(ValueError, match=rf"mu_shardings says:\n  mlp/up: .*{message}"):
        (jax.jit(tx.init) if jit else tx.init)(params)


SIZE_ONE = {
    "rows": (P(), P(("f", "o"))),
    "columns": (P(None, "o"), P("o", "f")),
    "both": (P(), P("f", "t")),
    "nothing_moves": (P("f"), P(("o", "f"))),
}


@pytest.mark.parametrize("jit", [jax.jit, lambda step: step], ids=["jit", "eager"])
@pytest.mark.parametrize("sizes", [(2, 4), (1, 1)])
@pytest.mark.parametrize(
    ("home", "there", "declared"),
    [
        (P("a", "e"), None, True),
        (P("a", "e"), None, False),
        (P(None, "e"), None, False),
        (P("a"), P("a", "e"), True),
        (P("a", "e"), P(("e", "a")), True),
    ],
)
def test_auto_and_explicit_axes_on_one_mesh(home, there, declared, sizes, jit):
    mesh = make_mesh(dict(zip("ae", sizes, strict=True)), {"a": "auto", "e": "explicit"})
    leaf = Leaf((16, 32), home)
    where = NamedSharding(mesh, home)
    moved = None if there is None else NamedSharding(mesh, there)
    tx = scale_by_muon(FAST, param_shardings=where if declared else None, mu_shardings=moved)
    x = leaf.gradient(0)
    grad = jax.device_put(x, where)
    updates, state = jit(tx.update)(grad, jit(tx.init)(grad), grad)
    assert sharded.worst_error(leaf, updates, sharded.answers({"w": leaf}, {"w": x})["w"]) <= 1e-5
    sharded.assert_sharded(state.mu, moved or where)
    if declared:
        sharded.assert_sharded(updates, where)


@pytest.mark.parametrize("kind", ["explicit", "auto", {"f": "explicit", "o": "auto", "t": "auto"}])
def test_momentum_that_lies_elsewhere_along_axes_of_size_one(kind):
    mesh = make_mesh({"f": 4, "o": 1, "t": 2}, kind)
    leaves = {name: Leaf((16, 32), home) for name, (home, _) in SIZE_ONE.items()}
    leaves["layers"] = Leaf((3, 16, 32), P(), STACK)
    where = sharded.shardings(leaves, mesh)
    there = {name: NamedSharding(mesh, spec) for name, (_, spec) in SIZE_ONE.items()}
    there["layers"] = NamedSharding(mesh, P("o", None, "f"))
    tx = scale_by_muon(
        FAST,
        weight_dimension_numbers=sharded.views(leaves),
        param_shardings=where,
        mu_shardings=there,
    )
    grads = sharded.gradients(leaves)
    placed = jax.device_put(grads, where)
    updates, state = jax.jit(tx.update)(placed, jax.jit(tx.init)(placed))
    for name, want in sharded.answers(leaves, grads).items():
        assert sharded.worst_error(leaves[name], updates[name], want) <= 1e-5
        sharded.assert_sharded(updates[name], where[name])
        sharded.assert_sharded(state.mu[name], there[name])
        if kind == "explicit":
            assert jax.typeof(updates[name]) == jax.typeof(placed[name])


def zero_1():
    """The optimizer of replicated parameters with sharded momentum."""
    where, params = make(sizes={"f": 8}, specs=dict.fromkeys(SHAPES, P()))
    there = {**where, "kernel": NamedSharding(params["kernel"].sharding.mesh, P("f"))}
    tx: Any = muon(0.1, FAST, param_shardings=where, mu_shardings=there, weight_decay=0.1)
    return tx, params, where, there


def test_the_whole_optimizer_with_momentum_that_lies_elsewhere():
    tx, params, where, there = zero_1()
    state = jax.jit(tx.init)(params)
    updates, state = jax.jit(tx.update)(params, state, params)
    kernel = params["kernel"]
    want = reference.muon(kernel, [kernel], learning_rate=0.1, rows=FAST, weight_decay=0.1)
    assert reference.relative_error(updates["kernel"], want[0]) <= 1e-5
    sharded.assert_sharded(updates["kernel"], where["kernel"])
    sharded.assert_sharded(dict(moments(state.inner_states["muon"]))["kernel"], there["kernel"])


def test_state_shardings_of_momentum_that_lies_elsewhere():
    tx, params, where, there = zero_1()
    found = state_shardings(tx, params, mu_shardings=there)
    state = jax.jit(tx.init, out_shardings=found)(params)
    sharded.assert_sharded(dict(moments(state.inner_states["muon"]))["kernel"], there["kernel"])
    for name, x in moments(state.inner_states["adam"]):
        sharded.assert_sharded(x, where[name])


# Prefixes

UNEVEN = {"w": (16, 32), "bias": (4,), "step_size": (), "odd": (12, 32)}


@pytest.mark.parametrize("kind", ["explicit", "auto"])
@pytest.mark.parametrize("spec", [P("f"), P("f", None), P(None, "f")])
def test_leaves_that_a_prefix_can_not_cut_are_replicated(kind, spec):
    mesh = make_mesh({"f": 8}, kind)
    where = NamedSharding(mesh, spec)
    params = {
        "model": {n: jax.ShapeDtypeStruct(shape, "float32") for n, shape in UNEVEN.items()},
        "norm": jax.ShapeDtypeStruct((8,), "float32"),
    }
    tx = optax.adam(0.1)
    found = state_shardings(tx, params, {"model": where, "norm": NamedSharding(mesh, P("f"))})
    whole = NamedSharding(mesh, P())
    fits = {"w", "odd"} if spec[0] is None else {"w"}
    wanted = {name: where if name in fits else whole for name in UNEVEN}
    assert found[0].mu == {"model": wanted, "norm": NamedSharding(mesh, P("f"))}
    state = jax.jit(tx.init, out_shardings=found)(
        jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params)
    )
    sharded.assert_sharded(state[0].nu["model"]["bias"], whole)


def test_leaves_that_a_prefix_of_the_momentum_can_not_cut_are_replicated():
    mesh = make_mesh({"f": 8})
    params = {n: jax.ShapeDtypeStruct(s, "float32") for n, s in SHAPES.items()}
    params["bias"] = jax.ShapeDtypeStruct((4,), "float32")
    rows, whole = NamedSharding(mesh, P("f")), NamedSharding(mesh, P())
    tx: Any = muon(0.1, mu_shardings=rows)
    found = state_shardings(tx, params, whole, mu_shardings=rows)
    assert found.inner_states["muon"].inner_state[0].mu["kernel"] == rows
    assert found.inner_states["adam"].inner_state[0].mu["bias"] == whole


def test_an_entry_of_a_leafs_own_that_can_not_cut_it_is_an_error_that_names_it():
    mesh = make_mesh({"f": 8})
    params = {n: jax.ShapeDtypeStruct(shape, "float32") for n, shape in UNEVEN.items()}
    rows = {name: NamedSharding(mesh, P("f")) for name in UNEVEN}
    message = r"bias: P\('f',\) can't cut shape \(4,\)(?s:.*)  odd: (?s:.*)  step_size: "
    with pytest.raises(ValueError, match=message):
        state_shardings(optax.adam(0.1), params, rows)


@pytest.mark.parametrize("jit", [jax.jit, lambda init: init], ids=["jit", "eager"])
def test_a_state_made_under_vmap_goes_on_under_vmap(jit):
    """JAX maps over arrays that are all sharded over the members: counts too."""
    mesh = make_mesh({"members": 2, "f": 4})
    leaf = Leaf((4, 16, 32), P("members", "f"), STACK)
    where = NamedSharding(mesh, leaf.spec)
    bias = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("members")))
    grads = [leaf.gradient(seed) for seed in (0, 10)]
    params = {"w": jax.device_put(grads[0].astype("float32"), where), "b": bias}
    tx: Any = muon(lambda count: 0.1 / (1 + count), FAST)
    state = jit(jax.vmap(tx.init))(params)
    counts = [x for x in jax.tree.leaves(state) if x.dtype == jnp.int32]
    assert len(counts) == 4
    for count in counts:
        sharded.assert_sharded(count, NamedSharding(mesh, P("members")))
        np.testing.assert_array_equal(count, 0)
    step, updates = jax.jit(jax.vmap(tx.update)), []
    for grad in grads:
        new, state = step({**params, "w": jax.device_put(grad, where)}, state, params)
        updates.append(new["w"])
    for i in range(4):
        mine = [grad[i] for grad in grads]
        mixes = reference.mixes(mine)
        for t, update in enumerate(updates):
            want = -0.1 / (1 + t) * 2**0.5 * reference.newton_schulz(mixes[t], FAST)
            assert reference.relative_error(np.asarray(update)[i], want) <= 1e-5


def test_a_nan_among_the_parameters_does_not_get_into_counts_under_vmap():
    mesh = make_mesh({"members": 8})
    params = jax.device_put(np.full((8, 4, 4), np.nan), NamedSharding(mesh, P("members")))
    state: Any = jax.vmap(scale_by_momentum().init)(params)
    np.testing.assert_array_equal(state.count, 0)
