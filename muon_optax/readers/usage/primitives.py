"""The effect of JAX's primitives on the dims of a parameter."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from muon_optax.readers.usage.axes import Dim, Factor, Weight
from muon_optax.readers.usage.calls import CALLS
from muon_optax.readers.usage.trace import Handler, Trace, shape_of
from muon_optax.readers.usage.values import Kind, Value

__all__ = ["HANDLERS"]


def _same(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    del trace
    return ins[: len(eqn.outvars)]


def _transpose(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    moved = ins[0].moved(lambda w: w.permuted(eqn.params["permutation"]))
    # einsum("td,kdh->kth") and vmap over weights bring the dims that count matrices to the front.
    for weight in moved.outputs:
        front = list(itertools.takewhile(bool, weight.dims))
        if any(weight.dims[len(front) :]):
            trace.stacked.update((weight.leaf, f) for dim in front for f in dim)
    return [moved]


def _reshape(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    value, old = ins[0], shape_of(eqn.invars[0])
    order = eqn.params["dimensions"]
    if order is not None:  # transposed first
        value, old = value.moved(lambda w: w.permuted(order)), tuple(old[i] for i in order)
    new = shape_of(eqn.outvars[0])
    trace.note([w for w in value.weights if w.reshaped(old, new) is None], "opaque")
    return [value.moved(lambda w: w.reshaped(old, new))]


def _broadcast(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    del trace
    places, new = eqn.params["broadcast_dimensions"], shape_of(eqn.outvars[0])
    old = shape_of(eqn.invars[0])
    grown = [i for i, place in enumerate(places) if old[i] != new[place]]
    kept = [place for i, place in enumerate(places) if i not in grown]
    return [ins[0].moved(lambda w: w.indexed(grown).broadcast(kept, len(new)))]


def _squeeze(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    del trace
    return [ins[0].moved(lambda w: w.indexed(eqn.params["dimensions"]))]


def _slice(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    del trace
    starts, stops = eqn.params["start_indices"], eqn.params["limit_indices"]
    return [_sliced(ins[0], shape_of(eqn.invars[0]), list(zip(starts, stops, strict=True)))]


def _split(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    del trace
    axis, shape = eqn.params["axis"], shape_of(eqn.invars[0])
    results, start = [], 0
    for size in map(int, eqn.params["sizes"]):
        ranges = [(start, start + size) if i == axis else (0, n) for i, n in enumerate(shape)]
        results.append(_sliced(ins[0], shape, ranges))
        start += size
    return results


def _sliced(value: Value, shape: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Value:
    for dim, (start, stop) in enumerate(ranges):
        value = value.moved(lambda w: w.sliced(dim, start, stop, shape[dim]))  # noqa: B023
    return value


def _dynamic_slice(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    """Where it starts isn't known; one place along a dim is a place whichever it is."""
    del trace
    shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    ranges = [(0, 1) if size == 1 else (0, n) for size, n in zip(sizes, shape, strict=True)]
    return [_sliced(ins[0], shape, ranges)]


