"""Helpers for tests of `model_rules`: what it says of each leaf, and an oracle for its views.

One example at one position has a gradient of rank one in every layer: the outer product of what the
layer takes and of what comes back. So the right view cuts such a gradient into matrices whose
columns are the layer's input, whatever the source of the layer's module says.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from muon_optax import Rule
from muon_optax._internal.tree_paths import leaves_with_segments
from muon_optax.views.matrix_view import BoundView, bind_view


def path_of(rule: Rule) -> str:
    assert isinstance(rule.pattern, tuple)
    return "/".join(rule.pattern)


def leaves_of(tree: Any) -> dict[str, Any]:
    return {"/".join(path): leaf for path, leaf in leaves_with_segments(tree)}


def views_of(rules: Sequence[Rule], params: Any) -> dict[str, BoundView]:
    """The views of Muon's leaves; each leaf must have a rule, and each rule a leaf."""
    leaves = leaves_of(params)
    assert sorted(leaves) == sorted(map(path_of, rules))
    return {
        path_of(r): bind_view(r.view, leaves[path_of(r)].shape) for r in rules if r.view is not None
    }


def said(rules: Sequence[Rule], params: Any) -> dict[str, Any]:
    """For each path the matrices (count, fan-in, fan-out) that get Muon, or AdamW's reason."""
    views = views_of(rules, params)
    reasons = {path_of(r): r.reason for r in rules}
    return {p: list(views[p].matrices) if p in views else why for p, why in reasons.items()}


def matrices_of_scanned_blocks(depth: int) -> dict[str, list[tuple[int, int, int]]]:
    """As `said` gives them, of a stack of blocks: attention 8 wide, and an MLP of 24."""
    attention = [f"layers/attention/{n}/kernel" for n in ("query", "key", "value", "out")]
    return {
        **{path: [(depth, 8, 8)] for path in attention},
        "layers/up/kernel": [(depth, 8, 24)],
        "layers/down/kernel": [(depth, 24, 8)],
    }


def axes_of(rules: Sequence[Rule], params: Any) -> dict[str, tuple[Any, Any, Any]]:
    """The batch, reduction and output axes of Muon's leaves."""
    return {
        path: (v.batch_axes, tuple(sorted(v.reduction_axes)), tuple(sorted(v.output_axes)))
        for path, v in views_of(rules, params).items()
    }


def check_outer(view: BoundView, gradient: Any, taken: Any) -> None:
    """Asserts that a view cuts one example's gradient into outer products with a layer's input.

    Args:
      view: the view.
      gradient: the leaf's gradient.
      taken: the input, flat; or one for each matrix.
    """
    for matrices in jax.jit(view.split)(jnp.asarray(gradient)):
        rows = np.broadcast_to(np.asarray(taken, np.float64), matrices.shape[:2])
        for matrix, row in zip(np.asarray(matrices, np.float64), rows, strict=True):
            outer = np.outer(row, row @ matrix / (row @ row))
            np.testing.assert_allclose(matrix, outer, atol=1e-5 * np.abs(matrix).max())
