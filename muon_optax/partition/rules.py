"""Rules that give a leaf its optimizer: by its path, its shape, or its role in the tree."""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, get_args

from muon_optax._internal.tree_paths import Segments, raise_all
from muon_optax.partition.names import names_of
from muon_optax.partition.roles import roles_of
from muon_optax.partition.tree import Described, Role, Shape
from muon_optax.views.matrix_view import View, is_view

__all__ = [
    "LABELS",
    "Label",
    "RolePattern",
    "Rule",
    "Shape",
    "check_patterns",
    "first_match",
    "first_rules",
    "has_run",
    "unmatched",
    "words",
]

Label = Literal["muon", "adam", "frozen"]
LABELS: tuple[str, ...] = get_args(Label)
T = TypeVar("T")

_SEPARATOR = re.compile(r"[./]")
_WILDCARD = re.compile(r"[*?\[]")


@functools.lru_cache(maxsize=2**16)
def words(segments: Segments) -> tuple[str, ...]:
    """The path's names in lower case.

    Flat trees hold whole paths in one key: 'model.embed_tokens.weight' has three names.

    Example:
      >>> words(("layers", "0", "Attn.q_proj"))
      ('layers', '0', 'attn', 'q_proj')
    """
    return tuple(name.lower() for name in names_of(segments))


@dataclasses.dataclass(frozen=True)
class RolePattern:
    """Matches leaves by what they are in their tree, which names and shapes of the whole tree tell.

    Attributes:
      role: one of the roles of `default_rules()`.

    Example:
      >>> RolePattern("head")
      RolePattern(role='head')
    """

    role: Role


Pattern = str | re.Pattern[str] | Segments | RolePattern | Callable[[Segments, Shape], bool]


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives a label to the leaves whose path, or path and shape, match.

    Attributes:
      pattern: a string matches one or more whole names of the path in a row, ignoring case, each
        with shell wildcards ('lm_head', 'lora_*', 'decoder/*/kernel'), never a part of a name by
        chance; '.' separates names as '/' does, in paths and patterns. A compiled regular
        expression must match the whole path 'a/b/c', with keys as they are. A tuple of keys is one
        whole path, exactly. A function gets (segments, shape) and returns a bool. The patterns of
        `default_rules()` are roles that the whole tree tells.
      label: 'muon', 'adam' or 'frozen'.
      reason: a few words for the report.
      view: which axes make the matrices, for 'muon'; None is (0, 1), for leaves of two dims. A rule
        with a view passes over leaves of fewer than two dims: a bias beside is no matrix.
      optional: whether it may match no leaf, as one that is written for many models may. Any other
        rule that decides nothing is an error, since a mistyped name decides nothing.
      warning: why the choice is doubtful, for a MuonWarning that names the leaves it decides.

    Raises:
      ValueError: for another label, an empty pattern, or a view without 'muon'.
      TypeError: for a pattern of another type.

    Example:
      >>> Rule("embed", "adam", "embedding").matches(("patch_embed", "kernel"), (16, 64))
      False
    """

    pattern: Pattern
    label: Label
    reason: str = "a rule"
    view: View | None = None
    optional: bool = False
    warning: str | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.label, str) and self.label in LABELS):
            raise ValueError(f"Rule label must be one of {LABELS}, got {self.label!r}")
        is_bytes = isinstance(self.pattern, re.Pattern) and isinstance(self.pattern.pattern, bytes)
        is_path = isinstance(self.pattern, tuple) and all(isinstance(s, str) for s in self.pattern)
        is_known = isinstance(self.pattern, str | re.Pattern | RolePattern) or is_path
        if is_bytes or not (is_known or callable(self.pattern)):
            raise TypeError(
                "Rule pattern must be a string, a compiled regular expression of one, a tuple of "
                f"keys or a function, got {self.pattern!r}"
            )
        if self.view is not None and not is_view(self.view):
            raise TypeError(
                f"Rule view must be MuonDimensionNumbers, MatrixView or None, got {self.view!r}"
            )
        if self.view is not None and self.label != "muon":
            raise ValueError(f"Rule has a view, so its label must be 'muon', got {self.label!r}")
        if isinstance(self.pattern, str) and not all(_SEPARATOR.split(self.pattern)):
            raise ValueError(f"Rule pattern has an empty segment: {self.pattern!r}")

    def __str__(self) -> str:
        return f"{_pattern_text(self.pattern)} -> {self.label!r}"

    def matches(self, segments: Segments, shape: Shape) -> bool:
        """Whether a leaf at this path, of this shape, falls under the rule.

        A role is told as if the leaf were the whole tree.
        """
        if isinstance(self.pattern, RolePattern):
            return roles_of([(segments, shape)]) == (self.pattern.role,)
        return self.matches_path(segments, shape)

    def matches_path(self, segments: Segments, shape: Shape) -> bool:
        """`matches` for the patterns that look at one leaf; no role matches here."""
        if self.view is not None and len(shape) < 2:
            return False
        if isinstance(self.pattern, str):
            return has_run(segments, self.pattern)
        if isinstance(self.pattern, tuple):
            return segments == self.pattern
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.fullmatch("/".join(segments)) is not None
        return not isinstance(self.pattern, RolePattern) and bool(self.pattern(segments, shape))


def _pattern_text(pattern: Any) -> str:
    if isinstance(pattern, RolePattern):
        return f"role {pattern.role!r}"
    is_function = not isinstance(pattern, str | re.Pattern | tuple)
    name = getattr(pattern, "__qualname__", None) if is_function else None
    return repr(pattern) if name is None else f"function {name}"


def has_run(segments: Segments, pattern: str) -> bool:
    """Whether names of the path in a row match the pattern's, as `Rule` says."""
    names, wanted = words(segments), words((pattern,))
    if len(wanted) == 1 and not _WILDCARD.search(pattern):
        return wanted[0] in names
    return any(
        all(fnmatch.fnmatchcase(n, w) for n, w in zip(names[i:], wanted, strict=False))
        for i in range(len(names) - len(wanted) + 1)
    )


