"""Muon's variants as stages of `muon`, beside the same pieces in a chain and their formulas."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
import variants_on_meshes as meshes
import variants_oracle as oracle
from jax.sharding import PartitionSpec as P
from running import apply_compiled, run, side_by_side

from muon_optax import (
    BlockPeriodic,
    Dion2,
    MatrixView,
    Namo,
    add_cautious_weight_decay,
    check_state,
    coupled_decay,
    floor_update,
    hyperball,
    momentum,
    muon,
    orthogonalize,
    radial_brake,
    relative_update,
    scale_by_dion2,
    scale_by_entry,
    scale_by_momentum,
    scale_by_muon,
    scale_by_namo,
    scale_by_neuron,
    scale_by_shape,
    state_shardings,
)
from muon_optax.interop import from_optax

SHAPES = {"qkv": (4, 16), "stack": (2, 6, 4), "bias": (16,)}
VIEWS = {"qkv": MatrixView(0, 1, split=(8, 4, 4)), "stack": MatrixView(1, 2)}
MATRICES = {"qkv": VIEWS["qkv"], "stack": VIEWS["stack"], "bias": None}
SPECS = {"qkv": P("a", "b"), "stack": P(None, "a", "b"), "bias": P()}
RATE = optax.linear_schedule(0.1, 0.01, 10)


def in_muon(**options: Any) -> Any:
    options = {"ns_coeffs": sharded.ONE_STEP, "muon_weight_dimension_numbers": MATRICES} | options
    return muon(RATE, **options)


def direction(**options: Any) -> Any:
    return scale_by_muon(sharded.ONE_STEP, weight_dimension_numbers=VIEWS, **options)


def viewed(piece: Any, *args: Any, **options: Any) -> Any:
    return piece(*args, weight_dimension_numbers=VIEWS, **options)


def scaled(*more: Any, **options: Any) -> list[Any]:
    return [viewed(scale_by_shape, **options), *more]


def stepped() -> Any:
    return optax.scale_by_learning_rate(RATE)


BLOCKS = BlockPeriodic([("stack", (3, 1)), ("qkv", (2, 4))], 2, 0.5)
SUMS = {"momentum": "sum", "nesterov": False, "bias_correction": False}
FALLING = coupled_decay(0.1, RATE, 0.1)
# Options of `muon`, and the chain of pieces for its matrices that is to give the same.
VARIANTS: dict[str, tuple[dict[str, Any], Any]] = {
    "normuon": (
        {"after_orthogonalization": scale_by_neuron()},
        lambda: [direction(), viewed(scale_by_neuron), *scaled(stepped())],
    ),
    "longer side, cautious decay": (
        {
            "after_orthogonalization": (scale_by_neuron(each="longer", guard="clamp"),),
            "weight_decay": FALLING,
            "weight_decay_kind": "cautious",
        },
        lambda: [
            direction(),
            viewed(scale_by_neuron, each="longer", guard="clamp"),
            *scaled(add_cautious_weight_decay(FALLING), stepped()),
        ],
    ),
    "adamuon": (
        {
            "sign": True,
            "scale": "none",
            "bias_correction": False,
            "after_orthogonalization": scale_by_entry(),
            "weight_decay": 0.1,
        },
        lambda: [
            scale_by_momentum(bias_correction=False),
            optax.scale_by_sign(),
            orthogonalize(sharded.ONE_STEP, weight_dimension_numbers=VIEWS),
            viewed(scale_by_entry),
            optax.add_decayed_weights(0.1),
            stepped(),
        ],
    ),
    "namo": (
        {"namo": Namo(beta2=0.9), "bias_correction": False},
        lambda: [
            viewed(scale_by_namo, beta2=0.9, ns_coeffs=sharded.ONE_STEP),
            *scaled(stepped()),
        ],
    ),
    "namo_d": (
        {"namo": Namo(each="input"), "bias_correction": False, "scale": "match_rms_adamw"},
        lambda: [
            viewed(scale_by_namo, each="input", ns_coeffs=sharded.ONE_STEP),
            *scaled(stepped(), scale="match_rms_adamw"),
        ],
    ),
    "muonh": (
        {"step": hyperball(RATE), "scale": "none"},
        lambda: [direction(), viewed(hyperball, RATE)],
    ),
    "normuonh": (
        {
            "after_orthogonalization": scale_by_neuron(each="longer", restore=None),
            "step": hyperball(RATE, radius="current"),
            "scale": "none",
            "weight_decay_kind": "independent",
        },
        lambda: [
            direction(),
            viewed(scale_by_neuron, each="longer", restore=None),
            viewed(hyperball, RATE, radius="current"),
        ],
    ),
    "floor and brake": (
        {
            "scale": "none",
            "after_orthogonalization": (scale_by_shape(), floor_update(0.5)),
            "last": (radial_brake(),),
        },
        lambda: [
            direction(),
            *scaled(viewed(floor_update, 0.5), stepped(), viewed(radial_brake)),
        ],
    ),
    "muonbp": (
        {"block_periodic": BLOCKS, "weight_decay": 0.1},
        lambda: [
            direction(block_periodic=BLOCKS),
            *scaled(optax.add_decayed_weights(0.1), stepped()),
        ],
    ),
    "dion2": (
        {"dion2": Dion2(0.6), "weight_decay": 0.1, **SUMS},
        lambda: [
            viewed(scale_by_dion2, 0.6, ns_coeffs=sharded.ONE_STEP),
            *scaled(optax.add_decayed_weights(0.1), stepped()),
        ],
    ),
    "nordion2": (
        {
            "dion2": Dion2(each="output"),
            "after_orthogonalization": scale_by_neuron(skip_zeros=True),
            **SUMS,
        },
        lambda: [
            viewed(scale_by_dion2, each="output", ns_coeffs=sharded.ONE_STEP),
            viewed(scale_by_neuron, skip_zeros=True),
            *scaled(stepped()),
        ],
    ),
    "relative": (
        {"scale": "none", "after_orthogonalization": relative_update(), "weight_decay": 0.1},
        lambda: [
            direction(),
            viewed(relative_update),
            optax.add_decayed_weights(0.1),
            stepped(),
        ],
    ),
}


def arrays(seed: int) -> Any:
    return meshes.arrays(seed, SHAPES)


Names = Iterable[str]


def variants(names: Names = VARIANTS, **options: Any) -> Any:
    """Each variant updates its own entry of a dict."""
    return side_by_side({name: in_muon(**options, **VARIANTS[name][0]) for name in names})


GRADS = [arrays(seed) for seed in range(1, 5)]
on_one_device = functools.cache(variants)


@functools.cache
def run_on_one_device() -> tuple[Any, Any]:
    """The updates of four steps by all variants, and their last states."""
    everyone = [dict.fromkeys(VARIANTS, tree) for tree in (arrays(0), *GRADS)]
    updates, state, _ = run(on_one_device(), everyone[0], everyone[1:], jit=True)
    return updates, state


def test_muon_is_the_chain_of_the_same_pieces():
    got, state = run_on_one_device()
    chains = side_by_side({k: optax.chain(*chain()) for k, (_, chain) in VARIANTS.items()})
    without = [{k: tree[k] for k in VIEWS} for tree in (arrays(0), *GRADS)]
    params, *grads = [dict.fromkeys(VARIANTS, tree) for tree in without]
    want, _, _ = run(chains, params, grads, jit=True)
    for name in VARIANTS:
        for t in range(len(grads)):
            for k in VIEWS:
                x, y = got[t][name][k], want[t][name][k]
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {t}")
        assert momentum(state[name])["qkv"].shape == (4, 16)


def check_steps(state: Any, update: Any, where: Any, expected: Any, steps: int) -> None:
    """Updates on a mesh are those of one device, and states are sharded as expected."""
    want, _ = run_on_one_device()
    params = dict.fromkeys(state, jax.device_put(arrays(0), where))
    for t, grad in enumerate(GRADS[:steps]):
        updates, state = update(dict.fromkeys(state, jax.device_put(grad, where)), state, params)
        for name in state:
            meshes.check_shardings(state[name], expected[name])
            for k in VIEWS:
                sharded.assert_sharded(updates[name][k], where[k])
                error = reference.relative_error(updates[name][k], want[t][name][k])
                assert error <= 1e-5, f"{name}, {k}, step {t}: {error:.1e}"
        params = apply_compiled(params, updates)


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_muon_is_the_same_on_meshes(kind):
    """And every state is sharded as `state_shardings` says, which asks `muon`."""
    names = ("longer side, cautious decay", "namo_d", "muonh", "adamuon", "muonbp", "nordion2")
    mesh = sharded.make_mesh({"a": 2, "b": 4}, meshes.KINDS[kind])
    where = {k: jax.NamedSharding(mesh, spec) for k, spec in SPECS.items()}
    params = jax.device_put(arrays(0), where)
    expected = {
        name: state_shardings(in_muon(param_shardings=where, **VARIANTS[name][0]), params)
        for name in names
    }
    tx = variants(names, param_shardings=where)
    init, update = tx.init, tx.update
    if kind == "manual":
        specs = dict.fromkeys(names, SPECS)
        of_state = jax.tree.map(lambda s: s.spec, expected)
        init = jax.shard_map(init, mesh=mesh, in_specs=(specs,), out_specs=of_state)
        ins = (specs, of_state, specs)
        update = jax.shard_map(update, mesh=mesh, in_specs=ins, out_specs=(specs, of_state))
    state = jax.jit(init)(dict.fromkeys(names, params))
    check_steps(state, jax.jit(update), where, expected, 3)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_muon_is_the_same_under_zero_1(kind):
    names = ("normuon", "namo", "namo_d", "muonh", "muonbp", "nordion2")
    mesh = sharded.make_mesh({"data": 2}, kind)
    where = {k: jax.NamedSharding(mesh, P()) for k in SHAPES}
    there = {k: jax.NamedSharding(mesh, P("data")) for k in SHAPES}
    options: Any = {"param_shardings": where, "mu_shardings": there}
    params = jax.device_put(arrays(0), where)
    expected = {
        name: state_shardings(in_muon(**options, **VARIANTS[name][0]), params) for name in names
    }
    tx = variants(names, **options)
    state = jax.jit(tx.init)(dict.fromkeys(names, params))
    check_steps(state, jax.jit(tx.update), where, expected, 2)


def test_a_run_goes_on_with_the_same_bits():
    tx, (want, end) = on_one_device(), run_on_one_device()
    grads = [dict.fromkeys(VARIANTS, grad) for grad in GRADS]
    _, state, params = run(tx, dict.fromkeys(VARIANTS, arrays(0)), grads[:2], jit=True)
    saved, update = jax.tree.map(np.asarray, state), jax.jit(tx.update)
    for name, (options, _) in VARIANTS.items():
        check_state(in_muon(**options), params[name], saved[name])
    for t, grad in enumerate(grads[2:], start=2):
        updates, saved = update(grad, saved, params)
        jax.tree.map(np.testing.assert_array_equal, updates, want[t])
        params = apply_compiled(params, updates)
    jax.tree.map(np.testing.assert_array_equal, saved, end)


def test_leaves_without_a_gradient_keep_their_moments():
    names = ("longer side, cautious decay", "adamuon", "namo_d", "muonh", "muonbp", "nordion2")
    params, grads = (dict.fromkeys(VARIANTS, arrays(seed)) for seed in (0, 1))
    everyone = on_one_device().init(params)
    whole, moved = jax.jit(on_one_device().update)(grads, everyone, params)
    state, after = ({name: tree[name] for name in names} for tree in (everyone, moved))
    without = dict.fromkeys(names, arrays(1) | {"stack": None})
    updates, new = jax.jit(variants(names).update)(without, state, params)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for name in names:
        assert updates[name]["stack"] is None
        np.testing.assert_allclose(updates[name]["qkv"], whole[name]["qkv"], rtol=1e-6)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(new)]
    trees = zip(*map(jax.tree.leaves, (new, state, after)), strict=True)
    for path, (x, kept, moved) in zip(paths, trees, strict=True):
        like = kept if "stack" in path else moved
        np.testing.assert_allclose(x, like, rtol=1e-6, err_msg=path)


def test_cautious_decay_is_the_formula_in_a_whole_step():
    """W <- W - lr (U + wd W where U W >= 0), with U scaled by shape."""
    weights = arrays(0)["qkv"]
    tx = muon(0.1, sharded.ONE_STEP, weight_decay=0.2, weight_decay_kind="cautious")
    plain = muon(0.1, sharded.ONE_STEP)
    grads = {"up": arrays(1)["qkv"]}
    params: Any = {"up": jnp.asarray(weights)}
    (got,), _, _ = run(tx, params, [grads])
    (step,), _, _ = run(plain, params, [grads])
    u = np.asarray(step["up"], np.float64) / -0.1
    want = -0.1 * oracle.Cautious(lambda _: 0.2).update(u, weights.astype(np.float64))
    assert reference.relative_error(got["up"], want) <= 1e-5


@functools.cache
def after_a_step_of_optax(decay: Any) -> tuple[Any, Any]:
    """Parameters and the state of optax's Muon; the stack is its first matrix."""
    params: Any = {k: jnp.asarray(x) for k, x in arrays(0).items()}
    params["stack"] = params["stack"][0]
    dims: Any = optax.contrib.MuonDimensionNumbers
    views: Any = {"qkv": dims(0, 1), "stack": dims(0, 1), "bias": None}
    theirs: Any = optax.contrib.muon(RATE, weight_decay=decay, muon_weight_dimension_numbers=views)
    return params, jax.jit(theirs.update)(params, theirs.init(params), params)[1]


