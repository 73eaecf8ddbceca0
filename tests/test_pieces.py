"""What all variants' pieces share: dtypes, zeros, states, memory, and what they send."""

import collections
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
import variants_on_meshes as meshes
from jax.sharding import PartitionSpec as P
from running import apply_compiled, first_update, run, side_by_side

from benchmarks.compiled import read_program
from muon_optax import (
    MatrixView,
    add_cautious_weight_decay,
    check_state,
    floor_update,
    hyperball,
    muon,
    radial_brake,
    relative_update,
    scale_by_entry,
    scale_by_muon,
    scale_by_namo,
    scale_by_neuron,
    state_shardings,
)
from muon_optax.transforms.binding import bind_leaves
from muon_optax.transforms.stage import as_stage, in_order

PIECES: dict[str, Any] = {
    "neuron": scale_by_neuron,
    "neuron_longer": functools.partial(scale_by_neuron, each="longer"),
    "entry": scale_by_entry,
    "namo": functools.partial(scale_by_namo, ns_coeffs=sharded.FAST),
    "namo_d": functools.partial(scale_by_namo, each="input", ns_coeffs=sharded.FAST),
    "hyperball": functools.partial(hyperball, 0.1),
    "hyperball_current": functools.partial(hyperball, 0.1, radius="current"),
    "floor": floor_update,
    "floor_of_rows": functools.partial(floor_update, each="output"),
    "relative": relative_update,
    "brake": radial_brake,
    "pinned": functools.partial(radial_brake, form="pinned"),
}
# One of each kind.
KINDS = ("neuron_longer", "entry", "namo", "hyperball", "floor_of_rows", "brake")
STATEFUL = ("neuron_longer", "entry", "namo", "hyperball")
OF_WEIGHTS = [name for name, piece in PIECES.items() if "scale_by" not in str(piece)]
# Fused blocks, of which some are longer and some wider; and a stack.
SHAPES = {"qkv": (4, 12), "stack": (2, 6, 4)}
VIEWS = {"qkv": MatrixView(0, 1, split=(6, 3, 3)), "stack": MatrixView(1, 2)}


def make(name: str, **options: Any) -> Any:
    return PIECES[name](weight_dimension_numbers=VIEWS, **options)


def arrays(seed: int, dtype: Any = np.float32) -> Any:
    return {name: x.astype(dtype) for name, x in meshes.arrays(seed, SHAPES).items()}


def test_updates_keep_their_dtype_and_are_rounded_once():
    half = [arrays(seed, jnp.bfloat16) for seed in range(4)]
    wide = [jax.tree.map(lambda x: x.astype("float32"), x) for x in half]
    pieces = {name: make(name) for name in KINDS} | {"namo": make("namo", mu_dtype="float32")}
    together = side_by_side(pieces)
    tx = together._replace(init=jax.jit(together.init))
    half, wide = ([dict.fromkeys(pieces, tree) for tree in trees] for trees in (half, wide))
    got, state, _ = run(tx, half[0], half[1:], jit=True)
    want, _, _ = run(tx, wide[0], wide[1:], jit=True)
    for leaf in jax.tree.leaves(state):
        assert leaf.dtype in ("float32", "int32")
    for name in pieces:
        for g, w in zip(
            *(jax.tree.leaves(updates[0][name]) for updates in (got, want)), strict=True
        ):
            assert g.dtype == jnp.bfloat16, name
            # Newton-Schulz is done in bfloat16, all else is not.
            bounds: Any = {"rtol": 2**-8, "atol": 0.2 * ("namo" in name)}
            np.testing.assert_allclose(g.astype("float32"), w, **bounds, err_msg=name)


def test_zeros_give_no_nan():
    zero, some = jax.tree.map(np.zeros_like, arrays(0)), arrays(0)
    pieces = {name: make(name) for name in PIECES}
    update = lambda u, w: {name: first_update(tx, u, w) for name, tx in pieces.items()}  # noqa: E731
    update = jax.jit(update)
    for params, grads in ((zero, zero), (zero, some), (some, zero)):
        for name, updates in update(grads, params).items():
            for x in jax.tree.leaves(updates):
                assert np.all(np.isfinite(x)), name


@pytest.mark.parametrize("name", PIECES)
def test_dtypes_and_ranks_are_never_promoted(name):
    tx, found = make(name), arrays(0)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        updates = jax.eval_shape(functools.partial(first_update, tx), found, found)
    jax.tree.map(lambda u, w: np.testing.assert_equal(u.shape, w.shape), updates, found)


