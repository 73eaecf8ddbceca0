"""Views of the Flax models of a corpus, whose axes were read from their code."""

import warnings
from typing import Any, NamedTuple

import model_corpus
import pytest

from muon_optax import MuonWarning, flax_matrix_views
from muon_optax._internal.tree_paths import leaves_with_segments, path_name
from muon_optax.views import flax
from muon_optax.views.matrix_view import BoundView, bind_view, is_view

SCANNED = model_corpus.SCANNED_JAX
MODELS = {**model_corpus.read("jax_models.json.gz"), **SCANNED}
OF_FLAX = sorted(
    name for name, model in MODELS.items() if {"linen", "nnx"} & set(model["framework"].split())
)


class Leaf(NamedTuple):
    """A leaf of the corpus: [batch, reduction, output] axes where it is or may be a matrix."""

    path: str
    shape: list[int]
    label: str
    reason: str
    axes: list[list[int]] | None
    by_heads: bool  # whether one matrix a head is right too


def leaves_of(name: str) -> list[Leaf]:
    return [Leaf(*leaf) for leaf in MODELS[name]["leaves"]]


def params_of(name: str) -> Any:
    corpus = "JAX, scanned" if name in SCANNED else "JAX"
    return model_corpus.tree_of(model_corpus.CORPORA[corpus][f"jax {name}"])


def views_and_warnings(name: str) -> tuple[dict[str, Any], str]:
    with warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always", MuonWarning)
        views = flax_matrix_views(params_of(name))
    found = leaves_with_segments(views, lambda x: x is None or is_view(x))
    return {path_name(path): view for path, view in found}, "\n".join(
        str(record.message) for record in records
    )


def is_right(view: BoundView, leaf: Leaf) -> bool:
    assert leaf.axes is not None
    got = [set(view.batch_axes), set(view.reduction_axes), set(view.output_axes)]
    wanted = [set(group) for group in leaf.axes]
    if got == wanted:
        return True
    head = got[0] - wanted[0]
    apart = [wanted[0] | head, wanted[1] - head, wanted[2] - head]
    return leaf.by_heads and len(head) == 1 and got == apart and view.fan_in > 1 < view.fan_out


@pytest.mark.parametrize("name", OF_FLAX)
def test_views_of_the_models_of_the_corpus(name, monkeypatch):
    leaves = leaves_of(name)
    adams = {leaf.path for leaf in leaves if leaf.label == "adam"}
    # which leaves are embeddings and heads isn't asked here, but in the tests of the partition
    monkeypatch.setattr(
        flax, "_adams", lambda stacks, _: {p for p in stacks if path_name(p) in adams}
    )
    views, text = views_and_warnings(name)
    matrices = [leaf for leaf in leaves if leaf.axes is not None]
    bound = {x.path: bind_view(views[x.path], tuple(x.shape)) for x in matrices if views[x.path]}
    wrong = [x for x in matrices if x.path in bound and not is_right(bound[x.path], x)]
    assert not wrong
    hidden = [leaf.path for leaf in matrices if leaf.label == "muon"]
    assert sum(path in bound for path in hidden) >= 0.98 * len(hidden)
    assert sum(f"{path} (" in text for path in hidden) <= 0.02 * len(hidden)
    lost = [x.path for x in matrices if x.path not in bound and f"{x.path} (" not in text]
    assert not lost


@pytest.mark.parametrize("name", sorted(MODELS))
def test_no_view_is_wrong_in_silence_in_any_framework(name):
    views, text = views_and_warnings(name)
    for leaf in leaves_of(name):
        view = views[leaf.path]
        if leaf.axes is not None and view is not None:
            assert is_right(bind_view(view, tuple(leaf.shape)), leaf), leaf
            assert f"{leaf.path} (" not in text


@pytest.mark.parametrize("name", sorted(SCANNED.keys() & {*OF_FLAX}))
def test_embeddings_heads_and_norms_have_no_view(name):
    views, _ = views_and_warnings(name)
    assert [x for x in leaves_of(name) if x.label == "adam" and views[x.path]] == []


def test_the_corpus_holds_its_models():
    assert (len(MODELS), len(SCANNED)) == (38 + 93, 93)
    assert len({*OF_FLAX} - SCANNED.keys()) == 29
