"""Hyperball, beside its formula in float64."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import variants_on_meshes as meshes
import variants_oracle as oracle
from jax.sharding import PartitionSpec as P
from running import apply_updates, first_update, run

from muon_optax import MatrixView, MuonDimensionNumbers
from muon_optax.transforms.spheres import hyperball


def falling(count):
    return 0.1 * 0.9**count


RATES = {"number": (0.05, lambda count: 0.05), "schedule": (falling, falling)}
RADII = ("initial", "current", 7.0)


def case(rate: str, radius) -> meshes.Case:
    given, of_count = RATES[rate]

    def make(views, shardings):
        return hyperball(
            given, radius=radius, weight_dimension_numbers=views, param_shardings=shardings
        )

    of_matrix = functools.partial(oracle.Hyperball, of_count, radius)
    return meshes.Case(make, of_matrix, moved=meshes.added)


def cases(*options):
    """By a rate and a radius each."""
    return {f"{rate}, {radius}": case(rate, radius) for rate, radius in options}


def test_the_formula():
    meshes.check_all(cases(*itertools.product(RATES, RADII)), "one")


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_the_same_on_meshes(kind):
    meshes.check_all(cases(("schedule", "initial"), ("number", "current")), kind)


SPANS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "leaf": ("leaf", (0, 1, 2, 3)),
    "all experts of a layer": ((1, 2, 3), (1, 2, 3)),
    "counted from the end": ((-2, -1), (2, 3)),
}


@pytest.mark.parametrize("kind", ["one", "explicit", "auto", "manual"])
def test_what_a_sphere_spans(kind):
    """The switch that marin#8749 asks for: experts are on one sphere, or each on its own."""
    shape, spec = (2, 2, 8, 6), P(None, "a", "b")
    weights, directions = (meshes.arrays(seed, {"w": shape})["w"] for seed in (1, 2))
    mesh = meshes.mesh_of(kind)
    where = mesh and jax.NamedSharding(mesh, spec)
    for spans, axes in SPANS.values():
        view = MuonDimensionNumbers(2, 3)
        tx: Any = hyperball(0.1, spans=spans, weight_dimension_numbers=view, param_shardings=where)
        update = lambda u, w, tx=tx: tx.update(u, tx.init(w), w)[0]  # noqa: E731
        if kind == "manual":
            update = jax.shard_map(update, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        got = jax.jit(update)(*jax.device_put((directions, weights), where))
        w, u = weights.astype(np.float64), directions.astype(np.float64)
        sizes = [np.sqrt(np.sum(x**2, axes, keepdims=True)) for x in (w, u)]
        new = w - 0.1 * sizes[0] * u / sizes[1]
        new = sizes[0] * new / np.sqrt(np.sum(new**2, axes, keepdims=True))
        assert reference.relative_error(got, new - w) <= 1e-5, spans


def test_axes_that_a_leaf_does_not_have():
    params = {"a": np.ones((2, 3)), "b": np.ones((2, 3, 4)), "c": np.ones((3, 2))}
    tx = hyperball(0.1, spans=(0, 1, 2), weight_dimension_numbers=MatrixView(-2, -1))
    with pytest.raises(ValueError, match=r"axes \(0, 1, 2\) of spans:\n  a: .*\n  c: "):
        tx.init(params)


def test_adamh_is_adam_and_hyperball():
    """Adam's bias-corrected direction, for the head (arXiv 2606.16899)."""
    weights = meshes.arrays(0, {"w": (6, 8)})["w"]
    grads = [meshes.arrays(t, {"w": (6, 8)})["w"] for t in range(1, 11)]
    tx = optax.chain(optax.scale_by_adam(0.9, 0.95), hyperball(0.05))
    _, _, got = run(tx, weights, grads, jit=True)
    w, m, v = weights.astype(np.float64), 0.0, 0.0
    ball = oracle.Hyperball(lambda _: 0.05)
    for t, g in enumerate((g.astype(np.float64) for g in grads), start=1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        direction = m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        w = w + ball.update(direction, w)
    assert reference.relative_error(got, w) <= 1e-5


@pytest.mark.parametrize("radius", RADII)
def test_weights_of_zero_are_refused_where_they_can_be_seen(radius):
    shapes = {"a": (2, 3), "b": (2, 3), "c": (2, 2, 4)}
    params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    params["a"][:] = 0
    params["c"][1] = 0  # one matrix of a stack
    tx: Any = hyperball(0.1, radius=radius, weight_dimension_numbers=MatrixView(-2, -1))
    with pytest.raises(ValueError, match="would stay zero under hyperball") as error:
        tx.init(params)
    assert [line.split(":")[0] for line in str(error.value).splitlines()[1:]] == ["  a", "  c"]
    state = jax.jit(tx.init)(params)  # nothing can be seen here: they stay where they are
    updates, _ = jax.jit(tx.update)(jax.tree.map(np.ones_like, params), state, params)
    np.testing.assert_array_equal(updates["a"], 0.0)
    np.testing.assert_array_equal(np.asarray(updates["c"])[1], 0.0)
    assert np.all(np.isfinite(updates["c"]))
    assert np.any(np.asarray(updates["c"])[0])


def test_a_block_of_zero_is_refused_and_an_empty_leaf_is_not():
    view = MatrixView(0, 1, split=(2, 1))
    tx = hyperball(0.1, weight_dimension_numbers=view)
    with pytest.raises(ValueError, match=r"\n  \(root\): shape \(2, 3\)"):
        tx.init(np.array([[1, 1, 0], [1, 1, 0]], np.float32))
    hyperball(0.1).init({"w": np.ones((0, 3), np.float32)})


def test_an_update_of_zero_brings_weights_back_to_their_sphere():
    tx: Any = hyperball(0.1)
    state = tx.init(np.array([[3, 4]], np.float32))
    grown = np.array([[6, 8]], np.float32)
    got, _ = jax.jit(tx.update)(np.zeros_like(grown), state, grown)
    np.testing.assert_allclose(got, [[-3.0, -4.0]], rtol=1e-6)


def test_a_step_that_ends_at_zero_stays_there():
    weights = np.array([[3, 4]], np.float32)
    got = first_update(hyperball(1.0), weights, weights, jit=True)
    np.testing.assert_allclose(got, -weights, rtol=1e-6)


def test_bfloat16_weights_stay_near_their_sphere():
    """They drift by rounding; the kept radius pulls them back (2000 steps: .01%)."""
    weights = meshes.arrays(0, {"w": (32, 32)})["w"].astype(jnp.bfloat16)
    tx: Any = hyperball(0.01)
    state, size = jax.jit(tx.init)(weights), np.linalg.norm(weights.astype("float32"))
    update = jax.jit(tx.update)
    for t in range(50):
        direction = meshes.arrays(t, {"w": (32, 32)})["w"].astype(jnp.bfloat16)
        updates, state = update(direction, state, weights)
        assert updates.dtype == jnp.bfloat16
        weights = apply_updates(weights, updates)
    assert abs(np.linalg.norm(np.asarray(weights, np.float32)) / size - 1) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radius": "first"}, "radius must be one of"),
        ({"radius": -1.0}, "radius must be finite and not negative"),
        ({"radius": 0.0}, "radius must be positive"),
        ({"spans": ()}, "spans must be"),
        ({"spans": "expert"}, "spans must be one of"),
        ({"spans": [0, 1]}, "spans must be"),
        ({"learning_rate": -0.1}, "learning_rate must be"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        hyperball(**{"learning_rate": 0.1, **options})
