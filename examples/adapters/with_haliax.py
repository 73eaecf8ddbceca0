"""Haliax, as in Levanter: layers name the axes they sum over, which says what the matrices are.

`named_views` reads each `Linear`'s `In` and `Out`; any other named axis, as that of `Stacked`
layers, is a batch axis. Run it with `python examples/adapters/with_haliax.py`; `pip install
--pre 'haliax>=1.4.dev0'` brings Haliax.
"""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import optax
from digits import batches, check_loss
from haliax.nn import Linear, Stacked

from muon_optax import MuonDimensionNumbers, muon, report

Rows, Pixels = hax.Axis("rows", 8), hax.Axis("pixels", 8)
Embed, Mlp, Label = hax.Axis("embed", 128), hax.Axis("mlp", 256), hax.Axis("label", 10)
Layers = hax.Axis("layers", 2)


def named_views(model: Any, adam: tuple[str, ...] = ()) -> Any:
    """Matrix views of a model's linear layers, by their named axes.

    Args:
      model: a tree with `haliax.nn.Linear` layers.
      adam: names of axes; a layer that has one of them gets AdamW, as a head or an embedding.

    Returns:
      A tree like `eqx.filter(model, eqx.is_inexact_array)`: a view in the place of each weight,
      None elsewhere.
    """

    def views(part: Any) -> Any:
        none = jax.tree.map(lambda _: None, part)
        if not isinstance(part, Linear):
            return none
        names = [axis.name for axis in part.weight.axes]
        if set(names) & set(adam):
            return none
        reduced, output = (
            tuple(names.index(axis.name) for axis in hax.axis.ensure_tuple(axes))
            for axes in (part.In, part.Out)
        )
        view = hax.NamedArray.tree_unflatten(
            part.weight.axes, (MuonDimensionNumbers(reduced, output),)
        )
        return eqx.tree_at(lambda linear: linear.weight, none, view, is_leaf=lambda x: x is None)

    params = eqx.filter(model, eqx.is_inexact_array)
    return jax.tree.map(views, params, is_leaf=lambda x: isinstance(x, Linear))


class Block(eqx.Module):
    """A residual MLP."""

    up: Linear
    down: Linear

    @staticmethod
    def init(*, key: jax.Array) -> "Block":
        """Makes one block, or under `Stacked.init` all of them."""
        first, second = jax.random.split(key)
        return Block(
            Linear.init(Embed, Mlp, key=first, use_bias=False),
            Linear.init(Mlp, Embed, key=second, use_bias=False),
        )

    def __call__(self, x: hax.NamedArray) -> hax.NamedArray:
        """Adds to the stream."""
        return x + self.down(hax.nn.gelu(self.up(x)))


class Model(eqx.Module):
    """Reads rows of pixels, through a stack of blocks."""

    embed: Linear
    blocks: Stacked
    head: Linear

    @staticmethod
    def init(key: jax.Array) -> "Model":
        """Makes the model."""
        first, second, third = jax.random.split(key, 3)
        return Model(
            Linear.init((Rows, Pixels), Embed, key=first),
            Stacked.init(Layers, Block)(key=jax.random.split(second, Layers.size)),
            Linear.init(Embed, Label, key=third),
        )

    def __call__(self, images: hax.NamedArray) -> hax.NamedArray:
        """Logits over labels."""
        return self.head(self.blocks.fold(self.embed(images)))


@eqx.filter_jit
def step(
    model: Model, state: optax.OptState, images: jax.Array, labels: jax.Array
) -> tuple[Model, optax.OptState, jax.Array]:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(model: Model) -> jax.Array:
        logits = model(hax.named(images, ("batch", "rows", "pixels"))).rearrange((..., "label"))
        return optax.softmax_cross_entropy_with_integer_labels(logits.array, labels).mean()

    loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
    updates, state = tx.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


model = Model.init(jax.random.key(0))
params = eqx.filter(model, eqx.is_inexact_array)
views = named_views(model, adam=("pixels", "label"))
tx = muon(0.02, adam_learning_rate=0.01, muon_weight_dimension_numbers=views)
table = report(tx, params)
print(table)
assert {row.matrices for row in table.rows if row.optimizer == "muon"} == {
    ((2, 128, 256),),
    ((2, 256, 128),),
}
state, losses = tx.init(params), []
for images, labels in batches(60):
    model, state, loss = step(model, state, images, labels)
    losses.append(float(loss))
check_loss("Haliax", losses, below=0.3)
