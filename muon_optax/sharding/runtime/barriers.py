"""Optimization barriers that put collectives and matmuls in an order, and split fusions.

`jax.lax.optimization_barrier` gives all of its results the type of the operand that varies over
most mesh axes, so that a replicated result would no longer count as one in shard_map. `barrier`
keeps the type of each.
"""

from typing import TypeVar

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

__all__ = ["barrier", "materialized"]

T = TypeVar("T")

_LANES = 128  # rows are padded to a multiple of so many elements on TPUs


def barrier(values: T) -> T:
    """Returns a tree of arrays as it is; none can be used before all are computed.

    Example:
      >>> [float(x) for x in barrier((1.0, 2.0))]
      [1.0, 2.0]
    """
    leaves, treedef = jax.tree.flatten(values)
    return treedef.unflatten(_barrier.bind(*leaves))


def materialized(part: jax.Array) -> jax.Array:
    """Returns a part of an array as it is; on TPUs in memory of its own, row-major.

    XLA there copies a whole array that is read and written in one fusion. It also gives arrays that
    are sharded by columns the layout that suits their all-to-all, by two copies of each. It may do
    that where short rows would be padded by much: they are column-major anyway.

    Example:
      >>> materialized(jax.numpy.ones(2)).tolist()
      [1.0, 1.0]
    """
    columns = part.shape[-1]
    row_major = Layout(tuple(range(part.ndim)))

    def on_tpu(x: jax.Array) -> jax.Array:
        if -columns % _LANES <= columns / 8:
            x = with_layout_constraint(x, row_major)
        return jax.lax.optimization_barrier(x)

    return jax.lax.platform_dependent(part, tpu=on_tpu, default=lambda x: x)


_barrier = Primitive("muon_barrier")
_barrier.multiple_results = True
_barrier.def_abstract_eval(lambda *types: types)
_barrier.def_impl(lambda *values: values)
mlir.register_lowering(
    _barrier,
    mlir.lower_fun(lambda *values: jax.lax.optimization_barrier(values), multiple_results=True),
)
batching.primitive_batchers[_barrier] = lambda values, dims: (_barrier.bind(*values), dims)
# Tangents wait for nothing: some are symbolic zeros, which aren't arrays.
ad.primitive_jvps[_barrier] = lambda values, tangents: (_barrier.bind(*values), tangents)
