"""NorMuon, beside its formula in float64."""

import functools
from typing import Any

import pytest
import variants_on_meshes as meshes
import variants_oracle as oracle

from muon_optax.transforms.neurons import scale_by_neuron

OPTIONS: dict[str, dict[str, Any]] = {
    "authors": {"eps": 1e-10},
    "dion": {},
    "paper": {"restore": 0.2},
    "emerging_optimizers": {"each": "longer", "guard": "clamp"},
    "speedrun": {"each": "longer", "guard": "clamp", "eps": 1e-10, "beta2": 0.9},
    "hyperball": {"each": "longer", "guard": "clamp", "restore": None},
}


def case(name: str) -> meshes.Case:
    options = OPTIONS[name]

    def make(views, shardings):
        return scale_by_neuron(weight_dimension_numbers=views, param_shardings=shardings, **options)

    return meshes.Case(make, functools.partial(oracle.Neuron, **options))


def test_the_formula():
    meshes.check_all({name: case(name) for name in OPTIONS}, "one")


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_the_same_on_meshes(kind):
    meshes.check_all({name: case(name) for name in ("dion", "speedrun")}, kind)