@pytest.mark.parametrize(
    "name", ["normuon", "longer side, cautious decay", "muonh", "adamuon", "muonbp", "nordion2"]
)
def test_a_run_of_optax_goes_on_as_a_variant(name):
    """Its momentum goes on; the states that optax doesn't have begin as at `init`."""
    params, state = after_a_step_of_optax(VARIANTS[name][0].get("weight_decay", 0.0))
    views: Any = {"qkv": VIEWS["qkv"], "stack": MatrixView(0, 1), "bias": None}
    tx = in_muon(**VARIANTS[name][0], muon_weight_dimension_numbers=views)
    fresh = tx.init(params)
    got = from_optax(state, params, tx)
    check_state(tx, params, got)
    want = dict(jax.tree.leaves_with_path(momentum(from_optax(state, params))))
    for path, x in jax.tree.leaves_with_path(momentum(got)):
        np.testing.assert_array_equal(x, want[path])
    after_optaxs = lambda s: s.inner_states["muon"].inner_state[4:]  # noqa: E731
    jax.tree.map(np.testing.assert_array_equal, after_optaxs(got), after_optaxs(fresh))
    jax.eval_shape(tx.update, params, got, params)
    other = in_muon(muon_weight_dimension_numbers=views | {"stack": None})
    with pytest.raises(ValueError, match=r"can't go on with this optimizer:\n.*mu/stack"):
        from_optax(state, params, other)


