"""Update statistics against numpy's SVD."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float
from running import first_update
from sharded import make_mesh
from shown import update_stats

from muon_optax import MatrixView, MuonDimensionNumbers, Rule, UpdateStats, muon
from muon_optax.inspect import statistics

SCALAR: Any = Float[Array, ""]
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def svd_range(x: Any) -> tuple[float, float]:
    values = np.linalg.svd(np.asarray(x, np.complex128), compute_uv=False)
    return float(values.min()), float(values.max())


def rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.abs(np.asarray(x, np.complex128)) ** 2)))


def stats(x: Any, view: Any = None, **options: Any) -> UpdateStats:
    view = view or MuonDimensionNumbers(0, 1)
    found = update_stats({"w": x}, muon_weight_dimension_numbers=view, **options)
    return found["w"]


def check(got: UpdateStats, x: Any, ends: tuple[float, float], rtol: float = 1e-5) -> None:
    assert all(isinstance(figure, SCALAR) for figure in got)
    np.testing.assert_allclose(got.rms, rms(x), rtol=1e-6)
    np.testing.assert_allclose(got.sigma_max, ends[1], rtol=rtol)
    np.testing.assert_allclose(got.sigma_min, ends[0], rtol=rtol, atol=rtol * ends[1])


@pytest.mark.parametrize("shape", [(1, 7), (5, 1), (9, 4), (16, 16)])
def test_exact_where_rows_are_at_most_steps(shape):
    x = normal(*shape)
    check(stats(x), x, svd_range(x))


def test_each_matrix_of_a_stack_and_each_block_counts():
    x = normal(3, 6, 8)
    x[1] *= 10
    x[2] *= 0.01
    view = MuonDimensionNumbers(1, 2)
    check(stats(x, view), x, (svd_range(x[2])[0], svd_range(x[1])[1]))
    y = normal(6, 10)
    y[:, :4] *= 5
    low, high = zip(svd_range(y[:, :4]), svd_range(y[:, 4:]), strict=True)
    check(stats(y, MatrixView(split=(4, 6))), y, (min(low), max(high)))


def test_large_matrices_give_bounds_from_inside():
    u, _ = np.linalg.qr(RNG.normal(size=(64, 64)))
    v, _ = np.linalg.qr(RNG.normal(size=(96, 64)))
    sigma = np.linspace(0.6, 1.25, 64)
    got = stats((u * sigma @ v.T).astype(np.float32))
    assert 0.6 * (1 - 1e-5) <= got.sigma_min <= 0.62
    assert 1.22 <= got.sigma_max <= 1.25 * (1 + 1e-5)


def test_an_outlier_among_many_is_found():
    u, _ = np.linalg.qr(RNG.normal(size=(64, 64)))
    v, _ = np.linalg.qr(RNG.normal(size=(96, 64)))
    sigma = np.full(64, 1.0)
    sigma[0], sigma[1] = 3.0, 0.05
    got = stats((u * sigma @ v.T).astype(np.float32))
    np.testing.assert_allclose(got.sigma_max, 3.0, rtol=1e-3)
    assert 0.05 * (1 - 1e-4) <= got.sigma_min < 0.2


def test_a_polar_factor_has_ones_only():
    u, _ = np.linalg.qr(RNG.normal(size=(96, 64)))
    got = stats(u.T.astype(np.float32))
    np.testing.assert_allclose([got.sigma_min, got.sigma_max], 1.0, rtol=1e-5)


def test_updates_of_muon():
    params = {"w": normal(12, 48), "b": normal(48)}
    tx = muon(0.1, "tight")
    found = update_stats(first_update(tx, params, jit=True))
    assert list(found) == ["w"]
    np.testing.assert_allclose([found["w"].sigma_min, found["w"].sigma_max], 0.2, rtol=0.05)


def test_zero_and_rank_deficient_matrices():
    assert [float(x) for x in stats(np.zeros((4, 6), np.float32))] == [0, 0, 0]
    low_rank = normal(4, 2) @ normal(2, 6)
    check(stats(low_rank), low_rank, (0.0, svd_range(low_rank)[1]))
    row = np.outer(normal(64), normal(96)).astype(np.float32)
    got = stats(row)
    np.testing.assert_allclose(got.sigma_max, svd_range(row)[1], rtol=1e-5)
    assert float(got.sigma_min) < 1e-4 * float(got.sigma_max)


@pytest.mark.parametrize("size", [1e-32, 1e-20, 1e37])
def test_any_size(size):
    x = normal(20, 30)
    x = (x / np.abs(x).max() * np.float32(size)).astype(np.float32)
    low, high = svd_range(x)
    got = stats(x, steps=20)
    np.testing.assert_allclose(got.sigma_max, high, rtol=1e-4)
    np.testing.assert_allclose(got.sigma_min, low, rtol=1e-3)
    np.testing.assert_allclose(got.rms, rms(x), rtol=1e-5)


def test_empty_leaves_are_zero():
    assert [float(x) for x in stats(np.zeros((0, 4), np.float32))] == [0, 0, 0]
    view = MuonDimensionNumbers(1, 2)
    assert [float(x) for x in stats(np.zeros((0, 3, 4), np.float32), view)] == [0, 0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_shows(bad):
    x = normal(4, 6)
    x[1, 2] = bad
    assert not any(math.isfinite(float(v)) for v in stats(x))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_widened(dtype):
    x = normal(8, 24).astype(dtype)
    got = stats(x)
    assert {v.dtype for v in got} == {jnp.dtype(jnp.float32)}
    check(got, x.astype(np.float32), svd_range(x.astype(np.float32)))


def test_complex_and_double():
    x = normal(5, 7) + 1j * normal(5, 7)
    got = stats(x.astype(np.complex64))
    assert got.rms.dtype == jnp.float32
    check(got, x, svd_range(x))
    y = normal(6, 9).astype(np.float64)
    y[0] = y[1] + 1e-6 * y[0]
    want = svd_range(y)
    assert want[0] < 1e-6 * want[1]  # lost in float32
    with jax.enable_x64(True):
        for x in (y, np.zeros((0, 4))):
            assert {figure.dtype for figure in stats(x)} == {jnp.dtype(jnp.float32)}
        np.testing.assert_allclose(stats(y), [rms(y), *want], rtol=1e-6)


def test_views_rules_and_labels_choose_the_leaves():
    updates = {"a": normal(4, 6), "head": normal(4, 6), "b": normal(4), "i": np.arange(4)}
    assert list(update_stats(updates)) == ["a"]
    assert list(update_stats(updates, partition=(Rule("a", "adam"),))) == ["head"]
    views = {"a": None, "head": MuonDimensionNumbers(0, 1), "b": None, "i": None}
    assert list(update_stats(updates, muon_weight_dimension_numbers=views)) == ["head"]
    assert update_stats({}) == {}
    with pytest.raises(ValueError, match="muonn"):
        update_stats(updates, partition=dict.fromkeys(updates, "muonn"))


def test_steps_out_of_range_raise():
    for steps in (0, 2.5, "3"):
        wrong: Any = steps
        with pytest.raises(ValueError, match=f"1 or more, got {steps!r}"):
            update_stats({"w": normal(4, 4)}, steps=wrong)
    x = normal(4, 4)
    one = stats(x, steps=1)
    assert svd_range(x)[0] <= one.sigma_min <= one.sigma_max <= svd_range(x)[1]


def test_jit_and_vmap():
    x = normal(3, 8, 10)

    @jax.jit
    @jax.vmap
    def figures(x):
        return jnp.stack(stats(x))

    got = figures(x)
    for row, one in zip(got, x, strict=True):
        np.testing.assert_allclose(row, [rms(one), *svd_range(one)], rtol=1e-4)


def many(count: int, *shape: int) -> dict[str, np.ndarray]:
    return {f"layer_{i}": (i + 1) * normal(*shape) for i in range(count)}


@pytest.mark.parametrize("count", [2, 3, 7])
@pytest.mark.parametrize("at_once", [1, 100, 10**6])
def test_equal_leaves_side_by_side(count, at_once, monkeypatch):
    monkeypatch.setattr(statistics, "_ELEMENTS_AT_ONCE", at_once)
    updates = many(count, 5, 8) | {"tall": normal(8, 5), "half": normal(5, 8).astype("float16")}
    for found in (update_stats(updates), jax.jit(update_stats)(updates)):
        assert list(found) == sorted(updates)  # as the tree has them
        for name, x in updates.items():
            check(found[name], x, svd_range(x))


def test_arrays_of_several_devices():
    pairs = zip(many(4, 5, 8).items(), jax.devices()[:2] * 2, strict=True)
    updates = {name: jax.device_put(x, device) for (name, x), device in pairs}
    for name, got in update_stats(updates).items():
        check(got, updates[name], svd_range(updates[name]))


def test_a_program_hardly_grows_with_equal_leaves():
    def lines(count: int) -> int:
        updates = dict.fromkeys(many(count, 1), jax.ShapeDtypeStruct((32, 32), jnp.float32))
        return len(jax.jit(update_stats).lower(updates).as_text().split("\n"))

    # A stack, and three figures to be cut from the results: all else is there once.
    assert lines(96) - lines(6) < 90 * 10


def test_strict_promotion():
    view = MatrixView(split=(4, 6))
    for x in (normal(6, 10), normal(6, 10).astype(jnp.bfloat16)):
        with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
            got = stats(x, view)
        blocks = [svd_range(np.asarray(x, np.float32)[:, part]) for part in np.s_[:4, 4:]]
        low, high = zip(*blocks, strict=True)
        check(got, np.asarray(x, np.float32), (min(low), max(high)), rtol=1e-4)


def test_cost_is_small():
    # matrix-vector products, far fewer than the FLOPs of one Newton-Schulz matmul: 2 m^2 n
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    text = jax.jit(lambda x: stats(x)).lower(x).as_text()
    products = [line for line in text.split("\n") if "dot_general" in line]
    assert len(products) < 10  # a loop, not an unrolled one
    assert not any("tensor<512x512" in line for line in products)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("explicit", P(None, "x", "y")),
        ("explicit", P("x", None, "y")),
        ("auto", P("x", "y")),
    ],
)
def test_sharded_updates_on_every_kind_of_mesh(kind, spec):
    x = normal(4, 8, 16)
    low, high = zip(*map(svd_range, x), strict=True)
    where = jax.NamedSharding(make_mesh({"x": 2, "y": 4}, kind), spec)
    figures = jax.jit(lambda x: stats(x, MuonDimensionNumbers(1, 2)))
    got = figures(jax.device_put(x, where))
    np.testing.assert_allclose(got, [rms(x), min(low), max(high)], rtol=1e-4)
    assert got.rms.sharding.is_fully_replicated
