"""Muon's variants beside the code that others publish, where MUON_OPTAX_PUBLISHED says where it is.

What was found last is in benchmarks/results/published_variants.json.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "benchmarks/results/published_variants.json"
RECORDED = json.loads(RESULTS.read_text())["distance"] if RESULTS.exists() else {}
MOST = 2e-6


@pytest.fixture(autouse=True)
def _forgets_what_was_imported():
    before = dict(sys.modules)
    yield
    roots = ("absl", "dion", "emerging_optimizers", "timm")
    for name in {name for name in sys.modules if name.split(".")[0] in roots} - set(before):
        del sys.modules[name]


def test_what_is_on_record():
    assert len(RECORDED) == 18
    assert max(RECORDED.values()) <= MOST


@pytest.mark.skipif("MUON_OPTAX_PUBLISHED" not in os.environ, reason="wants published code")
@pytest.mark.parametrize("name", RECORDED)
def test_the_weights_are_those_of_published_code(name):
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of theirs
        from benchmarks.published_variants import COMPARISONS

        assert set(COMPARISONS) == set(RECORDED)
        assert COMPARISONS[name]() <= MOST
