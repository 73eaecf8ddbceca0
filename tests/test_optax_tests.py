"""optax's own tests of its Muon, with ours in its place."""

import importlib
import unittest
from typing import Any

import pytest
from optax import contrib

from muon_optax import muon

THEIR_TESTS = {"_muon_test": "MuonTest", "_common_test": "ContribTest"}
# Test of a private function of optax's, whose counterpart is tested in the module of ours.
PRIVATE = {
    "test_reshape_inverse": "calls optax's _compute_muon_reshape; bind_view is tested for itself",
    "test_newton_schulz": "calls optax's orthogonalize_via_newton_schulz; ours has its own tests",
}


def their_cases():
    for module, name in THEIR_TESTS.items():
        case: Any = getattr(importlib.import_module(f"optax.contrib.{module}"), name)
        for method in unittest.TestLoader().getTestCaseNames(case):
            parameters = getattr(getattr(case, method), "__x_params_repr__", "")
            if module == "_muon_test" or "'muon'" in parameters:
                yield pytest.param(case, method, id=f"{name}.{method}")


@pytest.mark.filterwarnings("ignore::muon_optax.MuonWarning")
@pytest.mark.parametrize(("case", "method"), list(their_cases()))
def test_their_own(case, method, monkeypatch):
    reason = next((why for name, why in PRIVATE.items() if method.startswith(name)), None)
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.setattr("optax.contrib._muon.muon", muon)
    monkeypatch.setattr(contrib, "muon", muon)
    result = unittest.TestResult()
    case(method).run(result)
    if result.skipped:
        pytest.skip(result.skipped[0][1])
    problems = [trace for _, trace in (*result.errors, *result.failures)]
    assert result.testsRun == 1
    assert not problems, "\n".join(problems)
