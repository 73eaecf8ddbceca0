"""MuonBP: most steps orthogonalise blocks of matrices, every few steps whole matrices."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from muon_optax._internal.checks import check_number, check_static
from muon_optax._internal.tree_paths import Segments, raise_all
from muon_optax.partition import check_patterns, first_match
from muon_optax.sharding.blocks import BlockedLeaf, blocked, uncut_sides
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.transforms.shape_scale import Scaling

__all__ = ["BlockCounts", "BlockPeriodic", "Blocks"]

BlockCounts = tuple[int, int]
Blocks = BlockCounts | Sequence[tuple[str, BlockCounts]]


@dataclasses.dataclass(frozen=True)
class BlockPeriodic:
    """Which blocks MuonBP orthogonalises, and how often whole matrices (arXiv 2510.16981).

    The first step and every `period`-th after it orthogonalise whole matrices; in the steps between
    each block is a matrix of its own, with the scale of its own shape. The momentum is common. As
    blocks are declared, updates are the same on every mesh. Declare them so that each is whole on a
    device, as (4, 1) for rows that are sharded over 4 devices: block steps then send nothing.

    Attributes:
      blocks: in how many blocks matrices are cut along their reduction axes (fan-in) and along
        their output axes (fan-out), the rows and columns of a [fan-in, fan-out] kernel: one pair
        for all of Muon's leaves, or (pattern, pair) pairs with patterns as in `Rule`, of which the
        first match wins. Leaves that none matches are whole in each step. Where a view fuses
        several matrices, each of these is cut.
      period: a step of whole matrices comes once in so many. 1 is Muon.
      learning_rate_ratio: the learning rate of block steps over that of whole ones, for the leaves
        that have blocks. Weight decay keeps its rate.

    Raises:
      TypeError, ValueError: for anything but a pair of positive integers, a period and a ratio.

    Example:
      >>> pieces = BlockPeriodic([("attn", (1, 4)), ("*", (4, 1))], period=10)
      >>> pieces.counts_of(("mlp", "kernel")), pieces.counts_of(("attn", "query"))
      ((4, 1), (1, 4))
    """

    blocks: Blocks
    period: int = 5
    learning_rate_ratio: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", _checked_blocks(self.blocks))
        check_static("period", self.period)
        if not _is_positive(self.period):
            raise ValueError(f"period must be a positive integer, got {self.period!r}")
        check_static("learning_rate_ratio", self.learning_rate_ratio)
        check_number("learning_rate_ratio", self.learning_rate_ratio)

    def counts_of(self, path: Segments) -> BlockCounts:
        """The number of blocks along fan-in and fan-out of a leaf's matrices."""
        if self._is_pair:
            return self.blocks  # pyright: ignore[reportReturnType]
        return first_match(self.blocks, path) or (1, 1)  # pyright: ignore[reportArgumentType]

    @property
    def _is_pair(self) -> bool:
        return not isinstance(self.blocks[0], tuple)

    def check(self, leaves: Sequence[BoundLeaf]) -> None:
        """Raises for patterns that match no leaf, and for matrices that can't be cut in blocks.

        Raises:
          ValueError: listing the patterns, or the leaves.
        """
        if not self._is_pair:
            patterns = [pattern for pattern, _ in self.blocks]  # pyright: ignore
            check_patterns("blocks", patterns, [leaf.segments for leaf in leaves])
        problems = []
        for leaf in leaves:
            counts = self.counts_of(leaf.segments)
            if bad := uncut_sides(leaf.view, counts):
                problems.append(f"{leaf.path} {leaf.shape}, blocks={counts}: {', '.join(bad)}")
        raise_all(problems, "blocks must cut matrices in equal parts, but these leaves' can't be:")

    def alternates(self, leaves: Sequence[BoundLeaf]) -> bool:
        """Whether there are block steps, and any of these leaves has blocks in them."""
        are_cut = (self.counts_of(leaf.segments) != (1, 1) for leaf in leaves)
        return self.period > 1 and any(are_cut)

    def blocked(self, leaves: Sequence[BoundLeaf]) -> list[BlockedLeaf]:
        """The leaves as they are in block steps."""
        return [blocked(leaf, self.counts_of(leaf.segments)) for leaf in leaves]

    def factors(self, leaf: BoundLeaf, scaling: Scaling) -> list[float]:
        """The factor of each of a leaf's matrices in block steps, before its own shape's scale.

        Args:
          leaf: the leaf.
          scaling: the scale by shape that follows.

        Returns:
          The ratio of learning rates, times that of a block's scale to its matrix's, for each entry
          of the view's `matrices`.
        """
        rows, columns = self.counts_of(leaf.segments)
        if rows == columns == 1:
            return [1.0] * len(leaf.view.matrices)
        return [
            self.learning_rate_ratio * scaling.base(m // rows, n // columns) / scaling.base(m, n)
            for _, m, n in leaf.view.matrices
        ]


def _checked_blocks(blocks: Any) -> Blocks:
    """The blocks in tuples, so that they can be hashed."""
    check_static("blocks", blocks)
    try:
        if _is_counts(blocks):
            return _as_counts(blocks)
        pairs = [(pattern, counts) for pattern, counts in blocks]
        is_valid = bool(pairs) and all(isinstance(p, str) and _is_counts(c) for p, c in pairs)
    except (TypeError, ValueError):
        is_valid, pairs = False, []
    if not is_valid:
        raise TypeError(
            "blocks must be a pair of positive integers, (along fan-in, along fan-out), or a "
            f"sequence of (pattern, pair) pairs, got {blocks!r}"
        )
    return tuple((pattern, _as_counts(counts)) for pattern, counts in pairs)


def _is_counts(x: Any) -> bool:
    return isinstance(x, tuple | list) and len(x) == 2 and all(map(_is_positive, x))


def _as_counts(pair: Sequence[int]) -> BlockCounts:
    return int(pair[0]), int(pair[1])


def _is_positive(x: Any) -> bool:
    return isinstance(x, int | np.integer) and not isinstance(x, bool) and bool(x > 0)
