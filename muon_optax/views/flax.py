"""Matrix views of Flax models, Linen and NNX, inferred from their parameters' names and shapes."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from muon_optax._internal.leaf_types import check_arrays, is_float_leaf, kind_of
from muon_optax._internal.tree_paths import (
    Segments,
    is_absent,
    leaves_with_segments,
    path_name,
    raise_all,
)
from muon_optax._internal.warnings import warn_about
from muon_optax.partition import (
    RolePattern,
    Rule,
    Shape,
    check_rules,
    default_rules,
    first_rules,
    has_run,
)
from muon_optax.views.convolutions import sort_convolutions
from muon_optax.views.inference import Known, infer_roles
from muon_optax.views.matrix_view import MuonDimensionNumbers, bind_view
from muon_optax.views.stacks import Stacked, find_stacks
from muon_optax.views.weights import (
    Roles,
    Weight,
    bias_names,
    is_plain_name,
    is_vector_name,
    merged_size,
    names_of,
    sizes,
)

__all__ = ["flax_matrix_views"]

_MOST_NAMES = 100  # in one warning: these leaves are trained in another way than meant
_DOUBTS = (
    "flax_matrix_views can't tell the axes of these kernels, which get AdamW; declare their views "
    "in rules=(Rule(pattern, 'muon', view=...),), or name the parts that scan or vmap stacked in "
    "`scanned`, with the axis where nothing tells it: {'layers': 1}"
)
_STACKED_NORMS = (
    "norms with scales of more than one dim look stacked by scan or vmap, but not all the leaves "
    "around them do; name the stacked modules in `scanned`"
)
_ONE_CHANNEL = (
    "these kernels have one input channel: they are depthwise, or the first convolution of grey "
    "images"
)
_GROUPS = (
    "these convolutions may have groups (feature_group_count), as no layer gives the channels that "
    "they take, or they give many more"
)
_CURE = (
    "They get AdamW. Rules tell: Rule(pattern, 'muon') makes one matrix of each, Rule(pattern, "
    "'adam') is for depthwise ones, and a view MatrixView(..., heads=groups) for groups"
)

# AdamW's by the default rules, but here convolutions are sorted with more evidence.
_CONVOLUTIONS = tuple(RolePattern(role) for role in ("depthwise", "one_channel"))
# Roles that sizes tell, not names.
_BY_SIZE = tuple(
    RolePattern(role)
    for role in ("output", "wide_output", "few_outputs", "tall_table", "unconnected")
)

Scanned = Sequence[str] | str | Mapping[str, int]


def flax_matrix_views(params: Any, *, scanned: Scanned = (), rules: Sequence[Rule] = ()) -> Any:
    """Views for the weights of Flax's layers, and AdamW for leaves that aren't surely matrices.

    Flax keeps kernels as [in, out], convolutions as [*window, in, out], attention as [in, heads,
    head_dim] into heads and [heads, head_dim, out] out of them; `nn.scan` and `nnx.vmap` put an
    axis of layers or experts at any place. Ranks don't tell these apart. These do: the bias beside
    a weight, which has its output axes; scales of norms with a dim too many, and the dim that all
    the leaves of a subtree share; weights that lead there and back, as the two of an MLP do; and
    the names of attention's layers and of convolutions, where no size speaks against them.

    Args:
      params: a Linen parameter dict or an NNX state, of arrays or shape structs.
      scanned: patterns (as in `Rule`) of subtrees that `nn.scan`, `nnx.scan` or `nnx.vmap` stacked.
        Mostly they are found without. A mapping gives the place of the stacked axis as well:
        {'layers': 1}; it becomes a batch axis.
      rules: rules of your own, which come first: their views hold, 'adam' means no view, and
        'muon' without a view that the leaf is a matrix whose axes are to be found. Where a pattern
        matches a module, 'muon' is for its weights, not for biases and scales.

    Returns:
      A tree like `params` for `muon_weight_dimension_numbers`: views, or None (AdamW) for
      embeddings, heads, biases, norms, depthwise kernels, and weights whose axes nothing tells.
      MuonWarnings name the latter, and convolutions that may have groups.

    Raises:
      ValueError: for patterns or rules that match nothing, rules that freeze, views and axes that
        don't fit, or leaves that are no arrays.
      TypeError: for a number alone, as the count that `optax.inject_hyperparams` calls it with.

    Example:
      >>> shapes = {"wi": (8, 64, 128), "wo": (8, 128, 64), "stem": (3, 3, 16, 32)}
      >>> params = {n: {"kernel": jax.ShapeDtypeStruct(s, "float32")} for n, s in shapes.items()}
      >>> views = flax_matrix_views(params)
      >>> views["wo"]["kernel"], views["stem"]["kernel"]  # 8 matrices; one
      (MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,)), \
