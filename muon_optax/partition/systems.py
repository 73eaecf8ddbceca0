"""Rules of other systems: what they match by parts of names, and the leaves that they fuse."""

import re
from collections.abc import Mapping

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition.defaults import ADAM_RULES, MATRIX_RULES
from muon_optax.partition.rules import RolePattern, Rule
from muon_optax.partition.tree import Shape
from muon_optax.views.matrix_view import MatrixView

__all__ = ["Blocks", "fused_rules", "is_vector_in_disguise", "named_like", "with_default_rules"]

Blocks = int | tuple[int, ...]


def named_like(*parts: str) -> Rule:
    """AdamW for leaves with any of these anywhere in their path, as parts of names too.

    Example:
      >>> named_like("embed").matches(("model", "PatchEmbedder"), (4, 8))
      True
    """
    pattern = re.compile(rf"(?is).*({'|'.join(map(re.escape, parts))}).*")
    return Rule(pattern, "adam", f"{', '.join(parts)} in its path", optional=True)


def is_vector_in_disguise(segments: Segments, shape: Shape) -> bool:
    """Whether at most one dim is above 1.

    Example:
      >>> is_vector_in_disguise(("w",), (1, 8)), is_vector_in_disguise(("w",), (2, 8))
      (True, False)
    """
    del segments
    return sum(n > 1 for n in shape) < 2


def fused_rules(blocks: Mapping[str, Blocks], *, optional: bool = False) -> tuple[Rule, ...]:
    """Muon for [..., in, out] leaves whose output axis is cut: in sizes, or in equal parts.

    Args:
      blocks: sizes of the blocks, or their number, by pattern.
      optional: whether a pattern may match no leaf.

    Example:
      >>> fused_rules({"qkv": (8, 2, 2)})[0].view.split
      (8, 2, 2)
    """
    views = {
        name: MatrixView(-2, -1, heads=sizes)
        if isinstance(sizes, int)
        else MatrixView(-2, -1, split=tuple(sizes))
        for name, sizes in blocks.items()
    }
    return tuple(
        Rule(name, "muon", "fused matrices", view, optional) for name, view in views.items()
    )


_SMALL = {"vector", "bias", "norm", "quantisation", "lora"}


def with_default_rules(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The default rules, with rules for matrices after those of biases, norms and LoRA factors.

    Example:
      >>> rules = with_default_rules(fused_rules({"qkv": 3}))
      >>> [str(rule) for rule in rules if rule.label == "muon"][:2]
      ["'qkv' -> 'muon'", "role 'matrix' -> 'muon'"]
    """
    small = [
        r for r in ADAM_RULES if isinstance(r.pattern, RolePattern) and r.pattern.role in _SMALL
    ]
    others = [rule for rule in ADAM_RULES if rule not in small]
    return (*small, *rules, *others, *MATRIX_RULES)
