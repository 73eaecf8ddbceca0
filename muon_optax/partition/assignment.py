"""Which optimizer each leaf gets, and the reason.

Declared matrix views come first: they say which leaves are matrices, and so which get
Muon. Without them, ordered rules over a leaf's path and shape decide; the first that matches wins.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from muon_optax._internal.leaf_types import check_arrays, dtype_of, is_float_leaf
from muon_optax._internal.tree_paths import (
    Segments,
    align,
    is_absent,
    is_masked,
    leaves_with_segments,
    path_name,
    raise_all,
    resolve,
    short,
)
from muon_optax._internal.warnings import MuonWarning
from muon_optax.partition.defaults import default_rules
from muon_optax.partition.rules import LABELS, Label, Rule, first_rules
from muon_optax.partition.tree import Shape
from muon_optax.views.matrix_view import BoundView, MuonDimensionNumbers, View, bind_view, is_view

__all__ = [
    "NOT_FLOAT",
    "NO_VIEW",
    "Assignment",
    "Decision",
    "Partition",
    "Views",
    "as_rules",
    "assign",
    "check_rules",
    "overruled",
]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What one leaf gets.

    Attributes:
      segments: the leaf's path.
      shape: its shape.
      dtype: its dtype's name.
      label: its optimizer.
      reason: why.
      view: how it makes matrices, for a Muon leaf.
      warning: why that is doubtful, where it is.
    """

    segments: Segments
    shape: Shape
    dtype: str
    label: Label
    reason: str
    view: BoundView | None = None
    warning: str | None = None

    @property
    def path(self) -> str:
        """The path as text."""
        return path_name(self.segments)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Decisions for all leaves of a tree, in its flattening order."""

    decisions: tuple[Decision, ...]
    treedef: Any

    def shapes(self) -> Any:
        """The tree of shapes that was decided about, without leaves that aren't floating point."""
        floats = [
            jax.ShapeDtypeStruct(d.shape, d.dtype) if d.reason != NOT_FLOAT else None
            for d in self.decisions
        ]
        return self.treedef.unflatten(floats)

    def labels_of(self, tree: Any) -> Any:
        """The labels of a tree of all or some of these leaves, as `optax.partition` takes them.

        Leaves that aren't floating point are masked there, so that any label does.
        """
        labels = {d.segments: d.label if d.reason != NOT_FLOAT else "adam" for d in self.decisions}
        found = [labels[path] for path, _ in leaves_with_segments(tree)]
        return jax.tree.structure(tree).unflatten(found)

    def muon_part(self, tree: Any) -> tuple[Any, list[BoundView]]:
        """The tree with all but Muon's leaves masked, and the views of these."""
        pairs = zip(jax.tree.leaves(tree), self.decisions, strict=True)
        kept = [x if d.view is not None else optax.MaskedNode() for x, d in pairs]
        views = [d.view for d in self.decisions if d.view is not None]
        return self.treedef.unflatten(kept), views

    def views_of(self, tree: Any) -> Any:
        """The views of a tree of Muon's leaves alone, others masked."""
        views = {d.segments: d.view for d in self.decisions}
        found = [views[path] for path, _ in leaves_with_segments(tree)]
        return jax.tree.structure(tree).unflatten(found)


NOT_FLOAT = "not a floating-point leaf"
NO_VIEW = "no matrix view declared"

Views = View | Any | Callable[[Any], Any]
Partition = Sequence[Rule] | Any | Callable[[Any], Any]
Choose = Callable[[Segments, Shape], "_Choice"]


class _Choice(NamedTuple):
    """What a leaf gets before its view is bound to its shape."""

    label: Label
    reason: str
    view: View | None = None
    warning: str | None = None


def assign(params: Any, views: Views = None, partition: Partition = None) -> Assignment:
    """Decides for each leaf of `params`; leaves may be arrays, tracers or shape structs.

    Args:
      params: the parameter tree, or updates of its structure. Non-float leaves are 'frozen'.
      views: a view, a tree of views (or a prefix of one) with None for AdamW, a function that
        returns one, or None for the rules.
      partition: ordered rules, or labels as `optax.partition` takes them: a tree or a function that
        returns one.

    Returns:
      The decisions, each with its reason.

    Raises:
      ValueError: listing every leaf that can't be what it was declared to be.
      TypeError: for rules mixed with something else.
    """
    leaves = leaves_with_segments(params)
    treedef = jax.tree.structure(params)
    if not leaves:  # an empty tree, or the placeholder of optax.tree_map_params
        return Assignment((), treedef)
    check_arrays(leaves)
    choose = _chooser(params, views, partition)
    decisions, problems = [], []
    for path, leaf in leaves:
        try:
            decisions.append(_decide(path, leaf, choose))
        except ValueError as error:
            problems.append(f"{path_name(path)}: {error}")
    raise_all(problems, "muon can't take these leaves as declared:")
    return Assignment(tuple(decisions), treedef)