@pytest.mark.parametrize("decay", [0.1, lambda count: 0.1])
def test_a_step_leaves_no_place_for_decay(decay):
    with pytest.raises(ValueError, match="step takes the place of Muon's weight decay"):
        in_muon(step=hyperball(0.1), weight_decay=decay)


def test_namo_needs_an_average_without_bias_correction():
    with pytest.raises(ValueError, match="NAMO needs momentum='ema', got 'sum'"):
        in_muon(namo=Namo(), momentum="sum", bias_correction=False)
    with pytest.raises(ValueError, match="give bias_correction=False"):
        in_muon(namo=Namo())


def test_zero_weights_under_muonh_are_listed():
    params = {
        k: jnp.zeros(shape) if k == "stack" else jnp.ones(shape) for k, shape in SHAPES.items()
    }
    with pytest.raises(ValueError, match=r"would stay zero under hyperball.*\n  stack: "):
        in_muon(step=hyperball(0.1), scale="none").init(params)


def adamh(rate: float, **options: Any) -> Any:
    return optax.chain(optax.scale_by_adam(0.9, 0.95), hyperball(rate, **options))


@pytest.mark.parametrize("kind", ["one", "explicit", "auto"])
def test_adamh_for_a_named_leaf_beside_muon(kind):
    """The head is on its sphere, as the formula says in float64; the others are as ever."""
    shapes, specs = SHAPES | {"lm_head": (8, 12)}, SPECS | {"lm_head": P("a", "b")}
    mesh = meshes.mesh_of(kind)
    where: Any = mesh and {k: jax.NamedSharding(mesh, spec) for k, spec in specs.items()}
    views = MATRICES | {"lm_head": None}
    muons = in_muon(param_shardings=where, muon_weight_dimension_numbers=views)
    groups: Any = {"muon": muons, "adamh": adamh(0.05, param_shardings=where)}
    label = lambda path, _: "adamh" if path[-1].key == "lm_head" else "muon"  # noqa: E731
    tx: Any = optax.partition(groups, lambda tree: jax.tree.map_with_path(label, tree))
    params: Any = meshes.arrays(0, shapes)
    grads = [meshes.arrays(t, shapes) for t in range(1, 11)]
    alone, _, _ = run(in_muon(muon_weight_dimension_numbers=views), params, grads, jit=True)
    w, m, v = params["lm_head"].astype(np.float64), 0.0, 0.0
    ball, place = oracle.Hyperball(lambda _: 0.05), lambda x: jax.device_put(x, where)
    params = place(params)
    shardings = where and state_shardings(tx, params, where)
    state, update = jax.jit(tx.init, out_shardings=shardings)(params), jax.jit(tx.update)
    for t, grad in enumerate(grads, start=1):
        updates, state = update(place(grad), state, params)
        if where:
            meshes.check_shardings(state, shardings)
        for k in SHAPES:
            assert reference.relative_error(updates[k], alone[t - 1][k]) <= 1e-5
        params = apply_compiled(params, updates)
        g = grad["lm_head"].astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        u = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        w = w + ball.update(u, w)
        assert reference.relative_error(params["lm_head"], w) <= 1e-5


def test_adamh_is_not_for_vectors():
    params = {"lm_head": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    with pytest.raises(ValueError, match=r"can't take these leaves.*:\n  bias: a matrix needs two"):
        adamh(0.1).init(params)
