"""Which optimizer each leaf gets, and the reason.

Declared matrix views come first: they say what is a matrix, and so what gets Muon. Without them,
ordered rules over a leaf's path and shape decide; the first that matches wins.
"""

import dataclasses
import fnmatch
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from muon_optax.matrix_view import BoundView, MuonDimensionNumbers, View, bind_view, is_view
from muon_optax.tree_paths import (
    Segments,
    align,
    is_masked,
    leaves_with_segments,
    path_name,
    raise_together,
)

__all__ = ["Assignment", "Decision", "Label", "MuonWarning", "Rule", "assign", "default_rules"]

Label = Literal["muon", "adam", "frozen"]
LABELS: tuple[str, ...] = get_args(Label)
Shape = tuple[int, ...]


class MuonWarning(UserWarning):
    """A choice of muon_optax that is right but may not be what was meant."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives a label to the leaves whose path, or path and shape, match.

    Attributes:
      pattern: a string matches one or more whole path segments in a row, ignoring case, each with
        shell wildcards ('lm_head', 'lora_*', 'decoder/*/kernel'), never a part of a segment by
        chance; a compiled regular expression must match the whole path 'a/b/c'; a function gets
        (segments, shape) and returns a bool.
      label: 'muon', 'adam' or 'frozen'.
      reason: a few words for the report.

    Raises:
      ValueError: for another label or an empty pattern.
      TypeError: for a pattern of another type.

    Example:
      >>> Rule("embed", "adam", "embedding").matches(("patch_embed", "kernel"), (16, 64))
      False
    """

    pattern: str | re.Pattern[str] | Callable[[Segments, Shape], bool]
    label: Label
    reason: str = "a rule"

    def __post_init__(self) -> None:
        if self.label not in LABELS:
            raise ValueError(f"Rule label must be one of {LABELS}, got {self.label!r}")
        if not (isinstance(self.pattern, str | re.Pattern) or callable(self.pattern)):
            raise TypeError(
                "Rule pattern must be a string, a compiled regular expression or a function, got "
                f"{self.pattern!r}"
            )
        if isinstance(self.pattern, str) and not all(self.pattern.split("/")):
            raise ValueError(f"Rule pattern has an empty segment: {self.pattern!r}")

    def matches(self, segments: Segments, shape: Shape) -> bool:
        """Whether a leaf at this path, of this shape, falls under the rule."""
        if isinstance(self.pattern, str):
            return _has_run(segments, self.pattern)
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.fullmatch("/".join(segments)) is not None
        return self.pattern(segments, shape)


def _has_run(segments: Segments, pattern: str) -> bool:
    wanted = pattern.lower().split("/")
    # Flat trees hold whole paths in one key: 'model.embed_tokens.weight' has three segments.
    names = [name for s in segments for name in re.split(r"[./]", s.lower())]
    return any(
        all(fnmatch.fnmatchcase(n, w) for n, w in zip(names[i:], wanted, strict=False))
        for i in range(len(names) - len(wanted) + 1)
    )


def _is_below_matrix(segments: Segments, shape: Shape) -> bool:
    del segments
    return len(shape) < 2


def _is_depthwise(segments: Segments, shape: Shape) -> bool:
    del segments
    return len(shape) > 2 and shape[-2] == 1 and max(shape[:-2]) > 1


def _is_stacked_vector(segments: Segments, shape: Shape) -> bool:
    del shape
    names = ("bias", "*_bias", "scale", "*_scale")
    return bool(segments) and any(fnmatch.fnmatchcase(segments[-1].lower(), n) for n in names)


_EMBEDDINGS = (
    "embed",
    "embed_tokens",
    "embedder",
    "embedding",
    "embeddings",
    "input_embedding",
    *(
        f"{what}_{name}"
        for what in ("tok", "token", "pos", "position", "word")
        for name in ("emb", "embed", "embedder", "embedding", "embeddings")
    ),
    "wte",
    "wpe",
    "cls",
    "cls_token",
)
_HEADS = (
    "classifier",
    "head",
    "lm_head",
    "logits",
    "logits_dense",
    "output_head",
    "to_logits",
    "unembed",
    "unembedding",
)