MuonDimensionNumbers(reduction_axis=(0, 1, 2), output_axis=(3,)))
    """
    leaves = leaves_with_segments(params)
    check_arrays(leaves)
    if jax.tree_util.all_leaves([params]) and not is_float_leaf(params):
        raise TypeError(
            f"flax_matrix_views takes a tree of parameters, got {kind_of(params)}; under "
            "optax.inject_hyperparams pass static_args=('muon_weight_dimension_numbers',)"
        )
    shapes = {path: tuple(jnp.shape(x)) for path, x in leaves if is_float_leaf(x)}
    given = _given(params, rules, shapes)
    stacks = find_stacks(shapes, _declared(params, scanned, shapes))
    found = _find(stacks, given)
    for message, paths in found.doubts:
        warn_about(message, [leaf for path, leaf in stacks.items() if path in paths], _MOST_NAMES)
    views = {path: _view(stacks[path], roles) for path, roles in found.roles.items()}
    views |= {path: rule.view for path, rule in given.items() if rule.view is not None}
    return jax.tree.structure(params).unflatten([views.get(path) for path, _ in leaves])


def _given(
    params: Any, rules: Sequence[Rule], shapes: Mapping[Segments, Shape]
) -> dict[Segments, Rule]:
    """The leaves that the user's own rules decide about."""
    check_rules(tuple(rules), params)
    frozen = [str(rule) for rule in rules if rule.label == "frozen"]
    raise_all(frozen, "views freeze nothing; optax.partition over muon does. Got these rules:")
    found = dict(zip(shapes, first_rules(rules, list(shapes.items())), strict=True))
    usual = default_rules()  # these are asked about one layer's matrix
    given = {
        path: rule
        for path, rule in found.items()
        if not (rule is None or rule in usual or _passes_over(rule, path, shapes[path]))
    }
    problems = []
    for path, rule in given.items():
        try:
            _ = rule.view is None or bind_view(rule.view, shapes[path])
        except ValueError as error:
            problems.append(f"{path_name(path)} by the rule {rule}: {error}")
    raise_all(problems, "these rules' views don't fit:")
    return given


def _passes_over(rule: Rule, path: Segments, shape: Shape) -> bool:
    """Whether a rule for the weight of a module meets a bias or a scale of this module."""
    *module, name = names_of(path) or ("",)
    is_vector = len(shape) < 2 or is_vector_name(name)
    by_module = isinstance(rule.pattern, str) and has_run(tuple(module), rule.pattern)
    return rule.label == "muon" and is_vector and by_module


def _declared(
    params: Any, scanned: Scanned, shapes: Mapping[Segments, Shape]
) -> dict[Segments, int | None]:
    """The leaves that the user declared stacked, and the axis where it was given."""
    patterns = (scanned,) if isinstance(scanned, str) else scanned
    axes = patterns if isinstance(patterns, Mapping) else dict.fromkeys(patterns)
    stacks = [(Rule(pattern, "muon", "scanned"), axis) for pattern, axis in axes.items()]
    places = leaves_with_segments(params, is_absent)
    unused = [
        repr(rule.pattern)
        for rule, _ in stacks
        if places and not any(rule.matches(path, ()) for path, _ in places)
    ]
    names = ", ".join(path_name(path) for path, _ in places[:20])
    raise_all(unused, f"these patterns of `scanned` match nothing among {names}:")
    declared = {
        path: next((axis for rule, axis in stacks if rule.matches(path, ())), -1)
        for path in shapes
        if any(rule.matches(path, ()) for rule, _ in stacks)
    }
    raise_all(
        [
            f"{path_name(path)}: axis {axis} of shape {shapes[path]}"
            for path, axis in declared.items()
            if axis is not None and not 0 <= axis < len(shapes[path])
        ],
        "these leaves don't have the axis that `scanned` gives them, counted from 0:",
    )
    return declared


