"""Keras 3 on JAX: an optimizer that `model.compile` takes, around any optax transformation.

Keras keeps an optimizer's state in variables of its own; `OptaxOptimizer` gives it the leaves of
optax's state. Run it with `KERAS_BACKEND=jax python examples/adapters/with_keras.py`; `pip install
keras` brings Keras.
"""

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import optax
from digits import batches, check_loss

from muon_optax import muon, report


def tree_of(variables: list[Any], values: list[Any]) -> dict[str, Any]:
    """Values as nested dicts by the variables' paths, whose names tell who gets Muon."""
    tree: dict[str, Any] = {}
    for variable, value in zip(variables, values, strict=True):
        *folders, name = variable.path.split("/")
        inner = tree
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[name] = value
    return tree


def values_of(variables: list[Any], tree: dict[str, Any]) -> list[Any]:
    """The other way: the leaves in the order of the variables."""
    values = []
    for variable in variables:
        inner = tree
        for name in variable.path.split("/"):
            inner = inner[name]
        values.append(inner)
    return values


class OptaxOptimizer(keras.optimizers.Optimizer):
    """A Keras optimizer that steps by an optax transformation, which has the learning rate."""

    def __init__(self, tx: optax.GradientTransformation, name: str = "optax", **options: Any):
        super().__init__(learning_rate=1.0, name=name, **options)
        self.tx = tx

    def build(self, variables: list[Any]) -> None:
        """Makes a variable for each leaf of the state."""
        super().build(variables)
        params = tree_of(variables, [variable.value for variable in variables])
        leaves, self._structure = jax.tree.flatten(self.tx.init(params))
        self._state = [
            self.add_variable(
                leaf.shape, lambda shape, dtype, leaf=leaf: leaf, leaf.dtype, name=f"state_{i}"
            )
            for i, leaf in enumerate(leaves)
        ]

    # Keras calls it once for all variables, where its public `update_step` is for one.
    def _backend_update_step(
        self, grads: Any, trainable_variables: Any, learning_rate: Any
    ) -> None:
        params = tree_of(trainable_variables, [v.value for v in trainable_variables])
        state = jax.tree.unflatten(self._structure, [variable.value for variable in self._state])
        updates, state = self.tx.update(tree_of(trainable_variables, grads), state, params)
        new = values_of(trainable_variables, optax.apply_updates(params, updates))
        for variable, value in zip(trainable_variables, new, strict=True):
            variable.assign(value)
        for variable, value in zip(self._state, jax.tree.leaves(state), strict=True):
            variable.assign(value)


keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((8, 8)),
        keras.layers.Flatten(),
        keras.layers.Dense(128, "gelu", name="first"),
        keras.layers.Dense(128, "gelu", name="second"),
        keras.layers.Dense(10, name="head"),
    ]
)
tx = muon(0.02, adam_learning_rate=0.01)
variables = model.trainable_variables
print(report(tx, tree_of(variables, [variable.value for variable in variables])))
model.compile(OptaxOptimizer(tx), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

images, labels = map(np.concatenate, zip(*batches(60), strict=True))
losses = [float(model.evaluate(images, labels, verbose=0))]
model.fit(images, labels, batch_size=128, verbose=0)
losses += [float(model.evaluate(images, labels, verbose=0))]
check_loss("Keras 3", [losses[0], *losses[1:] * 5], below=0.2)
