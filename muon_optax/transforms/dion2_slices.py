"""Dion2's step: the largest slices of the momentum are orthogonalised, and decay."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp

from muon_optax._internal.checks import check_choice, check_number, check_static
from muon_optax._internal.dtypes import wide_dtype
from muon_optax._internal.slices import largest_of_each
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.execution import Prepared
from muon_optax.sharding.placement import on_mesh_of, place
from muon_optax.sharding.runtime.buffers import Arrays, Elementwise
from muon_optax.sharding.selected import Chosen, SelectedLeaf, SliceRole, SlicesOf, selected
from muon_optax.sharding.specs import LeafSharding
from muon_optax.transforms.block_sums import all_sums
from muon_optax.transforms.matrix_sums import MatrixSums, Role, WholeSums
from muon_optax.transforms.momentum import Momentum

__all__ = ["Dion2"]

_OTHER: dict[SliceRole, Role] = {"output": "reduction", "input": "output"}


@dataclasses.dataclass(frozen=True)
class Dion2:
    """Orthogonalise the largest slices of the momentum alone (Dion2, arXiv 2512.16928).

    For `muon(dion2=Dion2())`, and behind `scale_by_dion2`, which says more.

    Attributes:
      fraction: of the slices of each matrix, in (0, 1]: of n, the max(1, ceil(fraction * n)) of
        largest L1 norm are chosen, of equal ones the first.
      each: a slice belongs to one 'output' neuron, to one 'input', or to a place of the
        'shorter' side (to an output where both are equal).

    Raises:
      ValueError, TypeError: for options out of range.

    Example:
      >>> Dion2(0.5, each="output").fraction
      0.5
    """

    fraction: float = 0.25
    each: SlicesOf = "shorter"

    def __post_init__(self) -> None:
        check_static("fraction", self.fraction)
        check_number("fraction", self.fraction)
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction!r}")
        check_choice("each", self.each, get_args(SlicesOf))

    def check_options(self, momentum: Momentum, **others: Any) -> None:
        """Raises for options of `muon` beside which Dion2 has no meaning.

        Args:
          momentum: the form of momentum.
          **others: options by name, which must be None or False.

        Raises:
          ValueError: naming all of them.
        """
        problems = [f"{name}={value!r}" for name, value in others.items() if value]
        if momentum.form != "sum":
            problems.append(f"momentum={momentum.form!r}")
        for name in ("nesterov", "bias_correction"):
            if getattr(momentum, name):
                problems.append(f"{name}=True")
        if problems:
            raise ValueError(
                "dion2 adds gradients to the momentum and lets chosen slices decay by beta: give "
                "momentum='sum', nesterov=False and bias_correction=False, without sign, namo and "
                f"block_periodic; got {', '.join(problems)}"
            )

    def selected(self, leaves: Sequence[BoundLeaf]) -> list[SelectedLeaf]:
        """The leaves, and those that are orthogonalised in their places."""
        return [selected(leaf, self.fraction, self.each) for leaf in leaves]

    def planned(self, leaves: Sequence[BoundLeaf]) -> list[BoundLeaf]:
        """The leaves that are orthogonalised in the places of these."""
        return [row.leaf for row in self.selected(leaves)]

    def moved(
        self, leaf: BoundLeaf, old: LeafSharding, new: LeafSharding
    ) -> tuple[LeafSharding, LeafSharding]:
        """The shardings of the moved arrays, where a leaf's results go from one to another."""
        row = selected(leaf, self.fraction, self.each)
        return (row.sharding(old), row.sharding(new)) if row.end(new) is new else (old, new)

    def formed(
        self,
        run: Callable[..., list[Arrays]],
        ready: Prepared,
        decay: jax.Array,
        pairs: Sequence[Arrays],
    ) -> list[Arrays]:
        """The direction of each leaf, with zeros where no slice is chosen, and its new momentum.

        Args:
          run: orthogonalises leaves: `ExecutionOptions.run`.
          ready: the leaves, where they are worked on.
          decay: the factor of chosen slices of the momentum.
          pairs: gradient and momentum of each.
        """
        rows = self.selected(ready.leaves)
        ends = [row.end(move) for row, move in zip(rows, ready.moves, strict=True)]
        compact = [i for i, row in enumerate(rows) if row.axis is not None]
        sent = [i for i in compact if ends[i] is ready.moves[i]]
        for i in sent:
            rows[i] = rows[i].sent_to(ends[i])
        picked = _on_blocks(_Select, [(row, row.whole.sharding) for row in rows], decay, pairs)
        x = [(formed,) for formed, *_ in picked]
        found = run([row.leaf for row in rows], elementwise=_AS_IT_IS, scalars=(decay,), operands=x)
        moved = [
            place(
                [found[i][0], picked[i][2]],
                [rows[i].sharding(ends[i]), rows[i].places_sharding(ends[i])],
            )
            if i in sent
            else (found[i][0], picked[i][2])
            for i in compact
        ]
        scattered = _on_blocks(_Scatter, [(rows[i], ends[i]) for i in compact], decay, moved)
        results = [result for (result,) in found]
        for i, (result,) in zip(compact, scattered, strict=True):
            results[i] = result
        return [(x, new) for x, (_, new, _) in zip(results, picked, strict=True)]


