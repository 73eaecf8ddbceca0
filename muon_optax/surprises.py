"""What an assignment of optimizers may have got wrong, and warns of."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from muon_optax.notices import warn_about
from muon_optax.partition import MATRIX, NO_VIEW, NOT_FLOAT, Assignment, Decision
from muon_optax.rules import words
from muon_optax.tree_paths import Segments, has_unnamed

__all__ = ["warn_of_surprises"]


def warn_of_surprises(params: Any, assignment: Assignment) -> None:
    """Warns, once for each kind, of what was probably not meant."""
    decisions = assignment.decisions
    if decisions and not any(d.label == "muon" for d in decisions):
        reasons = ", ".join(dict.fromkeys(d.reason for d in decisions))
        warn_about(
            f"no leaf gets Muon; all of them get AdamW or are frozen (reasons: {reasons})",
            decisions,
        )
    warn_about(
        "leaves with three or more dims and no declared matrix view get AdamW; declare their views "
        "with muon_weight_dimension_numbers (flax_matrix_views makes them for Flax models)",
        [d for d in decisions if d.reason == NO_VIEW],
    )
    warn_about(
        "leaves that look like stacked vectors (first dim as that of a stack beside them) get Muon",
        _undeclared_stacks(decisions),
    )
    warn_about(
        "leaves in containers registered without names (jax.tree_util.register_pytree_node) get "
        "Muon by rules that can't see what they are",
        [d for d in decisions if d.reason == MATRIX and has_unnamed(d.segments)],
    )
    warn_about(
        "one array under several paths has different optimizers", _split_ties(params, decisions)
    )


def _undeclared_stacks(decisions: Sequence[Decision]) -> list[Decision]:
    """Muon's 2-D leaves beside, or in one subtree of equal first dims with, a leaf of three dims.

    A scanned block gives all its leaves the number of layers as first dim.
    """
    first_dims: dict[Segments, set[int]] = {}
    for d in decisions:
        if d.reason != NOT_FLOAT:
            for above in _ancestors(d):
                first_dims.setdefault(above, set()).add(d.shape[0] if d.shape else 0)
    stacked = [d for d in decisions if d.reason == NO_VIEW]
    beside = {(_ancestors(d)[0], d.shape[0]) for d in stacked}
    blocks = {(a, d.shape[0]) for d in stacked for a in _ancestors(d) if len(first_dims[a]) == 1}
    plain = [
        (d, [(above, d.shape[0]) for above in _ancestors(d)])
        for d in decisions
        if d.reason == MATRIX
    ]
    return [d for d, places in plain if places[0] in beside or not blocks.isdisjoint(places)]


def _ancestors(decision: Decision) -> list[Segments]:
    """The paths above a leaf, nearest first."""
    names = words(decision.segments)
    return [names[:n] for n in range(max(len(names) - 1, 0), -1, -1)]


def _split_ties(params: Any, decisions: Sequence[Decision]) -> list[Decision]:
    groups: dict[int, list[Decision]] = {}
    for leaf, decision in zip(jax.tree.leaves(params), decisions, strict=True):
        if isinstance(leaf, jax.Array | np.ndarray):
            groups.setdefault(id(leaf), []).append(decision)
    return [d for g in groups.values() if len({d.label for d in g}) > 1 for d in g]
