"""The matrices of each parameter by its uses in a traced call, or why it has none."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import jax

from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.partition import Shape
from muon_optax.readers.usage.axes import Factor, whole
from muon_optax.readers.usage.primitives import HANDLERS
from muon_optax.readers.usage.trace import Trace
from muon_optax.readers.usage.values import Use, Value
from muon_optax.views.matrix_view import MatrixView, MuonDimensionNumbers

__all__ = ["Role", "Usage", "read_usage"]


@dataclasses.dataclass(frozen=True)
class Role:
    """The use of one parameter.

    Attributes:
      kind: 'matrix', 'depthwise', 'lookup', 'one-hot' (a lookup by a matmul), 'elementwise',
        'unused', or 'unclear': multiplied with another parameter, in several ways, or in a kernel
        that can't be seen into.
      view: a matrix's.
    """

    kind: Literal["matrix", "depthwise", "lookup", "one-hot", "elementwise", "unused", "unclear"]
    view: MatrixView | MuonDimensionNumbers | None = None


@dataclasses.dataclass(frozen=True)
class Usage:
    """The uses of a model's parameters in a call.

    Attributes:
      roles: each parameter's, by its path.
      heads: the parameters of the layers that make the call's results: no other layer takes
        their output, and nothing else makes these results.
    """

    roles: dict[Segments, Role]
    heads: frozenset[Segments]


def read_usage(
    call: Callable[..., Any],
    params: Any,
    inputs: Any,
    adapters: Collection[Segments] = (),
) -> Usage:
    """Traces `call(params, inputs)`, without running it.

    Args:
      call: a function of the parameters and the inputs.
      params: a tree of arrays or shape structs.
      inputs: a tree of arrays or shape structs.
      adapters: paths of low-rank adapters, beside which a head is still a head.
    """
    jaxpr = jax.make_jaxpr(call)(params, inputs)
    leaves = leaves_with_segments(params)
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves}
    weights = [Value((whole(i, shape),)) for i, shape in enumerate(shapes.values())]
    data = [Value(is_data=True)] * (len(jaxpr.jaxpr.invars) - len(weights))
    trace = Trace(HANDLERS)
    consts = [Value()] * len(jaxpr.consts)
    results = trace.run(jaxpr.jaxpr, consts, [*weights, *data])
    paths = list(shapes)
    roles = {
        path: _role([_unstacked(use, i, trace) for use in trace.uses.get(i, ())], shapes[path])
        for i, path in enumerate(paths)
    }
    last = _last_layers(trace, results, {i for i, path in enumerate(paths) if path in adapters})
    return Usage(roles, frozenset(paths[i] for i in last))


def _last_layers(trace: Trace, results: Sequence[Value], adapters: set[int]) -> set[int]:
    found: set[int] = set()
    for value in results:
        layers = {layer for layer in value.layers if not trace.leaves[layer] <= adapters}
        if layers and layers.isdisjoint(trace.fed):
            found.update(*(trace.leaves[layer] for layer in layers))
    return found


def _unstacked(use: Use, leaf: int, trace: Trace) -> Use:
    """The use without the factors that count matrices."""
    output = frozenset(f for f in use.output if (leaf, f) not in trace.stacked)
    return use._replace(output=output or use.output)


def _role(uses: list[Use], shape: Shape) -> Role:
    kinds = {use.kind for use in uses}
    if not uses:
        return Role("unused")
    for kind in ("lookup", "one-hot", "depthwise"):
        if kind in kinds:
            return Role(kind)
    matmuls = [use for use in uses if use.kind == "matmul"]
    view = _view(matmuls, shape) if matmuls else None
    if view is not None:
        return Role("matrix", view)
    is_clear = kinds.isdisjoint({"matmul", "combined", "opaque"})
    return Role("elementwise" if is_clear else "unclear")


@dataclasses.dataclass(frozen=True)
class _Cut:
    """An axis that holds blocks of several matrices: their sizes, and how often they repeat."""

    axis: int
    sizes: tuple[int, ...]
    groups: int = 1


def _view(uses: Sequence[Use], shape: Shape) -> MatrixView | MuonDimensionNumbers | None:
    """The view that all matmuls agree on; one may use the transpose of another's."""
    first, *others = uses
    factors = _merged(first, shape)
    if any(_merged(use, shape) != factors for use in others):
        return None
    reduction, output = _axes(first.reduction), _axes(first.output)
    try:
        cuts = [_factored(factors, axis, shape) for axis in range(len(shape))]
        cuts.append(_sliced(uses, (*reduction, *output), shape))
    except ValueError:
        return None
    return _with_cuts(reduction, output, [cut for cut in cuts if cut], shape)


def _merged(use: Use, shape: Shape) -> frozenset[Factor]:
    """The factors of the matrices, an axis of which all are theirs as one."""
    factors = use.reduction | use.output
    sizes = {axis: math.prod(f.size for f in factors if f.axis == axis) for axis in _axes(factors)}
    full = {axis for axis, size in sizes.items() if size == shape[axis]}
    parts = {f for f in factors if f.axis not in full}
    return frozenset(parts | {Factor(axis, shape[axis], 1) for axis in full})


def _axes(factors: Collection[Factor]) -> tuple[int, ...]:
    return tuple(sorted({factor.axis for factor in factors}))


def _factored(factors: Collection[Factor], axis: int, shape: Shape) -> _Cut | None:
    """The cut of an axis of which some factors are the matrices' and the others count them.

    Raises:
      ValueError: where the matrices' factors are neither the outermost nor the innermost.
    """
    own = [factor for factor in factors if factor.axis == axis]
    length = math.prod(factor.size for factor in own)
    if not own or length == shape[axis]:
        return None
    count = shape[axis] // length
    stride = min(factor.stride for factor in own)
    is_span = stride * length == max(factor.stride * factor.size for factor in own)
    if is_span and stride == 1:
        return _Cut(axis, (length,) * count)
    if is_span and stride == count:
        return _Cut(axis, (1,) * count, length)
    raise ValueError("factors of several places")


def _sliced(uses: Sequence[Use], axes: Collection[int], shape: Shape) -> _Cut | None:
    """The cut of an axis whose slices go to matmuls of their own.

    Raises:
      ValueError: for slices that overlap or leave something out.
    """
    cuts = sorted({use.cut for use in uses if use.cut and use.cut[0] in axes})
    if not cuts or any(use.cut is None for use in uses):
        return None
    ends = [0, *(stop for _, _, stop in cuts)]
    starts = [*(start for _, start, _ in cuts), shape[cuts[0][0]]]
    if len({axis for axis, _, _ in cuts}) > 1 or starts != ends:
        raise ValueError("slices that overlap or leave something out")
    return _Cut(cuts[0][0], tuple(stop - start for _, start, stop in cuts))


def _with_cuts(
    reduction: tuple[int, ...], output: tuple[int, ...], cuts: Sequence[_Cut], shape: Shape
) -> MatrixView | MuonDimensionNumbers | None:
    if set(reduction) & set(output) or len(cuts) > 1:
        return None
    if not cuts:
        return MuonDimensionNumbers(reduction, output)
    (cut,) = cuts
    role = "output" if cut.axis in output else "reduction"
    axes = {"reduction": reduction, "output": output}
    others = [axis for axis in axes[role] if axis != cut.axis]
    axes[role] = (cut.axis, *others)
    rest = math.prod(shape[axis] for axis in others)
    sizes = tuple(size * rest for size in cut.sizes)
    return MatrixView(axes["reduction"], axes["output"], sizes, groups=cut.groups, axis=role)
