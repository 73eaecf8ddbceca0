"""The axes of all the weights of a tree, from sure evidence to likely evidence.

1. A bias beside a weight has its output axes.
2. A name says convolution, and the window is one.
3. Weights that lead there and back tell each other's axes, in the nearest module that has such.
4. A weight is as one beside it that differs in the number of heads only.
5. Names of attention's layers tell, where no size speaks against it.

A weight that none of these explains has no roles: nothing is guessed from a rank.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from muon_optax._internal.tree_paths import Segments
from muon_optax.views.evidence import Seen, by_bias, by_likeness, may_be_conv, there_and_back
from muon_optax.views.layer_names import (
    by_name,
    conv_by_name,
    has_inputs_first,
    is_conv_like,
    is_conv_name,
    is_fused_name,
    is_matmul_name,
    is_of_attention,
    may_transpose,
    with_heads_merged,
    with_parts_apart,
)
from muon_optax.views.weights import Roles, Weight, is_plain_name

__all__ = ["infer_roles"]

_SCOPES = 3  # modules above a layer that are searched for weights that fit it
_LONGEST_WINDOW = 16
_MATRIX = Roles((), (0,), (1,))
_TRANSPOSED = Roles((), (1,), (0,))

Known = dict[Segments, Roles]
Module = tuple[str, ...]


def infer_roles(weights: Sequence[Weight]) -> Known:
    """Finds the roles of the axes of weights.

    Args:
      weights: the weights of two dims or more that aren't biases or scales.

    Returns:
      The roles by path, without those that nothing tells.
    """
    search = _Search(weights)
    for up in range(1, _SCOPES + 1):
        near = search.neighbours(up)
        search.settle(lambda weight, near=near: _by_pairs(weight, near(weight)))
        if up == 1:
            near = search.neighbours(up)
            search.settle(lambda weight, near=near: _by_likeness(weight, near(weight)))
    search.settle(lambda weight: by_name(weight, search.beside(weight)))
    return {
        w.segments: with_heads_merged(w, with_parts_apart(w, search.known[w.segments]))
        for w in weights
        if w.segments in search.known
    }


def _by_pairs(weight: Weight, near: frozenset[Seen]) -> Iterable[Roles]:
    found = there_and_back(_seen(weight, None), near, may_transpose(weight))
    is_stack = any(roles.batch for roles in found) and not is_matmul_name(weight)
    return () if is_stack and may_be_conv(weight.shape, near) else found


def _by_likeness(weight: Weight, near: frozenset[Seen]) -> Iterable[Roles]:
    return by_likeness(weight.shape, near, has_inputs_first(weight))


def _seen(weight: Weight, roles: Roles | None) -> Seen:
    return Seen(weight.shape, roles, is_fused_name(weight), is_of_attention(weight))


class _Search:
    """Weights, and the axes known so far."""

    def __init__(self, weights: Sequence[Weight]):
        self._weights = weights
        self._modules: dict[Module, list[Weight]] = {}
        for weight in weights:
            self._modules.setdefault(_module(weight, 1), []).append(weight)
        self.known: Known = _matrices(weights)
        self._options: dict[Segments, list[Roles]] = {}
        self._open: list[Weight] = []
        for weight in weights:
            if weight.rank > 2:
                self._begin(weight)

    def _begin(self, weight: Weight) -> None:
        """Takes the evidence of a weight by itself: its bias, or a name of convolutions."""
        options = None if weight.bias is None else _by_bias(weight)
        if options is None and is_conv_like(weight):
            options = [] if weight.is_doubtful else conv_by_name(weight)
        if options is not None and len(options) == 1:
            self.known[weight.segments] = options[0]
        elif not (weight.is_doubtful or weight.is_of_torch) and _is_one_order(options):
            self._open.append(weight)
        if options:
            self._options[weight.segments] = options

    def beside(self, weight: Weight) -> Sequence[Weight]:
        """The weights of the same module, this one among them."""
        return self._modules[_module(weight, 1)]

    def settle(self, find: Callable[[Weight], Iterable[Roles]]) -> None:
        """Adds the roles that `find` gives to weights that aren't known yet."""
        found: Known = {}
        for weight in self._open:
            if weight.segments in self.known:
                continue
            allowed = self._options.get(weight.segments)
            readings = {r for r in find(weight) if allowed is None or r in allowed}
            named = by_name(weight, self.beside(weight)) if len(readings) > 1 else set()
            chosen = readings & named or readings
            if len(chosen) == 1:
                found[weight.segments] = chosen.pop()
        self.known |= found

    def neighbours(self, up: int) -> Callable[[Weight], frozenset[Seen]]:
        """The other weights below the module that is `up` above a weight's layer."""
        wanted = {_module(w, up) for w in self._open if w.segments not in self.known}
        scopes: dict[Module, Counter[Seen]] = {module: Counter() for module in wanted}
        for weight in self._weights if wanted else ():
            path = weight.layer_path
            for module in {path[:n] for n in range(len(path))} & wanted:
                scopes[module][_seen(weight, self.known.get(weight.segments))] += 1

        def others(weight: Weight) -> frozenset[Seen]:
            scope, mine = scopes[_module(weight, up)], _seen(weight, None)
            return frozenset(
                seen
                for seen, count in scope.items()
                if seen.is_attention == mine.is_attention and (seen != mine or count > 1)
            )

        return others


