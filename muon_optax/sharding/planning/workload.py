"""The sizes that a bucket's cost depends on."""

import dataclasses
from typing import Literal

from muon_optax.orthogonalization import NewtonSchulz, Schedule

__all__ = ["Workload"]


@dataclasses.dataclass(frozen=True)
class Workload:
    """Matrices of one shape and sharding, of any number.

    Attributes:
      rows, columns: m <= n of one (fused) matrix.
      itemsize: bytes of an element in collectives.
      flops: FLOPs to orthogonalise one matrix.
      shard_axes: mesh axes that shard a matrix.
      replica_axes: mesh axes whose replicas divide the matrices.
      sizes: size of each mesh axis, as pairs in the mesh's order.
      newton_schulz: the iteration that runs; None for a function of the user's.
      gathered_axes: those of `shard_axes` along which results are all-gathered.
      method: the method of the iteration for a matrix of this shape.
      sent_gram_itemsize: bytes of an entry of the Gram matrices that groups of devices send; see
        `NewtonSchulz.sent_gram_dtype`.
      sent_scalars: bytes of each scalar of a matrix that groups of devices send: its largest entry
        and, with `adaptive`, its inner product with the result.
      sent_elements: elements that a matrix is padded to where it is sent, if not rows * columns.
    """

    rows: int
    columns: int
    itemsize: int
    flops: int
    shard_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    sizes: tuple[tuple[str, int], ...]
    newton_schulz: NewtonSchulz | None = None
    gathered_axes: tuple[str, ...] = ()
    method: Literal["standard", "gram"] = "standard"
    sent_gram_itemsize: int = 4
    sent_scalars: tuple[int, ...] = (4,)
    sent_elements: int | None = None

    def count(self, axes: tuple[str, ...]) -> int:
        """Number of devices along axes."""
        count = 1
        for axis, size in self.sizes:
            count *= size if axis in axes else 1
        return count

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one whole matrix in collectives."""
        return (self.sent_elements or self.rows * self.columns) * self.itemsize

    @property
    def result_bytes(self) -> int:
        """Bytes of one result as a device keeps it."""
        return self.matrix_bytes * self.count(self.gathered_axes) // self.shards

    @property
    def slice_bytes(self) -> int:
        """Bytes of one slice of a matrix."""
        return self.matrix_bytes // self.shards

    @property
    def schedule(self) -> Schedule:
        """The schedule of the iteration that runs."""
        assert self.newton_schulz is not None
        return self.newton_schulz.schedule

    @property
    def owners(self) -> int:
        """Devices that can each own a matrix."""
        return self.shards * self.replicas

    @property
    def shards(self) -> int:
        """N, the devices that a matrix is sharded over."""
        return self.count(self.shard_axes)

    def most_repeats(self, count: int) -> int:
        """How many replicas can work on each of so many matrices at most, and send equal parts.

        Example:
          >>> workload = Workload(6, 8, 4, 0, ("f",), ("r",), (("r", 16), ("f", 4)))
          >>> [workload.most_repeats(count) for count in (1, 3, 8, 9)]
          [12, 4, 2, 1]
        """
        elements = self.result_bytes // self.itemsize
        most = max(1, self.replicas // count)
        return next(n for n in range(most, 0, -1) if elements % n == 0)

    @property
    def replicas(self) -> int:
        """R, the devices that divide the work on replicated matrices."""
        return self.count(self.replica_axes)
