"""The values of a traced call, and how the call uses its parameters."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

from muon_optax.readers.usage.axes import Factor, Weight

__all__ = ["Kind", "LayerId", "Use", "Value", "joined"]

LayerId = tuple[int, ...]
Kind = Literal["matmul", "depthwise", "lookup", "one-hot", "combined", "opaque", "elementwise"]


@dataclasses.dataclass(frozen=True)
class Value:
    """An intermediate value.

    Attributes:
      weights: the parameters of which it holds values, before they meet an activation.
      is_data: whether it depends on the inputs.
      is_one_hot: whether it compares inputs with an iota, as a one-hot lookup does.
      layers: the layers (matmuls, convolutions and lookups of parameters) that it comes from
        without another layer between.
      outputs: for the output of a layer, the factors of its parameters that make each of its dims;
        none for the activation's own dims.
    """

    weights: tuple[Weight, ...] = ()
    is_data: bool = False
    is_one_hot: bool = False
    layers: frozenset[LayerId] = frozenset()
    outputs: tuple[Weight, ...] = ()

    def moved(self, move: Callable[[Weight], Weight | None]) -> "Value":
        """The value after an operation that only moves elements."""
        weights, outputs = (
            tuple(m for w in held if (m := move(w)) is not None)
            for held in (self.weights, self.outputs)
        )
        return dataclasses.replace(self, weights=weights, outputs=outputs)

    def without_weights(self) -> "Value":
        """The value from where its contents can't be followed any further."""
        return dataclasses.replace(self, weights=())


def joined(a: Value, b: Value) -> Value:
    """The facts about a value that is one of two, as after a branch."""
    return Value(
        a.weights if a.weights == b.weights else (),
        a.is_data or b.is_data,
        a.is_one_hot and b.is_one_hot,
        a.layers | b.layers,
    )


class Use(NamedTuple):
    """One use of a parameter in a call.

    Attributes:
      kind: 'matmul' (a convolution too), 'depthwise', 'lookup', 'one-hot' (a lookup by a matmul),
        'combined' with another parameter in a matmul without an activation, 'opaque' (in a kernel
        that can't be seen into, or reshaped beyond recognition), or 'elementwise'.
      reduction: factors that a matmul sums over.
      output: factors of its output.
      cut: as in `Weight`.
    """

    kind: Kind
    reduction: frozenset[Factor] = frozenset()
    output: frozenset[Factor] = frozenset()
    cut: tuple[int, int, int] | None = None