def test_moments_of_empty_matrices_are_zero():
    """Their means divide zero by zero."""
    shapes = {"in": (0, 4), "out": (4, 0), "w": (4, 4)}
    params: Any = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    names = ("neuron", "neuron_longer", "entry", "namo", "namo_d")
    tx = side_by_side(
        {name: PIECES[name](weight_dimension_numbers=MatrixView(0, 1)) for name in names}
    )
    with jax.debug_nans(True):
        _, state = jax.jit(lambda x: tx.update(x, tx.init(x), x))(dict.fromkeys(names, params))
    for path, x in jax.tree.leaves_with_path(state):
        if "'w'" not in jax.tree_util.keystr(path) and x.ndim:
            np.testing.assert_array_equal(x, np.zeros_like(x))


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_weights_are_needed(name):
    tx = make(name)
    with pytest.raises(ValueError, match=r"needs the parameters: call update\(updates, state, par"):
        tx.update(arrays(0), tx.init(arrays(0)))


@pytest.mark.parametrize("name", STATEFUL)
def test_a_run_goes_on_with_the_same_bits(name):
    tx, params, grads = make(name), arrays(0), [arrays(seed) for seed in range(1, 7)]
    whole, end, _ = run(tx, params, grads, jit=True)
    update = jax.jit(tx.update)
    state = tx.init(params)
    for t, grad in enumerate(grads):
        if t == 3:  # as a checkpoint would be read, also in other containers
            check_state(tx, params, state)
            state = jax.tree.map(np.asarray, state)
            state = jax.tree.map(_reversed, state, is_leaf=lambda x: isinstance(x, dict))
        updates, state = update(grad, state, params)
        jax.tree.map(np.testing.assert_array_equal, updates, whole[t])
        params = apply_compiled(params, updates)
    sums = [sorted(float(np.sum(x)) for x in jax.tree.leaves(tree)) for tree in (state, end)]
    assert sums[0] == sums[1]  # which the containers' order doesn't touch


def _reversed(x: Any) -> Any:
    """An ordered dict flattens in its own order."""
    return collections.OrderedDict(reversed(x.items())) if isinstance(x, dict) else x


@pytest.mark.parametrize("name", STATEFUL)
def test_another_state_is_refused(name):
    tx, params = make(name), arrays(0)
    with pytest.raises(TypeError, match=r"must be a \w+State of muon_optax, got EmptyState"):
        tx.update(params, optax.EmptyState(), params)
    state = tx.init(params)
    fewer = {"qkv": params["qkv"]}
    views = {"qkv": VIEWS["qkv"]}
    other = PIECES[name](weight_dimension_numbers=views)
    with pytest.raises(ValueError, match="stack"):
        other.update(fewer, state, fewer)
    with pytest.raises(ValueError, match=r"stack: none in the state|stack: in the updates only"):
        tx.update(params, other.init(fewer), params)


@pytest.mark.parametrize("name", STATEFUL)
def test_states_are_mapped_with_the_parameters(name):
    tx, params = make(name), arrays(0)
    state = tx.init(params)
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    path_of = {"qkv": "of qkv", "stack": "of stack"}
    named = optax.tree_map_params(
        tx,
        lambda x, path: x if is_masked(x) else path,
        state,
        path_of,
        transform_non_params=lambda _: "other",
        is_leaf=is_masked,
    )
    assert set(jax.tree.leaves(named)) <= {"of qkv", "of stack", "other"}
    assert {"of qkv", "of stack"} <= set(jax.tree.leaves(named))


SPECS = {"qkv": P("a", "b"), "stack": P(None, "a", "b")}


