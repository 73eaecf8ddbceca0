"""Evidence about the axes of a weight from its bias and the weights beside it.

A layer's bias has its output axes. Two weights that lead there and back, D -> F and F -> D, as the
halves of an MLP or the query and output of attention do, tell each other's axes: read in another
way, they don't fit.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from muon_optax.partition import Shape
from muon_optax.views.weights import Roles, sizes

__all__ = ["Seen", "by_bias", "by_likeness", "conv_roles", "may_be_conv", "there_and_back"]

_MOST_BATCH_AXES = 3  # layers, experts or query, key and value, and heads
_FUSED = (2, 3)  # gate and up; query, key and value
_LONGEST_WINDOW = 16
_WIDEST = 16  # heads x head_dim over a layer's inputs, 16 in DeepSeek's low-rank queries


class Seen(NamedTuple):
    """A weight as its neighbours see it.

    Attributes:
      shape: its shape.
      roles: its roles, where they are known.
      is_fused: whether its name allows an axis of query, key and value, or of gate and up.
      is_attention: whether it is attention's; attention and other parts don't pair.
    """

    shape: Shape
    roles: Roles | None = None
    is_fused: bool = False
    is_attention: bool = False


class Reading(NamedTuple):
    """One way to read a weight, and the sizes that its neighbours must fit."""

    roles: Roles
    batch: Shape
    takes: Shape
    gives: Shape
    is_fused: bool = False


def conv_roles(rank: int) -> Roles:
    """[*window, in, out], and as well [heads, head_dim, out]: all axes but the last are summed."""
    return Roles((), tuple(range(rank - 1)), (rank - 1,))


def _is_window(leading: Shape) -> bool:
    """Whether the axes before the last two may be the window of a convolution."""
    return all(size <= _LONGEST_WINDOW for size in leading)


@functools.lru_cache(maxsize=4096)
def by_bias(shape: Shape, bias: Shape) -> tuple[Roles, ...]:
    """All ways to read a weight whose bias has its batch axes, at their places, and its outputs.

    The outputs are the last axes, or in weights [out, in] the first ones. Where equal sizes allow
    both, the former come first.
    """
    usual, transposed = [], []
    for batch in _subsets(range(min(len(shape), len(bias)))):
        if any(shape[axis] != bias[axis] for axis in batch):
            continue
        rest = tuple(axis for axis in range(len(shape)) if axis not in batch)
        outputs = tuple(size for axis, size in enumerate(bias) if axis not in batch)
        count = len(outputs)
        if not 0 < count < len(rest):
            continue
        if sizes(shape, rest[-count:]) == outputs:
            usual.append(Roles(batch, rest[:-count], rest[-count:]))
        if sizes(shape, rest[:count]) == outputs:
            transposed.append(Roles(batch, rest[count:], rest[:count]))
    if not usual and not transposed and len(bias) == 1:  # nn.ConvTranspose(transpose_kernel=True)
        found = [axis for axis, size in enumerate(shape) if size == bias[0]]
        others = [tuple(a for a in range(len(shape)) if a != axis) for axis in found]
        transposed = [Roles((), i, (o,)) for i, o in zip(others, found, strict=True)]
    return (*usual, *transposed)


def _subsets(axes: Iterable[int], most: int = _MOST_BATCH_AXES) -> Iterator[tuple[int, ...]]:
    axes = tuple(axes)
    for count in range(most + 1):
        yield from itertools.combinations(axes, count)


@functools.lru_cache(maxsize=4096)
def there_and_back(weight: Seen, others: frozenset[Seen], may_transpose: bool) -> frozenset[Roles]:
    """The ways to read a weight in which some other one leads back from its outputs to its inputs.

    Args:
      weight: a weight of three dims or more.
      others: the weights beside it.
      may_transpose: whether it may have its outputs before its inputs, as Gemma's gate and up.

    Returns:
      All of them; one, where this tells the weight's axes.
    """
    back = {reading for other in others for reading in _readings_of(other)}
    fitting = [mine for mine in _readings_of(weight) if any(_fits(mine, b) for b in back)]
    if all(_may_be_heads(mine) for mine in fitting):
        fitting = []  # these tell nothing by themselves, but make other readings doubtful
    if not fitting and may_transpose:
        mine = _transposed(weight.shape)
        fitting = [mine] if any(_fits(mine, b) and mine.batch != b.batch for b in back) else []
    return frozenset(mine.roles for mine in fitting)


@functools.lru_cache(maxsize=4096)
def may_be_conv(shape: Shape, others: frozenset[Seen]) -> bool:
    """Whether some other weight leads back from a convolution of this shape, by its channels."""
    if not _is_window(shape[:-2]):
        return False
    channels = shape[-2:]
    return any(
        other.shape[-2:] == channels[::-1]
        for other in others
        if other.roles in (None, conv_roles(len(other.shape)), Roles((), (0,), (1,)))
    )


def _readings_of(weight: Seen) -> list[Reading]:
    found = _readings(weight.shape)
    if weight.roles is not None:
        found = (_reading(weight.shape, *weight.roles),)
    return [r._replace(is_fused=weight.is_fused) for r in found]


@functools.lru_cache(maxsize=4096)
def _readings(shape: Shape) -> tuple[Reading, ...]:
    """The ways to read a weight [in, out]: inputs before outputs, and batch axes before those."""
    found = []
    for batch in _subsets(range(len(shape) - 1)):
        rest = tuple(axis for axis in range(len(shape)) if axis not in batch)
        if not 2 <= len(rest) <= 3:  # heads and their dims on one side, one axis on the other
            continue
        cuts = {1, len(rest) - 1}
        found += [_reading(shape, batch, rest[:cut], rest[cut:]) for cut in cuts]
    return tuple(found)


def _transposed(shape: Shape) -> Reading:
    """A weight as a stack of matrices [out, in]."""
    last = len(shape) - 1
    return _reading(shape, tuple(range(last - 1)), (last,), (last - 1,))._replace(is_fused=True)


def _reading(
    shape: Shape, batch: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> Reading:
    roles = Roles(batch, inputs, outputs)
    return Reading(roles, sizes(shape, batch), sizes(shape, inputs), sizes(shape, outputs))


def _fits(one: Reading, other: Reading) -> bool:
    """Whether the second leads back from the first: the same layers or experts, swapped sizes.

    One of them may have two or three parts to each of the other's matrices.
    """
    if not (_feeds(one, other) and _feeds(other, one)):
        return False
    if one.batch == other.batch:
        return one.roles.batch == other.roles.batch
    longer, shorter = sorted((one, other), key=lambda reading: len(reading.batch), reverse=True)
    return longer.is_fused and any(
        size in _FUSED and (*longer.batch[:k], *longer.batch[k + 1 :]) == shorter.batch
        for k, size in enumerate(longer.batch)
    )


def _feeds(one: Reading, other: Reading) -> bool:
    """Whether the second takes the first's outputs, or half of them (gate and up side by side)."""
    if one.gives == other.takes:
        return True
    is_stack = 0 < max(one.batch, default=0) < min(one.takes + other.takes)
    is_single = len(one.gives) == len(other.takes) == 1
    return one.is_fused and is_stack and is_single and one.gives[0] == 2 * other.takes[0]


