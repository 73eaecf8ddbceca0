"""Rules read from Flax NNX models."""

from typing import Any

import jax
import jax.numpy as jnp
import model_reading
import numpy as np
import oracle
import pytest
from flax import nnx
from model_reading import axes_of, said
from running import first_update

from muon_optax import MatrixView, MuonDimensionNumbers, MuonWarning, Rule, model_rules, muon

KEY = jax.random.key(0)


def params_of(model: nnx.Module) -> Any:
    return nnx.state(model, nnx.Param)


def read(model: nnx.Module, *inputs: Any, **options: Any) -> dict[str, Any]:
    return said(model_rules(model, *inputs, **options), params_of(model))


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def rngs() -> nnx.Rngs:
    return nnx.Rngs(0)


class Block(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, width, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 3 * width, rngs=rngs)
        self.down = nnx.Linear(3 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.relu(self.up(x)))


def stacked(make: Any, depth: int, axis: int, rngs: nnx.Rngs, **options: Any) -> Any:
    return nnx.split_rngs(splits=depth)(nnx.vmap(make, in_axes=0, out_axes=axis, **options))(rngs)


class Transformer(nnx.Module):
    def __init__(self, width: int, depth: int, axis: int, rngs: nnx.Rngs):
        self.axis = axis
        self.tokens = nnx.Embed(10, width, rngs=rngs)
        self.layers = stacked(lambda r: Block(width, r), depth, axis, rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.result = nnx.Linear(width, 10, rngs=rngs)  # a name that no rule knows

    def __call__(self, ids: jax.Array) -> jax.Array:
        axes = nnx.StateAxes({nnx.Param: self.axis, ...: 0})

        @nnx.scan(in_axes=(nnx.Carry, axes), out_axes=nnx.Carry)
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.result(self.norm(run(self.tokens(ids), self.layers)))


IDS = jax.ShapeDtypeStruct((1, 3), jnp.int32)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("depth", [3, 4, 8])
def test_a_scanned_transformer(axis, depth):
    """Stacks as deep as a layer is wide (8) or has dims a head (4) too; with and without inputs."""
    model = nnx.eval_shape(lambda: Transformer(8, depth, axis, rngs()))
    params = params_of(model)
    for inputs in ((), (IDS,)):
        rules = model_rules(model, *inputs)
        found = said(rules, params)
        matrices = {path: m for path, m in found.items() if isinstance(m, list)}
        assert matrices == model_reading.matrices_of_scanned_blocks(depth)
        assert found["result/kernel"] == "head: Linear"
        layers = {path: batch for path, (batch, _, _) in axes_of(rules, params).items()}
        assert layers["layers/up/kernel"] == ((axis + 3) % 3,)
        assert layers["layers/attention/query/kernel"] == ((axis + 4) % 4,)


def test_a_layer_does_not_move_with_another_ones_gradient():
    """MaxText and T5X stack on the second axis: `wi` is [width, layers, hidden]."""
    model = nnx.eval_shape(
        lambda: nnx.List([stacked(lambda r: nnx.Linear(8, 12, rngs=r), 4, 1, rngs())])
    )
    tx = muon(0.02, partition=model_rules(model))

    def update(kernel: jax.Array) -> jax.Array:
        shapes = params_of(model)
        grads = jax.tree.map(lambda s: kernel if s.ndim == 3 else jnp.ones(s.shape), shapes)
        return model_reading.leaves_of(first_update(tx, grads))["0/kernel"]

    run = jax.jit(update)
    grad = oracle.gaussian(8, 4, 12).astype(np.float32)
    other = grad.copy()
    other[:, 1] += oracle.gaussian(8, 12, seed=1)
    one, two = np.asarray(run(grad)), np.asarray(run(other))
    np.testing.assert_array_equal(one[:, 0], two[:, 0])
    assert np.abs(one[:, 1] - two[:, 1]).max() > 1e-3
    want = -0.02 * 1.5**0.5 * oracle.newton_schulz(grad[:, 0])
    assert oracle.relative_error(one[:, 0], want) < 1e-4


def test_square_stacks_that_nothing_tells():
    model = nnx.eval_shape(
        lambda: nnx.List(
            [stacked(lambda r: nnx.Linear(4, 4, use_bias=False, rngs=r), 4, 1, rngs())]
        )
    )
    with pytest.warns(MuonWarning, match=r"which axes of these stacked .* inputs.*: 0/kernel \(4"):
        (rule,) = model_rules(model)
    assert (rule.label, rule.reason) == (
        "adam",
        "weight of Linear, with stacked axes that nothing tells",
    )


def test_a_stack_beside_says_nothing_of_another():
    def make() -> nnx.Module:
        square = lambda r: nnx.Linear(4, 4, use_bias=False, rngs=r)  # noqa: E731
        wide = lambda r: nnx.Linear(4, 6, use_bias=False, rngs=r)  # noqa: E731
        return nnx.Dict(a=stacked(square, 4, 1, rngs()), b=stacked(wide, 3, 0, rngs()))

    with pytest.warns(MuonWarning, match="stacked"):
        found = read(nnx.eval_shape(make))
    assert found["b/kernel"] == [(3, 4, 6)]
    assert isinstance(found["a/kernel"], str)


def test_the_name_of_a_stacked_axis():
    """Square matrices and biases, all of which may be stacked on either axis by their shapes."""

    def linear(r: nnx.Rngs, *names: str) -> nnx.Linear:
        metadata = {"eager_sharding": False}
        kernel, bias = ({"out_sharding": n, **metadata} for n in (names, names[1:]))
        return nnx.Linear(4, 4, kernel_metadata=kernel, bias_metadata=bias, rngs=r)

    def layer(r: nnx.Rngs) -> nnx.Module:
        up, down = linear(r, "embed", "mlp"), linear(r, "mlp", "embed")
        return nnx.Dict(up=up, down=down, more=nnx.Linear(4, 4, rngs=r))

    named = {"transform_metadata": {nnx.PARTITION_NAME: "layers"}}
    model = nnx.eval_shape(lambda: stacked(layer, 4, 1, rngs(), **named))
    axes = axes_of(model_rules(model), params_of(model))
    assert axes == {f"{n}/kernel": ((1,), (0,), (2,)) for n in ("up", "down", "more")}


class Own(nnx.Module):
    """Layers of a user's own: an einsum's weight, tables, and LoRA beside Flax's layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.einsum_str = "td,ndh->tnh"
        self.w = nnx.Param(jnp.ones((2, 4, 3)))
        self.mix = nnx.Param(jnp.ones((6, 4)))
        self.table = nnx.Param(jnp.ones((5, 4)))
        self.places = nnx.Param(jnp.ones((3, 4)))
        self.linear: Any = nnx.Linear(4, 4, rngs=rngs)
        self.linear.kernel_lora_a = nnx.Param(jnp.ones((4, 2)))  # as Qwix does
        self.linear.kernel_lora_b = nnx.Param(jnp.ones((2, 4)))
        self.lora = nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.table[...][ids] + self.places[...]
        x = jnp.einsum(self.einsum_str, x, self.w[...]).reshape(3, 6) @ self.mix[...]
        factors = self.linear.kernel_lora_a[...] @ self.linear.kernel_lora_b[...]
        return self.lora(self.linear(x) + x @ factors) + x


FACTORS = {
    "linear/kernel_lora_a": "LoRA factor",
    "linear/kernel_lora_b": "LoRA factor",
    "lora/lora/lora_a": "LoRA factor of LoRA",
    "lora/lora/lora_b": "LoRA factor of LoRA",
}


def test_modules_of_ones_own_by_their_use():
    model = nnx.eval_shape(lambda: Own(rngs()))
    found = read(model, jax.ShapeDtypeStruct((3,), jnp.int32))
    assert found == FACTORS | {
        "w": [(1, 4, 6)],
        "mix": [(1, 6, 4)],
        "table": "a table that Own looks up",
        "places": "used elementwise in Own",
        "linear/kernel": [(1, 4, 4)],
        "linear/bias": "bias of Linear",
        "lora/kernel": [(1, 4, 4)],
        "lora/bias": "bias of LoRALinear",
    }


def test_modules_of_ones_own_without_inputs():
    with pytest.warns(
        MuonWarning, match=r"get Muon as \[in, out\]; give model_rules example inputs"
    ) as w:
        found = read(nnx.eval_shape(lambda: Own(rngs())))
    (message,) = [str(x.message) for x in w]
    assert message.endswith("mix (6, 4), places (3, 4)")
    assert found["w"] == [(1, 4, 6)]  # by its equation
    assert FACTORS.items() <= found.items()


def test_heads_of_a_vgg():
    """Only the last of three layers called classifier is a head; the first has most parameters."""

    class Vgg(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            zeros = {"kernel_init": nnx.initializers.zeros, "rngs": rngs}  # quick to make
            self.stem = nnx.Conv(1, 4, (3, 3), **zeros)
            self.conv = nnx.Conv(4, 8, (3, 3), **zeros)
            sizes = [(32, 16), (16, 16), (16, 10)]
            layers = [nnx.Linear(m, n, **zeros) for m, n in sizes]
            self.classifier = nnx.Sequential(layers[0], nnx.relu, layers[1], nnx.relu, layers[2])

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.max_pool(nnx.relu(self.conv(self.stem(x))), (2, 2), (2, 2))
            return self.classifier(x.reshape(len(x), -1))

    for model in (Vgg(rngs()), nnx.eval_shape(lambda: Vgg(rngs()))):
        for inputs in ((), (floats(1, 4, 4, 1),)):
            found = read(model, *inputs)
            assert {path: m for path, m in found.items() if path.endswith("kernel")} == {
                "stem/kernel": [(1, 9, 4)],
                "conv/kernel": [(1, 36, 8)],
                "classifier/layers/0/kernel": [(1, 32, 16)],
                "classifier/layers/2/kernel": [(1, 16, 16)],
                "classifier/layers/4/kernel": "head: Linear",
            }


def test_tied_weights():
    """The state has a shared table once, here below the layer's name."""

    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.tokens = nnx.Embed(9, 4, rngs=rngs)
            self.hidden = nnx.Linear(4, 4, use_bias=False, rngs=rngs)
            self.decoder = nnx.Linear(4, 9, use_bias=False, rngs=rngs)
            self.decoder.kernel = self.tokens.embedding

        def __call__(self, ids: jax.Array) -> jax.Array:
            return self.hidden(self.tokens(ids)) @ self.decoder.kernel[...].T

    model = nnx.eval_shape(lambda: Tied(rngs()))
    for inputs in ((), (jax.ShapeDtypeStruct((3,), jnp.int32),)):
        assert read(model, *inputs) == {
            "decoder/kernel": "embedding table of Embed",
            "hidden/kernel": [(1, 4, 4)],
        }


def test_heads_of_a_policy_without_inputs():
    class Policy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            zeros = {"kernel_init": nnx.initializers.zeros, "rngs": rngs}  # quick to make
            self.hidden = nnx.Linear(8, 16, **zeros)
            self.more = nnx.Linear(16, 16, **zeros)
            self.policy = nnx.Linear(16, 6, **zeros)
            self.value = nnx.Linear(16, 1, **zeros)

    found = read(Policy(rngs()))
    assert [p for p, m in found.items() if m == "head: Linear"] == ["policy/kernel", "value/kernel"]


@pytest.mark.parametrize("axis", [0, 1])
def test_the_update_is_that_of_views_by_hand(axis):
    model = nnx.eval_shape(lambda: Transformer(8, 3, axis, rngs()))
    rest = [a for a in range(3) if a != axis]
    four = [a for a in range(4) if a != axis]
    into = MuonDimensionNumbers(four[0], tuple(four[1:]))
    views = {
        "up": MuonDimensionNumbers(*rest),
        "down": MuonDimensionNumbers(*rest),
        **{name: into for name in ("query", "key", "value")},
        "out": MuonDimensionNumbers(tuple(four[:2]), four[2]),
    }

    def by_hand(path: tuple[str, ...]) -> MuonDimensionNumbers | None:
        return views.get(path[-2]) if path[-1] == "kernel" else None

    tree = {
        path: by_hand(tuple(path.split("/"))) for path in model_reading.leaves_of(params_of(model))
    }
    hand = [
        Rule(tuple(path.split("/")), "muon" if view else "adam", view=view)
        for path, view in tree.items()
    ]
    params = params_of(model)
    programs = [
        jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).as_text()
        for tx in (muon(0.02, partition=partition) for partition in (model_rules(model), hand))
    ]
    assert programs[0] == programs[1]


