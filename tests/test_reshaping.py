"""Reshapes dim by dim: those of numpy, and on Explicit meshes under `vmap`."""

import jax
import numpy as np
import pytest
import sharded
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from muon_optax._internal.reshaping import reshaped

SHAPES = [
    ((2, 3, 4, 5), (6, 20)),
    ((6, 20), (2, 3, 4, 5)),
    ((6, 4), (4, 6)),
    ((1, 2, 1, 3), (2, 3, 1)),
    ((2, 3), (1, 2, 1, 3, 1, 1)),
    ((2, 1), (2,)),
    ((), (1, 1)),
    ((1,), ()),
    ((0, 4, 2), (0, 8)),
    ((3, 0), (0,)),
]


@pytest.mark.parametrize(("old", "new"), SHAPES)
def test_as_numpy(old, new):
    x = np.arange(np.prod(old, dtype=int)).reshape(old)
    np.testing.assert_array_equal(reshaped(jax.numpy.asarray(x), new), x.reshape(new))


@pytest.mark.parametrize(("old", "new"), SHAPES[:5])
def test_over_an_explicit_axis(old, new):
    mesh = sharded.make_mesh({"m": 2, "f": 4})
    x = np.arange(2 * np.prod(old, dtype=int)).reshape(2, *old)
    placed = jax.device_put(x, NamedSharding(mesh, P("m")))
    found = jax.jit(jax.vmap(lambda x: reshaped(x, new)))(placed)
    np.testing.assert_array_equal(found, x.reshape(2, *new))
    assert found.sharding.spec[0] == "m"


def test_other_sizes_are_an_error():
    with pytest.raises(TypeError, match=r"\(2, 3\) .*\(7,\)"):
        reshaped(jax.numpy.ones((2, 3)), (7,))
