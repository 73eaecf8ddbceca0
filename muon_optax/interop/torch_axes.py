"""Which axis of a torch weight is its output, where a bias beside it tells.

torch's Linear and Conv keep [out, in, *window]. transformers' Conv1D keeps [in, out], and
ConvTranspose [in, out, *window]: a bias has the size of their second axis.
"""

import collections
import re
from collections.abc import Mapping

from muon_optax.rules import Shape, has_run

__all__ = ["TRANSPOSED_CONVS", "with_output_second"]

TRANSPOSED_CONVS = (
    "convtranspose*",
    "conv_transpose*",
    "transposedconv*",
    "transposed_conv*",
    "deconv*",
)
"""Names of transposed convolutions, as patterns of a `Rule`."""

_SEPARATOR = re.compile(r"[./]")
_WEIGHT = re.compile(r"weight$")


def with_output_second(shapes: Mapping[str, Shape]) -> set[str]:
    """The keys of weights whose second axis is their output, as biases tell.

    Of a transposed convolution to as many channels as it is from, its name tells. The bias of a
    square matrix fits either axis: its axes count as those of matrices whose biases tell, in the
    module that holds it or else in the one above, as long as these agree.

    Args:
      shapes: the shapes of a state dict, or of any part of one, by key.

    Returns:
      Keys of `shapes`.

    Example:
      >>> gpt2 = {"attn.c_attn.weight": (4, 12), "attn.c_attn.bias": (12,)}
      >>> gpt2 |= {"attn.c_proj.weight": (4, 4), "attn.c_proj.bias": (4,), "head.weight": (9, 4)}
      >>> sorted(with_output_second(gpt2))
      ['attn.c_attn.weight', 'attn.c_proj.weight']
    """
    weights = {key: shape for key, shape in shapes.items() if _WEIGHT.search(key)}
    told = {key: axes.pop() for key in weights if len(axes := _fitting_axes(key, shapes)) == 1}
    matrices: dict[tuple[str, ...], set[int]] = collections.defaultdict(set)
    for key, axis in told.items():
        if len(shapes[key]) == 2:
            for module in _modules_of(key):
                matrices[module].add(axis)
    for key, shape in weights.items():
        if key not in told and len(shape) > 2:
            told[key] = int(any(has_run((key,), name) for name in TRANSPOSED_CONVS))
        elif len(shape) == 2 and shape[0] == shape[1]:
            near = next((matrices[m] for m in _modules_of(key) if m in matrices), set())
            told[key] = 1 if near == {1} else 0
    return {key for key, axis in told.items() if axis == 1}


def _fitting_axes(key: str, shapes: Mapping[str, Shape]) -> set[int]:
    """The axes among the first two that have the size of the weight's bias."""
    bias = shapes.get(_WEIGHT.sub("bias", key), ())
    return {axis for axis, size in enumerate(shapes[key][:2]) if bias == (size,)}


def _modules_of(key: str) -> list[tuple[str, ...]]:
    """The module that holds a weight's layer, and the one above."""
    names = tuple(_SEPARATOR.split(key))
    return [names[:-2], names[:-3]]
