"""A container whose registration names no children."""

from typing import Any

import jax


@jax.tree_util.register_pytree_node_class
class Unnamed:
    def __init__(self, *parts: Any):
        self.parts = parts

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux, parts):
        del aux
        return cls(*parts)