def _module(weight: Weight, up: int) -> Module:
    return weight.layer_path[:-up]


def _is_one_order(options: Sequence[Roles] | None) -> bool:
    """Whether all readings that a bias allows have inputs first, as neighbours are read."""
    if options is None:
        return True
    return bool(options) and all(roles.reduction < roles.output for roles in options)


def _by_bias(weight: Weight) -> list[Roles]:
    """The roles by the bias; Flax's own layers have their inputs first where that is possible."""
    assert weight.bias is not None
    found = by_bias(weight.shape, weight.bias)
    ordered = [roles for roles in found if roles.reduction < roles.output]
    if weight.is_kernel and ordered:
        return ordered
    square = {Roles(roles.batch, roles.output, roles.reduction) for roles in ordered}
    others = [r for r in found if r not in ordered and r not in square]
    plain = [r for r in others if r.output == (len(r.batch),)]
    return ordered + plain if ordered else plain or others


def _matrices(weights: Sequence[Weight]) -> Known:
    """Roles of weights of two dims: [in, out], as Flax has it, if no bias says otherwise.

    Biases beside oblong weights tell. Square ones have the order of the nearest of these, as those
    of GPT-2's Conv1D, [out, in], but kernels without a bias are surely [in, out].
    """
    told: Known = {}
    votes: dict[Module, set[Roles]] = {}
    plain = [w for w in weights if w.rank == 2 and not w.is_doubtful and not _is_temporal(w)]
    for weight in plain:
        found = by_bias(weight.shape, weight.bias) if weight.bias is not None else ()
        if len(found) == 1:
            told[weight.segments] = found[0]
            for n in range(len(weight.layer_path)):
                votes.setdefault(weight.layer_path[:n], set()).update(found)
    for weight in plain:
        nearest = next((v for n in _outwards(weight) if (v := votes.get(n))), {_MATRIX})
        is_free = weight.bias is not None or not weight.is_kernel
        is_turned = is_free and nearest == {_TRANSPOSED}
        is_square = len(set(weight.shape)) == 1
        is_ordered = is_square if is_turned else not weight.is_of_torch
        if weight.segments not in told and is_ordered:
            told[weight.segments] = _TRANSPOSED if is_turned else _MATRIX
    return told


def _outwards(weight: Weight) -> list[Module]:
    return [weight.layer_path[:n] for n in range(len(weight.layer_path) - 1, -1, -1)]


def _is_temporal(weight: Weight) -> bool:
    """Whether a weight is a convolution's without channels, [window, features].

    As an array of a layer's own, `conv1d_kernel`, it may be [features, window] too.
    """
    is_plain = not weight.names or is_plain_name(weight.names[-1])
    window, features = weight.shape if is_plain else sorted(weight.shape)
    return window <= _LONGEST_WINDOW < features and is_conv_name(weight.layer_tokens)
