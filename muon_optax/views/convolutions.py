"""Convolutions whose shapes don't show into how many groups their channels fall.

`feature_group_count` leaves no trace but a kernel's input channels, which are those of one group:
[h, w, 1, out] is a depthwise kernel, or the first layer of a net for grey images.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from muon_optax.tree_paths import Segments
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
      depthwise: with a kernel for each channel.
      one_channel: depthwise, or ordinary ones of one input channel.
      grouped: of several groups, or ordinary ones of few input channels.
    """

    depthwise: set[Segments]
    one_channel: set[Segments]
    grouped: set[Segments]


def sort_convolutions(weights: Sequence[Weight], known: Mapping[Segments, Roles]) -> Convolutions:
    """Finds the convolutions that may have groups.

    An ordinary one takes as many channels as some other layer gives, unless it is the first.

    Args:
      weights: the weights of two dims or more.
      known: their roles, where they are known.

    Returns:
      Paths by kind.
    """
    convs = [w for w in weights if w.rank > 2 and known.get(w.segments) == conv_roles(w.rank)]
    one = [w for w in convs if w.shape[-2] == 1 and math.prod(w.shape[:-2]) > 1]
    one = [w for w in one if _has_window(w)]
    others = [w for w in weights if w.segments in known and w not in one]
    made = {merged_size(w.shape, known[w.segments].output) for w in others}
    depthwise = {w.segments for w in one if _is_depthwise(w, one, made)}
    first = {w.segments for w in others if not _is_fed(w, known[w.segments], made)}
    heads = {sizes(w.shape, known[w.segments].output) for w in others}
    plain = [w for w in convs if w not in one and w.shape[:-1] not in heads and _has_window(w)]
    alone = len(first) == 1
    grouped = [
        w
        for w in plain
        if ((w.segments in first and not alone) or _widens(w)) and _may_be_grouped(w, made)
    ]
    return Convolutions(
        depthwise, {w.segments for w in one} - depthwise, {w.segments for w in grouped}
    )


def _is_depthwise(weight: Weight, alike: Sequence[Weight], made: set[int]) -> bool:
    """Whether a name says so, or more than one has one input channel and as many as others give."""
    is_named = any(token.startswith(("depthwise", "dw")) for token in weight.layer_tokens)
    return is_named or (len(alike) > 1 and weight.shape[-1] in made)


def _is_fed(weight: Weight, roles: Roles, made: set[int]) -> bool:
    """Whether some layer gives what a layer takes; a dense one may take a flattened image."""
    if weight.rank > 2 and roles == conv_roles(weight.rank):
        return weight.shape[-2] in made
    size = merged_size(weight.shape, roles.reduction)
    return any(size % width == 0 for width in made if width > 1)


def _may_be_grouped(weight: Weight, made: set[int]) -> bool:
    if not _RECURRENT.isdisjoint(weight.layer_tokens):
        return False
    channels, outputs = weight.shape[-2:]
    is_patchify = not _FIRST.isdisjoint(weight.layer_tokens) or all(
        side % 2 == 0 for side in weight.shape[:-2]
    )
    if channels == _RGB or (channels <= _MOST_IMAGE_CHANNELS and is_patchify):
        return False
    return any(
        width > channels and width % channels == 0 and outputs % (width // channels) == 0
        for width in made
    )


def _has_window(weight: Weight) -> bool:
    """Whether the first axes are a window, not the heads of attention."""
    is_attention = is_of_attention(weight) and not is_conv_name(weight.layer_tokens)
    return weight.rank > 3 or not is_attention


def _widens(weight: Weight) -> bool:
    """Whether a window of few channels gives many more, rare but in the groups of ResNeXt's."""
    channels, outputs = weight.shape[-2:]
    return set(weight.shape[:-2]) <= {3, 5} and outputs >= 4 * channels > 4 * _MOST_IMAGE_CHANNELS