def _chooser(params: Any, views: Views, partition: Partition) -> Choose:
    """What decides: the views where there are any, then the rules or the labels."""
    rules = as_rules(partition)
    if views is None and rules is not None:
        rule_at = _rules_of_floats(rules, params)
        return lambda path, shape: _by_rule(shape, rule_at[path])
    if views is None:
        label_at = _of_floats(resolve(partition, params), params, what="labels")
        return lambda path, shape: _by_label(shape, label_at[path])
    found = resolve(views, params)
    if found is None:
        return lambda path, _: _Choice("adam", "the function of matrix views returned None")
    view_at = _of_floats(found, params, what="matrix views", is_leaf=is_view)
    rule_at = _rules_of_floats(default_rules(), params)
    return lambda path, _: _by_view(view_at[path], rule_at[path])


def _rules_of_floats(rules: Sequence[Rule], params: Any) -> dict[Segments, Rule | None]:
    """The rule that decides about each floating-point leaf; roles are told by all of these."""
    leaves = [(p, tuple(jnp.shape(x))) for p, x in leaves_with_segments(params) if is_float_leaf(x)]
    paths = [path for path, _ in leaves]
    return dict(zip(paths, first_rules(rules, leaves), strict=True))


def _of_floats(tree: Any, params: Any, **options: Any) -> dict[Segments, Any]:
    """The entries of a tree, or a prefix of one, for the floating-point leaves of `params`."""
    floats = jax.tree.map(lambda x: x if is_float_leaf(x) else None, params)
    paths = [path for path, _ in leaves_with_segments(floats)]
    return dict(zip(paths, align(tree, floats, **options), strict=True))


def as_rules(partition: Partition) -> tuple[Rule, ...] | None:
    """The rules that the argument stands for; None where it is labels.

    Raises:
      TypeError: for a single rule, or rules mixed with something else.
    """
    if partition is None:
        return default_rules()
    if isinstance(partition, Rule):
        raise TypeError(f"partition takes a sequence of rules, got one: write ({partition!r},)")
    if isinstance(partition, str) or not isinstance(partition, Sequence):
        return None
    others = [p for p in partition if not isinstance(p, Rule)]
    if others and len(others) < len(partition):
        raise TypeError(
            f"partition takes rules or labels, not both: got {short(others[0])} among rules (put a "
            "star before default_rules() in a tuple of your own)"
        )
    return None if others else tuple(partition)


def _decide(path: Segments, leaf: Any, choose: Choose) -> Decision:
    shape, dtype = tuple(jnp.shape(leaf)), str(dtype_of(leaf))
    if not is_float_leaf(leaf):
        return Decision(path, shape, dtype, "frozen", NOT_FLOAT)
    label, reason, view, warning = choose(path, shape)
    bound = None if view is None else bind_view(view, shape)
    if bound is not None and jnp.dtype(dtype).itemsize < 2:
        raise ValueError(
            f"dtype {dtype}: Muon needs 16 bits or more; take the dtype that it is trained in "
            "(muon_optax.models.as_trained, or --dtype), or label it 'adam'"
        )
    return Decision(path, shape, dtype, label, reason, bound, warning)


def _by_view(view: View | None, rule: Rule | None) -> _Choice:
    if view is None:
        if rule is not None and rule.label == "adam":
            return _Choice("adam", rule.reason)
        return _Choice("adam", "no matrix view in the given tree")
    if not is_view(view):
        raise ValueError(
            f"a matrix view must be MuonDimensionNumbers, MatrixView or None, got {short(view)}"
        )
    return _Choice("muon", "matrix view given", view)


def _by_rule(shape: Shape, rule: Rule | None) -> _Choice:
    if rule is None:
        return _by_no_rule(shape)
    if rule.view is not None:
        return _Choice("muon", rule.reason, rule.view, rule.warning)
    chosen = _by_label(shape, rule.label, rule.reason, f" by the rule {rule}")
    return chosen._replace(warning=rule.warning)


def _by_no_rule(shape: Shape) -> _Choice:
    if len(shape) < 2:
        return _Choice("adam", "fewer than two dims")
    if len(shape) > 2:
        return _Choice("adam", NO_VIEW)
    return _by_label(shape, "muon", "weight matrix")