# What is orthogonalised is formed before.
_AS_IT_IS = Elementwise(prepare=lambda scalars, x: x, keep=lambda scalars, x: ())


@dataclasses.dataclass(frozen=True)
class _Select:
    """Adds gradients to the momentum, and takes the largest slices; on one device."""

    rows: tuple[tuple[SelectedLeaf, LeafSharding], ...]

    def ins(self) -> list[tuple[LeafSharding, ...]]:
        """How operands are sharded."""
        return [(sharding, sharding) for _, sharding in self.rows]

    def outs(self) -> list[tuple[LeafSharding | None, ...]]:
        """How results are sharded."""
        return [
            (
                row.sharding(sharding),
                sharding,
                None if row.axis is None else row.places_sharding(_of_places(row, sharding)),
            )
            for row, sharding in self.rows
        ]

    def __call__(self, decay: jax.Array, pairs: Sequence[Arrays]) -> list[tuple]:
        """The matrices to orthogonalise, the new momentum, and the places of a leaf's slices."""
        leaves = [dataclasses.replace(row.whole, sharding=sharding) for row, sharding in self.rows]
        new = [_sum(*pair) for pair in pairs]
        rows = zip(self.rows, leaves, pairs, new, self._chosen(leaves, new), strict=True)
        return [_picked(row, leaf, decay, old, x, of) for (row, _), leaf, (_, old), x, of in rows]

    def _chosen(
        self, leaves: Sequence[BoundLeaf], new: Sequence[jax.Array]
    ) -> list[dict[SliceRole, Chosen]]:
        """For each leaf its chosen slices, by role; none where all slices are."""
        keys: list[tuple[int, SliceRole]] = [
            (i, role)
            for i, (row, _) in enumerate(self.rows)
            if not row.selects_all
            for role in row.used_roles
        ]
        norms = [_norms(self.rows[i][0], leaves[i], role) for i, role in keys]
        scores = all_sums(
            [(sums, jnp.abs(new[i])) for sums, (i, _) in zip(norms, keys, strict=True)]
        )
        scored = list(zip(keys, scores, strict=True))
        lines = [self.rows[i][0].lines(norms, role) for (i, role), norms in scored]
        found = iter(largest_of_each([line for of_leaf in lines for line in of_leaf]))
        chosen: list[dict[SliceRole, Chosen]] = [{} for _ in leaves]
        for ((i, role), norms), of_leaf in zip(scored, lines, strict=True):
            mine = [next(found) for _ in of_leaf]
            chosen[i][role] = self.rows[i][0].choice(mine, norms.shape, role)
        return chosen


def _norms(row: SelectedLeaf, leaf: BoundLeaf, role: SliceRole) -> WholeSums:
    """L1 norms, from absolute values, of all slices along a role."""
    sums = MatrixSums(leaf, (_OTHER[role],))
    every = tuple(range(len(leaf.shape)))
    return WholeSums(sums, every if row.is_chosen_everywhere else leaf.view.stack_axes)


def _of_places(row: SelectedLeaf, sharding: LeafSharding) -> LeafSharding:
    """The mesh axes that shard the places of slices that a device chooses."""
    every = tuple(a for axes in sharding.type_key for a in axes)
    return sharding.without(every) if row.is_chosen_everywhere else sharding


