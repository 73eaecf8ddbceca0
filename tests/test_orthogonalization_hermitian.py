from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import gaussian, log_uniform, singular_values

from muon_optax.orthogonalization import (
    NewtonSchulz,
    hermitian,
    newton_schulz,
    orthogonalizer,
    resolve_schedule,
)
from muon_optax.orthogonalization.hermitian import (
    commuting_matmul,
    gram_matrix,
    halved,
    hermitian_flops,
)
from muon_optax.orthogonalization.hermitian.backend import HermitianBackend


@pytest.fixture(autouse=True)
def small_leaves(monkeypatch):
    """Halving at sizes that compile quickly, and no program of other sizes."""
    monkeypatch.setattr(halved, "_SMALLEST_LEAF", 2)
    orthogonalize: Any = orthogonalizer._orthogonalize
    orthogonalize.clear_cache()
    yield
    orthogonalize.clear_cache()


def entries(shape: tuple[int, ...], dtype) -> np.ndarray:
    x = gaussian(*shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = x + 1j * gaussian(*shape, seed=1)
    return x.astype(dtype)


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


@pytest.mark.parametrize(
    ("m", "batch", "dtype"),
    [
        (3, (), jnp.complex64),
        (7, (), jnp.float32),
        (4, (2,), jnp.float16),
        (12, (), jnp.bfloat16),
        (12, (), jnp.float32),
        (12, (2, 3), jnp.complex64),
    ],
)
def test_gram_matrix(m, batch, dtype):
    x = entries((*batch, m, 5), dtype)
    expected = wide(x) @ wide(x).conj().swapaxes(-1, -2)
    for gram in (
        jax.jit(gram_matrix, static_argnums=1)(x, -1),
        jax.jit(gram_matrix, static_argnums=1)(x.swapaxes(-1, -2), -2),
    ):
        assert gram.dtype == (dtype if dtype == jnp.complex64 else jnp.float32)
        np.testing.assert_allclose(gram, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(gram, gram.mT.conj(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("m", "dtype"), [(7, jnp.float32), (12, jnp.complex64)])
def test_commuting_matmul(m, dtype):
    x = entries((2, m, m), dtype)
    x = x @ x.conj().swapaxes(-1, -2)
    y = 2 * x - x @ x
    for first, second in ((x, x), (x, y), (y, x)):
        result = np.asarray(jax.jit(commuting_matmul)(first, second))
        expected = wide(first) @ wide(second)
        np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_a_halved_product_is_hermitian_to_the_last_bit():
    x = entries((24, 24), jnp.complex64)
    x = x @ x.conj().T
    result = np.asarray(jax.jit(commuting_matmul)(x, x @ x))
    np.testing.assert_array_equal(result, result.conj().T)


@pytest.mark.parametrize("m", [3, 7, 12])
def test_the_multiplications_are_counted(m):
    x = jax.ShapeDtypeStruct((m, 5), jnp.float32)
    cost = jax.jit(lambda x: gram_matrix(x, -1)).lower(x).compile().cost_analysis()
    assert cost is not None
    assert hermitian_flops(m, 5) <= cost["flops"] < 1.1 * hermitian_flops(m, 5)


@pytest.mark.parametrize("shape", [(12, 20), (20, 12)])
def test_the_whole_iteration_runs_halved_in_half_precision(shape):
    m, n = shape
    x: Any = log_uniform(m, n, 50.0).astype(jnp.bfloat16)
    values = singular_values(newton_schulz(x, "fast", method="gram", dtype="bfloat16"))
    assert values.min() > 0.9
    assert values.max() < 1.06


def test_it_runs_under_vmap_and_grad():
    x = gaussian(2, 12, 5).astype(np.float32)
    mapped = jax.jit(jax.vmap(lambda x: gram_matrix(x, -1)))(x)
    np.testing.assert_allclose(mapped, jax.jit(lambda x: gram_matrix(x, -1))(x), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x: gram_matrix(x, -1)[0, :, 0].sum()))(x)
    expected = jax.jit(jax.grad(lambda x: (x @ x.mT)[0, :, 0].sum()))(x)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_a_backend_has_the_platforms_that_it_names(monkeypatch):
    """Its matmul runs there, and its FLOPs are those that methods are chosen by."""
    called = []

    def matmul(x, y, axis, precision):
        called.append((x is y, axis, precision))
        return 2 * hermitian.matmul(x, y.conj(), (axis, axis), precision)

    ours = HermitianBackend(("cpu",), lambda m: m > 3, matmul, lambda m, n: m * n)
    monkeypatch.setattr(hermitian, "BACKENDS", (ours, halved.HALVED))
    x = jnp.asarray(gaussian(4, 5))
    np.testing.assert_allclose(gram_matrix(x, -1), 2 * x @ x.T, rtol=1e-6)
    np.testing.assert_allclose(gram_matrix(x[:3], -1), x[:3] @ x[:3].T, rtol=1e-6)
    assert called == [(True, -1, None)]
    assert [hermitian_flops(m, 7) for m in (3, 4)] == [2 * 3 * 3 * 7, 4 * 7]
    elsewhere = NewtonSchulz(resolve_schedule("jordan")).gram_has_fewer_flops(4, 5, is_half=False)
    monkeypatch.setattr(hermitian, "BACKENDS", ())
    dense = NewtonSchulz(resolve_schedule("jordan")).gram_has_fewer_flops(4, 5, is_half=False)
    assert (elsewhere, dense) == (True, False)
