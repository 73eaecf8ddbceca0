"""A running `optax.contrib.muon` goes on as ours."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from running import run

from muon_optax import MuonState, muon, recipes
from muon_optax.interop import from_optax

SHAPES = {"w": (3, 4), "embed": (5, 3), "b": (4,)}
PARAMS = {name: jnp.asarray(np.ones(shape, np.float32)) for name, shape in SHAPES.items()}
EYES = {"w": np.eye(3, 4), "embed": np.eye(5, 3), "b": np.arange(4.0)}
GRADS = [{name: jnp.asarray(x.astype(np.float32)) for name, x in EYES.items()}] * 4


def test_a_running_state_goes_on():
    theirs, ours = optax.contrib.muon(0.1), recipes.optax_muon(0.1)
    _, state, params = run(theirs, PARAMS, GRADS[:2], jit=True)
    converted = from_optax(state, params)
    assert jax.tree.structure(converted) == jax.tree.structure(ours.init(params))
    assert isinstance(converted.inner_states["muon"].inner_state[0], MuonState)
    for grad in GRADS[2:]:
        want, state = jax.jit(theirs.update)(grad, state, params)
        got, converted = jax.jit(ours.update)(grad, converted, params)
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_inside_other_transformations():
    def make(muon_of: Any) -> Any:
        return optax.chain(optax.clip(1.0), muon_of(optax.linear_schedule(0.1, 0.0, 5)))

    _, state, params = run(make(optax.contrib.muon), PARAMS, GRADS[:1], jit=True)
    converted = from_optax(state, params)
    assert jax.tree.structure(converted) == jax.tree.structure(
        make(recipes.optax_muon).init(params)
    )


def test_leaves_that_are_not_floating_point_lose_their_moments():
    others = {"ids": jnp.arange(6).reshape(2, 3), "step": jnp.array(3)}
    zeros = jax.tree.map(jnp.zeros_like, others)
    theirs: Any = optax.contrib.muon(0.1)
    ours: Any = recipes.optax_muon(0.1)
    _, less, params = run(theirs, PARAMS, GRADS[:2], jit=True)
    given = [{**grad, **zeros} for grad in GRADS[:2]]
    _, more, _ = run(theirs, {**PARAMS, **others}, given, jit=True)
    assert len(jax.tree.leaves(more)) == len(jax.tree.leaves(less)) + 3  # adam has two of step
    params, grads = {**params, **others}, {**GRADS[2], **zeros}
    converted = from_optax(more, params)
    assert jax.tree.structure(converted) == jax.tree.structure(ours.init(params))
    want, _ = jax.jit(theirs.update)(GRADS[2], less, {name: params[name] for name in PARAMS})
    got, _ = jax.jit(ours.update)(grads, converted, params)
    for name in PARAMS:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-7)
    for name in others:
        np.testing.assert_array_equal(got[name], zeros[name])


def parted(muon_of: Any) -> Any:
    labels = {"w": "trained", "embed": "frozen", "b": "trained"}
    return optax.partition({"trained": muon_of(0.1), "frozen": optax.set_to_zero()}, labels)


def masked(muon_of: Any) -> Any:
    return optax.masked(muon_of(0.1), {"w": True, "embed": False, "b": True})


@pytest.mark.parametrize("make", [parted, masked])
def test_a_partly_frozen_run_goes_on(make):
    theirs, ours = make(optax.contrib.muon), make(recipes.optax_muon)
    _, state, params = run(theirs, PARAMS, GRADS[:2], jit=True)
    converted = from_optax(state, params)
    assert jax.tree.structure(converted) == jax.tree.structure(ours.init(params))
    want, _ = jax.jit(theirs.update)(GRADS[2], state, params)
    got, _ = jax.jit(ours.update)(GRADS[2], converted, params)
    for name in PARAMS:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match=r"c: parameter \(2,\), no moments"):
        from_optax(state, {**params, "c": jnp.ones(2)})


def test_a_subtree_that_is_masked_whole():
    params = {"trained": PARAMS["w"], "frozen": {"a": PARAMS["w"], "b": PARAMS["b"]}}
    tx = optax.masked(optax.contrib.muon(0.1), {"trained": True, "frozen": False})
    converted: Any = from_optax(tx.init(params), params)
    mu = converted.inner_state.inner_states["muon"].inner_state[0].mu
    assert mu["frozen"] == optax.MaskedNode()


def test_moments_that_a_checkpoint_lost_are_no_frozen_ones():
    state: Any = optax.contrib.muon(0.1).init(PARAMS)
    first, *others = state.inner_states["adam"].inner_state
    first = first._replace(mu={**first.mu, "b": None})
    adam = optax.MaskedState((first, *others))
    state = state._replace(inner_states={**state.inner_states, "adam": adam})
    with pytest.raises(ValueError, match=r"b: parameter \(4,\), no moments"):
        from_optax(state, PARAMS)


def test_shapes_alone():
    shapes = jax.eval_shape(lambda: PARAMS)
    state = jax.eval_shape(optax.contrib.muon(0.1).init, shapes)
    wanted = jax.eval_shape(recipes.optax_muon(0.1).init, shapes)
    assert from_optax(state, shapes) == wanted
    assert jax.eval_shape(from_optax, state, shapes) == wanted


def test_a_state_that_was_not_converted_is_an_error_that_says_how():
    state = optax.contrib.muon(0.1).init(PARAMS)
    with pytest.raises(TypeError, match=r"interop\.from_optax\(state, params\)"):
        muon(0.1).update(GRADS[0], state, PARAMS)


def test_a_leaf_that_changes_its_optimizer_is_refused_in_the_update():
    state = from_optax(optax.contrib.muon(0.1).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="embed: muon in the state, adam now"):
        muon(0.1).update(GRADS[0], state, PARAMS)


def test_states_of_other_parameters_are_refused():
    state = optax.contrib.muon(0.1).init(PARAMS)
    others = {"w": jnp.ones((4, 3)), "embed": jnp.ones((5, 3)), "c": jnp.ones(4)}
    with pytest.raises(ValueError, match="doesn't belong") as error:
        from_optax(state, others)
    text = str(error.value)
    assert "w: parameter (4, 3), moments (3, 4)" in text
    assert "c: parameter (4,), no moments" in text
    assert "b: moments (4,), no parameter" in text


def test_a_state_without_optax_muon_is_refused():
    with pytest.raises(ValueError, match=r"no optax\.contrib MuonState to convert; it has"):
        from_optax(optax.adam(0.1).init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match="neither that nor Adam's"):
        from_optax(optax.sgd(0.1).init(PARAMS), PARAMS)