def _may_be_heads(reading: Reading) -> bool:
    """Whether batches of square matrices, which fit each other, may be heads as wide as many.

    [width, heads, head_dim] of equal last sizes looks like a stack of as many layers.
    """
    inner = math.prod(reading.takes) * math.prod(reading.gives)
    is_wide = len(reading.batch) < 2 and all(inner > _WIDEST * n for n in reading.batch)
    return reading.takes == reading.gives and not is_wide


def by_likeness(shape: Shape, others: Iterable[Seen], is_ordered: bool) -> set[Roles]:
    """The ways to read a weight as one beside it is that differs in the number of heads only.

    Keys and values have fewer heads than queries: [in, heads, head_dim] of the same first and last
    size; or, heads first, the same last two sizes.

    Args:
      shape: the weight's.
      others: the shapes beside it, with their roles where they are known.
      is_ordered: whether its inputs surely come before its outputs. An output projection may be
        [out, heads, head_dim] too, as Praxis' is.
    """
    found, rank = set(), len(shape)
    for other, roles, *_ in others:
        if roles is None or len(other) < 3:
            continue
        if is_ordered and rank == len(other) and len(roles.output) > 1:
            kept = (*roles.batch, *roles.reduction, roles.output[-1])
            if sizes(shape, kept) == sizes(other, kept):
                found.add(roles)
        if roles[1:] == ((len(other) - 2,), (len(other) - 1,)) and shape[-2:] == other[-2:]:
            found.add(Roles(tuple(range(rank - 2)), (rank - 2,), (rank - 1,)))
    return found
