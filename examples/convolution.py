"""A convolutional network in Flax NNX reads scikit-learn's handwritten digits.

`flax_matrix_views` says how a kernel [height, width, in, out] makes a matrix: the window and the
input channels together are its fan-in. The first kernel here has one input channel, as depthwise
ones have; a rule gives it to AdamW, where a warning would ask otherwise. Run it with `python
examples/convolution.py`; scikit-learn comes with `pip install 'muon-optax[examples]'`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from muon_optax import Rule, flax_matrix_views, muon, report


class Classifier(nnx.Module):
    """Two convolutions and a linear head."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits, (batch, 10), for images of (batch, 8, 8, 1)."""
        x = nnx.relu(self.second(nnx.relu(self.first(images))))
        return self.head(x.reshape(len(x), -1))


@nnx.jit
def train_step(
    model: Classifier, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """One step; the loss is the mean cross-entropy in nats."""

    def loss_fn(model: Classifier) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


digits = load_digits()
images = digits.images[..., None].astype(np.float32) / 16
train, test, train_labels, test_labels = train_test_split(images, digits.target, random_state=0)

model = Classifier(nnx.Rngs(0))
params = nnx.state(model, nnx.Param)
views = functools.partial(flax_matrix_views, rules=(Rule("first", "adam", "first layer"),))
print(report(params, muon_weight_dimension_numbers=views))

tx = muon(0.02, adam_learning_rate=0.003, muon_weight_dimension_numbers=views)
optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
for step in range(101):
    batch = np.random.default_rng(step).integers(0, len(train), 64)
    loss = train_step(model, optimizer, train[batch], train_labels[batch])
    if step % 20 == 0:
        print(f"step {step:3}  loss {loss:.4f}")
answers = nnx.jit(Classifier.__call__)(model, test).argmax(1)
accuracy = jnp.mean(answers == test_labels)
print(f"test accuracy {accuracy:.3f}")
