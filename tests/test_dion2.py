"""Dion2 and NorDion2, beside their formulas in float64, and what they send."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest
import reference
import sharded
import variants_on_meshes as meshes
import variants_oracle as oracle
from jax.sharding import PartitionSpec as P
from running import run

from muon_optax import (
    Dion2,
    MatrixView,
    Namo,
    muon,
    scale_by_dion2,
    scale_by_muon,
    scale_by_neuron,
)
from muon_optax import MuonDimensionNumbers as Dims

FAST = sharded.FAST[:1]  # compiles in half of the time of two
orthogonalize = functools.partial(reference.newton_schulz, rows=FAST)
NEURON: dict[str, Any] = {"skip_zeros": True}
SUMS: dict[str, Any] = {"momentum": "sum", "nesterov": False, "bias_correction": False}
OPTIONS: dict[str, dict[str, Any]] = {
    "dion2": {},
    "nordion2": {"each": "output", "fraction": 0.5},
    "inputs": {"each": "input", "fraction": 0.6},
}


def case(name: str, **more: Any) -> meshes.Case:
    options = OPTIONS[name]

    def make(views: Any, shardings: Any) -> Any:
        kwargs = {"weight_dimension_numbers": views, "param_shardings": shardings}
        direction = scale_by_dion2(
            **options,
            ns_coeffs=FAST,
            device=sharded.SLOW,  # on which replicas share the work
            **kwargs,
            **more,
        )
        if name != "nordion2":
            return direction
        return optax.chain(direction, scale_by_neuron(**NEURON, **kwargs))

    def state() -> Any:
        direction = oracle.Dion2(orthogonalize, **options)
        return oracle.Chain(direction, oracle.Neuron(**NEURON)) if name == "nordion2" else direction

    return meshes.Case(make, state)


def check(name: str, kind: str, leaves: set[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(meshes, "shapes_on", lambda kind: {k: meshes.SHAPES[k] for k in leaves})
    meshes.check(case(name), kind)


# Blocks of unequal size and shape, also along the other side, and merged axes.
ON_ONE_DEVICE = {
    "dion2": {"stack", "merged", "qkv", "grouped", "heads", "input_blocks"},
    "nordion2": {"grouped", "merged"},
    "inputs": {"qkv", "input_blocks"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_formula(name, monkeypatch):
    check(name, "one", ON_ONE_DEVICE[name], monkeypatch)


MANY = {"rows", "both", "experts", "grouped", "input_blocks"}
FEW = {"rows", "both", "qkv"}


@pytest.mark.parametrize(
    ("name", "kind", "leaves"),
    [
        ("dion2", "explicit", MANY),
        ("dion2", "auto", FEW),
        ("dion2", "manual", FEW),
        ("nordion2", "explicit", {"experts", "grouped"}),
    ],
)
def test_the_same_on_meshes(name, kind, leaves, monkeypatch):
    check(name, kind, leaves, monkeypatch)


LAYOUTS: dict[str, tuple[dict[str, int], P, P | None]] = {
    "hsdp": ({"r": 2, "f": 4}, P(None, "f"), None),
    "zero-1": ({"r": 4}, P(), P("r")),
}
SHAPES = {"up": (16, 24), "down": (24, 16), "stack": (4, 16, 8)}
VIEWS: Any = {"up": Dims(0, 1), "down": Dims(0, 1), "stack": Dims(1, 2)}


def tied(seed: int) -> dict[str, np.ndarray]:
    """Gradients of whole numbers, whose sums are exact, and of which many are equal."""
    rng = np.random.default_rng(seed)
    return {k: rng.integers(-1, 2, shape).astype(np.float32) for k, shape in SHAPES.items()}


def slices(view: Any, updates: Any) -> list[list[int]]:
    """Which rows or columns of each matrix aren't zero."""
    found = []
    for x in oracle.matrices(view, updates):
        rows, columns = (np.flatnonzero(np.any(x != 0, axis=axis)) for axis in (1, 0))
        found.append((rows if x.shape[0] <= x.shape[1] else columns).tolist())
    return found


def wanted_slices(steps: int) -> dict[str, list[Any]]:
    states = {k: [oracle.Dion2(lambda x: x, 0.5, 0.5) for _ in range(4)] for k in SHAPES}
    for t in range(steps):
        for k, grad in tied(t).items():
            for state, g in zip(states[k], oracle.matrices(VIEWS[k], grad), strict=False):
                state.update(g, None)
    return {k: [state.chosen for state in rows if state.chosen] for k, rows in states.items()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "explicit") for name in LAYOUTS), ("zero-1", "auto"), ("one", "one")],
)
def test_the_same_slices_are_chosen_on_every_mesh_of_equals_the_first(name, kind):
    options: dict[str, Any] = {"weight_dimension_numbers": VIEWS, "orthogonalizer": lambda x: x}
    place = lambda tree: tree  # noqa: E731
    if name != "one":
        axes, spec, of_momentum = LAYOUTS[name]
        mesh = sharded.make_mesh(axes, kind)
        where = {k: jax.NamedSharding(mesh, spec) for k in SHAPES}
        there = of_momentum and {k: jax.NamedSharding(mesh, of_momentum) for k in SHAPES}
        options |= {"param_shardings": where, "mu_shardings": there, "device": sharded.SLOW}
        place = lambda tree: jax.device_put(tree, where)  # noqa: E731
    tx = scale_by_dion2(0.5, 0.5, **options)
    state, update = jax.jit(tx.init)(place(tied(0))), jax.jit(tx.update)
    want = wanted_slices(3)
    for t in range(3):
        updates, state = update(place(tied(t)), state)
        for k, view in VIEWS.items():
            assert slices(view, updates[k]) == [chosen[t] for chosen in want[k]], (k, t)