_DEFAULT_RULES = (
    Rule(_is_below_matrix, "adam", "fewer than two dims"),
    Rule(_is_depthwise, "adam", "depthwise kernel"),
    *(Rule(name, "adam", "embedding") for name in _EMBEDDINGS),
    *(Rule(name, "adam", "head") for name in _HEADS),
    *(Rule(name, "adam", "LoRA factor") for name in ("lora", "lora_*")),
    Rule(_is_stacked_vector, "adam", "bias or scale"),
)


def default_rules() -> tuple[Rule, ...]:
    """The rules used where none are given; what none of them matches is a matrix and gets Muon.

    Returns:
      An ordered tuple, to be put after rules of one's own: `partition=(Rule(...),
      *default_rules())`.

    Example:
      >>> sorted({rule.reason for rule in default_rules()})[:3]
      ['LoRA factor', 'bias or scale', 'depthwise kernel']
    """
    return _DEFAULT_RULES


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
    """

    segments: Segments
    shape: Shape
    dtype: str
    label: Label
    reason: str
    view: BoundView | None = None

    @property
    def path(self) -> str:
        """The path as text."""
        return path_name(self.segments)


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Decisions for all leaves of a tree, in its flattening order."""

    decisions: tuple[Decision, ...]
    treedef: Any

    def labels(self) -> Any:
        """The tree of labels, as `optax.partition` takes it.

        Leaves that aren't floating point are masked there, so that any label does.
        """
        return self.treedef.unflatten(
            [d.label if d.reason != NOT_FLOAT else "adam" for d in self.decisions]
        )

    def segments(self, label: Label) -> set[Segments]:
        """The paths of the trainable or frozen floating-point leaves with this label."""
        return {d.segments for d in self.decisions if d.label == label and d.reason != NOT_FLOAT}

    def views_of(self, tree: Any) -> Any:
        """The views of a tree of Muon's leaves alone, others masked."""
        views = {d.segments: d.view for d in self.decisions}
        found = [views[path] for path, _ in leaves_with_segments(tree)]
        return jax.tree.structure(tree).unflatten(found)


NOT_FLOAT = "not a floating-point leaf"
NO_VIEW = "no matrix view declared"

Views = View | Any | Callable[[Any], Any]
Partition = Sequence[Rule] | Any | Callable[[Any], Any]


def is_float_leaf(leaf: Any) -> bool:
    """Whether a leaf is floating point, real or complex (not an integer, bool, key or float0)."""
    return jnp.issubdtype(_dtype(leaf), jnp.inexact)


