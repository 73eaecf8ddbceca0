"""Matrix views of Flax models, Linen and NNX, read from parameter names and shapes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax.leaf_kinds import check_arrays, is_float_leaf, kind_of
from muon_optax.matrix_view import MuonDimensionNumbers
from muon_optax.notices import warn_about
from muon_optax.partition import Rule, Shape, default_rules, first_rules, words
from muon_optax.tree_paths import (
    Segments,
    is_absent,
    leaves_with_segments,
    path_name,
    raise_together,
)

__all__ = ["flax_matrix_views"]

_INTO_HEADS = {"query", "key", "value", "q", "k", "v", "qkv", "wq", "wk", "wv"}
_INTO_HEADS |= {f"{name}_proj" for name in ("q", "k", "v", "query", "key", "value")}
_INTO_HEADS |= {f"to_{name}" for name in "qkv"}
_OUT_OF_HEADS = {"out", "o", "o_proj", "out_proj", "wo", "to_out", "attention_output"}

_NOT_CONV = ("dense", "linear", "einsum", "convlocal")

Axes = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A floating-point leaf, its names in lower case, and what one layer of it looks like."""

    segments: Segments
    names: tuple[str, ...]
    is_scanned: bool
    shape: Shape
    bias: Shape | None  # of the bias beside it

    @property
    def path(self) -> str:
        return path_name(self.segments)

    @property
    def is_kernel(self) -> bool:
        return self.names[-1:] == ("kernel",)

    @property
    def layer(self) -> str:
        """The layer's name: that of the leaf itself if it has a telling one."""
        own = self.names[:-1] if self.names[-1:] in (("kernel",), ("w",)) else self.names
        return own[-1] if own else ""


def flax_matrix_views(params: Any, *, scanned: Sequence[str] | str = ()) -> Any:
    """Views for the kernels of Dense/Linear, Conv, DenseGeneral/LinearGeneral and attention.

    Flax keeps kernels as [in, out]; a convolution as [*window, in, out]; attention as [in, heads,
    head_dim] into heads and [heads, head_dim, out] out of them. A layer's bias, which has its
    output axes, tells them apart; without one its name does.

    Args:
      params: a Linen parameter dict or an NNX state, of arrays or shape structs.
      scanned: patterns (as in `Rule`) of subtrees whose leaves have a leading layer axis from
        `nn.scan`, `nnx.scan` or `nnx.vmap`; that axis becomes a batch axis.

    Returns:
      A tree like `params` for `muon_weight_dimension_numbers`: MuonDimensionNumbers, or None
      (AdamW) for embeddings, heads, biases, norms, depthwise kernels, and kernels whose axes
      neither bias nor name tell. A MuonWarning names the latter, and norms that look stacked
      although `scanned` leaves them out.

    Raises:
      ValueError: for patterns in `scanned` that match nothing, or leaves that are no arrays.
      TypeError: for a number alone, as the count that `optax.inject_hyperparams` calls it with.

    Example:
      >>> kernel = jax.ShapeDtypeStruct((3, 3, 16, 32), jnp.float32)
      >>> flax_matrix_views({"Conv_0": {"kernel": kernel}})["Conv_0"]["kernel"]
      MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=(3,))
    """
    patterns = (scanned,) if isinstance(scanned, str) else tuple(scanned)
    stacks = [Rule(pattern, "muon", "scanned") for pattern in patterns]
    _check_patterns(stacks, params)
    check_arrays(leaves_with_segments(params))
    if jax.tree_util.all_leaves([params]) and not is_float_leaf(params):
        raise TypeError(
            f"flax_matrix_views takes a tree of parameters, got {kind_of(params)}; under "
            "optax.inject_hyperparams pass static_args=('muon_weight_dimension_numbers',)"
        )
    leaves = _leaves(params, stacks)
    rules = first_rules(default_rules(), [(leaf.segments, leaf.shape) for leaf in leaves])
    pairs = list(zip(leaves, rules, strict=True))
    axes = {leaf.segments: _axes(leaf) for leaf, rule in pairs if not _is_adams(rule)}
    warn_about(
        "flax_matrix_views can't tell the axes of these kernels, which get AdamW; declare their "
        "views by hand, or name the parts that scan or vmap stacked in `scanned`",
        [leaf for leaf in leaves if axes.get(leaf.segments, ()) is None],
    )
    _warn_of_doubts(pairs)
    warn_about(
        "norms with scales of more than one dim look stacked by scan or vmap; name these parts in "
        "`scanned`, or their layers' views are wrong",
        [leaf for leaf in leaves if leaf.names[-1:] == ("scale",) and len(leaf.shape) > 1],
    )
    shifts = {leaf.segments: int(leaf.is_scanned) for leaf in leaves}
    views = [_view(axes.get(path), shifts.get(path, 0)) for path, _ in leaves_with_segments(params)]
    return jax.tree.structure(params).unflatten(views)


