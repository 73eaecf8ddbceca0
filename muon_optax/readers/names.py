"""Decisions by a parameter's path, where its module decides nothing or not all."""

import re
from collections.abc import Iterable

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import Shape, rule_by_name, words
from muon_optax.readers.records import ModuleLeaf

__all__ = ["adapters", "is_adapter", "is_expert", "named_head"]

_TOKEN = re.compile(r"[a-z]+|[0-9]+")
_BASES = {"base_layer", "base_module"}  # the layer inside an adapter, in PEFT and in Flax


def named_head(segments: Segments, shape: Shape) -> Segments | None:
    """The names of a path as far as to the one that says head; None for other paths.

    Example:
      >>> named_head(("classifier", "layers", "0", "kernel"), (64, 32))
      ('classifier',)
    """
    names = words(segments)
    for depth in range(1, len(names) + 1):
        rule = rule_by_name(names[:depth], len(shape))
        if rule is not None and rule.reason == "head":
            return names[:depth]
    return None


def is_adapter(segments: Segments) -> bool:
    """Whether a path is that of a low-rank adapter's factor, not of the weight that it adapts.

    Example:
      >>> is_adapter(("q_proj", "kernel_lora_a")), is_adapter(("lora", "base_module", "kernel"))
      (True, False)
    """
    names = words(segments)
    bases = [i for i, name in enumerate(names) if name in _BASES]
    return any("lora" in _TOKEN.findall(name) for name in names[bases[-1] + 1 if bases else 0 :])


def is_expert(segments: Segments) -> bool:
    """Whether a path is that of a mixture of experts.

    Example:
      >>> is_expert(("MoeBlock_0", "wo")), is_expert(("attention", "wo"))
      (True, False)
    """
    tokens = {token for name in words(segments) for token in _TOKEN.findall(name)}
    return any(token.startswith(("moe", "expert")) for token in tokens)


def adapters(leaves: Iterable[ModuleLeaf]) -> frozenset[Segments]:
    """The paths of adapters' factors."""
    return frozenset(leaf.segments for leaf in leaves if is_adapter(leaf.segments))
