"""Stages: the pieces of a step, on leaves that were bound once.

Muon's step is a list of named stages: momentum and orthogonalisation, a slot after it, the scale
by shape, weight decay, the learning rate, and a slot at the end. `muon` binds each leaf once, in
`init` and in `update`, and hands the records to all stages. A public piece is the same stage behind
a door of its own, which binds the leaves from the piece's own arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import optax

from muon_optax._internal.tree_paths import cast_like
from muon_optax.sharding.bound_leaf import BoundLeaf
from muon_optax.sharding.placement import keeping_placement
from muon_optax.transforms.wrappers import passing_over, summing, widened

__all__ = [
    "MatrixTransformation",
    "Stage",
    "as_stage",
    "bound_transformation",
    "in_order",
    "matrix_transformation",
    "slot_stage",
    "stage_in_float32",
]

Leaves = Sequence[BoundLeaf]


class Stage(NamedTuple):
    """One piece of a step.

    Attributes:
      init: (params, leaves) -> state.
      update: (updates, state, params, leaves, **extra_args) -> (updates, state).
      makes_steps: whether updates are added to the weights as they are, with the learning rate and
        the sign of a step down the gradient.

    Both functions get a record for each leaf of `params` or `updates`, in flattening order.
    """

    init: Callable[[Any, Leaves], Any]
    update: Callable[..., tuple[Any, Any]]
    makes_steps: bool = False


class MatrixTransformation(optax.GradientTransformationExtraArgs):
    """An optax transformation of matrices, which carries its stage.

    In a chain it binds leaves by its own arguments. Given to `muon`, its stage takes the records
    that `muon` has made, so that nothing is declared twice.

    Attributes:
      stage: its functions on bound leaves.
    """

    stage: Stage

    def __new__(cls, init: Any, update: Any, stage: Stage) -> "MatrixTransformation":
        """Makes the pair of functions that optax takes, and keeps the stage beside it."""
        self = super().__new__(cls, init, update)
        self.stage = stage
        return self


def matrix_transformation(stage: Stage, bind: Callable[[Any, Any], Leaves]) -> MatrixTransformation:
    """A stage as an optax transformation.

    Args:
      stage: the stage.
      bind: (parameters or updates, parameters or None) -> a record for each leaf of the first.

    Returns:
      The transformation.
    """

    def at(leaves: Leaves) -> optax.GradientTransformationExtraArgs:
        return summing(bound_transformation(stage, leaves))

    def init(params):
        return at(bind(params, params)).init(params)

    def update(updates, state, params=None, **extra_args):
        return at(bind(updates, params)).update(updates, state, params, **extra_args)

    whole = keeping_placement(passing_over(optax.GradientTransformationExtraArgs(init, update)))
    return MatrixTransformation(whole.init, whole.update, stage)


def bound_transformation(stage: Stage, leaves: Leaves) -> optax.GradientTransformationExtraArgs:
    """A stage as an optax transformation of leaves that are bound already."""

    def init(params):
        return stage.init(params, leaves)

    def update(updates, state, params=None, **extra_args):
        return stage.update(updates, state, params, leaves, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)


def as_stage(transformation: optax.GradientTransformation) -> Stage:
    """The stage that a transformation carries; any other transformation needs no records.

    Example:
      >>> stage = as_stage(optax.scale(2.0))
      >>> stage.update(3.0, stage.init(1.0, []), None, [])[0]
      6.0
    """
    if isinstance(transformation, MatrixTransformation):
        return transformation.stage
    inner = optax.with_extra_args_support(transformation)

    def init(params, leaves):
        del leaves
        return inner.init(params)

    def update(updates, state, params, leaves, **extra_args):
        del leaves
        return inner.update(updates, state, params, **extra_args)

    return Stage(init, update)


def slot_stage(
    name: str,
    given: optax.GradientTransformation | Sequence[optax.GradientTransformation] | None,
) -> Stage | None:
    """The stage of the transformations that a user gives for a slot of Muon's step.

    Args:
      name: the option's name, for messages.
      given: a transformation, or several, which updates pass from the first to the last. In an
        `optax.chain` they would be bound by their own arguments; here each takes the slot's
        records.

    Returns:
      The stage, whose state for several is a tuple of their states; None for none.

    Raises:
      TypeError: for anything else.
      ValueError: for one that makes steps of directions, as `hyperball`: in no slot is there a
        direction that nothing else makes a step of.

    Example:
      >>> stage = slot_stage("last", (optax.scale(2.0), optax.scale(3.0)))
      >>> stage.update(1.0, stage.init(1.0, []), None, [])[0]
      6.0
    """
    if given is None:
        return None
    if isinstance(given, optax.GradientTransformation):
        return _slot_piece(name, given)
    are_pieces = isinstance(given, list | tuple) and all(
        isinstance(piece, optax.GradientTransformation) for piece in given
    )
    if not are_pieces:
        raise TypeError(
            f"{name} must be a transformation, a list or tuple of them, or None, got {given!r}"
        )
    stages = {str(i): _slot_piece(name, piece) for i, piece in enumerate(given)}
    return in_order(stages, tuple(stages))


def _slot_piece(name: str, piece: optax.GradientTransformation) -> Stage:
    stage = as_stage(piece)
    if stage.makes_steps:
        raise ValueError(f"{name} got a transformation that makes steps itself: give it as step=")
    return stage


def in_order(stages: Mapping[str, Stage], order: Sequence[str]) -> Stage:
    """Named stages as one, whose state is a tuple of their states, as that of `optax.chain`.

    Args:
      stages: by name, in the order of their states.
      order: the names in the order in which updates pass; each once. The states don't depend on it,
        so that one kind of weight decay can go on with the checkpoint of another.

    Returns:
      The stage.

    Example:
      >>> double, add_one = optax.scale(2.0), optax.stateless(lambda u, p: u + 1.0)
      >>> stages = {"double": as_stage(double), "add": as_stage(add_one)}
      >>> step = in_order(stages, ("add", "double"))
      >>> step.update(3.0, step.init(0.0, []), None, [])[0]
      8.0
    """
    if sorted(order) != sorted(stages):
        raise ValueError(f"the order must name each stage once: got {order} for {(*stages,)}")

    def init(params, leaves):
        return tuple(stage.init(params, leaves) for stage in stages.values())

    def update(updates, state, params, leaves, **extra_args):
        new = dict(zip(stages, state, strict=True))
        for name in order:
            updates, new[name] = stages[name].update(
                updates, new[name], params, leaves, **extra_args
            )
        return updates, tuple(new.values())

    return Stage(init, update)


def stage_in_float32(stage: Stage, *, takes_half: bool) -> Stage:
    """Forms updates in float32 at least; updates and state keep the dtypes they came with.

    Args:
      stage: the stage that forms the updates.
      takes_half: whether it gets half-precision gradients as they are, and widens them itself.

    Returns:
      The stage.
    """

    def update(updates, state, params, leaves, **extra_args):
        grads = updates if takes_half else widened(updates)
        new, new_state = stage.update(grads, state, widened(params), leaves, **extra_args)
        return cast_like(new, updates), cast_like(new_state, state)

    return Stage(stage.init, update)
