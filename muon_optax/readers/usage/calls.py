"""Loops and branches."""

from typing import Any

from muon_optax.readers.usage.trace import Handler, Trace, shape_of
from muon_optax.readers.usage.values import Value, joined

__all__ = ["CALLS"]


def _scan(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    body = getattr(eqn.params["jaxpr"], "jaxpr", eqn.params["jaxpr"])
    # Operands are constants, carry and slices, in this order; JAX 0.12 counts them otherwise than
    # 0.10, but slices and stacked results have one dim more outside.
    count = sum(not _is_stacked(*pair) for pair in zip(eqn.outvars, body.outvars, strict=True))
    slices = sum(_is_stacked(*pair) for pair in zip(eqn.invars, body.invars, strict=True))
    end = len(ins) - slices
    consts, carry = ins[: end - count], ins[end - count : end]
    # A loop takes one place of the leading dim at a time: a layer's weights of a stack.
    taken = [value.moved(lambda w: w.indexed((0,))) for value in ins[end:]]

    def step(carry: list[Value]) -> list[Value]:
        return trace.call(eqn, eqn.params["jaxpr"], [*consts, *carry, *taken])

    results = step(trace.fixed_point(lambda c: step(c)[:count], carry))
    return [*results[:count], *(value.without_weights() for value in results[count:])]


def _is_stacked(outside: Any, inside: Any) -> bool:
    return len(shape_of(outside)) > len(shape_of(inside))


def _while(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    first = eqn.params["cond_nconsts"]
    consts = first + eqn.params["body_nconsts"]

    def step(carry: list[Value]) -> list[Value]:
        return trace.call(eqn, eqn.params["body_jaxpr"], [*ins[first:consts], *carry])

    return step(trace.fixed_point(step, ins[consts:]))


def _cond(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    branches = [trace.call(eqn, branch, ins[1:]) for branch in eqn.params["branches"]]
    results = branches[0]
    for other in branches[1:]:
        results = [joined(a, b) for a, b in zip(results, other, strict=True)]
    return results


CALLS: dict[str, Handler] = {"cond": _cond, "scan": _scan, "while": _while}
"""For each primitive that calls jaxprs otherwise than once with its own operands."""
