"""Data parallelism: leaves are replicated, and no norm or mean is summed over the replicas."""

import dataclasses

import pytest
import test_brakes
import test_decays
import test_dion2
import test_entries
import test_namo
import test_neurons
import test_relative_size
import test_spheres
import variants_on_meshes as meshes

CASES: dict[str, meshes.Case] = {
    "neuron": test_neurons.case("dion"),
    "neuron, longer side": test_neurons.case("speedrun"),
    "entry": test_entries.case("authors"),
    "namo": test_namo.case("namo"),
    "namo_d": test_namo.case("namo_d"),
    "nordion2": test_dion2.case("nordion2"),
    "hyperball": test_spheres.case("schedule", "initial"),
    "hyperball, current": test_spheres.case("number", "current"),
    "floor": test_relative_size.case("matrix"),
    "floor of rows": test_relative_size.case("output"),
    "relative": test_relative_size.case("relative"),
    "brake": test_brakes.case("norm"),
    "component": test_brakes.case("component"),
    "pinned": test_brakes.case("pinned"),
    "cautious": test_decays.case("schedule"),
}


@pytest.mark.parametrize("kind", meshes.DDP)
def test_the_same_where_all_leaves_are_replicated(kind):
    cases = {name: dataclasses.replace(case, steps=3) for name, case in CASES.items()}
    meshes.check_all(cases, kind)
