"""Sums that several devices each have a part of, in as few all-reduces as can be."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.specs import LeafSharding
from muon_optax.sharding.trace_context import varying_axes

__all__ = ["BlockSums", "all_sums"]


class BlockSums(Protocol):
    """Sums of each device over its block of a leaf, to be summed over the devices that share it."""

    @property
    def leaf(self) -> BoundLeaf:
        """The leaf."""
        ...

    @property
    def dims(self) -> tuple[int, ...]:
        """The axes that are summed over."""
        ...

    def block_sums(self, sharding: LeafSharding, x: jax.Array) -> jax.Array:
        """The sums over one device's block, where the sharding has Manual axes."""
        ...


def all_sums(rows: Sequence[tuple[BlockSums, jax.Array]]) -> list[jax.Array]:
    """The sums of several arrays, in one all-reduce for all that are over the same mesh axes.

    Pieces ask for the sums of all their leaves at once. XLA would merge the all-reduces of one
    piece, but where two pieces follow each other it merges a leaf's second with the next leaf's
    first, after which the rest can't be merged: 12 leaves would take 13 all-reduces, not two.

    Args:
      rows: sums and their summands: an array of the leaf's shape (a block of it inside a
        shard_map).

    Returns:
      The sums of each row.

    Example:
      >>> from muon_optax.transforms.binding import bind_leaves
      >>> from muon_optax.transforms.matrix_sums import MatrixSums
      >>> (leaf,) = bind_leaves(jnp.ones((2, 3)))
      >>> [float(x[0, 0]) for x in all_sums([(MatrixSums(leaf), jnp.ones((2, 3)))] * 2)]
      [6.0, 6.0]
    """
    shardings = [sums.leaf.sharding for sums, _ in rows]
    # Along Manual axes there is a psum; along others JAX places the all-reduce. Where several dims
    # are sharded, the partitioner would reduce over the mesh axes of one dim after those of
    # another. A shard_map makes it one all-reduce.
    least = 2 if len(rows) == 1 else 1
    groups: dict[tuple[frozenset[str], Any], list[int]] = {}
    for i, (sums, x) in enumerate(rows):
        open_axes = frozenset(shardings[i].known) - set(shardings[i].manual)
        sharded = [
            d
            for d in sums.dims
            if x.shape[d] > 1 and open_axes.intersection(shardings[i].axes_of([d]))
        ]
        is_mapped = len(sharded) >= least and _takes_shard_map(shardings[i], x)
        kind = (open_axes, shardings[i].mesh) if is_mapped else (frozenset(), None)
        groups.setdefault(kind, []).append(i)
    results: dict[int, jax.Array] = {}
    for (open_axes, _), members in groups.items():
        of_group = [rows[i] for i in members]
        found = (
            _mapped_sums(of_group, set(open_axes))
            if open_axes
            else _reduced(of_group, [shardings[i] for i in members])
        )
        results |= dict(zip(members, found, strict=True))
    return [results[i] for i in range(len(rows))]


def _mapped_sums(
    rows: Sequence[tuple[BlockSums, jax.Array]], open_axes: set[str]
) -> Sequence[jax.Array]:
    """The sums, in a shard_map over mesh axes that aren't Manual yet."""
    inner, ins, outs = [], [], []
    for sums, x in rows:
        sharding = sums.leaf.sharding
        spec = (*sharding.partition_spec, *[None] * (x.ndim - len(sharding.partition_spec)))
        spec = [None if n == 1 else a for n, a in zip(x.shape, spec, strict=True)]
        ins.append(PartitionSpec(*spec))
        outs.append(PartitionSpec(*(None if d in sums.dims else a for d, a in enumerate(spec))))
        inner.append(dataclasses.replace(sharding, manual=(*sharding.manual, *open_axes)))
    return jax.shard_map(
        lambda *arrays: tuple(
            _reduced([(s, x) for (s, _), x in zip(rows, arrays, strict=True)], inner)
        ),
        mesh=rows[0][0].leaf.sharding.mesh,
        in_specs=tuple(ins),
        out_specs=tuple(outs),
        axis_names=open_axes,
    )(*[x for _, x in rows])


def _reduced(
    rows: Sequence[tuple[BlockSums, jax.Array]], shardings: Sequence[LeafSharding]
) -> list[jax.Array]:
    """The sums, psummed over the Manual axes of the dims: one psum for each set of axes."""
    results, groups = [], {}
    for i, ((sums, x), sharding) in enumerate(zip(rows, shardings, strict=True)):
        results.append(sums.block_sums(sharding, x))
        axes = tuple(a for a in sharding.axes_of(sums.dims) if a in sharding.manual)
        axes += _axes_of_size_1(results[i])
        if axes:
            kind = (axes, results[i].dtype, frozenset(varying_axes(results[i])))
            groups.setdefault(kind, []).append(i)
    for (axes, *_), members in groups.items():
        flat = [results[i].reshape(-1) for i in members]
        reduced = jax.lax.psum(jnp.concatenate(flat) if len(flat) > 1 else flat[0], axes)
        parts = jnp.split(reduced, np.cumsum([x.size for x in flat])[:-1])
        for i, part in zip(members, parts, strict=True):
            results[i] = part.reshape(results[i].shape)
    return results


def _axes_of_size_1(x: jax.Array) -> tuple[str, ...]:
    """Manual axes of size 1 over which an array varies by its type.

    `LeafSharding` leaves them out, but the type of the sums must not vary over them either:
    the user's shard_map checks it.
    """
    mesh = jax.sharding.get_abstract_mesh()
    varying = varying_axes(x)
    return tuple(a for a in mesh.manual_axes if a in varying and mesh.shape[a] == 1)


def _takes_shard_map(sharding: LeafSharding, x: jax.Array) -> bool:
    """Whether an array can be given to a shard_map over its mesh, and it costs nothing."""
    mesh = sharding.mesh
    is_elsewhere = (
        mesh is not None and mesh.explicit_axes and jax.typeof(x).sharding.mesh.empty
    )  # as the placeholders of `eval_shape`
    # Outside of jit a shard_map would be compiled anew, operation by operation, in every step.
    return isinstance(x, Tracer) and not is_elsewhere