def _by_label(shape: Shape, label: Any, reason: str = "label given", by: str = "") -> _Choice:
    if not (isinstance(label, str) and label in LABELS):
        raise ValueError(f"shape {shape}, label {short(label)}: must be one of {LABELS}")
    if label == "muon":
        return _Choice("muon", reason, _plain_matrix(shape, by))
    return _Choice("adam" if label == "adam" else "frozen", reason)


def _plain_matrix(shape: Shape, by: str) -> View:
    if len(shape) < 2:
        raise ValueError(
            f"shape {shape}, labelled 'muon'{by}: Muon needs two dims; label it 'adam'"
        )
    if len(shape) > 2:
        raise ValueError(
            f"shape {shape}, labelled 'muon'{by}: a leaf of three or more dims needs a matrix view "
            "(muon_weight_dimension_numbers)"
        )
    return MuonDimensionNumbers(0, 1)


def check_rules(partition: Partition, params: Any) -> None:
    """Raises for rules that decide nothing, as a mistyped name does, but for optional ones.

    Where parts of the tree are masked, a rule may be meant for what is there: a warning then. Rules
    by an exact path are those of a whole model, of which a part may be trained, and which rules in
    front may overrule: it's enough that one of them matches.

    Raises:
      ValueError: for rules that match no leaf, or lose each leaf to an earlier rule that says
        otherwise.
    """
    places = leaves_with_segments(params, is_absent)
    rules = as_rules(partition) or ()
    exact = [rule for rule in rules if isinstance(rule.pattern, tuple) and not rule.optional]
    own = [rule for rule in rules if not isinstance(rule.pattern, tuple) and not rule.optional]
    if not places or not (own or exact):
        return
    matched = [(rule, [p for p in places if _may_match(rule, *p)]) for rule in own]
    unused = [str(rule) for rule, found in matched if not found]
    if {path for path, _ in places}.isdisjoint(rule.pattern for rule in exact):
        unused += [str(rule) for rule in exact[:20]] + ["..."] * (len(exact) > 20)
    names = f"{', '.join(_names(places))}:"
    if unused and any(is_masked(leaf) for _, leaf in places):
        headline = f"these rules match no leaf outside the masked parts; there are {names}"
        warnings.warn("\n  ".join([headline, *unused]), MuonWarning, stacklevel=3)
        unused = []
    raise_all(unused, f"these rules match no leaf of {names}")
    there = [(path, tuple(jnp.shape(x))) for path, x in places if not is_absent(x)]
    first = dict(zip([path for path, _ in there], first_rules(rules, there), strict=True))
    losers = [(rule, _winner(rule, first, found)) for rule, found in matched if found]
    raise_all(
        [f"{rule}: an earlier rule, {winner}" for rule, winner in losers if winner],
        "these rules decide nothing; the first rule that matches a leaf wins:",
    )


def overruled(partition: Partition, assignment: Assignment) -> list[Decision]:
    """The leaves of which the user's own rules or labels say otherwise than matrix views.

    Args:
      partition: as in `assign`.
      assignment: what the views decided.

    Returns:
      The decisions for these leaves.

    Raises:
      ValueError: for labels of another tree.
    """
    trained = [d for d in assignment.decisions if d.reason != NOT_FLOAT]
    rules = as_rules(partition)
    if rules is None and trained:
        params = assignment.shapes()
        said = _of_floats(resolve(partition, params), params, what="labels")
        return [d for d in trained if said[d.segments] != d.label]
    if not rules or all(rule.optional for rule in rules):
        return []
    first = first_rules(rules, [(d.segments, d.shape) for d in trained])
    own = [(d, r) for d, r in zip(trained, first, strict=True) if r and not r.optional]
    return [d for d, rule in own if rule.label != d.label]


def _may_match(rule: Rule, path: Segments, leaf: Any) -> bool:
    """Whether the rule matches; a function can't be asked about a leaf that isn't there."""
    if is_absent(leaf):
        return callable(rule.pattern) or rule.matches(path, (1, 1))
    return rule.matches(path, jnp.shape(leaf))


def _winner(
    rule: Rule,
    first: Mapping[Segments, Rule | None],
    matched: Sequence[tuple[Segments, Any]],
) -> str | None:
    """What takes the first leaf that the rule matches, if all go to rules of other labels."""
    if any(is_absent(leaf) for _, leaf in matched):
        return None
    winners = [first[path] for path, _ in matched]
    if any(other is not None and other.label == rule.label for other in winners):
        return None
    return f"{winners[0]}, takes {path_name(matched[0][0])}"


def _names(places: Sequence[tuple[Segments, Any]], most: int = 20) -> list[str]:
    return [path_name(path) for path, _ in places[:most]] + ["..."] * (len(places) > most)