def _dtype(leaf: Any) -> Any:
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


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
    """
    leaves = leaves_with_segments(params)
    treedef = jax.tree.structure(params)
    if not leaves:  # an empty tree, or the placeholder of optax.tree_map_params
        return Assignment((), treedef)
    declared = views is not None
    views = resolve(views, params)
    floats = jax.tree.map(lambda x: x if is_float_leaf(x) else None, params)
    if declared:
        chosen = iter(align(views, floats, what="matrix views", is_leaf=is_view))
        choose = lambda path, shape: _by_view(path, shape, next(chosen))  # noqa: E731
    elif (rules := as_rules(partition)) is not None:
        choose = lambda path, shape: _by_rules(path, shape, rules)  # noqa: E731
    else:
        labels = iter(align(resolve(partition, params), floats, what="labels"))
        choose = lambda path, shape: _by_label(path, shape, next(labels))  # noqa: E731
    decisions, problems = [], []
    for path, leaf in leaves:
        try:
            decisions.append(_decide(path, leaf, choose))
        except ValueError as error:
            problems.append(f"{path_name(path)}: {error}")
    raise_together(problems, "muon can't take these leaves as declared:")
    return Assignment(tuple(decisions), treedef)


def resolve(tree: Any, params: Any) -> Any:
    """Calls a function of the parameters; a callable tree (a model) is a tree."""
    is_function = callable(tree) and jax.tree_util.all_leaves([tree]) and not is_view(tree)
    return tree(params) if is_function else tree


def as_rules(partition: Partition) -> tuple[Rule, ...] | None:
    """The rules that the argument stands for; None where it is labels."""
    if partition is None:
        return _DEFAULT_RULES
    if isinstance(partition, Sequence) and all(isinstance(r, Rule) for r in partition):
        return tuple(partition)
    return None


Choice = tuple[Label, str, View | None]


def _decide(path: Segments, leaf: Any, choose: Callable[[Segments, Shape], Choice]) -> Decision:
    shape, dtype = tuple(jnp.shape(leaf)), str(_dtype(leaf))
    if not is_float_leaf(leaf):
        return Decision(path, shape, dtype, "frozen", NOT_FLOAT)
    label, reason, view = choose(path, shape)
    bound = None if view is None else bind_view(view, shape)
    return Decision(path, shape, dtype, label, reason, bound)


def _by_view(path: Segments, shape: Shape, view: View | None) -> Choice:
    del path, shape
    if view is None:
        return "adam", "no matrix view in the given tree", None
    if not is_view(view):
        raise ValueError(
            f"a matrix view must be MuonDimensionNumbers, MatrixView or None, got {view!r}"
        )
    return "muon", "matrix view given", view


def _by_rules(path: Segments, shape: Shape, rules: Sequence[Rule]) -> Choice:
    rule = next((r for r in rules if r.matches(path, shape)), None)
    if rule is not None:
        return _by_label(path, shape, rule.label, rule.reason)
    if len(shape) > 2:
        return "adam", NO_VIEW, None
    return _by_label(path, shape, "muon", "weight matrix")


def _by_label(path: Segments, shape: Shape, label: Any, reason: str = "label given") -> Choice:
    del path
    if label not in LABELS:
        raise ValueError(f"shape {shape}, label {label!r}: must be one of {LABELS}")
    if label != "muon":
        return label, reason, None
    if len(shape) != 2:
        raise ValueError(
            f"shape {shape}, labelled 'muon': a leaf that isn't two-dimensional needs a matrix "
            "view (muon_weight_dimension_numbers)"
        )
    return "muon", reason, MuonDimensionNumbers(0, 1)


def check_rules(partition: Partition, params: Any) -> None:
    """Raises for rules of the user's own that match no leaf, as a mistyped name does."""
    places = leaves_with_segments(params, lambda x: x is None or is_masked(x))
    if not places:
        return
    unused = [
        f"{rule.pattern!r} -> {rule.label!r}"
        for rule in as_rules(partition) or ()
        if rule not in _DEFAULT_RULES
        and not any(rule.matches(path, getattr(leaf, "shape", ())) for path, leaf in places)
    ]
    raise_together(unused, f"these rules match no leaf of {', '.join(_names(places))}:")


def _names(places: Sequence[tuple[Segments, Any]], most: int = 20) -> list[str]:
    return [path_name(path) for path, _ in places[:most]] + ["..."] * (len(places) > most)


def warn_of_surprises(params: Any, assignment: Assignment) -> None:
    """Warns, once for each kind, of what was probably not meant."""
    decisions = assignment.decisions
    if decisions and not any(d.label == "muon" for d in decisions):
        _warn("no leaf gets Muon; all of them get AdamW or are frozen", decisions)
    _warn(
        "leaves with three or more dims and no declared matrix view get AdamW; declare their views "
        "with muon_weight_dimension_numbers (flax_matrix_views makes them for Flax models)",
        [d for d in decisions if d.reason == NO_VIEW],
    )
    _warn(
        "leaves that look like stacked vectors (first dim as that of a stack beside them) get Muon",
        _undeclared_stacks(decisions),
    )
    _warn("one array under several paths has different optimizers", _split_ties(params, decisions))


def _warn(message: str, decisions: Sequence[Decision]) -> None:
    if decisions:
        names = ", ".join(f"{d.path} {d.shape}" for d in decisions[:8])
        more = f" and {len(decisions) - 8} more" if len(decisions) > 8 else ""
        warnings.warn(f"{message}: {names}{more}", MuonWarning, stacklevel=2)


def _undeclared_stacks(decisions: Sequence[Decision]) -> list[Decision]:
    stacks = {(d.segments[:-1], d.shape[0]) for d in decisions if d.reason == NO_VIEW}
    return [
        d
        for d in decisions
        if d.label == "muon" and len(d.shape) == 2 and (d.segments[:-1], d.shape[0]) in stacks
    ]


def _split_ties(params: Any, decisions: Sequence[Decision]) -> list[Decision]:
    groups: dict[int, list[Decision]] = {}
    for leaf, decision in zip(jax.tree.leaves(params), decisions, strict=True):
        groups.setdefault(id(leaf), []).append(decision)
    return [d for g in groups.values() if len({d.label for d in g}) > 1 for d in g]
