"""Rules that give a leaf its optimizer by its path and shape, and the rules of a fresh start."""

import dataclasses
import fnmatch
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar, get_args

from muon_optax.matrix_view import View, is_view
from muon_optax.tree_paths import Segments

__all__ = [
    "LABELS",
    "Label",
    "Rule",
    "Shape",
    "default_rules",
    "first_match",
    "first_rule",
    "has_run",
    "unmatched",
    "words",
]

Label = Literal["muon", "adam", "frozen"]
LABELS: tuple[str, ...] = get_args(Label)
Shape = tuple[int, ...]
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
    return tuple(name for s in segments for name in _SEPARATOR.split(s.lower()))


@dataclasses.dataclass(frozen=True)
class Rule:
    """Gives a label to the leaves whose path, or path and shape, match.

    Attributes:
      pattern: a string matches one or more whole names of the path in a row, ignoring case, each
        with shell wildcards ('lm_head', 'lora_*', 'decoder/*/kernel'), never a part of a name by
        chance; '.' separates names as '/' does, in paths and patterns. A compiled regular
        expression must match the whole path 'a/b/c', with keys as they are. A tuple of keys is one
        whole path, exactly. A function gets (segments, shape) and returns a bool.
      label: 'muon', 'adam' or 'frozen'.
      reason: a few words for the report.
      view: which axes make the matrices, for 'muon'; None is (0, 1), for leaves of two dims.

    Raises:
      ValueError: for another label, an empty pattern, or a view without 'muon'.
      TypeError: for a pattern of another type.

    Example:
      >>> Rule("embed", "adam", "embedding").matches(("patch_embed", "kernel"), (16, 64))
      False
    """

    pattern: str | re.Pattern[str] | Segments | Callable[[Segments, Shape], bool]
    label: Label
    reason: str = "a rule"
    view: View | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.label, str) and self.label in LABELS):
            raise ValueError(f"Rule label must be one of {LABELS}, got {self.label!r}")
        is_bytes = isinstance(self.pattern, re.Pattern) and isinstance(self.pattern.pattern, bytes)
        is_path = isinstance(self.pattern, tuple) and all(isinstance(s, str) for s in self.pattern)
        is_known = isinstance(self.pattern, str | re.Pattern) or is_path or callable(self.pattern)
        if is_bytes or not is_known:
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
        """Whether a leaf at this path, of this shape, falls under the rule."""
        if isinstance(self.pattern, str):
            return has_run(segments, self.pattern)
        if isinstance(self.pattern, tuple):
            return segments == self.pattern
        if isinstance(self.pattern, re.Pattern):
            return self.pattern.fullmatch("/".join(segments)) is not None
        return bool(self.pattern(segments, shape))


def _pattern_text(pattern: Any) -> str:
    is_function = not isinstance(pattern, str | re.Pattern | tuple)
    name = getattr(pattern, "__qualname__", None) if is_function else None
    return repr(pattern) if name is None else f"function {name}"


def has_run(segments: Segments, pattern: str) -> bool:
    """Whether names of the path in a row match the pattern's, as `Rule` says."""
    names, wanted = words(segments), words((pattern,))
    if len(wanted) == 1 and not _WILDCARD.search(pattern):  # most rules, asked for each leaf
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


def first_rule(rules: Iterable[Rule], segments: Segments, shape: Shape) -> Rule | None:
    """The rule that decides about a leaf, the first that matches.

    Example:
      >>> first_rule(default_rules(), ("lm_head", "kernel"), (4, 8)).reason
      'head'
    """
    return next((rule for rule in rules if rule.matches(segments, shape)), None)


def unmatched(patterns: Iterable[str], paths: Sequence[Segments]) -> list[str]:
    """The patterns that match none of the paths, as a mistyped name does.

    Example:
      >>> unmatched(["mlp", "mpl"], [("mlp", "kernel")])
      ['mpl']
    """
    return [p for p in patterns if not any(has_run(path, p) for path in paths)]


def _is_below_matrix(segments: Segments, shape: Shape) -> bool:
    del segments
    return len(shape) < 2


def _is_depthwise(segments: Segments, shape: Shape) -> bool:
    del segments
    return len(shape) > 2 and shape[-2] == 1 and max(shape[:-2]) > 1


def _is_stacked_vector(segments: Segments, shape: Shape) -> bool:
    del shape
    patterns = ("bias", "*_bias", "scale", "*_scale")
    return any(fnmatch.fnmatchcase(name, p) for name in words(segments)[-1:] for p in patterns)


def _is_lora_factor(segments: Segments, shape: Shape) -> bool:
    """Whether a leaf is called lora_*, or is in a module called lora and not that one's base."""
    del shape
    names = words(segments)
    if any(name.startswith("lora_") for name in names):
        return True
    # nnx.LoRALinear has its own kernel, and nnx.LoRA that of its base_module, beside the factors.
    below = [names[i + 1 :] for i, name in enumerate(names) if name == "lora"]
    return any(rest not in _LORA_BASES and rest[:1] not in _LORA_BASES for rest in below)


_LORA_BASES = {(name,) for name in ("kernel", "weight", "w", "base_module", "base_layer")}


_EMBEDDINGS = (
    "emb",
    "embed",
    "embed_in",
    "embed_out",
    "embed_tokens",
    "embedder",
    "embedding",
    "embedding_table",
    "embeddings",
    "input_embedding",
    "output_embedding",
    *(
        f"{what}_{name}"
        for what in (
            "tok",
            "token",
            "token_type",
            "type",
            "pos",
            "position",
            "positional",
            "rel",
            "word",
        )
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
    Rule(_is_lora_factor, "adam", "LoRA factor"),
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
