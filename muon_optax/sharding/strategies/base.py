"""The interface of a strategy."""

import abc
from typing import ClassVar

import jax

from muon_optax.orthogonalization import NewtonSchulz
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.runtime.orthogonalizer import Orthogonalizer
from muon_optax.sharding.strategies.flat_exchange import FlatExchange
from muon_optax.sharding.strategies.sharded_matrices import ShardedMatrices

__all__ = ["Strategy"]


class Strategy(abc.ABC):
    """One way to bring sharded matrices together, orthogonalise them and re-shard the results.

    The planner asks whether it is possible and what it costs. The pipeline then runs `pick`,
    `receive`, `orthogonalize` and `send` on each chunk of matrices, inside a shard_map: `receive`
    and `send` hold the collectives, whose bytes `received_bytes` counts.

    Attributes:
      name: as users ask for it and tables show it.
      has_owners: whether each matrix has an owner, a device or a group of devices that alone work
        on it. Matrices then go in rounds of one for each owner, and the remainder may go another
        way.
      shares_rounds: whether matrices of several shapes can be in one round of owners, by `shared`.
      communicates: whether anything is sent. Only then can replicas divide the work.
      needs_newton_schulz: whether it takes Newton-Schulz apart, so that no other function of
        matrices can be used.
      copies_held: for each matrix that a device works on, how many of its size it holds at once:
        as slices and whole, before and after, or one where results replace their input.
      group_size: how many devices own a matrix together. Above 1, they need collectives in the
        middle of the work, in which all devices must take part: each works on a matrix that is
        padded to the largest sizes of its round, or on zeros.
    """

    name: ClassVar[str]
    has_owners: ClassVar[bool] = False
    shares_rounds: ClassVar[bool] = False
    communicates: ClassVar[bool] = True
    needs_newton_schulz: ClassVar[bool] = False
    copies_held: ClassVar[int] = 4
    group_size: int = 1

    # Planning

    def why_impossible(self, leaf: BoundLeaf, newton_schulz: NewtonSchulz | None) -> str | None:
        """Why a leaf can't be handled so; None where it can.

        Args:
          leaf: the leaf.
          newton_schulz: the iteration that runs; None for a function of the user's.
        """
        return None

    def is_candidate(self, leaf: BoundLeaf, workload: Workload) -> bool:
        """Whether 'auto' weighs it: where it isn't another strategy with more overhead."""
        return workload.shards > 1

    @abc.abstractmethod
    def received_bytes(self, count: int, workload: Workload) -> int:
        """Bytes that a device receives from the other shards, for `count` matrices of a replica."""

    def gathered_bytes(self, count: int, workload: Workload) -> int:
        """Bytes that it receives, besides, of results that are sharded over fewer axes."""
        return count * (workload.result_bytes - workload.slice_bytes)

    def summed_bytes(self, count: int, workload: Workload) -> int:
        """Bytes that a device receives from the others of its group, for `count` of a replica."""
        return 0

    def padded_workload(self, one: Workload, other: Workload) -> Workload:
        """The workload of the sizes to which matrices of two shapes are padded in one round."""
        return one if one.matrix_bytes >= other.matrix_bytes else other

    def least_workspace(self, matrix_bytes: int) -> int:
        """Bytes of workspace on a device that works on one matrix at a time.

        The chunks before and after, which are on their way, take a copy each.
        """
        return (self.copies_held + 2) * matrix_bytes // self.group_size

    @abc.abstractmethod
    def flops(self, count: int, workload: Workload) -> int:
        """FLOPs of the busiest device, for `count` matrices of a replica."""

    @abc.abstractmethod
    def collectives(self, count: int, workload: Workload) -> int:
        """Collectives among the shards, each of which costs a latency."""

    @abc.abstractmethod
    def round_size(self, workload: Workload) -> int:
        """Matrices in a chunk of which a device works on one at a time."""

    @abc.abstractmethod
    def reason(self, leaf: BoundLeaf, count: int, workload: Workload) -> str:
        """Why it is taken, for the plan's table."""

    # Running, on one device

    def pick(self, matrices: ShardedMatrices, x: jax.Array) -> jax.Array:
        """Slices (count, *block) -> those that this device's replica works on."""
        return matrices.own(x)

    def receive(self, matrices: ShardedMatrices, x: jax.Array) -> jax.Array:
        """Runs the collectives that bring the picked slices to their owners."""
        return x

    def orthogonalize(
        self, matrices: ShardedMatrices, x: jax.Array, orthogonalizer: Orthogonalizer
    ) -> jax.Array:
        """Orthogonalises the received matrices."""
        return orthogonalizer.whole(x, matrices.leaf.view)

    @abc.abstractmethod
    def send(self, matrices: ShardedMatrices, y: jax.Array) -> jax.Array:
        """Undoes `receive` and `pick`: results (count, *block), as their leaves are sharded."""

    def shared(self, kinds: tuple[ShardedMatrices, ...]) -> FlatExchange:
        """How matrices of different shapes are received, orthogonalised and sent in one round.

        Args:
          kinds: the matrices of each shape, whose owners follow one another.
        """
        raise NotImplementedError(f"{self.name} has no rounds that are shared")
