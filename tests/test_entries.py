"""AdaMuon, beside its formula in float64."""

import functools
from typing import Any

import numpy as np
import optax
import pytest
import reference
import variants_on_meshes as meshes
import variants_oracle as oracle
from running import run

from muon_optax import orthogonalize, scale_by_momentum
from muon_optax.transforms.entries import scale_by_entry

OPTIONS: dict[str, dict[str, Any]] = {
    "authors": {},
    "emerging_optimizers": {"rms": None, "beta2": 0.9},
    "small": {"eps": 0.1},
}


def case(name: str) -> meshes.Case:
    options = OPTIONS[name]

    def make(views, shardings):
        return scale_by_entry(weight_dimension_numbers=views, param_shardings=shardings, **options)

    return meshes.Case(make, functools.partial(oracle.Entry, **options))


def test_the_formula():
    meshes.check_all({name: case(name) for name in OPTIONS}, "one")


@pytest.mark.parametrize("kind", ["explicit", "auto", "manual"])
def test_the_same_on_meshes(kind):
    meshes.check(case("authors"), kind)


def test_adamuon_is_a_chain_of_pieces():
    """Signs of the Nesterov mix, orthogonalised; b is the momentum's (arXiv 2507.11005)."""
    grads = reference.gradients(0, 8, 12, 10)
    tx = optax.chain(
        scale_by_momentum(0.95, bias_correction=False),
        optax.scale_by_sign(),
        orthogonalize(),
        scale_by_entry(0.95),
    )
    got, _, _ = run(tx, np.ones((8, 12), np.float32), grads, jit=True)
    scaling = oracle.Entry(0.95)
    for update, mix in zip(got, reference.mixes(grads, bias_correction=False), strict=True):
        direction = reference.newton_schulz(np.sign(mix))
        assert reference.relative_error(update, scaling.update(direction, None)) <= 1e-5
