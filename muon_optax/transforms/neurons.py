"""NorMuon: each neuron's update is divided by the root of its second moment."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from muon_optax._internal.checks import check_choice, check_decay, check_flag, check_number
from muon_optax._internal.dtypes import scaled
from muon_optax.partition import Views
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.transforms.block_sums import all_sums
from muon_optax.transforms.matrix_sums import (
    MatrixSums,
    Role,
    WholeSums,
    quotient,
    squares,
    sums_across,
    sums_and_moments,
)
from muon_optax.transforms.moments import holds_moments
from muon_optax.transforms.stage import Leaves, MatrixTransformation, Stage
from muon_optax.transforms.standalone import (
    check_state_type,
    moments_of,
    moving_average,
    restored,
    standalone,
    zero_sums,
)
from muon_optax.views.matrix_view import BoundView

__all__ = ["NeuronGuard", "NeuronState", "Neurons", "scale_by_neuron"]

Neurons = Literal["output", "longer"]
NeuronGuard = Literal["root", "clamp"]
# Second moments are kept along one role and averaged over the other.
_OTHER: dict[Role, Role] = {"output": "reduction", "reduction": "output"}


@holds_moments("nu", "nu_input")
class NeuronState(NamedTuple):
    """Second moments of NorMuon, in float32 at least.

    Attributes:
      nu: of output neurons. For each leaf an array with the leaf's dims, the reduction axes as 1;
        where blocks are fused along those, a last dim has an entry for each block.
      nu_input: of inputs, likewise, with the output axes as 1; None unless moments are kept for the
        longer side. Leaves that have no use for one of the two have `optax.MaskedNode` there.

    Example:
      >>> state = scale_by_neuron(each="longer").init({"wide": jnp.ones((8, 4))})
      >>> state.nu, state.nu_input["wide"].shape
      ({'wide': MaskedNode()}, (8, 1))
    """

    nu: optax.Updates
    nu_input: optax.Updates | None


def scale_by_neuron(
    beta2: jax.typing.ArrayLike = 0.95,
    eps: jax.typing.ArrayLike = 1e-8,
    *,
    each: Neurons = "output",
    restore: Literal["norm"] | float | None = "norm",
    guard: NeuronGuard = "root",
    skip_zeros: bool = False,
    weight_dimension_numbers: Views = None,
    param_shardings: Any = None,
) -> MatrixTransformation:
    """NorMuon (arXiv 2510.05491): divides each neuron by the root of its second moment.

    Stands between orthogonalisation and the scale by shape. For each matrix, the mean square of
    each neuron's update enters a moving average nu; the update is divided by its root, and brought
    back to the Frobenius norm that it had. Each fused block is a matrix. There is no bias
    correction, since the norm that is brought back undoes a common factor.

    The defaults are those of the paper's authors and of Dion. Emerging-Optimizers and the speedrun
    of modded-nanogpt use `each='longer', guard='clamp'`.

    Args:
      beta2: decay rate of the second moment, in [0, 1).
      eps: keeps the divisor from zero.
      each: each of these has a second moment: each 'output' neuron, or each place of the 'longer'
        side (of outputs where both are equal).
      restore: the size that each matrix is brought back to: 'norm', its Frobenius norm before; a
        number, the root mean square of its entries (0.2 in the paper); None, nothing.
      guard: divide by sqrt(nu) + eps, 'root', or by sqrt(max(nu, eps)), 'clamp'.
      skip_zeros: neurons whose whole update is zero keep their second moment, where it would decay.
        For NorDion2: those that Dion2 doesn't choose have such updates. One that is chosen with a
        momentum of zero keeps its moment too, as it has nothing to add to it.
      weight_dimension_numbers: as in `orthogonalize`.
      param_shardings: as in `orthogonalize`; needed inside a shard_map.

    Returns:
      A transformation with a `NeuronState`. Updates keep their dtype, and are formed in float32 at
      least. Zero updates stay zero.

    Raises:
      ValueError, TypeError: for options out of range; at `init`, for leaves that make no matrix.

    Example:
      >>> tx = scale_by_neuron(each="output", restore=1.0)
      >>> direction = jnp.array([[3.0, 1.0], [3.0, 1.0]])  # [fan-in, fan-out]
      >>> tx.update(direction, tx.init(direction))[0].round(3).tolist()
      [[1.0, 1.0], [1.0, 1.0]]
    """
    check_decay("beta2", beta2)
    check_decay("eps", eps, below=np.inf)
    check_choice("each", each, get_args(Neurons))
    check_choice("guard", guard, get_args(NeuronGuard))
    check_flag("skip_zeros", skip_zeros)
    if isinstance(restore, str):
        check_choice("restore", restore, ("norm",))
    elif restore is not None:
        check_number("restore", restore)
    scaling = _NeuronScaling(beta2, eps, each, restore, guard, skip_zeros)
    return standalone(
        Stage(scaling.init, scaling.update), weight_dimension_numbers, param_shardings
    )


@dataclasses.dataclass(frozen=True)
class _NeuronScaling:
    """The arguments of `scale_by_neuron`, once checked."""

    beta2: jax.typing.ArrayLike
    eps: jax.typing.ArrayLike
    each: Neurons
    restore: Any
    guard: NeuronGuard
    skip_zeros: bool

    def init(self, params: Any, leaves: Leaves) -> NeuronState:
        arrays, treedef = jax.tree.flatten(params)

        def zeros(role: Role) -> Any:
            rows = zip(leaves, arrays, strict=True)
            return treedef.unflatten(
                [
                    zero_sums(_averaged(leaf, role), x)
                    if role in self._roles(leaf.view)
                    else optax.MaskedNode()
                    for leaf, x in rows
                ]
            )

        return NeuronState(zeros("output"), zeros("reduction") if self.each == "longer" else None)

    def update(
        self, updates: Any, state: Any, params: Any, leaves: Leaves, **extra_args: Any
    ) -> tuple[Any, NeuronState]:
        del params, extra_args
        check_state_type(state, NeuronState)
        arrays, treedef = jax.tree.flatten(updates)
        rows = list(zip(leaves, arrays, strict=True))
        moments: dict[Role, list] = {}
        trees: dict[Role, Any] = {"output": state.nu, "reduction": state.nu_input}
        for role, tree in trees.items():
            shapes = [
                _averaged(leaf, role).shape(x.shape) if role in self._roles(leaf.view) else None
                for leaf, x in rows
            ]
            moments[role] = moments_of(tree, updates, shapes)
        factors: list[dict[Role, jax.Array]] = [{} for _ in rows]
        for (i, role), factor, nu in self._factors(rows, moments):
            factors[i][role], moments[role][i] = factor, nu
        results = [
            scaled(x, self._joined(leaf, of_leaf))
            for (leaf, x), of_leaf in zip(rows, factors, strict=True)
        ]
        nu = restored(moments["output"], updates, state.nu)
        nu_input = restored(moments["reduction"], updates, state.nu_input)
        return treedef.unflatten(results), NeuronState(nu, nu_input)

    def _roles(self, view: BoundView) -> dict[Role, list[bool]]:
        """The roles along which a leaf has moments, and which of its blocks have them there."""
        is_output = [self.each == "output" or n >= m for _, m, n in view.matrices]
        by_role: dict[Role, list[bool]] = {
            "output": is_output,
            "reduction": [not x for x in is_output],
        }
        return {role: blocks for role, blocks in by_role.items() if any(blocks)}

    def _factors(
        self, rows: list[tuple[BoundLeaf, jax.Array]], moments: dict[Role, list]
    ) -> Iterator[tuple[tuple[int, Role], jax.Array, jax.Array]]:
        """For each leaf and role, its factor and its new moments."""
        keys: list[tuple[int, Role]] = [
            (i, role) for i, (leaf, _) in enumerate(rows) for role in self._roles(leaf.view)
        ]
        averaged = [_averaged(rows[i][0], role) for i, role in keys]
        asked = sums_across(averaged, of_norms=self.restore is not None)
        summed, old = sums_and_moments(
            asked,
            [(squares(rows[i][1]),) for i, _ in keys],
            [moments[role][i] for i, role in keys],
        )
        of_neurons = [squared for (squared,) in summed]
        new = list(map(self._averages, averaged, old, of_neurons))
        gains = [quotient(1, self._divisor(nu)) for nu in new]
        if self.restore is not None:
            pairs = zip(asked, keys, strict=True)
            rest = [MatrixSums(found.result_leaf, (role,)) for found, (_, role) in pairs]
            gains = self._restored(rest, of_neurons, gains)
        for key, sums, found, gain, nu in zip(keys, averaged, asked, gains, new, strict=True):
            own = gain, nu
            if isinstance(found, WholeSums):
                own = found.blocks_of(gain), found.blocks_of(nu)
            yield key, sums.broadcast(own[0]), own[1]

    def _averages(self, sums: MatrixSums, old: jax.Array, squared: jax.Array) -> jax.Array:
        """The second moments after this update."""
        nu = moving_average(self.beta2, old, squared / sums.counts.astype(old.dtype))
        return jnp.where(squared == 0, old, nu) if self.skip_zeros else nu

    def _divisor(self, nu: jax.Array) -> jax.Array:
        """The divisors of neurons."""
        eps = jnp.asarray(self.eps, nu.dtype)
        return jnp.sqrt(nu) + eps if self.guard == "root" else jnp.sqrt(jnp.maximum(nu, eps))

    def _restored(
        self, rest: list[MatrixSums], of_neurons: list[jax.Array], gains: list[jax.Array]
    ) -> list[jax.Array]:
        """Gains that give each matrix the norm that is wanted."""
        # The matrix's sum of squares is that of its neurons', which is less to send.
        rows = list(zip(rest, of_neurons, gains, strict=True))
        after = [(sums, squared * gain**2) for sums, squared, gain in rows]
        before = [(sums, squared) for sums, squared, _ in rows]
        is_norm = isinstance(self.restore, str)
        found = all_sums([*after, *before] if is_norm else after)
        results = []
        for i, (sums, _, gain) in enumerate(rows):
            got = found[i]
            wanted = found[len(rows) + i] if is_norm else self._squares_wanted(sums.leaf, got)
            results.append(gain * sums.broadcast(jnp.sqrt(quotient(wanted, got))))
        return results

    def _joined(self, leaf: BoundLeaf, factors: dict[Role, jax.Array]) -> jax.Array:
        """A leaf's factor, of those along each role."""
        if len(factors) == 1:
            return next(iter(factors.values()))
        # Fused blocks, of which some are longer along the outputs.
        has_output = jnp.asarray(leaf.view.per_block(self._roles(leaf.view)["output"]))
        has_output = leaf.sharding.block_of(has_output)
        return jnp.where(has_output, factors["output"], factors["reduction"])

    def _squares_wanted(self, leaf: BoundLeaf, like: jax.Array) -> jax.Array:
        rms = jnp.asarray(self.restore, like.dtype)
        return rms**2 * MatrixSums(leaf).counts.astype(like.dtype)


def _averaged(leaf: BoundLeaf, role: Role) -> MatrixSums:
    """Sums over all that a second moment of this role averages over."""
    return MatrixSums(leaf, (_OTHER[role],))
