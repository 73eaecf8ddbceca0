"""Arrays whose type is unreduced or reduced over mesh axes.

The gradient of a parameter of type `P(..., reduced={"data"})` is unreduced over 'data': each device
has a summand of it. An optimizer isn't linear in the gradient, so it needs the sum: whole on each
device, by an all-reduce, or the part of which the device has the momentum, by a reduce-scatter,
which receives half as much.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from muon_optax._internal.tree_paths import Segments, leaves_with_segments
from muon_optax.sharding.declared import Axes, as_axes, plain_spec
from muon_optax.sharding.trace_context import mapped_axes, unreduced_axes

__all__ = ["Summation", "reduced_axes", "reduced_like", "summation", "summed"]


class Summation(NamedTuple):
    """How a gradient is summed over the mesh axes that it is unreduced over.

    Attributes:
      scattered: for each dim, the axes over which it is reduce-scattered along this dim.
      rest: the axes over which it is all-reduced.
    """

    scattered: tuple[Axes, ...]
    rest: Axes

    @property
    def axes(self) -> Axes:
        """The axes of the reduce-scatters."""
        return tuple(itertools.chain(*self.scattered))

    def applied(self, x: jax.Array) -> jax.Array:
        """The sum, where the axes are Manual."""
        for dim, axes in enumerate(self.scattered):
            if axes:
                x = jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        return jax.lax.psum(x, self.rest) if self.rest else x

    def spec(self, old: PartitionSpec) -> PartitionSpec:
        """How the sum of an array is sharded."""
        dims = itertools.zip_longest(map(as_axes, old.partitions), self.scattered, fillvalue=())
        return PartitionSpec(*((*own, *more) or None for own, more in dims))


def summation(
    spec: Sequence[Any], unreduced: Sequence[str], wanted: Sequence[Any], rank: int
) -> Summation:
    """How to sum a gradient, so that as much as can be is reduce-scattered to another sharding.

    A reduce-scatter cuts a device's block: the dims of the other sharding must begin with the axes
    that cut them already.

    Args:
      spec: the mesh axes on each dim of the gradient, as in a PartitionSpec.
      unreduced: the axes that it is unreduced over.
      wanted: the mesh axes on each dim of the other sharding.
      rank: number of dims.

    Returns:
      The axes of reduce-scatters and all-reduces.

    Example:
      >>> summation(("fsdp",), ("replica", "pod"), (("fsdp", "replica"),), 2)
      Summation(scattered=(('replica',), ()), rest=('pod',))
    """
    owns, wants = ([*map(as_axes, x), *[()] * (rank - len(x))] for x in (spec, wanted))
    scattered = []
    for own, want in zip(owns, wants, strict=True):
        more = want[len(own) :] if want[: len(own)] == own else ()
        scattered.append(tuple(itertools.takewhile(lambda a: a in unreduced, more)))
    done = {a for axes in scattered for a in axes}
    return Summation(tuple(scattered), tuple(a for a in unreduced if a not in done))


def summed(tree: Any, momenta: Callable[[], Mapping[Segments, Any]] = dict) -> Any:
    """The tree with plain types: unreduced leaves are summed, reduced ones stay as they are.

    Args:
      tree: arrays, tracers or shape structs.
      momenta: returns momenta by path, to whose shardings sums of gradients are reduce-scattered
        as far as these can be had. Other sums are blocks as they were.

    Returns:
      The tree.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if not any(map(_all_axes, leaves)):
        return tree
    plain = list(map(_plain, leaves))
    pending = [i for i, x in enumerate(leaves) if _is_unreduced(x)]
    if not pending:
        return treedef.unflatten(plain)
    paths = [path for path, _ in leaves_with_segments(tree)]
    like = momenta()
    groups: dict[Any, dict[int, Summation]] = {}
    for i in pending:
        groups.setdefault(_mesh(leaves[i]), {})[i] = _summation(leaves[i], like.get(paths[i]))
    for mesh, members in groups.items():
        sums = _sums(mesh, [leaves[i] for i in members], list(members.values()))
        for i, x in zip(members, sums, strict=True):
            plain[i] = _plain(x)
    return treedef.unflatten(plain)


def _plain(x: Any) -> Any:
    """A leaf without reduced axes in its type; unreduced arrays stay as they are."""
    if _is_unreduced(x):
        return x
    if _manual_axes(x):  # there is no cast to an invariant type (JAX 0.10.2)
        return jnp.where(True, x, jnp.zeros((), x.dtype))
    sharding = _sharding(x)
    if sharding is None or not reduced_axes(x):
        return x
    plain = sharding.update(spec=plain_spec(sharding.spec))
    is_abstract = isinstance(x, jax.ShapeDtypeStruct)
    return x.update(sharding=plain) if is_abstract else jax.sharding.reshard(x, plain)


