"""Holds values back until others are there, or apart from others.

`jax.lax.optimization_barrier` gives all of its results the type of what varies most, and a
replicated result would no longer count as one. Here each value keeps its own type.
"""

from typing import TypeVar

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["apart", "together"]

T = TypeVar("T")

_LANES = 128  # rows are padded to a multiple of so many elements on TPUs


def together(values: T) -> T:
    """Returns a tree of arrays as it is; none can be used before all are computed.

    Example:
      >>> [float(x) for x in together((1.0, 2.0))]
      [1.0, 2.0]
    """
    leaves, treedef = jax.tree.flatten(values)
    return treedef.unflatten(_together.bind(*leaves))


def apart(part: jax.Array) -> jax.Array:
    """Returns a part of an array as it is; on TPUs in memory of its own, its rows in one piece.

    XLA there copies a whole array that is read and written in one fusion. It also gives arrays that
    are cut by columns the layout that suits their exchange, by two copies of each. Where short rows
    would be padded by much it may: they lie by columns anyway.

    Example:
      >>> apart(jax.numpy.ones(2)).tolist()
      [1.0, 1.0]
    """
    columns = part.shape[-1]
    rows_in_one_piece = Layout(tuple(range(part.ndim)))

    def on_tpu(x: jax.Array) -> jax.Array:
        if -columns % _LANES <= columns / 8:
            x = with_layout_constraint(x, rows_in_one_piece)
        return jax.lax.optimization_barrier(x)

    return jax.lax.platform_dependent(part, tpu=on_tpu, default=lambda x: x)


_together = Primitive("together")
_together.multiple_results = True
_together.def_abstract_eval(lambda *types: types)
_together.def_impl(lambda *values: values)
mlir.register_lowering(
    _together,
    mlir.lower_fun(lambda *values: jax.lax.optimization_barrier(values), multiple_results=True),
)
batching.primitive_batchers[_together] = lambda values, dims: (_together.bind(*values), dims)
# Tangents wait for nothing: some are symbolic zeros, which aren't arrays.
ad.primitive_jvps[_together] = lambda values, tangents: (_together.bind(*values), tangents)
