"""Convolutions whose shapes don't show into how many groups their channels fall.

`feature_group_count` leaves no trace but a kernel's input channels, which are those of one group:
[h, w, 1, out] is a depthwise kernel, or the first layer of a net for grey images.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import Shape
from muon_optax.views.evidence import conv_roles
from muon_optax.views.layer_names import is_conv_name, is_of_attention
from muon_optax.views.weights import Roles, Weight, merged_size, sizes

__all__ = ["Convolutions", "sort_convolutions"]

_RGB = 3
_MOST_IMAGE_CHANNELS = 4
_RECURRENT = {"ih", "hh"}  # of ConvLSTMCell, whose outputs are four gates side by side
_FIRST = {"stem", "patch", "patches", "patchify", "embed", "embedding", "in", "input", "init"}


class Convolutions(NamedTuple):
    """Convolutions that aren't one matrix, or may not be.

    Attributes:
      depthwise: with a kernel for each channel, or with one output.
      one_channel: depthwise, or ordinary ones of one input channel.
      grouped: of several groups, or ordinary ones of few input channels.
    """

    depthwise: set[Segments]
    one_channel: set[Segments]
    grouped: set[Segments]


class _Kernel(NamedTuple):
    """A convolution's weight: the sides of its window, its input and output channels."""

    weight: Weight
    window: Shape
    channels: int
    outputs: int


def sort_convolutions(weights: Sequence[Weight], known: Mapping[Segments, Roles]) -> Convolutions:
    """Finds the convolutions that may have groups.

    An ordinary one takes as many channels as some other layer gives, unless it is the first.

    Args:
      weights: the weights of two dims or more.
      known: their roles, where they are known.

    Returns:
      Paths by kind.
    """
    kernels = [k for w in weights if (k := _kernel(w, known.get(w.segments))) is not None]
    one = [k for k in kernels if k.channels == 1 and math.prod(k.window) > 1]
    apart = {kernel.weight.segments for kernel in one}
    others = [w for w in weights if w.segments in known and w.segments not in apart]
    outputs = [sizes(w.shape, known[w.segments].output) for w in others]
    made = {math.prod(shape) for shape in outputs}
    depthwise = {k.weight.segments for k in one if _is_depthwise(k, one, made)}
    depthwise |= {k.weight.segments for k in kernels if _has_one_output(k)}
    made |= {kernel.outputs for kernel in one}
    taken = {k.weight.segments: k.channels for k in kernels}
    first = {w.segments for w in others if not _is_fed(w, known[w.segments], taken, made)}
    grouped = {
        k.weight.segments
        for k in kernels
        if k not in one and k.weight.shape[:-1] not in outputs and _may_be_grouped(k, made)
        if (k.weight.segments in first and len(first | apart - depthwise) > 1) or _widens(k)
    }
    return Convolutions(depthwise, apart - depthwise, grouped)


def _kernel(weight: Weight, roles: Roles | None) -> _Kernel | None:
    """A convolution's weight, [*window, in, out] or torch's [out, in, *window]."""
    is_named, shape = is_conv_name(weight.layer_tokens), weight.shape
    if weight.rank > 2 and roles == conv_roles(weight.rank):
        is_conv = is_named or weight.rank > 3 or not is_of_attention(weight)
        return _Kernel(weight, shape[:-2], *shape[-2:]) if is_conv else None
    if weight.rank > 2 and is_named and roles is not None and roles.output == (0,):
        return _Kernel(weight, shape[2:], shape[1], shape[0])
    return None


def _is_depthwise(kernel: _Kernel, alike: Sequence[_Kernel], made: set[int]) -> bool:
    """Whether a name says so, or several layers have one channel: a net for grey images has one."""
    weight = kernel.weight
    is_named = any(t.startswith(("depthwise", "dw")) for t in weight.layer_tokens)
    is_stacked = weight.axes != tuple(range(weight.rank))
    return is_named or is_stacked or (len(alike) > 1 and kernel.outputs in made)


def _has_one_output(kernel: _Kernel) -> bool:
    """Whether it is a depthwise kernel of Keras, [h, w, channels, 1], or gives one number a pixel.

    As a matrix either is a vector.
    """
    return kernel.outputs == 1 < kernel.channels


def _is_fed(weight: Weight, roles: Roles, taken: Mapping[Segments, int], made: set[int]) -> bool:
    """Whether a layer's inputs are some layer's outputs; a dense one may take a flattened image."""
    if weight.segments in taken:
        return taken[weight.segments] in made
    size = merged_size(weight.shape, roles.reduction)
    return any(size % width == 0 for width in made if width > 1)


def _may_be_grouped(kernel: _Kernel, made: set[int]) -> bool:
    _, window, channels, outputs = kernel
    tokens = kernel.weight.layer_tokens
    is_patchify = not _FIRST.isdisjoint(tokens) or all(side % 2 == 0 for side in window)
    is_image = channels == _RGB or (channels <= _MOST_IMAGE_CHANNELS and is_patchify)
    if is_image or not _RECURRENT.isdisjoint(tokens):
        return False
    return any(
        width > channels and width % channels == 0 and outputs % (width // channels) == 0
        for width in made
    )


def _widens(kernel: _Kernel) -> bool:
    """Whether a window of few channels gives many more, rare but in the groups of ResNeXt's."""
    is_image = kernel.channels <= _MOST_IMAGE_CHANNELS
    return set(kernel.window) <= {3, 5} and not is_image and kernel.outputs >= 4 * kernel.channels
