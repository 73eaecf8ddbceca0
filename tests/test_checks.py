"""Checks of options: what passes, and errors that name the option and what is allowed."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from muon_optax._internal.checks import (
    check_choice,
    check_decay,
    check_flag,
    check_float_dtype,
    check_mask,
    check_number,
)


def accepted_under_jit(check, value):
    """Whether `check` takes the value as a tracer."""

    def f(x):
        check("x", x)
        return x

    jax.eval_shape(f, value)
    return True


@pytest.mark.parametrize("value", [True, False, np.True_])
def test_flags(value):
    check_flag("nesterov", value)


@pytest.mark.parametrize("value", ["false", "", 0, 1, None, jnp.array(True)])
def test_a_flag_is_a_bool(value):
    with pytest.raises(TypeError, match="nesterov must be True or False, got"):
        check_flag("nesterov", value)


def test_choices():
    check_choice("scale", "none", ("none", "all"))
    for value in ("None", "", None, 3, ["none"], np.array(["none"])):
        with pytest.raises(ValueError, match=r"scale must be one of \('none', 'all'\), got"):
            check_choice("scale", value, ("none", "all"))


NUMBERS = [0, 2, 0.5, np.float32(0.5), np.float64(0.5), np.int32(1), np.array(0.5)]
ARRAYS = [jnp.array(0.5), jnp.array(1), jnp.bfloat16(0.5), jnp.array(0.5, jnp.bfloat16)]


@pytest.mark.parametrize("value", NUMBERS + ARRAYS)
def test_numbers(value):
    check_number("learning_rate", value)
    assert accepted_under_jit(check_number, value)


@pytest.mark.parametrize("value", ["0.1", None, True, np.True_, [0.1], {}, 1j, jnp.array([0.1])])
def test_a_number_is_a_real_scalar(value):
    with pytest.raises(TypeError, match="learning_rate must be a number or a schedule, got"):
        check_number("learning_rate", value, schedule=True)
    with pytest.raises(TypeError, match="scale_factor must be a number, got"):
        check_number("scale_factor", value)


@pytest.mark.parametrize("value", [-1e-9, -1, math.nan, math.inf, np.float32(-1), jnp.array(-1.0)])
def test_a_number_is_finite_and_not_negative(value):
    with pytest.raises(ValueError, match="learning_rate must be finite and not negative, got"):
        check_number("learning_rate", value, schedule=True)


def test_of_a_traced_value_the_kind_is_checked():
    with pytest.raises(TypeError, match="learning_rate must be a number, got"):
        accepted_under_jit(lambda name, x: check_number("learning_rate", x), jnp.ones(3))
    assert accepted_under_jit(check_number, jnp.array(-1.0))


def test_schedules_only_where_they_are_taken():
    check_number("learning_rate", lambda count: 0.1, schedule=True)
    for check in (check_number, check_decay):
        with pytest.raises(TypeError, match=r"beta must be a number, .*optax\.inject_hyperparams"):
            check("beta", lambda count: 0.1)


@pytest.mark.parametrize("value", [0, 0.0, 0.95, np.float32(0.999), jnp.array(0.5)])
def test_decay_rates(value):
    check_decay("beta", value)
    assert accepted_under_jit(check_decay, value)


@pytest.mark.parametrize("value", [1, 1.0, 1.5, -0.1, math.nan, jnp.array(1.0)])
def test_a_decay_rate_is_below_one(value):
    with pytest.raises(ValueError, match=r"beta must be in \[0, 1.0\), got"):
        check_decay("beta", value)


def test_an_epsilon_may_be_large():
    check_decay("eps", 8.0, below=math.inf)
    with pytest.raises(ValueError, match="eps must be finite and not negative, got -1"):
        check_decay("eps", -1, below=math.inf)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_decay_rates_name_the_way_out(dtype):
    value = jnp.array(0.5, dtype)
    message = "adam_b2 came as a b?float16 array.*hyperparam_dtype=jnp.float32"
    with pytest.raises(TypeError, match=message):
        check_decay("adam_b2", value)
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(lambda x: check_decay("adam_b2", x), value)


@pytest.mark.parametrize("dtype", [None, "bfloat16", jnp.float16, np.float64, "complex64", float])
def test_float_dtypes(dtype):
    check_float_dtype("mu_dtype", dtype)


@pytest.mark.parametrize("dtype", ["int8", jnp.int32, bool, "bf16", "", 3, [], "float8_e4m3fn"])
def test_a_dtype_is_floating_point(dtype):
    with pytest.raises(TypeError, match="mu_dtype must be a floating-point dtype or None, got"):
        check_float_dtype("mu_dtype", dtype)


def test_masks():
    for mask in (None, True, {"a": False, "b": {"c": np.True_}}, lambda params: params):
        check_mask("weight_decay_mask", mask)


@pytest.mark.parametrize(
    ("mask", "where"),
    [("false", ""), (1, ""), ({"a": True, "b": ["no"]}, r"\['b'\]\[0\]"), ({"a": 1.0}, r"\['a'\]")],
)
def test_a_mask_holds_bools(mask, where):
    with pytest.raises(TypeError, match=f"weight_decay_mask{where} must be True or False, got"):
        check_mask("weight_decay_mask", mask)
