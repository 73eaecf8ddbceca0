"""Follows parameters through a jaxpr to the matmuls, convolutions and lookups that use them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from muon_optax.readers.usage.axes import Factor, Weight
from muon_optax.readers.usage.values import Kind, LayerId, Use, Value, joined

__all__ = ["Handler", "Trace", "shape_of"]

Handler = Callable[["Trace", Any, list[Value]], list[Value]]


class Trace:
    """Reads a jaxpr from top to bottom.

    Attributes:
      uses: for each parameter's index, its uses in order.
      fed: the layers whose results another layer takes.
      leaves: the parameters of each layer.
      stacked: (parameter, factor) of a matmul's output that count matrices side by side.
    """

    def __init__(self, handlers: dict[str, Handler]) -> None:
        self.uses: dict[int, dict[Use, None]] = {}
        self.fed: set[LayerId] = set()
        self.leaves: dict[LayerId, frozenset[int]] = {}
        self.stacked: set[tuple[int, Factor]] = set()
        self._handlers = handlers
        self._calls: LayerId = ()
        self._is_paused = False

    def run(self, jaxpr: Any, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
        """The values of an open jaxpr's results."""
        known = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def value_of(atom: Any) -> Value:
            return Value() if hasattr(atom, "val") else known[atom]

        for eqn in jaxpr.eqns:
            handle = self._handlers.get(eqn.primitive.name) or _by_structure(eqn)
            results = handle(self, eqn, [value_of(atom) for atom in eqn.invars])
            known.update(zip(eqn.outvars, results, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def call(self, eqn: Any, jaxpr: Any, args: Sequence[Value]) -> list[Value]:
        """The results of a jaxpr, open or closed, that an equation calls."""
        before, self._calls = self._calls, (*self._calls, id(eqn))
        try:
            consts = [Value()] * len(getattr(jaxpr, "consts", ()))
            return self.run(getattr(jaxpr, "jaxpr", jaxpr), consts, args)
        finally:
            self._calls = before

    def fixed_point(
        self, step: Callable[[list[Value]], list[Value]], carry: list[Value]
    ) -> list[Value]:
        """The facts about a loop's carry that hold in every iteration."""
        with self._paused():
            while True:
                after = [joined(a, b) for a, b in zip(carry, step(carry), strict=True)]
                if after == carry:
                    return carry
                carry = after

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def note(self, weights: Sequence[Weight], kind: Kind) -> None:
        """Records that parameters are used in another way than as a layer's weight."""
        for weight in weights:
            self._note(weight, Use(kind, cut=weight.cut))

    def _note(self, weight: Weight, use: Use) -> None:
        if not self._is_paused:
            self.uses.setdefault(weight.leaf, {})[use] = None

    def layer(
        self,
        eqn: Any,
        weights: Sequence[tuple[Weight, Kind, Sequence[Factor], Sequence[Factor]]],
        operands: Sequence[Value],
    ) -> Value:
        """The result of a layer whose weights reduce over some factors and put out others."""
        identity = (*self._calls, id(eqn))
        for weight, kind, reduction, output in weights:
            is_matrix = kind != "matmul" or (reduction and output)
            use = Use(kind, frozenset(reduction), frozenset(output), weight.cut)
            self._note(weight, use if is_matrix else Use("elementwise"))
        self.leaves[identity] = frozenset(weight.leaf for weight, *_ in weights)
        self.fed.update(*(value.layers for value in operands))
        is_data = any(value.is_data for value in operands)
        return Value(is_data=is_data, layers=frozenset({identity}))


def shape_of(atom: Any) -> tuple[int, ...]:
    """The shape of an equation's operand or result."""
    return tuple(getattr(atom.aval, "shape", ()))


def _by_structure(eqn: Any) -> Handler:
    """Any other primitive: a call of one jaxpr, as `jit` and `checkpoint` are, or a plain one."""
    jaxpr = next((eqn.params[n] for n in ("jaxpr", "call_jaxpr") if n in eqn.params), None)
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    counts = [
        len(getattr(side, name, ())) for side in (eqn, inner) for name in ("invars", "outvars")
    ]
    if inner is None:
        return _opaque if eqn.primitive.name in _FOREIGN else _by_shapes
    if counts[:2] != counts[2:]:  # Pallas' have their results as arguments
        return _opaque
    return lambda trace, eqn, ins: trace.call(eqn, jaxpr, ins)


_FOREIGN = ("ffi_call", "io_callback", "pure_callback")


def _opaque(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    """A kernel that can't be seen into."""
    weights = [weight for value in ins for weight in value.weights]
    value = trace.layer(eqn, [(weight, "opaque", (), ()) for weight in weights], ins)
    return [value] * len(eqn.outvars)


def _by_shapes(trace: Trace, eqn: Any, ins: list[Value]) -> list[Value]:
    """A primitive that is elementwise where the shapes say so; else nothing can be followed."""
    operands = [(value, shape_of(atom)) for value, atom in zip(ins, eqn.invars, strict=True)]
    shapes = [shape_of(result) for result in eqn.outvars]
    is_data = any(value.is_data for value in ins)
    weights = [(value.weights, shape) for value, shape in operands if value.weights]
    if is_data and any(not _broadcasts(shape, r) for _, shape in weights for r in shapes):
        return _opaque(trace, eqn, ins)
    for value, shape in operands:
        if is_data or shape not in shapes:
            trace.note(value.weights, "lookup" if value.is_data else "elementwise")
    layers = frozenset[LayerId]().union(*(value.layers for value in ins))
    results = []
    for shape in shapes:
        same = [value.weights for value, other in operands if other == shape]
        weights = () if is_data else tuple(dict.fromkeys(w for found in same for w in found))
        outputs = {v.outputs for v, other in operands if v.outputs and other == shape}
        made_of = outputs.pop() if len(outputs) == 1 else ()
        results.append(Value(weights, is_data, eqn.primitive.name == "eq", layers, made_of))
    return results


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether an operand of this shape can be one of an elementwise primitive's."""
    return not shape or (
        len(shape) == len(result)
        and all(n in (1, most) for n, most in zip(shape, result, strict=True))
    )
