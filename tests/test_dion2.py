"""Dion2 and NorDion2, beside their formulas in float64, and what they send."""

import functools
from typing import Any

import optax
import pytest
import reference
import sharded
import variants_on_meshes as meshes
import variants_oracle as oracle

from muon_optax import scale_by_dion2, scale_by_neuron

orthogonalize = functools.partial(reference.newton_schulz, rows=sharded.FAST)
NEURON: dict[str, Any] = {"skip_zeros": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "dion2": {},
    "nordion2": {"each": "output", "fraction": 0.5},
    "inputs": {"each": "input", "fraction": 0.6},
}


def case(name: str, **more: Any) -> meshes.Case:
    options = OPTIONS[name]

    def make(views: Any, shardings: Any) -> Any:
        kwargs = {"weight_dimension_numbers": views, "param_shardings": shardings}
        direction = scale_by_dion2(
            **options,
            ns_coeffs=sharded.FAST,
            device=sharded.SLOW,  # on which replicas share the work
            **kwargs,
            **more,
        )
        if name != "nordion2":
            return direction
        return optax.chain(direction, scale_by_neuron(**NEURON, **kwargs))

    def state() -> Any:
        direction = oracle.Dion2(orthogonalize, **options)
        return oracle.Chain(direction, oracle.Neuron(**NEURON)) if name == "nordion2" else direction

    return meshes.Case(make, state)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_formula(name, monkeypatch):
    monkeypatch.setattr(meshes, "ON_MESHES", set())
    meshes.check(case(name), "one")


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
@pytest.mark.parametrize("name", ["dion2", "nordion2"])
def test_the_same_on_meshes(name, kind, monkeypatch):
    monkeypatch.setattr(meshes, "ON_ONE_DEVICE", set())
    meshes.check(case(name), kind)
