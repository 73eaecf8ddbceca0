"""The record of one leaf: all that inner functions need to know of it, read once at the door."""

import dataclasses

from muon_optax._internal.tree_paths import Segments, path_name
from muon_optax.orthogonalization import NewtonSchulz
from muon_optax.sharding.declared import Axes, Declared
from muon_optax.sharding.specs import LeafSharding
from muon_optax.views.matrix_view import BoundView

__all__ = ["BoundLeaf"]


@dataclasses.dataclass(frozen=True)
class BoundLeaf:
    """A leaf with its view and its sharding.

    Attributes:
      segments: its path.
      view: how it makes matrices.
      sharding: how it is sharded: as bound, like its parameter; as planned, where it is worked on.
      dtype: the dtype of collectives and matmuls, by name.
      strategy: 'auto', or the strategy that the user asks for.
      result_sharding: how the results are sharded, if over fewer mesh axes, as under ZeRO-1: they
        are all-gathered along the others.
      param_sharding: the declared sharding of the parameter.
      mu_sharding: the declared sharding of its momentum, if that is another.
      is_mu_on_host: whether its momentum is declared to be in host memory.
    """

    segments: Segments
    view: BoundView
    sharding: LeafSharding
    dtype: str
    strategy: str = "auto"
    result_sharding: LeafSharding | None = None
    param_sharding: Declared = None
    mu_sharding: Declared = None
    is_mu_on_host: bool = False

    @property
    def path(self) -> str:
        """The path as text."""
        return path_name(self.segments)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole leaf."""
        return self.sharding.shape

    @property
    def batch_axes(self) -> Axes:
        """Mesh axes that shard the batch dims: whole matrices are on one device."""
        return self.sharding.axes_of(self.view.batch_axes)

    @property
    def shard_axes(self) -> Axes:
        """Mesh axes that shard matrices."""
        return self.sharding.axes_of(self.view.stack_axes)

    @property
    def gathered_axes(self) -> Axes:
        """Mesh axes that shard matrices, and along which results are all-gathered."""
        kept = (self.result_sharding or self.sharding).axes_of(self.view.stack_axes)
        return tuple(a for a in self.shard_axes if a not in kept)

    @property
    def count(self) -> int:
        """Matrices that a device has a slice of, or whole."""
        return self.view.batch // self.sharding.count(self.batch_axes)

    @property
    def sides(self) -> tuple[tuple[int, Axes], ...]:
        """Size and mesh axes of each dim of a stacked matrix."""
        axes = self.view.stack_axes
        return tuple((self.shape[a], self.sharding.type_key[a]) for a in axes)

    @property
    def key(self) -> tuple:
        """Equal for leaves that are handled together: all but the sizes of batch axes."""
        return (self.view.matrix_key, self.sides, *self._rest_of_key)

    @property
    def round_key(self) -> tuple:
        """Equal for leaves whose matrices may be sent at once, whatever their shapes."""
        # Results of one array vary over all its axes, those of size 1 too, by their type.
        axes = frozenset(a for _, side in self.sides for a in side)
        return (self.shard_axes, axes, *self._rest_of_key)

    def key_or_transposed(self, newton_schulz: NewtonSchulz | None) -> tuple:
        """Equal for leaves, too, whose transposes are sharded as this one is.

        Under FSDP x TP, query and output projections are such leaves. They can be handled together,
        since the transpose's polar factor is the polar factor's transpose.
        """
        if not self._may_be_transposed(newton_schulz):
            return self.key
        return (tuple(sorted(self.sides)), *self._rest_of_key)

    @property
    def _rest_of_key(self) -> tuple:
        sharding = self.sharding
        batch = frozenset(x for a in self.view.batch_axes for x in sharding.type_key[a])
        of_sharding = (sharding.mesh, batch, sharding.free, sharding.manual, sharding.is_known)
        return (*of_sharding, self.dtype, self.strategy, self.gathered_axes)

    def _may_be_transposed(self, newton_schulz: NewtonSchulz | None) -> bool:
        """Whether its transposes may be orthogonalised instead, and could be of use."""
        # AOL norms are those of rows, and a user's function may do anything.
        is_symmetric = newton_schulz is not None and newton_schulz.schedule.preconditioning != "aol"
        view = self.view
        is_cut = len(view.block_sizes) > 1 or view.tiles != (1, 1) or bool(view.nonzero)
        is_plain = len(self.sides) == 2 and not is_cut
        return is_symmetric and is_plain and bool(self.shard_axes)
