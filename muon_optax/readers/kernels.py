"""The kernel that a module declares for a parameter: its shape, and the matrices that it makes."""

import dataclasses
from collections.abc import Sequence

from muon_optax.partition import Shape
from muon_optax.views.matrix_view import MatrixView, MuonDimensionNumbers

__all__ = ["Kernel", "convolution", "einsum", "other", "weight"]


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A parameter as its module declares it, without the axes that `vmap` or `scan` add.

    Attributes:
      shape: the declared shape.
      kind: the kind of layer, for the report's reason.
      view: the matrices that it makes; None for AdamW's.
      is_adapted: whether it is the weight beside an adapter's factors, which it is named after.
    """

    shape: Shape
    kind: str
    view: MatrixView | MuonDimensionNumbers | None = None
    is_adapted: bool = False


def other(shape: Sequence[int], kind: str) -> Kernel:
    """A parameter that is no matrix."""
    return Kernel(tuple(shape), kind)


def weight(
    shape: Sequence[int],
    reduction: int | Sequence[int],
    output: int | Sequence[int],
    *,
    blocks: int = 1,
) -> Kernel:
    """A weight matrix, or equal ones side by side along its output, as the gates of an LSTM.

    Example:
      >>> weight((16, 64), 0, 1, blocks=4).view.heads
      4
    """
    sums, outs = _axes(reduction), _axes(output)
    view = MuonDimensionNumbers(sums, outs) if blocks == 1 else MatrixView(sums, outs, heads=blocks)
    return Kernel(tuple(shape), "weight", view)


def _axes(axes: int | Sequence[int]) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else tuple(axes)


def convolution(
    shape: Sequence[int],
    inputs: int,
    outputs: int,
    *,
    groups: int = 1,
    grouped: str = "output",
    blocks: int = 1,
) -> Kernel:
    """A convolution's kernel, whose other axes are its window.

    Args:
      shape: its shape.
      inputs: the axis of its input channels.
      outputs: the axis of its output channels.
      groups: number of groups of channels; each makes a matrix of its own.
      grouped: which axis holds the groups one after the other, 'output' or 'reduction'. The other
        one is as long as one group.
      blocks: equal kernels side by side along the output.

    Example:
      >>> convolution((3, 3, 1, 16), 2, 3, groups=16).kind
      'depthwise kernel'
      >>> convolution((3, 3, 1, 16), 2, 3).view  # of grey images
      MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=(3,))
    """
    window = tuple(axis for axis in range(len(shape)) if axis not in (inputs, outputs))
    each = shape[inputs] if grouped == "output" else shape[inputs] // groups
    if groups > 1 and each == 1:
        return other(shape, "depthwise kernel")
    if groups == 1 or grouped == "output":
        return weight(shape, sorted((inputs, *window)), outputs, blocks=groups * blocks)
    # The groups are cut from the first of the merged axes.
    view = MatrixView((inputs, *window), (outputs,), heads=groups, axis="reduction")
    return Kernel(tuple(shape), "weight", view)


def einsum(equation: str, shape: Sequence[int]) -> Kernel | None:
    """The kernel that is an einsum's second operand; None where the equation makes no matrix of it.

    Letters of both operands and of the result are batch axes. So are those that the result has in
    front of the activations' axes: they count weights side by side, as a fused key and value.

    Example:
      >>> einsum("BTD,NDH->BTNH", (4, 32, 8)).view
      MuonDimensionNumbers(reduction_axis=(1,), output_axis=(0, 2))
      >>> einsum("BSD,CKDH->CBSKH", (2, 4, 32, 8)).view
      MuonDimensionNumbers(reduction_axis=(2,), output_axis=(1, 3))
    """
    operands, _, result = equation.replace(" ", "").partition("->")
    inputs, comma, kernel = operands.partition(",")
    letters = _letters(kernel, len(shape))
    if not (comma and result) or letters is None:
        return None
    front = result[: min((result.find(c) for c in inputs if c in result), default=0)]
    sums = [i for i, c in enumerate(letters) if c not in result and c in inputs]
    outs = [i for i, c in enumerate(letters) if c in result and c not in inputs]
    apart = [i for i in outs if letters[i] not in front]
    if not (sums and outs):
        return None
    return weight(shape, sums, apart or outs)


def _letters(operand: str, rank: int) -> str | None:
    """The letters of an operand of this rank; None for an ellipsis that stands for some axes."""
    letters = operand.replace("...", "")
    is_plain = len(letters) == rank and len(set(letters)) == rank
    return letters if is_plain else None
