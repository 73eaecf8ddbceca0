"""What a choice of optimizers may have got wrong: said by `init` and by `report` alike."""

import re
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from muon_optax._internal.warnings import MuonWarning, about
from muon_optax.partition.assignment import (
    NO_VIEW,
    Assignment,
    Decision,
    Partition,
    Views,
    overruled,
)

__all__ = ["doubts", "find_warnings", "warn"]


def find_warnings(
    params: Any, assignment: Assignment, views: Views = None, partition: Partition = None
) -> tuple[str, ...]:
    """Says, once for each kind, what was probably not meant.

    Args:
      params: the tree, whose arrays show what is tied; inside a shard_map they may be blocks.
      assignment: what was decided about it.
      views: as in `assign`.
      partition: as in `assign`.

    Returns:
      A text a kind, with the leaves and what to do about them.
    """
    decisions = assignment.decisions
    beaten = [] if views is None else overruled(partition, assignment)
    texts = (
        _no_muon(decisions),
        about(_NO_VIEW, [d for d in decisions if d.reason == NO_VIEW]),
        *doubts(decisions),
        about(_TIED, _split_ties(params, decisions)),
        about(_BEATEN, beaten),
    )
    return tuple(text for text in texts if text)


_NO_VIEW = (
    "leaves with three or more dims and no declared matrix view get AdamW; declare their views "
    "with muon_weight_dimension_numbers (flax_matrix_views makes them for Flax models), or in rules"
)
_TIED = "one array under several paths has different optimizers"
_BEATEN = (
    "matrix views beat partition, which says otherwise of these leaves; say it in "
    "muon_weight_dimension_numbers alone (None is AdamW, nothing is frozen)"
)


def warn(texts: Iterable[str]) -> None:
    """Gives each of the texts as a MuonWarning."""
    for text in texts:
        warnings.warn(text, MuonWarning, stacklevel=3)


def _no_muon(decisions: Sequence[Decision]) -> str:
    if any(d.label == "muon" for d in decisions):
        return ""
    reasons = ", ".join(dict.fromkeys(d.reason for d in decisions))
    return about(
        f"no leaf gets Muon; all of them get AdamW or are frozen (reasons: {reasons})", decisions
    )


def doubts(decisions: Sequence[Decision]) -> list[str]:
    """What rules call doubtful: all the leaves of each, and a rule that ends the doubt."""
    kinds = dict.fromkeys(d.warning for d in decisions if d.warning is not None)
    groups = [[d for d in decisions if d.warning == kind] for kind in kinds]
    return [
        f"{about(kind, group, most=None)}. A rule says what it is: "
        f"partition=({_example(group[0])}, *default_rules())"
        for kind, group in zip(kinds, groups, strict=True)
    ]


def _example(decision: Decision) -> str:
    """A rule that decides otherwise about a leaf."""
    path = re.sub(r"([*?\[])", r"[\1]", decision.path)
    if decision.view is not None and "[in, out]" in decision.reason:
        return f"Rule({path!r}, 'muon', view=MuonDimensionNumbers(1, 0))"
    if decision.label == "muon":
        return f"Rule({path!r}, 'adam')"
    inputs = tuple(range(len(decision.shape) - 1))
    view = f", view=MuonDimensionNumbers({inputs}, {len(inputs)})" if len(inputs) > 1 else ""
    return f"Rule({path!r}, 'muon'{view})"


def _split_ties(params: Any, decisions: Sequence[Decision]) -> list[Decision]:
    groups: dict[int, list[Decision]] = {}
    for leaf, decision in zip(jax.tree.leaves(params), decisions, strict=True):
        if isinstance(leaf, jax.Array | np.ndarray):
            groups.setdefault(id(leaf), []).append(decision)
    return [d for g in groups.values() if len({d.label for d in g}) > 1 for d in g]