def _gather(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    """A lookup in a table, or of an expert's whole matrix."""
    operand, indices = ins[0], ins[1]
    numbers = eqn.params["dimension_numbers"]
    picked = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    rank = len(shape_of(eqn.outvars[0]))
    if not operand.weights:
        layers = operand.layers | indices.layers
        return [Value(is_data=operand.is_data or indices.is_data, layers=layers)]

    def taken(weight: Weight) -> Weight:
        return weight.indexed(picked).broadcast(numbers.offset_dims, rank)

    is_table = all(_matrix_dims(taken(weight)) < 2 for weight in operand.weights)
    if is_table:
        return [trace.layer(eqn, [(w, "lookup", (), ()) for w in operand.weights], ins)]
    value = operand.moved(taken)
    return [Value(value.weights, indices.is_data, False, operand.layers | indices.layers)]


def _matrix_dims(weight: Weight) -> int:
    return sum(any(f.size > 1 for f in dim) for dim in weight.dims)


def _concatenate(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    return [_together(trace, ins, [value.weights for value in ins])]


def _stack(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    axis, rank = eqn.params["axis"], len(shape_of(eqn.outvars[0]))
    places = [place for place in range(rank) if place != axis]
    moved = [value.moved(lambda w: w.broadcast(places, rank)) for value in ins]
    return [_together(trace, ins, [value.weights for value in moved])]


def _together(trace: Trace, ins: list[Value], weights: list[tuple[Weight, ...]]) -> Value:
    """Several values side by side; beside activations, a parameter is one too."""
    is_data = any(value.is_data for value in ins)
    layers = frozenset().union(*(value.layers for value in ins))
    if is_data:
        for value in ins:
            trace.note(value.weights, "elementwise")
        return Value(is_data=True, layers=layers)
    return Value(tuple(dict.fromkeys(w for found in weights for w in found)), layers=layers)


def _dot_general(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    (lhs_sums, rhs_sums), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = _choose(trace, *ins)
    sides = [(lhs, (*lhs_sums,), (*lhs_batch,)), (rhs, (*rhs_sums,), (*rhs_batch,))]
    if not (lhs.weights or rhs.weights):
        return [_activation(ins)]
    is_lookup = lhs.is_one_hot or rhs.is_one_hot
    is_pair = bool(lhs.weights and rhs.weights)
    kind: Kind = "one-hot" if is_lookup else "combined" if is_pair else "matmul"
    used, free = [], [_free(atom, *side[1:]) for atom, side in zip(eqn.invars, sides, strict=True)]
    for (value, sums, batch), kept in zip(sides, free, strict=True):
        for weight in value.weights:
            used.append((weight, kind, weight.factors_of(sums), weight.factors_of(kept)))
        for weight in value.outputs:  # one layer's stack is the next one's
            trace.stacked.update((weight.leaf, f) for f in weight.factors_of(batch))
    result = trace.layer(eqn, used, ins)
    blank: list[list[Dim]] = [[()] * len(lhs_batch), *([()] * len(kept) for kept in free)]
    outputs = []
    for i, (value, _, _) in enumerate(sides):
        for weight in value.weights:
            parts = [*blank]
            parts[i + 1] = [weight.dims[k] for k in free[i]]
            outputs.append(Weight(weight.leaf, tuple(itertools.chain(*parts))))
    return [dataclasses.replace(result, outputs=tuple(outputs))]


def _free(atom: Any, sums: Sequence[int], batch: Sequence[int]) -> list[int]:
    return [i for i in range(len(shape_of(atom))) if i not in (*sums, *batch)]


def _activation(ins: Sequence[Value]) -> Value:
    """A product of two activations."""
    layers = frozenset().union(*(value.layers for value in ins))
    return Value(is_data=any(value.is_data for value in ins), layers=layers)


def _choose(trace: Trace, lhs: Value, rhs: Value) -> tuple[Value, Value]:
    """Which of two parameters in a matmul is the weight; the other one is an activation.

    Looked up ones are activations, and ones broadcast along a batch, as learned queries are.
    """
    if not (lhs.weights and rhs.weights):
        return lhs, rhs
    for is_activation in (_is_looked_up, _is_broadcast):
        if is_activation(lhs) != is_activation(rhs):
            loser = lhs if is_activation(lhs) else rhs
            trace.note(loser.weights, "lookup" if loser.is_data else "elementwise")
            return (lhs.without_weights(), rhs) if loser is lhs else (lhs, rhs.without_weights())
    return lhs, rhs


def _is_looked_up(value: Value) -> bool:
    return value.is_data


def _is_broadcast(value: Value) -> bool:
    return any(not dim for weight in value.weights for dim in weight.dims)


def _convolution(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    image, kernel = ins
    trace.note(image.weights, "elementwise")
    if not kernel.weights:
        return [_activation(ins)]
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["feature_group_count"]
    out_dim, in_dim, *window = numbers.rhs_spec
    used, outputs = [], []
    for weight in kernel.weights:
        output, rest = _in_groups(weight.dims[out_dim], groups)
        is_depthwise = shape_of(eqn.invars[1])[in_dim] == 1 and (rest > 1 or not output)
        kind: Kind = "depthwise" if is_depthwise else "matmul"
        used.append((weight, kind, weight.factors_of((in_dim, *window)), output))
        dims: list[Dim] = [()] * len(numbers.out_spec)
        dims[numbers.out_spec[1]] = weight.dims[out_dim]
        outputs.append(Weight(weight.leaf, tuple(dims)))
    result = trace.layer(eqn, used, [image])
    return [dataclasses.replace(result, outputs=tuple(outputs))]


def _in_groups(dim: Sequence[Factor], groups: int) -> tuple[list[Factor], int]:
    """An output dim's factors within a group, and how many groups split a whole axis.

    A batch of convolutions, as `vmap` makes, is one convolution whose groups are whole axes.
    """
    inner = list(dim)
    while inner and groups > 1 and groups % inner[0].size == 0:
        groups //= inner[0].size
        inner.pop(0)
    if groups > 1 and inner and inner[0].size % groups == 0:
        axis, size, stride = inner.pop(0)
        inner.insert(0, Factor(axis, size // groups, stride))
    return inner, groups


def _ragged_dot(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    """Matmuls with one matrix for each group of rows: experts."""
    lhs, rhs, *_ = ins
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, sums), (_, batch) = numbers.dot_dimension_numbers
    alone = {*sums, *batch, *numbers.rhs_group_dimensions}
    trace.note(lhs.weights, "elementwise")
    if not rhs.weights:
        return [_activation(ins)]
    kind: Kind = "matmul"
    used = []
    for weight in rhs.weights:
        free = [i for i in range(len(weight.dims)) if i not in alone]
        used.append((weight, kind, weight.factors_of(sums), weight.factors_of(free)))
    return [trace.layer(eqn, used, ins)]


HANDLERS: dict[str, Handler] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "convert_element_type": _same,
    "copy": _same,
    "dot_general": _dot_general,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "optimization_barrier": _same,
    "pad": _same,
    "ragged_dot_general": _ragged_dot,
    "reduce_precision": _same,
    "reshape": _reshape,
    "rev": _same,
    "sharding_constraint": _same,
    "slice": _slice,
    "split": _split,
    "squeeze": _squeeze,
    "stack": _stack,
    "stop_gradient": _same,
    "transpose": _transpose,
    **CALLS,
}
"""For each primitive that moves or contracts elements; the others are elementwise."""
