"""Stages: their order, their states, and pieces that take the records of `muon`."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from running import first_update, run

from muon_optax import MatrixView, Namo, hyperball, muon, scale_by_shape
from muon_optax.transforms.stage import as_stage, in_order

PARAMS = {"w": np.array([1, 2], np.float32), "b": np.float32(3)}


def transformation(stage: Any) -> Any:
    return optax.GradientTransformation(
        lambda params: stage.init(params, []),
        lambda updates, state, params=None: stage.update(updates, state, params, []),
    )


def test_the_order_of_updates_is_not_that_of_states():
    counted = optax.scale_by_schedule(lambda count: 10.0 + count)
    stages = {"trace": as_stage(optax.trace(0.5)), "counted": as_stage(counted)}
    tx = transformation(in_order(stages, ("counted", "trace")))
    one = np.float32(1)
    updates, state, _ = run(tx, one, [one, one], jit=True)
    np.testing.assert_array_equal(updates, [10, 11 + 0.5 * 10])
    assert isinstance(state[0], optax.TraceState)
    assert int(state[1].count) == 2


def test_in_the_given_order_it_is_a_chain():
    parts = {
        "adam": optax.scale_by_adam(),
        "decay": optax.add_decayed_weights(0.1),
        "sign": optax.scale(-1.0),
    }
    stages = {name: as_stage(part) for name, part in parts.items()}
    ours, theirs = transformation(in_order(stages, list(parts))), optax.chain(*parts.values())
    got, want = (list(run(tx, PARAMS, [PARAMS, PARAMS], jit=True)) for tx in (ours, theirs))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_an_order_names_each_stage_once():
    stages = {"a": as_stage(optax.scale(1.0)), "b": as_stage(optax.scale(1.0))}
    for order in (["a"], ["a", "b", "b"], ["a", "c"]):
        with pytest.raises(ValueError, match="the order must name each stage once"):
            in_order(stages, order)


def test_slots_of_muon_stand_where_they_are_said_to():
    """Behind orthogonalisation, and last: the sign flips in between, and the rate comes before."""
    grads = {"w": np.diag([3, 1]).astype(np.float32)}
    shift = optax.stateless(lambda updates, params: jax.tree.map(lambda x: x + 1.0, updates))
    options: Any = ({}, {"after_orthogonalization": shift}, {"last": shift})
    first = lambda grads: [first_update(muon(0.5, **slot), grads)["w"] for slot in options]  # noqa: E731
    plain, after, last = map(np.asarray, jax.jit(first)(grads))
    np.testing.assert_allclose(after, plain - 0.5, atol=1e-6)
    np.testing.assert_allclose(last, plain + 1.0, atol=1e-6)


@pytest.mark.parametrize("slot", ["after_orthogonalization", "last"])
@pytest.mark.parametrize("value", ["sign", 5, scale_by_shape, [None], {"a": scale_by_shape()}])
def test_a_slot_takes_transformations(slot, value):
    with pytest.raises(TypeError, match=f"^{slot} must be a transformation, a list or tuple of"):
        muon(0.1, **{slot: value})


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"step": 0.1}, "GradientTransformation"),
        ({"step": [hyperball(0.1)]}, "GradientTransformation"),
        ({"namo": True, "bias_correction": False}, "Namo"),
        ({"namo": Namo, "bias_correction": False}, "Namo"),
    ],
)
def test_a_place_for_one_takes_its_kind(options, kind):
    with pytest.raises(TypeError, match=f"^{next(iter(options))} must be a {kind} or None, got "):
        muon(0.1, **options)


@pytest.mark.parametrize("slot", ["after_orthogonalization", "last"])
def test_what_makes_steps_has_a_place_of_its_own(slot):
    """Behind the learning rate, hyperball would go up the gradient."""
    values: Any = (hyperball(0.1), [scale_by_shape(), hyperball(0.1)])
    for value in values:
        with pytest.raises(ValueError, match=f"^{slot} got a transformation that makes steps"):
            muon(0.1, **{slot: value})


def test_a_piece_in_a_slot_takes_the_views_of_muon():
    """The scale by shape twice: each block of a fused leaf has its own factor."""
    grads = {"w": np.random.default_rng(0).normal(size=(4, 24)).astype(np.float32)}
    options: Any = {"muon_weight_dimension_numbers": MatrixView(0, 1, split=(16, 8))}
    options |= {"scale": "shape_scaling"}
    once = muon(1.0, **options)
    twice = muon(1.0, after_orthogonalization=scale_by_shape(), **options)
    first = jax.jit(lambda grads: [first_update(tx, grads)["w"] for tx in (once, twice)])
    once, twice = map(np.asarray, first(grads))
    factors = np.repeat([2.0, 2**0.5], [16, 8])
    np.testing.assert_allclose(twice, once * factors, rtol=1e-6)