def _picked(
    row: SelectedLeaf,
    leaf: BoundLeaf,
    decay: jax.Array,
    old: jax.Array,
    new: jax.Array,
    chosen: dict[SliceRole, Chosen],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    decayed = (decay.astype(new.dtype) * new).astype(old.dtype)
    if row.selects_all:
        return new.astype(row.leaf.dtype), decayed, None
    own: dict[SliceRole, Chosen] = {
        role: row.blocks_of(found, leaf.sharding) for role, found in chosen.items()
    }
    mask = _mask(row, leaf, own)
    kept = jnp.where(mask, decayed, new.astype(old.dtype))
    x = new.astype(row.leaf.dtype)
    if row.axis is None:
        return jnp.where(mask, x, 0), kept, None
    (only,), (mine,) = chosen.values(), own.values()
    assert mine.indices is not None
    return row.gather(x, mine.indices), kept, only.places


def _mask(row: SelectedLeaf, leaf: BoundLeaf, chosen: dict[SliceRole, Chosen]) -> jax.Array:
    """Whether each entry of a device's block is in a slice that is chosen, to be broadcast."""
    masks = {}
    for role, found in chosen.items():
        mask = found.places >= 0
        for dim in row.axes(role):
            mask = _block_along(leaf.sharding, mask, dim)
        sums = MatrixSums(leaf, (_OTHER[role],))
        masks[role] = sums.broadcast(mask.astype(jnp.float32)) > 0
    if len(masks) == 1:
        return next(iter(masks.values()))
    # Fused blocks, of which some are longer along the outputs.
    of_outputs = [role == "output" for role in row.roles]
    has_outputs = leaf.sharding.block_of(jnp.asarray(row.view.per_block(of_outputs)))
    return jnp.where(has_outputs, masks["output"], masks["input"])


@dataclasses.dataclass(frozen=True)
class _Scatter:
    """Puts the results of chosen slices between zeros; on one device."""

    rows: tuple[tuple[SelectedLeaf, LeafSharding], ...]

    def ins(self) -> list[tuple[LeafSharding, ...]]:
        """How operands are sharded."""
        return [(row.sharding(end), row.places_sharding(end)) for row, end in self.rows]

    def outs(self) -> list[tuple[LeafSharding | None, ...]]:
        """How results are sharded."""
        return [(end,) for _, end in self.rows]

    def __call__(self, decay: jax.Array, pairs: Sequence[Arrays]) -> list[tuple]:
        """The leaves with zeros."""
        del decay
        rows = zip(self.rows, pairs, strict=True)
        return [(row.scatter(x, places),) for (row, _), (x, places) in rows]


_Program = type[_Select] | type[_Scatter]


def _on_blocks(
    program: _Program,
    rows: Sequence[tuple[SelectedLeaf, LeafSharding]],
    decay: jax.Array,
    operands: Sequence[Arrays],
) -> list[tuple]:
    """Runs a program on each device's blocks, which have all that is chosen, taken and put back.

    The partitioner would gather matrices for indices that depend on data, and Explicit mesh axes
    know no such gather.
    """
    groups: dict[Any, list[int]] = {}
    for i, (_, sharding) in enumerate(rows):
        groups.setdefault((sharding.mesh, sharding.axes_to_map()), []).append(i)
    results: dict[int, tuple] = {}
    for (mesh, axes), members in groups.items():
        mine = [operands[i] for i in members]
        made = program(tuple(rows[i] for i in members))
        if axes:
            mine = [
                tuple(on_mesh_of(s, x) for s, x in zip(pair, xs, strict=True))
                for pair, xs in zip(made.ins(), mine, strict=True)
            ]
        results |= dict(zip(members, _compiled(made, mesh, axes, decay, mine), strict=True))
    return [results[i] for i in range(len(rows))]


def _over_mesh(
    program: _Select | _Scatter, mesh: Any, axes: frozenset[str], decay: jax.Array, operands: Any
) -> list[tuple]:
    if not axes:
        return program(decay, operands)
    spec = lambda sharding: sharding and sharding.partition_spec  # noqa: E731
    ins, outs = (
        [tuple(map(spec, shardings)) for shardings in rows]
        for rows in (program.ins(), program.outs())
    )
    rows = [
        (row, dataclasses.replace(sharding, manual=(*sharding.manual, *axes)))
        for row, sharding in program.rows
    ]
    return jax.shard_map(
        type(program)(tuple(rows)),
        mesh=mesh,
        in_specs=(jax.sharding.PartitionSpec(), ins),
        out_specs=outs,
        axis_names=set(axes),
    )(decay, operands)


# As in `sharding.runtime.pipeline`: a shard_map outside of `jit` would be compiled in every step.
_compiled = jax.jit(_over_mesh, static_argnums=(0, 1, 2), inline=True)


def _sum(grad: jax.Array, momentum: jax.Array) -> jax.Array:
    dtype = wide_dtype(grad.dtype, momentum.dtype)
    return momentum.astype(dtype) + grad.astype(dtype)


def _block_along(sharding: LeafSharding, x: jax.Array, dim: int) -> jax.Array:
    """This device's block along one dim of an array that is whole along it."""
    axes = sharding.manual_axes_of([dim])
    if not axes:
        return x
    size = x.shape[dim] // sharding.count(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, dim)