def test_a_step_of_training():
    def model() -> nnx.Module:
        first, last = nnx.Linear(4, 6, rngs=rngs()), nnx.Linear(6, 2, rngs=rngs())
        return nnx.Sequential(first, nnx.relu, last)

    rules = model_rules(nnx.eval_shape(model))

    def step() -> tuple[Any, Any, Any]:
        trained = model()
        before = jax.tree.map(jnp.copy, params_of(trained))
        optimizer = nnx.Optimizer(trained, muon(0.02, partition=rules), wrt=nnx.Param)
        grads = nnx.grad(lambda m: jnp.square(m(jnp.eye(4))).mean())(trained)
        optimizer.update(trained, grads)
        return before, params_of(trained), grads

    results = jax.jit(step)()
    before, after, grad = (model_reading.leaves_of(r)["layers/0/kernel"] for r in results)
    want = -0.02 * 1.5**0.5 * oracle.newton_schulz(grad)
    assert oracle.relative_error(np.asarray(after) - np.asarray(before), want) < 1e-4


def test_only_adapters_are_trained():
    """Rules for the whole model, of which a part is trained."""
    model = Own(rngs())
    inputs = jax.ShapeDtypeStruct((3,), jnp.int32)
    tx = muon(0.02, partition=model_rules(model, inputs))
    with pytest.warns(MuonWarning, match="no leaf gets Muon"):
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)
    assert len(jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))) > 0


def test_views_hold_fused_gates_apart():
    rules = model_rules(nnx.eval_shape(lambda: nnx.OptimizedLSTMCell(4, 6, rngs=rngs())))
    assert {r.view for r in rules if r.view} == {MatrixView((0,), (1,), heads=4)}
