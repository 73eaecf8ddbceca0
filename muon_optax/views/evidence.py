"""What biases and neighbouring weights tell about the axes of a weight.

A layer's bias has its output axes. Two weights that lead there and back, D -> F and F -> D, as the
halves of an MLP or the query and output of attention do, tell each other's axes: read in another
way, they don't fit.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from muon_optax.rules import Shape
from muon_optax.views.weights import Roles, sizes

__all__ = ["WIDEST", "Seen", "by_bias", "by_likeness", "conv_roles", "is_window", "there_and_back"]

_MOST_BATCH_AXES = 2
_FUSED = (2, 3, 4)  # gate and up; query, key and value; the gates of an LSTM
_LONGEST_WINDOW = 16
WIDEST = 8  # heads x head_dim over the width of the model, 4 at most in known models

Seen = tuple[Shape, Roles | None]  # a weight beside another one, with its roles if they are known


class Reading(NamedTuple):
    """One way to read a weight, and the sizes that its neighbours must fit."""

    roles: Roles
    batch: Shape
    takes: Shape
    gives: Shape
    is_conv: bool = False


def conv_roles(rank: int) -> Roles:
    """[*window, in, out], and as well [heads, head_dim, out]: all axes but the last are summed."""
    return Roles((), tuple(range(rank - 1)), (rank - 1,))


def is_window(leading: Shape) -> bool:
    """Whether the axes before the last two may be the window of a convolution."""
    return all(size <= _LONGEST_WINDOW for size in leading)


@functools.lru_cache(maxsize=4096)
def by_bias(shape: Shape, bias: Shape) -> tuple[Roles, ...]:
    """All ways to read a weight whose bias has its batch axes, at their places, and its outputs.

    The outputs are the last axes, or in weights [out, in] the first ones. A square weight fits
    both; of more dims, it is [in, out] then, as all of Flax's are.
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
    return tuple(usual or transposed)


def _subsets(axes: Iterable[int], most: int = _MOST_BATCH_AXES) -> Iterator[tuple[int, ...]]:
    axes = tuple(axes)
    for count in range(most + 1):
        yield from itertools.combinations(axes, count)


@functools.lru_cache(maxsize=4096)
def there_and_back(shape: Shape, others: frozenset[Seen], is_einsum: bool) -> frozenset[Roles]:
    """The ways to read a weight in which some other one leads back from its outputs to its inputs.

    Args:
      shape: the weight's, of three dims or more.
      others: the shapes beside it, with their roles where they are known.
      is_einsum: whether it may have its outputs before its inputs, as Gemma's gate and up have.

    Returns:
      All of them; one, where this tells the weight's axes.
    """
    back = {reading for other in others for reading in _readings_of(*other)}
    fitting = [
        mine
        for mine in _readings(shape)
        if any(_fits(mine, b) for b in back) and not _may_be_heads(mine)
    ]
    if all(mine.is_conv for mine in fitting):
        fitting = []  # channels that fit don't make a convolution; they only make others doubtful
    found = {mine.roles for mine in fitting}
    if not found and is_einsum:
        found = {
            mine.roles
            for mine in _transposed(shape)
            if any(_fits(mine, b) and len(mine.batch) > len(b.batch) for b in back)
        }
    return frozenset(found)


def _readings_of(shape: Shape, roles: Roles | None) -> Sequence[Reading]:
    if roles is None:
        return _readings(shape)
    conv = [r for r in _readings(shape) if r.is_conv and r.roles == roles]
    return [_reading(shape, *roles), *conv]


@functools.lru_cache(maxsize=4096)
def _readings(shape: Shape) -> tuple[Reading, ...]:
    """The ways to read a weight [in, out]: inputs before outputs, and batch axes before those."""
    found = []
    for batch in _subsets(range(len(shape) - 1)):
        rest = tuple(axis for axis in range(len(shape)) if axis not in batch)
        found += [_reading(shape, batch, rest[:cut], rest[cut:]) for cut in range(1, len(rest))]
    if len(shape) > 2 and is_window(shape[:-2]):
        found.append(Reading(conv_roles(len(shape)), (), shape[-2:-1], shape[-1:], is_conv=True))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def _transposed(shape: Shape) -> tuple[Reading, ...]:
    """The ways to read a weight as a stack of matrices [out, in]."""
    return tuple(
        _reading(shape, r.roles.batch, r.roles.output, r.roles.reduction)
        for r in _readings(shape)
        if r.roles.batch and len(r.takes) == len(r.gives) == 1
    )


def _reading(
    shape: Shape, batch: tuple[int, ...], inputs: tuple[int, ...], outputs: tuple[int, ...]
) -> Reading:
    roles = Roles(batch, inputs, outputs)
    return Reading(roles, sizes(shape, batch), sizes(shape, inputs), sizes(shape, outputs))


def _fits(one: Reading, other: Reading) -> bool:
    """Whether the second leads back from the first: the same layers or experts, swapped sizes."""
    if one.takes != other.gives or one.gives != other.takes:
        return False
    if one.batch == other.batch:
        return one.roles.batch == other.roles.batch
    if one.is_conv or other.is_conv:
        return False
    longer, shorter = sorted((one.batch, other.batch), key=len, reverse=True)
    return any(
        size in _FUSED and (*longer[:k], *longer[k + 1 :]) == shorter
        for k, size in enumerate(longer)
    )


def _may_be_heads(reading: Reading) -> bool:
    """Whether batches of square matrices, which fit each other, may be heads as wide as many.

    [width, heads, head_dim] of equal last sizes looks like a stack of as many layers.
    """
    inner = math.prod(reading.takes) * math.prod(reading.gives)
    return reading.takes == reading.gives and any(inner <= WIDEST * n for n in reading.batch)


def by_likeness(shape: Shape, others: Iterable[Seen]) -> set[Roles]:
    """The ways to read a weight as one beside it is that differs in the number of heads only.

    Keys and values have fewer heads than queries: [in, heads, head_dim] of the same first and last
    size; or, heads first, the same last two sizes.
    """
    found, rank = set(), len(shape)
    for other, roles in others:
        if roles is None or len(other) < 3:
            continue
        if rank == len(other) and len(roles.output) > 1:
            kept = (*roles.batch, *roles.reduction, roles.output[-1])
            if sizes(shape, kept) == sizes(other, kept):
                found.add(roles)
        if roles[1:] == ((len(other) - 2,), (len(other) - 1,)) and shape[-2:] == other[-2:]:
            found.add(Roles(tuple(range(rank - 2)), (rank - 2,), (rank - 1,)))
    return found