def _check_patterns(stacks: Sequence[Rule], params: Any) -> None:
    places = leaves_with_segments(params, is_absent)
    unused = [
        repr(rule.pattern)
        for rule in stacks
        if places and not any(rule.matches(path, ()) for path, _ in places)
    ]
    found = ", ".join(path_name(path) for path, _ in places[:20])
    raise_together(unused, f"these patterns of `scanned` match nothing among {found}:")


def _leaves(params: Any, stacks: Sequence[Rule]) -> list[_Leaf]:
    shapes, scanned = {}, {}
    for path, x in leaves_with_segments(params):
        if is_float_leaf(x):
            scanned[path] = any(rule.matches(path, ()) for rule in stacks)
            shapes[path] = tuple(jnp.shape(x))[scanned[path] :]
    by_name = {words(path): shape for path, shape in shapes.items()}
    return [
        _Leaf(path, names, scanned[path], shape, by_name.get((*names[:-1], "bias")))
        for path, shape in shapes.items()
        for names in [words(path)]
    ]


def _warn_of_doubts(pairs: Sequence[tuple[_Leaf, Rule | None]]) -> None:
    """Of leaves that get AdamW by shapes that may mean something else."""
    doubtful = [(leaf, rule.warning) for leaf, rule in pairs if rule and _is_adams(rule)]
    for text in dict.fromkeys(text for _, text in doubtful if text is not None):
        leaves = [leaf for leaf, said in doubtful if said == text]
        warn_about(f"{text}; declare the views of such a one by hand", leaves)


def _is_adams(rule: Rule | None) -> bool:
    return rule is not None and rule.label == "adam"


def _axes(leaf: _Leaf) -> Axes | None:
    """Reduction and output axes of one layer's kernel, or None where nothing tells them."""
    rank = len(leaf.shape)
    if rank == 2:
        return (0,), (1,)
    if leaf.layer == "qkv" and rank == 4 and leaf.shape[1] == 3:
        return (0,), (2, 3)  # [in, 3, heads, head_dim]: three matrices
    outputs = _outputs_by_name(leaf)
    if leaf.is_kernel and leaf.bias is not None:
        outputs = _outputs_by_bias(leaf.shape, leaf.bias, outputs)
    if outputs is None:
        return None
    return tuple(range(rank - outputs)), tuple(range(rank - outputs, rank))


def _outputs_by_name(leaf: _Leaf) -> int | None:
    """Number of output axes of a kernel of three dims or more, as far as the layer's name tells."""
    rank = len(leaf.shape)
    if leaf.layer in _INTO_HEADS:
        return 2 if rank == 3 else None
    if leaf.layer in _OUT_OF_HEADS:
        return 1 if rank == 3 else None
    is_conv = leaf.layer.startswith("conv") or rank > 3
    return 1 if leaf.is_kernel and is_conv and not leaf.layer.startswith(_NOT_CONV) else None


def _outputs_by_bias(shape: Shape, bias: Shape, by_name: int | None) -> int | None:
    """Number of output axes: those of the bias, unless it may be a stack of smaller ones."""
    outputs = len(bias)
    if not 0 < outputs < len(shape) or shape[-outputs:] != bias:
        return None
    fits_stack = outputs > 1 and (shape[0], *shape[1 - outputs :]) == bias
    return outputs if not fits_stack or by_name == outputs else None


def _view(axes: Axes | None, shift: int) -> MuonDimensionNumbers | None:
    if axes is None:
        return None
    reduction, output = (tuple(a + shift for a in group) for group in axes)
    return MuonDimensionNumbers(reduction, output)
