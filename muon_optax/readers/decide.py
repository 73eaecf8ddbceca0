"""From a reader's records to the decision about each parameter."""

from collections.abc import Mapping
from typing import NamedTuple

from muon_optax._internal.tree_paths import Segments
from muon_optax.partition import Label, rule_by_name
from muon_optax.partition.systems import is_vector_in_disguise
from muon_optax.readers.heads import Layer, heads_by_name, heads_by_shape
from muon_optax.readers.kernels import Kernel
from muon_optax.readers.names import is_adapter, is_expert
from muon_optax.readers.records import ModuleLeaf, Reading
from muon_optax.readers.stacks import Axes, Declared, choices, shifted, stacked_axes
from muon_optax.readers.usage import Role
from muon_optax.views.matrix_view import MatrixView, MuonDimensionNumbers, bind_view

__all__ = ["UNKNOWN_MODULE", "UNKNOWN_STACK", "Choice", "decide"]

View = MatrixView | MuonDimensionNumbers


class Choice(NamedTuple):
    """The decision on one parameter.

    Attributes:
      label: its optimizer.
      reason: why.
      view: its matrices, for Muon.
      doubt: the open question about it; None where there is none.
    """

    label: Label
    reason: str
    view: View | None = None
    doubt: str | None = None


UNKNOWN_MODULE = "unknown module"
UNKNOWN_STACK = "unknown stack"

_KINDS = {
    "lookup": "a table that {} looks up",
    "one-hot": "a table that {} looks up",
    "depthwise": "depthwise kernel of {}",
    "elementwise": "used elementwise in {}",
}


def decide(reading: Reading) -> dict[Segments, Choice]:
    """The choice for each parameter, in the reading's order."""
    stacked = _stacked(reading)
    found = {leaf.segments: _choose(leaf, reading, stacked) for leaf in reading.leaves}
    heads = _heads(reading, found, stacked)
    modules = {leaf.segments: leaf.module for leaf in reading.leaves}
    return {
        path: Choice("adam", f"head: {modules[path]}") if path in heads else choice
        for path, choice in found.items()
    }


def _stacked(reading: Reading) -> dict[Segments, Axes | None]:
    declared = {
        leaf.segments: Declared(leaf.shape, leaf.kernel.shape)
        for leaf in reading.leaves
        if leaf.kernel is not None
    }
    used = {
        leaf.segments: axes
        for leaf in reading.leaves
        if reading.usage and (axes := _axes_by_use(leaf, reading.usage.roles)) is not None
    }
    return stacked_axes(declared, {**reading.stacked, **used})


def _axes_by_use(leaf: ModuleLeaf, roles: Mapping[Segments, Role]) -> Axes | None:
    """The only choice of stacked axes by which the module's view is that of the leaf's use."""
    used = roles[leaf.segments].view if leaf.segments in roles else None
    if used is None or leaf.kernel is None or leaf.kernel.view is None:
        return None
    options = choices(Declared(leaf.shape, leaf.kernel.shape))
    rank = len(leaf.shape)
    fits = [a for a in options if _same_axes(shifted(leaf.kernel.view, a, rank), used)]
    return fits[0] if len(fits) == 1 else None


def _same_axes(a: View, b: View) -> bool:
    return _sorted_axes(a) == _sorted_axes(b)


def _sorted_axes(view: View) -> list[tuple[int, ...]]:
    axes = (view.reduction_axis, view.output_axis)
    return [(a,) if isinstance(a, int) else tuple(sorted(a)) for a in axes]


def _choose(leaf: ModuleLeaf, reading: Reading, stacked: Mapping[Segments, Axes | None]) -> Choice:
    kernel = leaf.kernel
    is_factor = is_adapter(leaf.segments) and len(leaf.shape) > 1
    is_known = kernel is not None and bool(choices(Declared(leaf.shape, kernel.shape)))
    role = reading.usage.roles.get(leaf.segments) if reading.usage else None
    if kernel and kernel.view and role and role.kind == "lookup":  # tied to an embedding
        return Choice("adam", _KINDS["lookup"].format(leaf.module))
    if kernel and is_known and (kernel.view is None or kernel.is_adapted or not is_factor):
        return _by_module(leaf, kernel, stacked[leaf.segments])
    if is_factor:
        return Choice("adam", "LoRA factor")
    if len(leaf.shape) < 2:
        return Choice("adam", "fewer than two dims")
    if role is not None and role.view is not None:
        view = _experts_apart(role.view, leaf) if is_expert(leaf.segments) else role.view
        return Choice("muon", f"weight of {leaf.module}, by its use", view)
    if role is not None and role.kind in _KINDS:
        return Choice("adam", _KINDS[role.kind].format(leaf.module))
    return _by_name(leaf, reading.is_input_first)


