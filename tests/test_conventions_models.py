"""Models of Flax and Equinox hold the parameters, on one device and on meshes."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharded
from battery import GRADS, PARAMS, SPECS, assert_close, everywhere, momentum, plain
from flax import nnx
from flax.training.train_state import TrainState
from running import apply_compiled, first_update

from muon_optax import MuonDimensionNumbers, muon


def loss_of(tree: Any, grad: Any) -> jax.Array:
    """A loss whose gradient is known."""
    terms = jax.tree.map(lambda x, g: (x * g).sum(), tree, grad)
    return jnp.stack(jax.tree.leaves(terms)).sum()


@functools.cache
def last() -> Any:
    """The parameters after plain training on one device."""
    params = PARAMS
    for update in plain():
        params = apply_compiled(params, update)
    return params


class Part(nnx.Module):
    def __init__(self, tree):
        for name, x in tree.items():
            setattr(self, name, Part(x) if isinstance(x, dict) else nnx.Param(x))


def of_nnx(model: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


@everywhere
def test_nnx_optimizer(place):
    model = Part(place.put(PARAMS))
    optimizer = nnx.Optimizer(model, place.muon(), wrt=nnx.Param)
    optimizer.update(model, nnx.state(Part(place.put(GRADS[0])), nnx.Param))
    assert_close(of_nnx(model), apply_compiled(PARAMS, plain()[0]))
    jax.tree.map(sharded.assert_sharded, of_nnx(model), place.where)


@everywhere
def test_nnx_jit(place):
    model = Part(place.put(PARAMS))
    optimizer = nnx.Optimizer(model, place.muon(), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, grad):
        grads = nnx.grad(lambda m: loss_of(of_nnx(m), grad))(model)
        optimizer.update(model, grads)

    for grad in GRADS:
        step(model, optimizer, place.put(grad))
    assert_close(of_nnx(model), last())
    jax.tree.map(sharded.assert_sharded, of_nnx(model), place.where)


@everywhere
def test_linen_train_state(place):
    train = TrainState.create(apply_fn=loss_of, params=place.put(PARAMS), tx=place.muon())

    @jax.jit
    def step(train, grad):
        grads = jax.grad(train.apply_fn)(train.params, grad)
        return train.apply_gradients(grads=grads)

    for grad in GRADS:
        train = step(train, place.put(grad))
    assert int(train.step) == len(GRADS)
    assert_close(train.params, last())
    jax.tree.map(sharded.assert_sharded, train.params, place.where)


def boxed(tree: Any) -> Any:
    def box(x, spec):
        return nn.Partitioned(x, names=(*spec, *[None] * (x.ndim - len(spec))))

    return jax.tree.map(box, tree, SPECS)


@everywhere
def test_linen_boxes(place):
    tx = place.muon()
    params = boxed(place.put(PARAMS))
    state, step = jax.jit(tx.init)(params), jax.jit(tx.update)
    for grad, want in zip(GRADS, plain(), strict=True):
        updates, state = step(boxed(place.put(grad)), state, params)
        params = apply_compiled(params, updates)
        assert_close(nn.unbox(updates), want)
    assert_close(nn.unbox(params), last())
    assert jax.tree.structure(params) == jax.tree.structure(boxed(PARAMS))
    specs: Any = nn.get_partition_spec(state)
    assert momentum(specs)["mlp"]["kernel"] == jax.P("f", None)


class Mlp(eqx.Module):
    kernel: jax.Array
    bias: jax.Array
    activation: Callable = jax.nn.relu  # a leaf that is no array
    width: int = eqx.field(static=True, default=32)


class Embed(eqx.Module):
    embedding: jax.Array
    calls: int = 0  # nor is this one to be trained


class Model(eqx.Module):
    mlp: Mlp
    embed: Embed

    def __call__(self, grad):
        return loss_of(arrays(self), grad)


def arrays(model: Any) -> Any:
    mlp = {"kernel": model.mlp.kernel, "bias": model.mlp.bias}
    return {"mlp": mlp, "embed": {"embedding": model.embed.embedding}}


@everywhere
def test_equinox(place):
    tree = place.put(PARAMS)
    model = Model(Mlp(**tree["mlp"]), Embed(**tree["embed"]))
    tx = place.muon()
    state = eqx.filter_jit(tx.init)(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(model, state, grad):
        grads = eqx.filter_grad(lambda m: m(grad))(model)
        params, static = eqx.partition(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.combine(eqx.apply_updates(params, updates), static), state

    for grad in GRADS:
        model, state = step(model, state, place.put(grad))
    assert (model.mlp.activation, model.embed.calls) == (jax.nn.relu, 0)
    assert_close(arrays(model), last())
    jax.tree.map(sharded.assert_sharded, arrays(model), place.where)


def test_equinox_layers_are_out_by_in():
    model = eqx.filter_jit(eqx.nn.Linear)(4, 16, key=jax.random.key(0))
    params = eqx.filter(model, eqx.is_inexact_array)
    views = jax.tree.map(lambda x: MuonDimensionNumbers(1, 0) if x.ndim == 2 else None, params)
    tx: Any = muon(1.0, muon_weight_dimension_numbers=views)
    updates = first_update(tx, params, jit=True)
    want = first_update(muon(1.0), {"kernel": params.weight.T}, jit=True)
    assert_close(updates.weight.T, want["kernel"])
    sigma = np.linalg.svd(updates.weight, compute_uv=False)
    assert 2 * 0.6 < sigma.min() <= sigma.max() < 2 * 1.25  # fan-out is four times fan-in


def test_an_unfiltered_model_names_what_is_no_array():
    model: Any = Model(Mlp(**PARAMS["mlp"]), Embed(**PARAMS["embed"]))
    with pytest.raises(ValueError, match=r"equinox\.filter(?s:.*)mlp/activation: got"):
        muon(0.1).init(model)
