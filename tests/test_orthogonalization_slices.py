"""The Gram method on column slices, with vmap's named axis in place of devices."""

from functools import cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import gaussian, relative_error

from muon_optax.orthogonalization import (
    GramCollectives,
    NewtonSchulz,
    Preconditioning,
    resolve_schedule,
)

DEVICES = 4
OWNERS = GramCollectives(
    maximum=lambda x: jax.lax.pmax(x, "d"),
    reduce=lambda x: jax.lax.psum_scatter(x, "d", scatter_dimension=0, tiled=True),
    to_all=lambda x: jax.lax.all_gather(x, "d", axis=0, tiled=True),
)
EVERYONE = GramCollectives(
    maximum=lambda x: jax.lax.pmax(x, "d"), reduce=lambda x: jax.lax.psum(x, "d")
)


def matrices(count: int = 8, dtype: Any = np.float32) -> Any:
    x = gaussian(count, 6, 20) * np.logspace(-8, 8, count)[:, None, None]
    if np.issubdtype(dtype, np.complexfloating):
        x = x + 1j * gaussian(count, 6, 20, seed=1) * np.abs(x).max((1, 2), keepdims=True)
    return x.astype(dtype)


def on_devices(
    function: NewtonSchulz, x: np.ndarray, collectives: GramCollectives, axis: Any
) -> np.ndarray:
    slices = np.stack(np.split(x, DEVICES, axis))
    results = compiled_on_devices(function, collectives, axis)(slices)
    return np.concatenate(list(np.asarray(results)), axis)


@cache
def compiled_on_devices(function: NewtonSchulz, collectives: GramCollectives, axis: Any) -> Any:
    local = partial(function.on_slices, collectives=collectives, axis=axis)
    return jax.jit(jax.vmap(local, axis_name="d"))


@pytest.mark.parametrize(
    ("name", "collectives"), [("jordan", OWNERS), ("turbo", OWNERS), ("tight", EVERYONE)]
)
def test_slices_equal_whole_matrices(name, collectives):
    function = NewtonSchulz(resolve_schedule(name), "gram")
    x = matrices()
    whole = function(x)
    assert relative_error(on_devices(function, x, collectives, -1), whole) < 1e-5
    assert (
        relative_error(
            on_devices(function, x.swapaxes(1, 2), collectives, -2).swapaxes(1, 2), whole
        )
        < 1e-5
    )


@pytest.mark.parametrize("kind", get_args(Preconditioning))
def test_every_normalisation(kind):
    function = NewtonSchulz(resolve_schedule("jordan", 1, kind), "gram")
    x = matrices(4, np.complex64)
    assert relative_error(on_devices(function, x, OWNERS, -1), function(x)) < 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_exchanges_float32(dtype):
    seen = set()

    def reduce(x):
        seen.add(x.dtype)
        return OWNERS.reduce(x)

    function = NewtonSchulz(resolve_schedule("tight"), "gram", dtype)
    x = matrices()
    sliced = on_devices(function, x, OWNERS._replace(reduce=reduce), -1)
    assert seen == {jnp.dtype("float32")}
    assert relative_error(sliced, function(x)) < 2e-2


def test_collectives_are_as_many_as_passes():
    calls = {"maximum": 0, "reduce": 0, "to_all": 0}

    def counted(name):
        def call(x):
            calls[name] += 1
            return getattr(EVERYONE, name)(x)

        return call

    function = NewtonSchulz(resolve_schedule("cans"))
    on_devices(function, matrices(), GramCollectives(*map(counted, calls)), -1)
    assert calls == {"maximum": 1, "reduce": 3, "to_all": 4}


def test_non_finite_values_stay_in_their_matrix():
    function = NewtonSchulz(resolve_schedule("tight"))
    x = matrices()
    clean = on_devices(function, x, OWNERS, -1)
    x[3, 2, 7] = np.nan
    spoilt = on_devices(function, x, OWNERS, -1)
    assert not np.isfinite(spoilt[3]).any()
    others = np.arange(8) != 3
    np.testing.assert_array_equal(spoilt[others], clean[others])


def test_empty_slices_need_no_exchange():
    function = NewtonSchulz(resolve_schedule("tight"))
    assert function.on_slices(jnp.zeros((0, 3, 4)), GramCollectives()).shape == (0, 3, 4)
