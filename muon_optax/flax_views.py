"""Matrix views of Flax models, Linen and NNX, read from parameter names and shapes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from muon_optax.matrix_view import MuonDimensionNumbers
from muon_optax.partition import Rule, default_rules
from muon_optax.tree_paths import Segments, leaves_with_segments

__all__ = ["flax_matrix_views"]

_INTO_HEADS = {"query", "key", "value", "q", "k", "v", "qkv", "wq", "wk", "wv"}
_INTO_HEADS |= {f"{name}_proj" for name in "qkv"} | {f"to_{name}" for name in "qkv"}
_OUT_OF_HEADS = {"out", "o", "o_proj", "out_proj", "wo", "to_out", "attention_output"}


def flax_matrix_views(params: Any, *, scanned: Sequence[str] = ()) -> Any:
    """Views for the kernels of Dense/Linear, Conv, DenseGeneral/LinearGeneral and attention.

    Flax keeps kernels as [in, out]; a convolution as [*window, in, out]; attention as [in, heads,
    head_dim] into heads and [heads, head_dim, out] out of them, told apart by the layer's name.

    Args:
      params: a Linen parameter dict or an NNX state, of arrays or shape structs.
      scanned: patterns (as in `Rule`) of subtrees whose leaves have a leading layer axis from
        `nn.scan`, `nnx.scan` or `nnx.vmap`; that axis becomes a batch axis.

    Returns:
      A tree like `params` for `muon_weight_dimension_numbers`: MuonDimensionNumbers, or None
      (AdamW) for embeddings, heads, biases, norms, depthwise kernels, and 3-D kernels whose layer's
      name doesn't tell their axes.

    Example:
      >>> kernel = jax.ShapeDtypeStruct((3, 3, 16, 32), jnp.float32)
      >>> flax_matrix_views({"Conv_0": {"kernel": kernel}})["Conv_0"]["kernel"]
      MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=(3,))
    """
    stacks = [Rule(pattern, "muon", "scanned") for pattern in scanned]
    views = [
        _view(path, tuple(jnp.shape(leaf)), any(s.matches(path, ()) for s in stacks))
        for path, leaf in leaves_with_segments(params)
    ]
    return jax.tree.structure(params).unflatten(views)


def _view(path: Segments, shape: tuple[int, ...], is_scanned: bool) -> MuonDimensionNumbers | None:
    layer = shape[1:] if is_scanned else shape
    if any(rule.matches(path, layer) for rule in default_rules()):
        return None
    names = {name.lower() for name in path}
    last = len(layer) - 1
    is_conv = last > 2 or any(name.startswith("conv") for name in names)
    if last == 1:
        axes = ((0,), (1,))
    elif names & _INTO_HEADS:
        axes = ((0,), tuple(range(1, last + 1)))
    elif names & _OUT_OF_HEADS or is_conv:
        axes = (tuple(range(last)), (last,))
    else:
        return None
    shift = int(is_scanned)
    reduction, output = (tuple(a + shift for a in group) for group in axes)
    return MuonDimensionNumbers(reduction, output)
