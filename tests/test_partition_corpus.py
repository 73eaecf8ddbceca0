"""Who gets Muon in 45 PyTorch and 38 JAX models that nobody wrote for this library.

`data/models.json.gz` is {model: [[path, shape, want, why]]}, from the modules of transformers,
diffusers, timm and torchvision, layers that are alike told once; want is 'adam', 'muon', 'view'
(three dims or more: AdamW until a view is declared) or 'either'. `data/jax_models.json.gz` is
{model: {framework, tree, leaves: [[path, shape, want, why, axes, heads]]}}.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from shown import report

from muon_optax import ParameterReport
from muon_optax.partition import NO_VIEW

DATA = Path(__file__).parent / "data"


class Leaf(NamedTuple):
    path: str
    shape: tuple[int, ...]
    want: str


def read(name: str) -> Any:
    return json.loads(gzip.decompress((DATA / name).read_bytes()))


TORCH = {
    f"torch {model}": [Leaf(path, tuple(shape), want) for path, shape, want, _ in rows]
    for model, rows in read("models.json.gz").items()
}
JAX = {
    f"jax {model}": [Leaf(path, tuple(shape), want) for path, shape, want, *_ in found["leaves"]]
    for model, found in read("jax_models.json.gz").items()
}
FLAT = {
    f"jax {model}" for model, found in read("jax_models.json.gz").items() if found["tree"] == "flat"
}
MODELS = TORCH | JAX

# Linear layers that are Muon's by the corpus and get AdamW: last layers with a few outputs that
# nothing takes, and tables of position biases that are looked up with one-hot vectors.
AS_HEADS_OR_TABLES = {
    "torch d_flux": {"proj_out.weight"},
    "torch detr": {"class_labels_classifier.weight", "bbox_predictor.layers.2.weight"},
    "torch layoutlm": {f"encoder.rel_pos{axis}_bias.weight" for axis in ("", "_x", "_y")},
    "torch sam": {"mask_decoder.iou_prediction_head.proj_out.weight"},
    "torch tv_vgg16": {"classifier.6.weight"},
}


def tree_of(model: str) -> Any:
    """PyTorch's flat names, Keras' flat paths, and nested dicts for the rest."""
    leaves = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, jnp.float32) for leaf in MODELS[model]}
    if model in TORCH or model in FLAT:
        return leaves
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *above, last = path.split("/")
        node = tree
        for name in above:
            node = node.setdefault(name, {})
        node[last] = leaf
    return tree


@pytest.fixture(scope="module")
def reports() -> dict[str, ParameterReport]:
    return {model: report(tree_of(model)) for model in MODELS}


def decided(found: ParameterReport, model: str) -> Iterator[tuple[Leaf, str, str]]:
    rows = {row.path: row for row in found.rows}
    for leaf in MODELS[model]:
        yield leaf, rows[leaf.path].optimizer, rows[leaf.path].reason


def doubted(found: ParameterReport, leaf: Leaf) -> bool:
    """Whether a warning of a doubtful choice names the leaf."""
    return any(f"{leaf.path} {leaf.shape}" in text for text in found.warnings if "Rule(" in text)


def test_the_whole_corpus_is_there():
    assert (len(TORCH), len(JAX)) == (45, 38)
    assert sum(leaf.want == "muon" for rows in TORCH.values() for leaf in rows) == 478


@pytest.mark.parametrize("model", MODELS)
def test_adamws_leaves_get_adamw_or_a_warning(model, reports):
    wrong = [
        leaf
        for leaf, optimizer, _ in decided(reports[model], model)
        if leaf.want == "adam" and optimizer == "muon" and not doubted(reports[model], leaf)
    ]
    assert wrong == []


@pytest.mark.parametrize("model", MODELS)
def test_hidden_matrices_get_muon(model, reports):
    lost = {
        leaf.path
        for leaf, optimizer, _ in decided(reports[model], model)
        if leaf.want == "muon" and len(leaf.shape) == 2 and optimizer != "muon"
    }
    assert lost == AS_HEADS_OR_TABLES.get(model, set())


@pytest.mark.parametrize("model", MODELS)
def test_hidden_stacks_and_convolutions_are_not_lost_in_silence(model, reports):
    """They need a view, and the warning says so: none is taken for a table or a head."""
    lost = {
        (leaf.path, reason)
        for leaf, _, reason in decided(reports[model], model)
        if leaf.want == "muon" and len(leaf.shape) > 2 and reason != NO_VIEW
    }
    assert lost == set()


def test_nearly_all_hidden_matrices_get_muon(reports):
    for models in (TORCH, JAX):
        hidden = [
            optimizer
            for model in models
            for leaf, optimizer, _ in decided(reports[model], model)
            if leaf.want == "muon" and len(leaf.shape) == 2
        ]
        assert hidden.count("muon") >= 0.98 * len(hidden)


def test_warnings_name_few_hidden_matrices(reports):
    for models in (TORCH, JAX):
        hidden = [
            (model, leaf) for model in models for leaf in models[model] if leaf.want == "muon"
        ]
        named = [leaf for model, leaf in hidden if doubted(reports[model], leaf)]
        assert len(named) <= 0.02 * len(hidden)
