"""All-to-all to groups of devices, each of which owns a matrix together.

Where there are more devices than matrices, owners that are single devices leave others idle, and
all wait for the largest matrix. The devices of a group each receive a part of a matrix's long side.
In every step they sum their Gram matrices, and each computes the same factor of the sum.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from muon_optax.orthogonalization import GramCollectives, NewtonSchulz
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.strategies.all_to_all import AllToAll
from muon_optax.sharding.strategies.base import Strategy
from muon_optax.sharding.strategies.flat_exchange import FlatExchange
from muon_optax.sharding.strategies.group_sums import DeviceGroups, add, maximum
from muon_optax.sharding.strategies.sharded_matrices import ShardedMatrices, axis_to_cut
from muon_optax.sharding.strategies.triangle import triangle_entries

__all__ = ["GroupExchange", "Groups"]


@dataclasses.dataclass(frozen=True)
class Groups(AllToAll):
    """As all_to_all, with groups of g neighbours for owners.

    A round has N/g matrices, over N shards. For m x n, m <= n, with b bytes an element, each device
    receives 2 mn b/g (N - 1)/N bytes of slices. By T steps of the standard method it receives
    T log2(g) 9/16 m^2 s bytes from the others of its group, as triangles of Gram matrices are sent
    with s bytes an entry, and does T (4 m^2 n/g + 2 m^3) FLOPs. The Gram method sums once for each
    of its passes, and divides its matmuls with X by g.

    Attributes:
      group_size: g, the number of devices in a group, a power of two.
      method: that of the iteration, one for all matrices of a round, as all groups take part in the
        same sums.
    """

    group_size: int
    method: Literal["standard", "gram"] = "standard"

    name = "groups"
    needs_newton_schulz = True

    def why_impossible(self, leaf: BoundLeaf, newton_schulz: NewtonSchulz | None) -> str | None:
        view, shards = leaf.view, leaf.sharding.count(leaf.shard_axes)
        if newton_schulz is None:
            return "a function of the user's needs whole matrices"
        if len(view.block_sizes) > 1 or view.tiles != (1, 1) or view.nonzero:
            return "blocks are cut from whole matrices"
        if shards == 1 or shards % self.group_size:
            return f"the devices must be whole groups of {self.group_size}"
        if axis_to_cut(leaf, self.group_size) is None:
            return f"slices can't be cut in {self.group_size} along the long side"
        return None

    def received_bytes(self, count: int, workload: Workload) -> int:
        each = 2 * workload.slice_bytes * (workload.shards - 1) // self.group_size
        return self._rounds(count, workload) * each

    def gathered_bytes(self, count: int, workload: Workload) -> int:
        return Strategy.gathered_bytes(self, count, workload)

    def summed_bytes(self, count: int, workload: Workload) -> int:
        """The triangles of Gram matrices, and the scalars once.

        With each triangle in float16 goes its scale, in float32.
        """
        itemsize = workload.sent_gram_itemsize
        triangle = triangle_entries(workload.rows) * itemsize + (4 if itemsize < 4 else 0)
        sent = self._sums(workload) * triangle + sum(workload.sent_scalars)
        return self._rounds(count, workload) * self._exchanges * sent

    def padded_workload(self, one: Workload, other: Workload) -> Workload:
        return dataclasses.replace(
            one,
            rows=max(one.rows, other.rows),
            columns=max(one.columns, other.columns),
            sent_elements=max(one.matrix_bytes, other.matrix_bytes) // one.itemsize,
        )

    def flops(self, count: int, workload: Workload) -> int:
        m, n, iteration = workload.rows, workload.columns, workload.newton_schulz
        assert iteration is not None
        if self.method == "gram":
            with_slices, steps = iteration.gram_flops(m, n, is_half=workload.itemsize < 4)
            each = with_slices // self.group_size + steps
        else:
            each = len(workload.schedule.rows) * (4 * m**2 * n // self.group_size + 2 * m**3)
        return self._rounds(count, workload) * each

    def collectives(self, count: int, workload: Workload) -> int:
        each = 1 if workload.sent_gram_itemsize >= 4 else 2  # the triangle, and its scale
        exchanged = self._sums(workload) * each + len(workload.sent_scalars)
        return 2 + bool(workload.gathered_axes) + self._exchanges * exchanged

    def round_size(self, workload: Workload) -> int:
        return workload.owners // self.group_size

    def reason(self, leaf: BoundLeaf, count: int, workload: Workload) -> str:
        matrices = "matrix" if count == 1 else "matrices"
        groups = self.round_size(workload)
        owners = f"{groups} group{'s' * (groups > 1)} of {self.group_size} devices"
        return f"{count} {matrices} for {owners}, which split each"

    def receive(self, matrices: ShardedMatrices, x: jax.Array) -> jax.Array:
        return self.shared((matrices,)).receive((x,))

    def orthogonalize(
        self, matrices: ShardedMatrices, x: jax.Array, orthogonalizer: Orthogonalizer
    ) -> jax.Array:
        return self.shared((matrices,)).orthogonalize(x, orthogonalizer)

    def send(self, matrices: ShardedMatrices, y: jax.Array) -> jax.Array:
        return self.shared((matrices,)).send(y)[0]

    def shared(self, kinds: tuple[ShardedMatrices, ...]) -> "GroupExchange":
        return GroupExchange(kinds, self.method)

    @property
    def _exchanges(self) -> int:
        """Exchanges of an all-reduce over a group: log2(g)."""
        return self.group_size.bit_length() - 1

    def _rounds(self, count: int, workload: Workload) -> int:
        return -(-count * self.group_size // workload.shards)

    def _sums(self, workload: Workload) -> int:
        """How many Gram matrices are summed over a group for one matrix."""
        schedule = workload.schedule
        return schedule.passes if self.method == "gram" else len(schedule.rows)


@dataclasses.dataclass(frozen=True)
class GroupExchange(FlatExchange):
    """Kinds of matrices that groups of devices get at once.

    No collective may be in a branch that other groups don't take, and the sums over groups are in
    the middle of the iteration. So all devices iterate on matrices of the largest sizes, padded
    with zero rows and columns, which Newton-Schulz keeps zero. Only cutting the flat slices before
    and after is a branch. Devices without a matrix iterate on zeros.

    Attributes:
      method: as of `Groups`.
    """

    method: Literal["standard", "gram"]

    def orthogonalize(self, x: jax.Array, orthogonalizer: Orthogonalizer) -> jax.Array:
        """Orthogonalises this device's part of the matrix of its group."""
        iteration, first = orthogonalizer.newton_schulz, self._first
        assert iteration is not None
        dtype = iteration.sent_gram_dtype(self.method, x.dtype)
        groups = DeviceGroups(first.leaf.shard_axes, first.shards, first.group_size)
        collectives = GramCollectives(
            maximum=lambda v: groups.all_reduce(jax.lax.stop_gradient(v), maximum),
            reduce=lambda a: groups.all_reduce_gram(a, dtype),
        )
        wide = self._by_kind(self._wide, x)
        y = orthogonalizer.slices(
            wide, -1, collectives, lambda v: groups.all_reduce(v, add), self.method
        )
        return self._by_kind(self._flat, y)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Rows and columns to which the parts of all kinds are padded, each the largest."""
        sizes = [_wide_sizes(kind) for kind in self.kinds]
        return max(m for m, _ in sizes), max(n for _, n in sizes)

    def _wide(self, kind: ShardedMatrices, x: jax.Array) -> jax.Array:
        """Flat slices (shards, longest) -> a part of the matrix, its long side second."""
        slices = x[:, : math.prod(kind.part.block)].reshape(kind.shards, 1, *kind.part.block)
        (parts,) = kind.part.leaf.view.split_stack(kind.part.assemble(slices))
        wide = parts[0].T if _is_tall(kind) else parts[0]
        missing = (size - own for size, own in zip(self._sizes, wide.shape, strict=True))
        return jnp.pad(wide, [(0, n) for n in missing])

    def _flat(self, kind: ShardedMatrices, y: jax.Array) -> jax.Array:
        """Undoes `_wide`."""
        m, n = _wide_sizes(kind)
        part = y[:m, :n].T if _is_tall(kind) else y[:m, :n]
        whole = kind.part.leaf.view.merge_stack([part[None]])
        return self._padded(kind.part.disassemble(whole).reshape(kind.shards, -1))


def _is_tall(kind: ShardedMatrices) -> bool:
    return kind.leaf.view.fan_in > kind.leaf.view.fan_out


def _wide_sizes(kind: ShardedMatrices) -> tuple[int, int]:
    """Rows and columns of the part of a matrix that a device gets, its long side second."""
    m, n = sorted((kind.leaf.view.fan_in, kind.leaf.view.fan_out))
    return m, n // kind.group_size
