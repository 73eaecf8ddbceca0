from collections import Counter
from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from optax.contrib._muon import orthogonalize_via_newton_schulz

from muon_optax.orthogonalization import (
    SCHEDULES,
    NewtonSchulz,
    Preconditioning,
    newton_schulz,
    resolve_schedule,
)

JORDAN = (3.4445, -4.7750, 2.0315)
METHODS = ("standard", "gram")
SHAPES = [(24, 40), (40, 24), (3, 20, 20), (2, 2, 30, 20)]


def equations(primitive: str, function, *args) -> list[Any]:
    """The equations of one primitive in a function, inner functions included."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == primitive:
                yield equation
            for inner in jax.tree.leaves(
                list(equation.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")
            ):
                if hasattr(inner, "jaxpr"):
                    yield from walk(inner.jaxpr)

    return list(walk(jax.make_jaxpr(function)(*args).jaxpr))


def dots(function, *args) -> list[Any]:
    return equations("dot_general", function, *args)


def expected(x: np.ndarray, rows, norm: str = "frobenius") -> np.ndarray:
    flat = x.reshape(-1, *x.shape[-2:])
    return np.stack([oracle.newton_schulz(each, rows, norm) for each in flat]).reshape(x.shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_float64_agrees_with_the_oracle(shape, method):
    x: Any = oracle.gaussian(*shape)
    with jax.enable_x64(True):
        result = newton_schulz(x, method=method)
    assert result.dtype == jnp.float64
    assert oracle.relative_error(result, expected(x, (JORDAN,) * 5)) < 1e-12


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", get_args(Preconditioning))
def test_every_normalisation_agrees_with_the_oracle(kind, method):
    x: Any = oracle.gaussian(20, 30) + 1j * oracle.gaussian(20, 30, seed=1)
    with jax.enable_x64(True):
        for each in (x.T, x.real):
            schedule = resolve_schedule("jordan", None, kind)
            result = NewtonSchulz(schedule, method)(each)
            assert oracle.relative_error(result, expected(each, schedule.rows, kind)) < 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_agrees_with_the_oracle(name):
    schedule = resolve_schedule(name)
    x: Any = oracle.gaussian(20, 30)
    norm_factor = {"modded_nanogpt": 1.02}.get(name, 1)
    with jax.enable_x64(True):
        (a, b, c), *rest = schedule.rows
        first = (a / norm_factor, b / norm_factor**3, c / norm_factor**5)
        result = NewtonSchulz(schedule)(x)
        reference = expected(x, (first, *rest), schedule.preconditioning)
        assert oracle.relative_error(result, reference) < 1e-11


@pytest.mark.parametrize("method", METHODS)
def test_complex_matrices_become_unitary(method):
    for shape in ((6, 9), (9, 6), (6, 6)):
        x: Any = oracle.gaussian(*shape) + 1j * oracle.gaussian(*shape, seed=1)
        result = newton_schulz(x.astype(np.complex64), "polar_express", 8, method=method)
        assert result.dtype == jnp.complex64
        assert oracle.relative_error(result, oracle.polar_factor(x)) < 1e-5


@pytest.mark.parametrize("shape", [(32, 32), (96, 32), (64, 256), (2, 32, 48), (300, 400)])
def test_jordan_is_optax_to_1e_5(shape):
    m, n = shape[-2:]
    for condition in (10.0, 100.0):
        x = oracle.log_uniform(m, n, condition).astype(np.float32)
        reference = jax.jit(orthogonalize_via_newton_schulz)(x, np.array(JORDAN, np.float32))
        stack: Any = np.broadcast_to(x, shape)
        for method in ("standard", "gram") if m < 300 else ("auto",):
            result = newton_schulz(stack, method=method)
            assert oracle.relative_error(result, np.broadcast_to(reference, shape)) < 1e-5


@pytest.mark.parametrize("name", ["dion", "polar_express"])
def test_other_schedules_are_optax_to_1e_4_with_gram(name):
    rows = np.array(resolve_schedule(name).rows, np.float32)
    for shape in ((32, 96), (96, 32)):
        x: Any = oracle.log_uniform(*shape, 100.0).astype(np.float32)
        reference = jax.jit(orthogonalize_via_newton_schulz)(x, rows)
        assert oracle.relative_error(newton_schulz(x, name, method="gram"), reference) < 1e-4


@pytest.mark.parametrize("kind", ["frobenius", "spectral", "aol", "schatten"])
def test_optax_preconditionings(kind):
    x: Any = oracle.log_uniform(16, 24, 20.0).astype(np.float32)
    theirs = jax.jit(partial(orthogonalize_via_newton_schulz, preconditioning=kind))
    reference = theirs(x, np.array(JORDAN, np.float32))
    assert oracle.relative_error(newton_schulz(x, preconditioning=kind), reference) < 1e-5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [(48, 160), (160, 48), (3, 96, 32)])
def test_half_precision_runs_compiled_and_is_accurate(shape, dtype, method):
    m, n = shape[-2:]
    x = np.broadcast_to(oracle.log_uniform(m, n, 50.0).astype(dtype), shape)
    function = jax.jit(lambda x: newton_schulz(x, "tight", method=method))
    result = jax.block_until_ready(function(x))
    assert result.dtype == dtype
    values = oracle.singular_values(result)
    assert values.min() > 0.955
    assert values.max() < 1.035


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(30, 50), (50, 30), (40, 40)])
def test_flops_are_those_of_the_products(shape, method, dtype):
    m, n = shape
    for name in ("jordan", "fast", "deepseek_v4"):
        function = NewtonSchulz(resolve_schedule(name), method)
        total = 0
        for dot in dots(function, jax.ShapeDtypeStruct(shape, dtype)):
            (left, _), _ = dot.params["dimension_numbers"]
            contracted = dot.invars[0].aval.shape[left[0]]
            total += 2 * contracted * int(np.prod(dot.outvars[0].aval.shape))
        assert function.flops(m, n, dtype) == total


@pytest.mark.parametrize("method", METHODS)
def test_a_matrix_gets_no_batch_dimension_and_no_transposition(method):
    for shape in ((30, 50), (50, 30)):
        function = NewtonSchulz(resolve_schedule("fast"), method)
        assert {
            dot.outvars[0].aval.ndim
            for dot in dots(function, jax.ShapeDtypeStruct(shape, jnp.float32))
        } == {2}
        for transposed in equations(
            "transpose", function, jax.ShapeDtypeStruct(shape, jnp.float32)
        ):
            assert 1 in transposed.outvars[0].aval.shape


def test_precision_reaches_every_product():
    for method in METHODS:
        function = NewtonSchulz(resolve_schedule("fast"), method, None, "highest")
        for dot in dots(function, jax.ShapeDtypeStruct((30, 50), jnp.float32)):
            assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


@pytest.mark.parametrize("precision", [None, "default", "bfloat16", "high"])
@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", {"float32": 10 + 2 * 2}),
        # In each of two passes one product from X, and two to X, one for each part of Q.
        ("bfloat16", {"float32": 10, "bfloat16": 2 * 3}),
    ],
)
def test_the_gram_methods_products_round_nothing(precision: Any, dtype, expected):
    """On GPUs even 'high' means TF32."""
    function = NewtonSchulz(resolve_schedule("fast"), "gram", None, precision)
    seen = Counter()
    for dot in dots(function, jax.ShapeDtypeStruct((30, 50), dtype)):
        assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
        seen[dot.invars[0].aval.dtype.name] += 1
    assert seen == expected


@pytest.mark.parametrize(
    ("name", "precision", "expected"),
    [
        ("tight", None, None),
        ("tight", "default", "default"),
        ("cans", None, "highest"),
        ("cans", "default", "default"),  # with a safety factor
    ],
)
def test_float32_is_rounded_by_default_where_the_schedule_withstands_it(
    name, precision: Any, expected
):
    schedule = resolve_schedule(name)
    function = NewtonSchulz(schedule, "standard", precision=precision)
    found = {
        dot.params["precision"]
        for dot in dots(function, jax.ShapeDtypeStruct((30, 50), jnp.float32))
    }
    assert found == {expected and (jax.lax.Precision(expected),) * 2}


@pytest.mark.parametrize("method", METHODS)
def test_a_global_precision_is_kept(method):
    with jax.default_matmul_precision("highest"):
        function = NewtonSchulz(resolve_schedule("fast"), method)
        for dot in dots(function, jax.ShapeDtypeStruct((30, 50), jnp.float32)):
            assert dot.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2


def test_it_differentiates_and_vmaps():
    x: Any = oracle.gaussian(3, 10, 14).astype(np.float32)
    for method in METHODS:
        function = NewtonSchulz(resolve_schedule("jordan", 2), method)
        mapped, slope = jax.vmap(function), jax.grad(lambda x, f=function: f(x)[0, 0].sum())
        np.testing.assert_allclose(jax.jit(mapped)(x), function(x), atol=1e-6)
        assert np.isfinite(jax.jit(slope)(x)).all()