def _is_unreduced(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(_unreduced(x))


def _unreduced(x: jax.Array) -> Axes:
    """Axes that an array is unreduced over, in the order of the mesh; in a shard_map, its own."""
    sharding, manual = _sharding(x), jax.sharding.get_abstract_mesh().manual_axes
    axes = sharding.spec.unreduced if sharding and not manual else unreduced_axes(x)
    return tuple(a for a in _mesh(x).axis_names if a in axes) if axes else ()


def _mesh(x: Any) -> Mesh | AbstractMesh:
    context = jax.sharding.get_abstract_mesh()
    return context if context.manual_axes else jax.typeof(x).sharding.mesh


def _summation(x: jax.Array, momentum: Any) -> Summation:
    own, theirs = _sharding(x), _sharding(momentum)
    spec = () if own is None else own.spec.partitions
    wanted = spec if theirs is None or momentum.shape != x.shape else theirs.spec.partitions
    return summation(spec, _unreduced(x), wanted, x.ndim)


def _sums(
    mesh: Mesh | AbstractMesh, arrays: Sequence[jax.Array], by: Sequence[Summation]
) -> list[jax.Array]:
    """The sums of arrays of one mesh.

    `jax.sharding.reshard` to the sharded type would do, but on CPU XLA makes an all-reduce and a
    slice of that (JAX 0.10.2); `psum_scatter` is one reduce-scatter everywhere.
    """

    def summed_blocks(*blocks):
        return [how.applied(x) for how, x in zip(by, blocks, strict=True)]

    if mesh.manual_axes:
        return summed_blocks(*arrays)
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    return jax.shard_map(
        summed_blocks,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=[how.spec(spec) for how, spec in zip(by, specs, strict=True)],
        axis_names=set(mesh.explicit_axes) - mapped_axes(mesh),
    )(*arrays)


def reduced_like(old: Any, new: Any, grads: Any) -> Any:
    """The leaves of `new`, with the types of those of `old` if these or `grads` aren't plain.

    An update then has the type of its parameter, as `optax.apply_updates` needs.

    Args:
      old: the parameters, or the gradients where these aren't known: a leaf that is unreduced over
        an axis has an update that is reduced over it.
      new: updates of plain types.
      grads: the gradients.

    Returns:
      The updates. Those that are sharded like their parameters are sent nowhere.
    """
    before = dict(leaves_with_segments(old))
    moved = {path for path, x in leaves_with_segments(grads) if _all_axes(x)}
    moved.update(path for path, x in before.items() if _all_axes(x))
    if not moved:
        return new
    found = leaves_with_segments(new)
    leaves = [_reduced(x, before.get(path)) if path in moved else x for path, x in found]
    return jax.tree.structure(new).unflatten(leaves)


def _reduced(x: jax.Array, like: Any) -> jax.Array:
    if manual := tuple(_manual_axes(like)):
        x = jax.lax.pcast(x, manual, to="reduced")
    axes, sharding, own = reduced_axes(like), _sharding(like), jax.typeof(x).sharding
    if sharding is None or sharding.mesh.empty:
        return x
    spec = plain_spec(sharding.spec)
    if own.spec != spec:
        x = jax.sharding.reshard(x, own.update(spec=spec))
    return jax.sharding.reshard(x, own.update(spec=spec.update(reduced=axes))) if axes else x


def reduced_axes(x: Any) -> frozenset[str]:
    """Explicit mesh axes that an array's type is reduced or unreduced over."""
    sharding = _sharding(x)
    return frozenset() if sharding is None else sharding.spec.reduced | sharding.spec.unreduced


def _manual_axes(x: Any) -> frozenset[str]:
    """Manual mesh axes that an array's type is reduced or unreduced over."""
    if not isinstance(x, jax.Array):
        return frozenset()
    kind = jax.typeof(x).manual_axis_type
    return kind.reduced | kind.unreduced


def _all_axes(x: Any) -> frozenset[str]:
    """Explicit and Manual mesh axes that an array's type is reduced or unreduced over."""
    return reduced_axes(x) | _manual_axes(x)


def _sharding(x: Any) -> NamedSharding | None:
    """The sharding in the type of an array, or that of a shape struct."""
    found = jax.typeof(x).sharding if isinstance(x, jax.Array) else getattr(x, "sharding", None)
    return found if isinstance(found, NamedSharding) else None
