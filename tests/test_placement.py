"""Where a state is born and returns to."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sharded
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from muon_optax.sharding.options import ShardingOptions
from muon_optax.sharding.placement import (
    is_on_host,
    keeping_placement,
    momentum_to_host,
    names_host,
    to_device,
)
from muon_optax.transforms.binding import binder

DEVICE = SingleDeviceSharding(jax.devices()[1])
HOST = DEVICE.with_memory_kind("pinned_host")
X = jax.device_put(jnp.arange(3.0), HOST)


def test_the_type_says_what_is_in_host_memory():
    assert is_on_host(X)
    assert jax.eval_shape(lambda x: jnp.float32(is_on_host(x)), X).shape == ()
    assert not any(map(is_on_host, (to_device(X), np.ones(3), 1.0, None)))
    np.testing.assert_array_equal(to_device({"x": X})["x"], [0, 1, 2])
    assert [names_host(x) for x in (HOST, X, DEVICE, P("f"), None)] == [True, True, *[False] * 3]


def test_declared_host_memory():
    tree = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2))}
    bind = binder(None, ShardingOptions(None, {"a": HOST, "b": P()}))
    moved = momentum_to_host(tree, bind(tree, None))
    assert is_on_host(moved["a"])
    assert not is_on_host(moved["b"])


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_counts_are_born_on_the_mesh(kind):
    mesh = sharded.make_mesh({"f": 8}, kind)
    schedule: Any = keeping_placement(optax.scale_by_schedule(lambda count: 0.1))
    count = schedule.init(jax.device_put(jnp.ones(8), NamedSharding(mesh, P("f")))).count
    sharded.assert_sharded(count, NamedSharding(mesh, P()))
    assert (int(count), count.dtype) == (0, jnp.int32)


def test_counts_are_born_on_the_device_that_was_asked_for():
    schedule: Any = keeping_placement(optax.scale_by_schedule(lambda count: 0.1))
    assert schedule.init(X).count.sharding == DEVICE
    assert not schedule.init(jnp.ones(3)).count.committed
    assert not schedule.init({}).count.committed