def first_match(table: Iterable[tuple[str, T]], segments: Segments) -> T | None:
    """The value of the first of (pattern, value) pairs whose pattern matches the path.

    Example:
      >>> first_match([("embed", "gather"), ("*", "gram")], ("mlp", "kernel"))
      'gram'
    """
    return next((value for pattern, value in table if has_run(segments, pattern)), None)


def first_rules(rules: Sequence[Rule], leaves: Described) -> list[Rule | None]:
    """The rule that decides about each leaf of a tree, the first that matches; None for no rule.

    Args:
      rules: in order.
      leaves: paths and shapes of the whole tree.

    Example:
      >>> rules = (Rule(RolePattern("head"), "adam", "head"), Rule("*", "muon"))
      >>> [str(r) for r in first_rules(rules, [(("fc", "kernel"), (8, 4)), (("w",), (8, 8))])]
      ["role 'head' -> 'adam'", "'*' -> 'muon'"]
    """
    roles: Sequence[Role | None] = [None] * len(leaves)
    if any(isinstance(rule.pattern, RolePattern) for rule in rules):
        roles = roles_of(leaves)
    return [
        _first(rules, segments, shape, role)
        for (segments, shape), role in zip(leaves, roles, strict=True)
    ]


def _first(
    rules: Sequence[Rule], segments: Segments, shape: Shape, role: Role | None
) -> Rule | None:
    for rule in rules:
        if isinstance(rule.pattern, RolePattern):
            if rule.pattern.role == role:
                return rule
        elif rule.matches_path(segments, shape):
            return rule
    return None


def unmatched(patterns: Iterable[str], paths: Sequence[Segments]) -> list[str]:
    """The patterns that match none of the paths, as a mistyped name does.

    Example:
      >>> unmatched(["mlp", "mpl"], [("mlp", "kernel")])
      ['mpl']
    """
    return [p for p in patterns if not any(has_run(path, p) for path in paths)]


def check_patterns(option: str, patterns: Iterable[str], paths: Sequence[Segments]) -> None:
    """Raises for patterns of an option that match none of Muon's leaves, if there are any leaves.

    Raises:
      ValueError: listing the patterns.
    """
    unused = unmatched(patterns, paths) if paths else []
    raise_all(list(map(repr, unused)), f"these patterns of {option} match no leaf of Muon's:")