def stateful(where: Any) -> Any:
    return optax.chain(*[make(name, param_shardings=where) for name in STATEFUL])


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_states_are_born_where_they_belong(kind):
    """With and without a context mesh, in and outside of jit, and from shapes alone."""
    mesh = sharded.make_mesh({"a": 2, "b": 4}, kind)
    where = {name: jax.NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params, tx = jax.device_put(arrays(0), where), stateful(where)
    shardings = state_shardings(tx, params, where)
    assert {str(x.spec) for x in jax.tree.leaves(shardings[0].nu)} == {"P(None, 'b')"}
    meshes.check_shardings(tx.init(params), shardings)
    meshes.check_shardings(jax.jit(tx.init)(params), shardings)
    with jax.set_mesh(mesh):
        meshes.check_shardings(jax.jit(tx.init)(params), shardings)


def test_states_of_offloaded_parameters_are_offloaded():
    mesh = sharded.make_mesh({"a": 2, "b": 4})
    where = {k: jax.NamedSharding(mesh, s, memory_kind="pinned_host") for k, s in SPECS.items()}
    params, tx = jax.device_put(arrays(0), where), stateful(where)
    shardings = state_shardings(tx, params, where)
    state = jax.jit(tx.init)(params)
    kinds = lambda tree: [x.memory_kind for x in jax.tree.leaves(tree)]  # noqa: E731
    got = kinds(jax.tree.map(lambda x: x.sharding, state))
    assert got.count("pinned_host") == kinds(shardings).count("pinned_host") > 0
    updates, new = jax.jit(tx.update)(params, state, params)
    assert kinds(jax.tree.map(lambda x: x.sharding, new)) == got
    assert set(kinds(jax.tree.map(lambda x: x.sharding, updates))) == {"pinned_host"}


@pytest.mark.parametrize("name", KINDS)
def test_in_a_slot_a_piece_takes_the_views_that_are_bound_there(name):
    alone = PIECES[name]() if "namo" not in name else make(name)
    step = in_order({"piece": as_stage(alone)}, ("piece",))

    @jax.jit
    def both(grads, params):
        state = step.init(params, bind_leaves(params, VIEWS))
        in_slot, _ = step.update(grads, state, params, bind_leaves(grads, VIEWS))
        return in_slot, first_update(make(name), grads, params)

    got, want = both(arrays(1), arrays(0))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_members_of_an_ensemble_on_an_explicit_mesh():
    """A vmap hides its axis from the types inside."""
    mesh = sharded.make_mesh({"members": 2, "a": 2, "b": 2})
    shape, spec = (2, 4, 6), P("members", "a", "b")
    params, grads = (meshes.arrays(seed, {"w": shape})["w"] for seed in (0, 1))
    tx = optax.chain(scale_by_neuron(), hyperball(0.1))
    step = functools.partial(first_update, tx)
    place = functools.partial(jax.device_put, device=jax.NamedSharding(mesh, spec))
    got = jax.jit(jax.vmap(step))(place(grads), place(params))
    assert got.sharding.spec == spec
    for i, update in enumerate(np.asarray(got)):
        want: Any = jax.jit(step)(grads[i], params[i])
        np.testing.assert_allclose(update, want, rtol=1e-5, atol=1e-6)


def test_an_auto_mesh_of_which_nothing_is_said():
    mesh = sharded.make_mesh({"a": 2, "b": 4}, "auto")
    where = {name: jax.NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    tx = optax.chain(make("neuron_longer"), make("hyperball"))
    params, grads = arrays(0), arrays(1)
    want = first_update(tx, grads, params, jit=True)
    placed = jax.device_put((grads, params), (where, where))
    got = first_update(tx, *placed, jit=True)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


@pytest.mark.parametrize("sizes", [{"a": 1, "b": 4, "c": 2}, {"a": 1, "b": 1, "c": 1}])
def test_axes_of_size_1_in_a_shard_map(sizes):
    mesh = sharded.make_mesh(sizes, "auto")
    shapes = {"qkv": (4, 12), "stack": (2, 8, 4)}
    specs = {"qkv": P("a", "b"), "stack": P(None, ("a", "b"), None)}
    where = {name: jax.NamedSharding(mesh, spec) for name, spec in specs.items()}
    names = ("neuron_longer", "hyperball")
    tx = optax.chain(*[make(name, param_shardings=where) for name in names])
    params, grads = meshes.arrays(0, shapes), meshes.arrays(1, shapes)
    want = first_update(optax.chain(*map(make, names)), grads, params, jit=True)
    of_state = jax.tree.map(lambda s: s.spec, state_shardings(tx, params, where))
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=(specs,), out_specs=of_state)
    ins = (specs, of_state, specs)
    update = jax.shard_map(tx.update, mesh=mesh, in_specs=ins, out_specs=(specs, of_state))
    got, _ = jax.jit(lambda u, w: update(u, init(w), w))(grads, params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)


def test_steps_that_are_skipped_move_nothing():
    tx = optax.MultiSteps(optax.chain(make("neuron"), make("hyperball")), 2)
    params = arrays(0)
    first, update = tx.init(params), jax.jit(tx.update)
    _, second = update(arrays(1), first, params)
    for old, new in zip(
        *(jax.tree.leaves(x.inner_opt_state) for x in (first, second)), strict=True
    ):
        np.testing.assert_array_equal(old, new)
    _, third = update(arrays(2), second, params)
    assert third.inner_opt_state[1].count == 1


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_the_same_under_zero_1(kind):
    """Replicated parameters, and a sharded momentum; no second step is traced anew."""
    mesh = sharded.make_mesh({"data": 2}, kind)
    where = {name: jax.NamedSharding(mesh, P()) for name in SHAPES}
    there = {name: jax.NamedSharding(mesh, P("data")) for name in SHAPES}

    def chain(**options):
        direction = scale_by_muon(
            sharded.FAST,
            weight_dimension_numbers=VIEWS,
            mu_shardings=there if options else None,
            **options,
        )
        return optax.chain(direction, make("neuron", **options), make("hyperball", **options))

    grads = [meshes.arrays(t, SHAPES) for t in (1, 2)]
    want, _, _ = run(chain(), arrays(0), grads, jit=True)
    tx: Any = chain(param_shardings=where)
    params = jax.device_put(arrays(0), where)
    state, traces = jax.jit(tx.init)(params), []
    update = jax.jit(lambda *args: traces.append(args) or tx.update(*args))
    for t, grad in enumerate(grads):
        updates, state = update(jax.device_put(grad, where), state, params)
        for name, x in updates.items():
            sharded.assert_sharded(x, where[name])
            np.testing.assert_allclose(x, want[t][name], rtol=1e-5, atol=1e-6)
        params = apply_compiled(params, updates)
    assert len(traces) == 1


# How many all-reduces a tree of several leaves takes, where [fan-in, fan-out] are sharded so.
SENT = {
    P("a", "b"): {},
    P("b", None): {},
    P(None, "b"): {"floor_of_rows": 0},
}


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
@pytest.mark.parametrize("spec", SENT)
def test_all_leaves_share_one_all_reduce(spec, kind):
    """Whatever the leaves, and also where both sides of matrices are sharded."""
    mesh = sharded.make_mesh({"a": 2, "b": 4}, meshes.KINDS[kind])
    shapes = {"x": (16, 32), "y": (16, 32), "z": (32, 16)}
    where = {name: jax.NamedSharding(mesh, spec) for name in shapes}
    names = [name for name in PIECES if "namo" not in name]
    if kind != "explicit":
        names = ["neuron"]
    elif spec != P("a", "b"):
        names = ["neuron_longer", "hyperball", "floor_of_rows"]
    for name in names:
        program = read_program(compiled(PIECES[name](param_shardings=where), shapes, where, kind))
        count = SENT[spec].get(name, 1)
        assert program.counts == ({"all-reduce": count} if count else {}), name
        assert program.received <= 2 * 4 * 2 * sum(map(sum, shapes.values()))


def compiled(tx: Any, shapes: Any, where: Any, kind: str, of_momentum: Any = None) -> Any:
    """The update, compiled from shapes."""
    structs = lambda x, s: jax.ShapeDtypeStruct(x.shape, "float32", sharding=s)  # noqa: E731
    params = {k: jax.ShapeDtypeStruct(s, "float32", sharding=where[k]) for k, s in shapes.items()}
    shardings = state_shardings(tx, params, where, mu_shardings=of_momentum)
    state = jax.tree.map(structs, jax.eval_shape(tx.init, params), shardings)
    update = tx.update
    if kind == "manual":
        specs, of_state = (jax.tree.map(lambda s: s.spec, tree) for tree in (where, shardings))
        mesh = next(iter(where.values())).mesh
        ins = (specs, of_state, specs)
        update = jax.shard_map(update, mesh=mesh, in_specs=ins, out_specs=(specs, of_state))
    jitted = jax.jit(update, out_shardings=(where, shardings))
    return jitted.lower(params, state, params).compile()


def test_cautious_decay_sends_nothing():
    mesh = sharded.make_mesh({"a": 2, "b": 4}, "auto")
    where = {"w": jax.NamedSharding(mesh, P("a", "b"))}
    tx = add_cautious_weight_decay(0.1)
    assert read_program(compiled(tx, {"w": (8, 8)}, where, "auto")).counts == {}


@pytest.mark.parametrize("each", ["matrix", "input"])
def test_namo_sends_what_muon_sends_and_its_norms(each):
    mesh = sharded.make_mesh({"a": 2, "b": 4})
    shapes = {"x": (16, 32), "y": (16, 32), "z": (32, 16)}
    where = {name: jax.NamedSharding(mesh, P("a", "b")) for name in shapes}
    namo = PIECES["namo"](each=each, param_shardings=where)
    plain = scale_by_muon(sharded.FAST, param_shardings=where)
    counts = [read_program(compiled(tx, shapes, where, "explicit")).counts for tx in (namo, plain)]
    more = {k: n - counts[1].get(k, 0) for k, n in counts[0].items()}
    assert {k: n for k, n in more.items() if n} == {"all-reduce": 1}


@pytest.mark.parametrize("name", ["muon", "scale_by_muon", "cautious", *PIECES])
def test_numpys_float64_is_float32_without_a_word(name):
    """Outside of `jit` too, and as there: optax's own transformations don't warn either."""
    more = {
        "muon": functools.partial(muon, 0.1),
        "scale_by_muon": scale_by_muon,
        "cautious": functools.partial(add_cautious_weight_decay, 0.1),
    }
    tx: Any = (PIECES | more)[name]()
    rng = np.random.default_rng(0)
    wide = [{"w": rng.normal(size=(4, 6))} for _ in range(2)]
    narrow = [jax.tree.map(jnp.float32, tree) for tree in wide]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = tx.update(wide[0], tx.init(wide[1]), wide[1])
    want = tx.update(narrow[0], tx.init(narrow[1]), narrow[1])
    assert jax.tree.map(jax.typeof, got) == jax.tree.map(jax.typeof, want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
