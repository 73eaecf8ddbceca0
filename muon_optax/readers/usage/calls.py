"""Loops and branches."""

from typing import Any

from muon_optax.readers.usage.trace import Handler, Trace
from muon_optax.readers.usage.values import Value, joined

__all__ = ["CALLS"]


def _scan(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    consts = eqn.params["num_consts"]
    carries = consts + eqn.params["num_carry"]
    # A loop takes one place of its leading axis at a time: a layer's weights of a stack.
    slices = [value.moved(lambda w: w.indexed((0,))) for value in ins[carries:]]

    def step(carry: list[Value]) -> list[Value]:
        return trace.call(eqn, eqn.params["jaxpr"], [*ins[:consts], *carry, *slices])

    count = carries - consts
    carry = trace.fixed_point(lambda c: step(c)[:count], ins[consts:carries])
    results = step(carry)
    return [*results[:count], *(value.without_weights() for value in results[count:])]


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
