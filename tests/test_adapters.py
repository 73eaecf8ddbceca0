"""The adapters' examples: each trains a model of its library and asserts how its loss falls."""

import importlib.util
import re
from importlib.metadata import version
from pathlib import Path

import pytest
from programs import printed_by

ADAPTERS = Path(__file__).parents[1] / "examples/adapters"
# Example -> the package it needs, and lines of its report.
EXAMPLES = {
    "with_equinox.py": (
        "equinox",
        ["layers/0/weight 128 x 64 1 of 64 x 128 muon 1.414 weight of Linear"],
    ),
    "with_haiku.py": ("haiku", ["mlp/~/linear_0/w 64 x 128 1 of 64 x 128 muon 1.414 weight"]),
    "with_train_state.py": (
        "flax",
        [
            "attention/query/kernel 32 x 4 x 8 1 of 32 x 32 muon 1 ",
            "attention/out/kernel 4 x 8 x 32 1 of 32 x 32 muon 1 ",
            "head/kernel 32 x 10 adam head",
        ],
    ),
    "with_nnx_master.py": (
        "flax",
        ["the weights are the master copy, rounded; it is in pinned_host"],
    ),
    "with_keras.py": (
        "keras",
        [
            "sequential/second/kernel 128 x 128 1 of 128 x 128 muon 1 ",
            "sequential/head/kernel 128 x 10 adam head",
        ],
    ),
    "with_maxtext.py": (
        "jax",
        [
            "decoder/layers/self_attention/out/kernel 4 x 2 x 8 x 32 2 of 32 x 32 muon 1 ",
            "decoder/layers/mlp/wo/kernel 128 x 2 x 32 2 of 128 x 32 muon 1 ",
            "token_embedder/kernel 8 x 32 adam ",
        ],
    ),
    "with_haliax.py": (
        "haliax",
        [
            "blocks/stacked/up/weight/<0> 2 x 256 x 128 2 of 128 x 256 muon 1.414 ",
            "head/weight/<0> 10 x 128 adam head",
        ],
    ),
}


def can_run(package: str) -> bool:
    """Whether a package is installed and knows the JAX that is here."""
    if importlib.util.find_spec(package) is None:
        return False
    # Haliax 1.4.dev453 calls what JAX 0.12 has removed.
    return package != "haliax" or version("jax") < "0.12"


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_adapter_trains_and_its_report_says_how(name: str):
    pytest.importorskip("sklearn")
    package, lines = EXAMPLES[name]
    if not can_run(package):
        pytest.skip(f"{package} isn't installed, or not for this JAX")
    printed = "\n" + printed_by(ADAPTERS / name)
    for line in lines:
        assert f"\n{line}" in printed
    ((first, last, bound),) = re.findall(r"loss ([\d.]+) -> ([\d.]+), below ([\d.]+)\n", printed)
    assert float(last) < float(bound) < 0.7
    assert float(first) > 2.0  # ten classes: 2.3 nats for a guess


def test_the_list_of_adapters_is_whole():
    programs = {path.name for path in ADAPTERS.glob("with_*.py")}
    assert programs == set(EXAMPLES)
    page = (ADAPTERS.parents[1] / "docs/adapters.md").read_text()
    assert set(re.findall(r"`examples/adapters/(\w+\.py)`", page)) == programs