def test_a_fraction_of_one_is_muon():
    grads = [meshes.arrays(t, SHAPES) for t in range(3)]
    views: dict[str, Any] = {"weight_dimension_numbers": VIEWS}
    got, _, _ = run(scale_by_dion2(1.0, ns_coeffs=FAST, **views), grads[0], grads, jit=True)
    want, _, _ = run(scale_by_muon(FAST, **SUMS, **views), grads[0], grads, jit=True)
    for g, w in zip(got, want, strict=True):
        assert max(reference.relative_error(g[k], w[k]) for k in SHAPES) <= 1e-5


def test_zero_gradients_give_zero_updates():
    """Also beside others, in a stack: fewer slices than are chosen aren't zero there."""
    grads: Any = {"qkv": np.zeros((8, 16), np.float32), "w": np.zeros((3, 8, 6), np.float32)}
    views: Any = {"qkv": MatrixView(0, 1, split=(12, 2, 2)), "w": Dims(1, 2)}
    direction = scale_by_dion2(0.5, ns_coeffs=FAST, weight_dimension_numbers=views)
    tx: Any = optax.chain(direction, scale_by_neuron(**NEURON, weight_dimension_numbers=views))
    update = jax.jit(tx.update)
    updates, state = update(grads, tx.init(grads))
    for x in jax.tree.leaves((updates, state[1].nu)):
        np.testing.assert_array_equal(x, np.zeros_like(x))
    grads["qkv"][0, 3], grads["w"][1, 2, 4] = 2.0, -3.0
    updates, _ = update(grads, state)
    for k, grad in grads.items():
        x = np.asarray(updates[k])
        np.testing.assert_array_equal(np.sign(x), np.sign(grad))
        assert np.isfinite(x).all()


def test_the_gram_strategy_takes_zeros_for_slices():
    """Slices of a sharded longer side stay where they are."""
    mesh = sharded.make_mesh({"f": 4}, "explicit")
    where = jax.NamedSharding(mesh, P("f"))
    grad = meshes.arrays(1, {"w": (24, 8)})["w"]
    options: dict[str, Any] = {"each": "input", "ns_coeffs": FAST, "ns_method": "gram"}
    want, _, _ = run(scale_by_dion2(0.5, **options), grad, [grad], jit=True)
    tx = scale_by_dion2(0.5, strategy="gram", **options)
    got, _, _ = run(tx, jax.device_put(grad, where), [jax.device_put(grad, where)], jit=True)
    sharded.assert_sharded(got[0], where)
    assert reference.relative_error(got[0], want[0]) <= 1e-5


def test_half_precision_momentum_and_updates():
    """The momentum is formed in float32, and rounded once."""
    grad = meshes.arrays(1, {"w": (8, 6)})["w"].astype("bfloat16")
    tx: Any = scale_by_dion2(0.5, 0.7, orthogonalizer=lambda x: x)
    state = tx.init(grad)._replace(mu=grad / 3)
    update, new = tx.update(grad, state)
    momentum = (np.asarray(grad / 3, np.float64) + grad.astype(np.float64)).T
    chosen = np.argsort(-np.abs(momentum).sum(1))[:3]
    want = np.zeros_like(momentum)
    want[chosen] = momentum[chosen]
    assert update.dtype == new.mu.dtype == "bfloat16"
    assert reference.relative_error(update.T, want) <= 2**-8
    momentum[chosen] *= 0.7
    assert reference.relative_error(new.mu.T, momentum) <= 2**-8


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((2, 8, 12), P("members", None, "t")), ((2, 3, 8, 12), P("members"))],
)
def test_members_under_vmap(shape, spec):
    """Over an Explicit mesh axis, which is in no type inside of it."""
    mesh = sharded.make_mesh({"members": 2, "t": 4}, "explicit")
    where = jax.NamedSharding(mesh, spec)
    view = Dims(len(shape) - 3, len(shape) - 2)  # of a member
    tx = scale_by_dion2(0.5, ns_coeffs=FAST, weight_dimension_numbers=view)
    grad = meshes.arrays(1, {"w": shape})["w"]
    placed = jax.device_put(grad, where)
    state = jax.jit(jax.vmap(tx.init))(placed)
    got, _ = jax.jit(jax.vmap(tx.update))(placed, state)
    for member in range(2):
        of_member = (oracle.matrices(view, np.asarray(x)[member]) for x in (grad, got))
        for g, result in zip(*of_member, strict=True):
            want = oracle.Dion2(orthogonalize, 0.5).update(g, None)
            assert reference.relative_error(result, want) <= 1e-5


def test_options_out_of_range():
    for fraction in (0.0, -0.5, 1.5):
        with pytest.raises(ValueError, match="fraction must be"):
            Dion2(fraction)
    with pytest.raises(ValueError, match="each must be one of"):
        Dion2(each="longer")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="ef_decay must be in"):
        scale_by_dion2(ef_decay=1.0)
    with pytest.raises(TypeError, match="dion2 must be a Dion2 or None"):
        muon(0.1, dion2=0.25)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="leave out dion2"):
        muon(0.1, dion2=Dion2(), namo=Namo(), **SUMS)
    with pytest.raises(TypeError, match="skip_zeros must be True or False"):
        scale_by_neuron(skip_zeros=1)  # pyright: ignore[reportArgumentType]


def test_conflicts_are_named_at_once():
    with pytest.raises(ValueError, match="dion2 adds gradients to the momentum") as error:
        muon(0.1, dion2=Dion2(), sign=True)
    assert str(error.value).endswith(
        "got sign=True, momentum='ema', nesterov=True, bias_correction=True"
    )