def _experts_apart(view: View, leaf: ModuleLeaf) -> View:
    """The view without experts' leading axis among the merged ones.

    einsum("td,edf->tef") and einsum("tef,efd->td") are those of heads, but for their meaning.
    """
    reduction, output = _sorted_axes(view)
    first = min((*reduction, *output))
    kept = [tuple(a for a in axes if a != first) for axes in (reduction, output)]
    is_apart = isinstance(view, MuonDimensionNumbers) and len(leaf.shape) > 2 and all(kept)
    return MuonDimensionNumbers(*kept) if is_apart else view


def _by_module(leaf: ModuleLeaf, kernel: Kernel, stacked: Axes | None) -> Choice:
    reason = f"{kernel.kind} of {leaf.module}"
    if kernel.view is None:
        return Choice("adam", reason)
    if stacked is None:
        return Choice(
            "adam", f"{reason}, with stacked axes that nothing tells", doubt=UNKNOWN_STACK
        )
    return Choice("muon", reason, shifted(kernel.view, stacked, len(leaf.shape)))


def _by_name(leaf: ModuleLeaf, is_input_first: bool) -> Choice:
    """The default rules' decision on a parameter that no module and no use explains."""
    if is_vector_in_disguise(leaf.segments, leaf.shape):
        return Choice("adam", "at most one dim above 1")
    rule = rule_by_name(leaf.segments, len(leaf.shape))
    if rule is not None:
        return Choice("adam", rule.reason)
    if len(leaf.shape) == 2 and is_input_first:
        view = MuonDimensionNumbers((0,), (1,))
        return Choice("muon", f"two dims, in {leaf.module}", view, UNKNOWN_MODULE)
    return Choice("adam", f"unknown use in {leaf.module}", doubt=UNKNOWN_MODULE)


def _heads(
    reading: Reading,
    found: Mapping[Segments, Choice],
    stacked: Mapping[Segments, Axes | None],
) -> set[Segments]:
    """The weights that make the logits: as a traced call or the framework says, or as they look."""
    matrices = {path for path, choice in found.items() if choice.label == "muon"}
    said = reading.usage.heads if reading.usage else reading.heads
    if said:  # of which a tied embedding isn't a matrix of Muon's anyway
        return set(said & matrices)
    layers = [
        _layer(leaf, found[leaf.segments], stacked.get(leaf.segments))
        for leaf in reading.leaves
        if leaf.segments in matrices
    ]
    widths = _widths(reading)
    heads = heads_by_name(layers, widths)
    by_shape = heads_by_shape(layers, widths, is_ordered=reading.is_ordered)
    return heads if reading.usage else heads | by_shape


def _layer(leaf: ModuleLeaf, choice: Choice, stacked: Axes | None) -> Layer:
    assert choice.view is not None
    bound = bind_view(choice.view, leaf.shape)
    channels = max(leaf.shape[axis] for axis in bound.reduction_axes)
    takes = frozenset({bound.fan_in, channels})
    is_dense = len(bound.reduction_axes) == len(bound.output_axes) == 1
    return Layer(leaf.segments, leaf.shape, takes, bound.fan_out, bool(stacked), is_dense)


def _widths(reading: Reading) -> frozenset[int]:
    """Sizes of norms, of embeddings' rows, and of unknown modules' possible inputs."""
    kinds = ("norm", "embedding table")
    kernels = [leaf.kernel for leaf in reading.leaves]
    known = {k.shape[-1] for k in kernels if k and k.kind in kinds and k.shape}
    return frozenset(known.union(*(x.shape for x in reading.leaves if x.kernel is None)))
