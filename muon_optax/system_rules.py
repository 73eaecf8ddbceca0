"""Who gets Muon in another system: rules that may match nothing, and fused leaves by name.

Rules given to `muon` must each decide something, since a mistyped name decides nothing; those that
come with a recipe fit many models, and not every model has a leaf for each.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax.matrix_view import MatrixView, MuonDimensionNumbers
from muon_optax.notices import warn_about
from muon_optax.rules import Label, Rule, Shape, first_match, first_rule, unmatched
from muon_optax.tree_paths import Segments, leaves_with_segments, path_name, raise_together

__all__ = ["Blocks", "SystemRules", "is_vector_in_disguise", "named_like", "views_of_blocks"]

Blocks = int | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SystemRules:
    """Rules of which any may match no leaf, and the views of fused leaves.

    Attributes:
      rules: the first that matches decides; a matrix that none matches gets Muon.
      fused: (pattern, view) of the leaves that hold several matrices side by side; patterns are as
        in `Rule`.
      any_of: those of these patterns of which one match is enough.
    """

    rules: tuple[Rule, ...]
    fused: tuple[tuple[str, MatrixView], ...] = ()
    any_of: frozenset[str] = frozenset()

    def options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `muon` that say so, unless the caller gives others.

        Raises:
          ValueError: if the caller gives rules or views beside names of fused leaves.
        """
        own = [
            n for n in ("partition", "muon_weight_dimension_numbers") if given.get(n) is not None
        ]
        if own and self.fused:
            raise ValueError(
                f"{own[0]} would replace the views of {[name for name, _ in self.fused]}; give "
                "these as MatrixView in muon_weight_dimension_numbers instead"
            )
        if own:
            return {}
        if self.fused:
            return {"muon_weight_dimension_numbers": self.views}
        return {"partition": self.labels}

    def labels(self, params: Any) -> Any:
        """The tree of labels."""
        labels: list[Label] = ["adam" if v is None else "muon" for v in self._of_leaves(params)]
        return jax.tree.structure(params).unflatten(labels)

    def views(self, params: Any) -> Any:
        """The tree of views, None for AdamW."""
        return jax.tree.structure(params).unflatten(self._of_leaves(params))

    def _of_leaves(self, params: Any) -> list[MuonDimensionNumbers | MatrixView | None]:
        leaves = [_Leaf(path, jnp.shape(leaf)) for path, leaf in leaves_with_segments(params)]
        if leaves:  # not an empty tree, or the placeholder of optax.tree_map_params
            self._check_patterns([x.segments for x in leaves])
        stacks = [x for x in leaves if len(x.shape) > 2 and self._is_matrix(x)]
        warn_about(
            "leaves with three or more dims and no declared matrix view get AdamW; declare their "
            "views with muon_weight_dimension_numbers (flax_matrix_views makes them for Flax)",
            [x for x in stacks if self._fused_view(x) is None],
        )
        return [self._view(x) for x in leaves]

    def _check_patterns(self, paths: list[Segments]) -> None:
        names = {name for name, _ in self.fused}
        unused = set(unmatched(names, paths))
        if not self.any_of <= unused:
            unused -= self.any_of
        found = ", ".join(path_name(path) for path in paths[:20])
        raise_together(sorted(unused), f"these names of fused leaves are in no path of {found}:")

    def _view(self, leaf: "_Leaf") -> MuonDimensionNumbers | MatrixView | None:
        if not self._is_matrix(leaf):
            return None
        plain = MuonDimensionNumbers(0, 1) if len(leaf.shape) == 2 else None
        return self._fused_view(leaf) or plain

    def _is_matrix(self, leaf: "_Leaf") -> bool:
        rule = first_rule(self.rules, leaf.segments, leaf.shape)
        return len(leaf.shape) >= 2 and (rule is None or rule.label == "muon")

    def _fused_view(self, leaf: "_Leaf") -> MatrixView | None:
        return first_match(self.fused, leaf.segments)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    segments: Segments
    shape: Shape

    @property
    def path(self) -> str:
        return path_name(self.segments)


def named_like(*parts: str) -> Rule:
    """AdamW for leaves with any of these anywhere in their path, as parts of names too.

    Example:
      >>> named_like("embed").matches(("model", "PatchEmbedder"), (4, 8))
      True
    """
    pattern = re.compile(rf"(?is).*({'|'.join(map(re.escape, parts))}).*")
    return Rule(pattern, "adam", f"{', '.join(parts)} in its path")


def is_vector_in_disguise(segments: Segments, shape: Shape) -> bool:
    """Whether at most one dim is above 1.

    Example:
      >>> is_vector_in_disguise(("w",), (1, 8)), is_vector_in_disguise(("w",), (2, 8))
      (True, False)
    """
    del segments
    return sum(n > 1 for n in shape) < 2


def views_of_blocks(blocks: Mapping[str, Blocks]) -> dict[str, MatrixView]:
    """Views of [..., in, out] leaves whose output axis is cut: in sizes, or in equal parts.

    Example:
      >>> views_of_blocks({"qkv": (8, 2, 2)})["qkv"].split
      (8, 2, 2)
    """
    return {
        name: MatrixView(-2, -1, heads=sizes)
        if isinstance(sizes, int)
        else MatrixView(-2, -1, split=tuple(sizes))
        for name, sizes in blocks.items()
    }
