from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import gaussian, relative_error

from muon_optax.orthogonalization import (
    NewtonSchulz,
    Preconditioning,
    ScheduleName,
    newton_schulz,
    resolve_schedule,
)

JORDAN = resolve_schedule("jordan")


def test_it_is_hashable_and_equal_by_its_options():
    first = NewtonSchulz(JORDAN, "gram", jnp.bfloat16, "high")
    second = NewtonSchulz(JORDAN, "gram", "bfloat16", "high")
    assert first == second
    assert len({first, second}) == 1
    assert first == NewtonSchulz(JORDAN, "gram", "bfloat16", jax.lax.Precision.HIGH)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(method="fast"), ValueError, r"method must be one of .*'gram'.*, got 'fast'"),
        (dict(precision="best"), ValueError, r"precision must be one of .*'highest'.*, got 'best'"),
        (dict(dtype="int8"), ValueError, r"dtype='int8'; allowed are .*'bfloat16'"),
        (dict(dtype="complex64"), ValueError, "allowed are"),
        (dict(dtype="no dtype"), ValueError, "allowed are"),
        (dict(dtype="float64"), ValueError, "jax_enable_x64"),
        (dict(schedule="jordan"), TypeError, "resolve_schedule"),
    ],
)
def test_options_are_checked_at_construction(options: Any, error, message):
    with pytest.raises(error, match=message):
        NewtonSchulz(**{"schedule": JORDAN, **options})


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (jnp.ones((3, 3), jnp.int32), TypeError, "int32"),
        (jnp.ones((3, 3), jnp.float8_e4m3fn), TypeError, "float8_e4m3fn"),
        (jnp.ones(3), ValueError, r"shape \(3,\)"),
        ([[1.0, 2.0]], TypeError, "x must be an array, got list"),
    ],
)
def test_input_is_checked(x, error, message):
    with pytest.raises(error, match=message):
        newton_schulz(x)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_the_result_has_the_dtype_of_the_input(dtype, compute):
    x = jnp.asarray(gaussian(4, 6), dtype)
    result = newton_schulz(x, "fast", dtype=compute)
    assert result.dtype == dtype
    halved = compute in ("float16", "bfloat16") and dtype != "complex64"
    bar = 3e-2 if halved or dtype in ("float16", "bfloat16") else 1e-5
    assert relative_error(result, newton_schulz(x, "fast", dtype="float32")) < bar


def test_wide_input_is_scaled_before_it_is_narrowed():
    with jax.enable_x64(True):
        x = jnp.asarray(gaussian(4, 6))
        for dtype in ("float32", "bfloat16", "float16"):
            small = newton_schulz(x * 2.0**-700, dtype=dtype)
            np.testing.assert_array_equal(small, newton_schulz(x, dtype=dtype))
            assert small.dtype == jnp.float64


def test_the_method_with_fewer_operations_is_chosen():
    def chosen(m, n, name: ScheduleName = "jordan", dtype="float32"):
        return NewtonSchulz(resolve_schedule(name)).chosen_method(m, n, dtype)

    assert [chosen(200, n) for n in (200, 280, 320, 800)] == ["standard"] * 2 + ["gram"] * 2
    assert [chosen(n, 200) for n in (200, 280, 320, 800)] == ["standard"] * 2 + ["gram"] * 2
    # Halved matmuls move the break-even towards the square.
    assert [chosen(1024, n) for n in (1024, 1408)] == ["standard", "gram"]
    assert chosen(200, 10**5, "deepseek_v4") == "gram"
    assert NewtonSchulz(JORDAN, "gram").chosen_method(8, 8, "float32") == "gram"


@pytest.mark.parametrize(
    ("dtype", "precision", "on_cpu", "on_gpu"),
    [
        ("float32", None, "gram", "standard"),
        ("float32", "highest", "gram", "gram"),
        ("float32", "high", "standard", "standard"),
        ("float32", "bfloat16", "standard", "standard"),
        ("bfloat16", "highest", "gram", "gram"),
        ("float16", None, "gram", "gram"),
        ("complex64", None, "gram", "standard"),
        ("float64", "default", "gram", "gram"),
    ],
)
def test_the_gram_method_is_chosen_only_where_products_are_exact(
    dtype, precision: Any, on_cpu, on_gpu, monkeypatch
):
    function = NewtonSchulz(JORDAN, precision=precision)
    assert function.chosen_method(64, 6400, dtype) == on_cpu
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert function.chosen_method(64, 6400, dtype) == on_gpu


def test_flops():
    m, n = 100, 700
    assert NewtonSchulz(JORDAN, "standard").flops(m, n) == 5 * (4 * m * m * n + 2 * m**3)
    assert NewtonSchulz(JORDAN, "gram").flops(n, m) == 8 * m * m * n + 28 * m**3
    assert NewtonSchulz(JORDAN).flops(m, n) == 8 * m * m * n + 28 * m**3


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "complex64"])
def test_it_needs_no_implicit_promotion(dtype, method):
    with jax.numpy_dtype_promotion("strict"):
        for kind in get_args(Preconditioning):
            schedule = resolve_schedule("modded_nanogpt", None, kind)
            jax.eval_shape(NewtonSchulz(schedule, method), jax.ShapeDtypeStruct((4, 6), dtype))
