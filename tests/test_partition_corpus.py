"""Who gets Muon in PyTorch and JAX models that nobody wrote for this library: `model_corpus`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from model_corpus import CORPORA, JAX, TORCH, Counts, Leaf, count, doubted, tree_of
from shown import report

from muon_optax import ParameterReport
from muon_optax.partition import NO_VIEW

PAGE = Path(__file__).parents[1] / "docs" / "who_gets_muon.md"
MODELS = {**TORCH, **JAX}

# Linear layers that are Muon's by the corpus and get AdamW: last layers with a few outputs that
# nothing takes, and tables of position biases that are looked up with one-hot vectors.
AS_HEADS_OR_TABLES = {
    "torch d_flux": {"proj_out.weight"},
    "torch detr": {"class_labels_classifier.weight", "bbox_predictor.layers.2.weight"},
    "torch layoutlm": {f"encoder.rel_pos{axis}_bias.weight" for axis in ("", "_x", "_y")},
    "torch sam": {"mask_decoder.iou_prediction_head.proj_out.weight"},
    "torch tv_vgg16": {"classifier.6.weight"},
}


@pytest.fixture(scope="module")
def reports() -> dict[str, ParameterReport]:
    return {model: report(tree_of(MODELS[model])) for model in MODELS}


def decided(found: ParameterReport, model: str) -> Iterator[tuple[Leaf, str, str]]:
    rows = {row.path: row for row in found.rows}
    for leaf in MODELS[model].leaves:
        yield leaf, rows[leaf.path].optimizer, rows[leaf.path].reason


def test_the_whole_corpus_is_there():
    assert (len(TORCH), len(JAX)) == (45, 38)
    assert sum(leaf.want == "muon" for rows in TORCH.values() for leaf in rows.leaves) == 478


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


@pytest.fixture(scope="module")
def counts() -> dict[str, Counts]:
    return {name: count(models) for name, models in CORPORA.items()}


@pytest.mark.parametrize("corpus", CORPORA)
def test_no_corpus_has_a_silent_fault_nor_many_doubts(corpus, counts):
    found = counts[corpus]
    assert found.adam_silent == 0
    assert found.on_muon >= 0.98 * found.hidden
    assert found.named <= 0.02 * found.hidden


def test_the_figures_of_the_page(counts):
    rows = [
        line.strip("|").split("|")
        for line in PAGE.read_text().splitlines()
        if line.startswith(("| PyTorch", "| JAX"))
    ]
    told = {
        name.strip(): Counts(*(int(n.replace(",", "")) for n in cells)) for name, *cells in rows
    }
    assert told == counts