class _Found(NamedTuple):
    """The roles of the leaves that get Muon, and the warnings: messages and paths."""

    roles: Known
    doubts: list[tuple[str, set[Segments]]]


def _find(stacks: Mapping[Segments, Stacked], given: Mapping[Segments, Rule]) -> _Found:
    weights = _weights(stacks)
    known = infer_roles(weights)
    convs = sort_convolutions(weights, known)
    adams = _adams({path: x for path, x in stacks.items() if path not in given}, known)
    adams |= {path for path, rule in given.items() if rule.label == "adam" or rule.view}
    muons = {w.segments for w in weights} - adams
    groups = set().union(*convs) - given.keys()
    doubts = [
        (_DOUBTS, (muons | _nameless(stacks) - given.keys() - adams) - known.keys()),
        (_STACKED_NORMS, {path for path, leaf in stacks.items() if leaf.is_unexplained}),
        (f"{_ONE_CHANNEL}. {_CURE}", muons & convs.one_channel & groups),
        (f"{_GROUPS}. {_CURE}", muons & convs.grouped & groups),
    ]
    return _Found({path: known[path] for path in muons & known.keys() - groups}, doubts)


def _nameless(stacks: Mapping[Segments, Stacked]) -> set[Segments]:
    """Leaves of two dims or more called b or g, as biases and scales are, without their weight."""
    named = [leaf for leaf in stacks.values() if leaf.names]
    modules = {leaf.names[:-1] for leaf in named if is_plain_name(leaf.names[-1])}
    return {
        leaf.segments
        for leaf in named
        if len(leaf.axes) > 1 and is_vector_name(leaf.names[-1]) and leaf.names[:-1] not in modules
    }


def _weights(stacks: Mapping[Segments, Stacked]) -> list[Weight]:
    """The leaves of two dims or more, without stacked axes, that aren't biases or scales."""
    cores = {leaf.names: leaf.core for leaf in stacks.values()}
    found = []
    for leaf in stacks.values():
        *module, name = leaf.names or ("",)
        if len(leaf.axes) < 2 or is_vector_name(name):
            continue
        biases = (cores.get((*module, bias)) for bias in bias_names(name))
        bias = next((shape for shape in biases if shape is not None), None)
        doubts = leaf.is_doubtful, leaf.stack_places
        found.append(Weight(leaf.segments, leaf.names, leaf.axes, leaf.core, bias, *doubts))
    return found


def _adams(stacks: Mapping[Segments, Stacked], known: Known) -> set[Segments]:
    """The leaves that aren't hidden matrices, as embeddings, heads and norms.

    Where sizes alone say so of a matrix made of several axes, the axes as they are must say so too.
    """
    as_matrices = _rules_of({path: _matrix_shape(leaf, known) for path, leaf in stacks.items()})
    found = {path for path, rule in as_matrices.items() if _is_adams(rule)}
    doubtful = {p for p in found if len(stacks[p].axes) > 2 and not _is_named(as_matrices[p])}
    if not doubtful:
        return found
    as_maps = _rules_of({path: leaf.core for path, leaf in stacks.items()})
    return {path for path in found if path not in doubtful or _is_adams(as_maps[path])}


def _rules_of(shapes: Mapping[Segments, Shape]) -> dict[Segments, Rule | None]:
    return dict(zip(shapes, first_rules(default_rules(), list(shapes.items())), strict=True))


def _is_adams(rule: Rule | None) -> bool:
    return rule is not None and rule.label == "adam" and rule.pattern not in _CONVOLUTIONS


def _is_named(rule: Rule | None) -> bool:
    """Whether a name decides: sizes of matrices made of several axes are weak evidence."""
    return rule is not None and rule.pattern not in _BY_SIZE


def _matrix_shape(leaf: Stacked, known: Known) -> Shape:
    """The shape that rules see: the matrix, so that none takes heads or layers for a window."""
    if len(leaf.axes) < 2:
        return leaf.core
    last = len(leaf.axes) - 1
    roles = known.get(leaf.segments, Roles((), tuple(range(last)), (last,)))
    return merged_size(leaf.core, roles.reduction), merged_size(leaf.core, roles.output)


def _view(leaf: Stacked, roles: Roles) -> MuonDimensionNumbers:
    return MuonDimensionNumbers(sizes(leaf.axes, roles.reduction), sizes(leaf.axes, roles.output))
