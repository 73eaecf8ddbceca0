"""The factor of each mode, and how the three options merge."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from muon_optax.transforms.shape_scale import resolve_scaling

# mode -> factors of the [fan-in, fan-out] matrices 4 x 16, 16 x 4 and 9 x 9.
FACTORS = {
    None: (2, 1, 1),
    "shape_scaling": (2, 1, 1),
    "match_rms_adamw": (0.8, 0.8, 0.6),
    "spectral": (4, 4, 3),
    "unit_rms_norm": (2, 0.5, 1),
    "none": (1, 1, 1),
}


@pytest.mark.parametrize(("mode", "factors"), FACTORS.items())
def test_the_factor_of_each_mode(mode, factors):
    scaling = resolve_scaling(mode, 0.5, None)
    got = [scaling.base(*shape) for shape in ((4, 16), (16, 4), (9, 9))]
    np.testing.assert_allclose(got, factors, rtol=1e-15)
    assert all(isinstance(value, float) for value in got)
    assert scaling.multiplier == 0.5


def test_an_empty_matrix_has_factor_one():
    for mode in FACTORS:
        assert resolve_scaling(mode, 1.0, None).base(0, 4) == 1
        assert resolve_scaling(mode, 1.0, None).base(4, 0) == 1


def test_consistent_rms_is_the_spectral_mode_times_a_number():
    scaling = resolve_scaling(None, 3.0, 0.2)
    assert scaling.base(4, 16) == 4
    np.testing.assert_allclose(np.asarray(scaling.multiplier), 0.2 * 3)
    traced = resolve_scaling(None, 1.0, jnp.float32(0.2))
    np.testing.assert_allclose(np.asarray(traced.multiplier), 0.2, rtol=1e-7)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (("rms", 1.0, None), ValueError, "scale must be one of .*'match_rms_adamw'.*got 'rms'"),
        (("none", 1.0, 0.2), ValueError, "scale or consistent_rms, not both.*'none'.*0.2"),
        ((None, 1.0, -0.2), ValueError, "consistent_rms must be finite and not negative"),
        ((None, 1.0, "0.2"), TypeError, "consistent_rms must be a number, got '0.2'"),
        ((None, math.nan, None), ValueError, "scale_factor must be finite and not negative"),
        ((None, lambda count: 1.0, None), TypeError, "scale_factor must be a number, got the fun"),
    ],
)
def test_errors(options, error, message):
    with pytest.raises(error, match=message):
        resolve_scaling(*options)
