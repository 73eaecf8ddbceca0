"""Rules read from Flax Linen models, whose modules are seen while `init` is traced."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import model_reading
import numpy as np
import oracle
import pytest
from flax.core import meta
from jax.sharding import AxisType
from model_reading import axes_of, check_outer, said
from running import first_update

from muon_optax import model_rules, muon

KEY = jax.random.key(0)


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def params_of(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    init = lambda *a: model.init(KEY, *a, **options)  # noqa: E731
    return meta.unbox(jax.eval_shape(init, *inputs)["params"])


def read(model: nn.Module, *inputs: Any, **options: Any) -> dict[str, Any]:
    return said(model_rules(model, *inputs, **options), params_of(model, *inputs, **options))


MODULES = {
    "Dense": (nn.Dense(6), (2, 4), {"kernel": [(1, 4, 6)], "bias": "bias of Dense"}),
    "DenseGeneral": (
        nn.DenseGeneral((4, 5), axis=(-2, -1), use_bias=False),
        (2, 2, 3),
        {"kernel": [(1, 6, 20)]},
    ),
    "DenseGeneral, batched": (
        nn.DenseGeneral(5, axis=-1, batch_dims=(0,)),
        (2, 3, 4),
        {"kernel": [(2, 4, 5)], "bias": "bias of DenseGeneral"},
    ),
    "Einsum": (
        nn.Einsum((2, 6, 3), "btd,ndh->btnh"),
        (1, 5, 6),
        {"kernel": [(1, 6, 6)], "bias": "bias of Einsum"},
    ),
    "Einsum of key and value": (
        nn.Einsum((2, 3, 6, 4), "bsd,ckdh->cbskh", use_bias=False),
        (1, 5, 6),
        {"kernel": [(2, 6, 12)]},
    ),
    "Conv": (
        nn.Conv(6, (3, 2)),
        (1, 3, 2, 4),
        {"kernel": [(1, 24, 6)], "bias": "bias of Conv"},
    ),
    "Conv of grey images": (
        nn.Conv(6, (3, 3), use_bias=False),
        (1, 4, 4, 1),
        {"kernel": [(1, 9, 6)]},
    ),
    "Conv, grouped": (
        nn.Conv(6, (3,), feature_group_count=2, use_bias=False),
        (1, 3, 4),
        {"kernel": [(2, 6, 3)]},
    ),
    "Conv, depthwise": (
        nn.Conv(8, (3,), feature_group_count=4, use_bias=False),
        (1, 3, 4),
        {"kernel": "depthwise kernel of Conv"},
    ),
    "ConvLocal": (
        nn.ConvLocal(6, (3,), padding="VALID", use_bias=False),
        (1, 5, 4),
        {"kernel": [(3, 12, 6)]},
    ),
    "ConvTranspose": (
        nn.ConvTranspose(6, (3,), use_bias=False),
        (1, 3, 4),
        {"kernel": [(1, 12, 6)]},
    ),
    "ConvTranspose, transposed": (
        nn.ConvTranspose(6, (3,), transpose_kernel=True, use_bias=False),
        (1, 3, 4),
        {"kernel": [(1, 12, 6)]},
    ),
    "LayerNorm of two dims": (
        nn.LayerNorm(reduction_axes=(-2, -1), feature_axes=(-2, -1)),
        (1, 4, 6),
        {"scale": "norm of LayerNorm", "bias": "norm of LayerNorm"},
    ),
    "BatchNorm": (
        nn.BatchNorm(use_running_average=False),
        (2, 4),
        {"scale": "norm of BatchNorm", "bias": "norm of BatchNorm"},
    ),
    "attention": (
        nn.MultiHeadDotProductAttention(2, qkv_features=8, use_bias=False),
        (1, 3, 6),
        {f"{name}/kernel": [(1, 6, 8)] for name in ("query", "key", "value")}
        | {"out/kernel": [(1, 8, 6)]},
    ),
    "OptimizedLSTMCell": (
        nn.RNN(nn.OptimizedLSTMCell(6)),
        (1, 3, 4),
        {f"cell/i{gate}/kernel": [(1, 4, 6)] for gate in "ifgo"}
        | {f"cell/h{gate}/kernel": [(1, 6, 6)] for gate in "ifgo"}
        | {f"cell/h{gate}/bias": "bias of DenseParams" for gate in "ifgo"},
    ),
    "ConvLSTMCell": (
        nn.RNN(nn.ConvLSTMCell(6, (3,))),
        (1, 2, 5, 4),
        {"cell/ih/kernel": [(4, 12, 6)], "cell/hh/kernel": [(4, 18, 6)]}
        | {f"cell/{name}/bias": "bias of Conv" for name in ("ih", "hh")},
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    """Within a model: its last layer would be a head."""
    module, shape, expected = MODULES[name]

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = module.copy(name="it")(x)
            return nn.Dense(3, use_bias=False)(x.reshape(-1))

    found = read(Model(), floats(*shape))
    assert found.pop("Dense_0/kernel") == "head: Dense"
    assert found == {f"it/{path}": matrices for path, matrices in expected.items()}


ONE_POSITION = {
    "Einsum of key and value": lambda x: x[0, 0],
    "Conv": lambda x: x.reshape(-1),
    "ConvLocal": lambda x: np.stack([x[0, i : i + 3].T.reshape(-1) for i in range(3)]),
    "ConvTranspose": lambda x: x.reshape(-1),
    "ConvTranspose, transposed": lambda x: x[0, ::-1].reshape(-1),
}


@pytest.mark.parametrize("name", ONE_POSITION)
def test_views_by_what_the_layer_computes(name):
    """The oracle of `model_reading`, of the only output of a window or of one token."""
    module, shape, _ = MODULES[name]
    x = oracle.gaussian(1, *shape[1:]).astype(np.float32)

    def loss(params: Any) -> Any:
        y: Any = module.apply({"params": params}, x)
        if name == "Einsum of key and value":
            y = y[:, :, 0]
        elif name != "ConvLocal":
            y = y[(0, *((n - 1) // 2 for n in y.shape[1:-1]))]
        return (y * oracle.gaussian(*y.shape, seed=1)).sum()

    def gradient() -> Any:
        return jax.grad(loss)(module.init(KEY, x)["params"])["kernel"]

    within = nn.Sequential([module, nn.Dense(2)])
    view = model_reading.views_of(model_rules(within, x), params_of(within, x))["layers_0/kernel"]
    check_outer(view, jax.jit(gradient)(), ONE_POSITION[name](x))


class Block(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False, name="attention")(y, y)
        return x + nn.Dense(self.width, name="down")(nn.relu(nn.Dense(24, name="up")(x))), None


class Transformer(nn.Module):
    """Layers of a scan under remat, a table of its own, metadata of axes, and a head."""

    axis: int
    depth: int

    @nn.compact
    def __call__(self, ids: jax.Array, train: bool = False) -> jax.Array:
        normal = nn.initializers.normal()
        places: Any = self.param("places", nn.with_partitioning(normal, (None, "embed")), (3, 8))
        x = nn.Embed(10, 8)(ids) + places
        scan = nn.scan(
            nn.remat(Block),
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=self.depth,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scan(8, name="layers")(x, None)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10, name="logitdense")(x)


IDS = jax.ShapeDtypeStruct((1, 3), jnp.int32)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("depth", [3, 8])
def test_a_scanned_transformer(axis, depth):
    """Also as deep as a layer is wide."""
    model = Transformer(axis, depth)
    params = params_of(model, IDS)
    rules = model_rules(model, IDS, train=True)
    found = said(rules, params)
    matrices = {path: m for path, m in found.items() if isinstance(m, list)}
    assert matrices == model_reading.matrices_of_scanned_blocks(depth)
    assert found["logitdense/kernel"] == "head: Dense"
    assert found["places"] == "used elementwise in Transformer"
    axes = axes_of(rules, params)
    assert axes["layers/attention/out/kernel"][0] == (axis % 4,)
    assert axes["layers/down/kernel"][0] == (axis % 3,)


class Annotated(nn.Module):
    """A table and two layers with annotations, stacked by a scan, and a boxed variable."""

    partitioned: Any

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        normal = nn.initializers.normal()
        x = nn.Embed(16, 8, embedding_init=self.partitioned(normal, (None, "f")))(ids)
        start = lambda: self.partitioned(jnp.zeros, (None,))((8,))  # noqa: E731
        mean: Any = self.variable("statistics", "mean", start)
        partitioned = self.partitioned

        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                up, down = partitioned(normal, (None, "f")), partitioned(normal, ("f", None))
                hidden = nn.relu(nn.Dense(32, kernel_init=up, name="up")(x))
                return x + nn.Dense(8, kernel_init=down, name="down")(hidden), None

        scan = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: None},
        )
        x, _ = scan(name="layers")(x - mean.value, None)
        return nn.Dense(16, kernel_init=self.partitioned(normal, (None, None)), name="logits")(x)


@pytest.mark.parametrize("partitioned", [nn.with_partitioning, nn.with_logical_partitioning])
def test_annotations_within_a_mesh(partitioned):
    """There the parameters are made; Flax would constrain the shardings of what it unboxes."""
    model, matrices = Annotated(partitioned), {"up": [(3, 8, 32)], "down": [(3, 32, 8)]}
    mesh = jax.make_mesh((2,), ("f",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh), nn.logical_axis_rules([("f", "f")]):
        within = model_rules(model, IDS)
    found = said(within, params_of(model, IDS))
    assert {name: found[f"layers/{name}/kernel"] for name in matrices} == matrices
    assert found["logits/kernel"] == "head: Dense"
    assert within == model_rules(model, IDS)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_square_layers_by_their_use(axis):
    """Nothing but the call tells the axes of 4 x 4 x 4."""

    class Ensemble(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            shared: Any = None
            dense = nn.vmap(
                nn.Dense,
                variable_axes={"params": axis},
                split_rngs={"params": True},
                in_axes=shared,
                axis_size=4,
            )
            return nn.Dense(2)(dense(4, use_bias=False, name="all")(x).sum(0))

    params = params_of(Ensemble(), floats(1, 4))
    axes = axes_of(model_rules(Ensemble(), floats(1, 4)), params)
    assert axes["all/kernel"][0] == (axis,)


def test_modules_of_ones_own():
    """FlaxGPT2's Conv1D has a kernel [out, in]; experts, tables and LoRA are bare parameters."""

    class Conv1D(nn.Module):
        features: int

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            shape = (self.features, x.shape[-1])
            kernel = self.param("kernel", nn.initializers.normal(), shape)
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            return jax.lax.dot_general(x, kernel.T, (((x.ndim - 1,), (0,)), ((), ()))) + bias

    class Experts(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            normal = nn.initializers.normal()
            routes = jax.nn.softmax(x @ self.param("router", normal, (8, 2)))
            y = jnp.einsum("td,edf->tef", x, self.param("wi_0", normal, (2, 8, 16)))
            y = jax.nn.relu(y) * routes[..., None]
            return jnp.einsum("tef,efd->td", y, self.param("wo", normal, (2, 16, 8)))

    class Model(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            normal = nn.initializers.normal()
            x = self.param("table", normal, (9, 8))[ids]
            x = Conv1D(24, name="c_attn")(x).reshape(3, 3, 8).sum(1)
            x = Experts(name="moe")(x)
            lora = self.param("w_lora_a", normal, (8, 2)), self.param("w_lora_b", normal, (2, 8))
            weight = self.param("w", normal, (8, 8)) + lora[0] @ lora[1]
            return nn.Dense(1, name="value")(x @ weight)

    found = read(Model(), jax.ShapeDtypeStruct((3,), jnp.int32))
    assert found == {
        "c_attn/kernel": [(1, 8, 24)],
        "c_attn/bias": "fewer than two dims",
        "moe/router": [(1, 8, 2)],
        "table": "a table that Model looks up",
        "value/bias": "bias of Dense",
        "value/kernel": "head: Dense",
        "w": [(1, 8, 8)],
        "w_lora_a": "LoRA factor",
        "w_lora_b": "LoRA factor",
        "moe/wi_0": [(2, 8, 16)],
        "moe/wo": [(2, 16, 8)],
    }


def test_a_tied_head():
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, ids: jax.Array) -> jax.Array:
            embed = nn.Embed(9, 4)
            return embed.attend(nn.Dense(4, use_bias=False, name="head")(embed(ids)))

    found = read(Tied(), jax.ShapeDtypeStruct((3,), jnp.int32))
    assert found == {"Embed_0/embedding": "embedding table of Embed", "head/kernel": [(1, 4, 4)]}


def test_setup_and_method():
    class Model(nn.Module):
        def setup(self) -> None:
            self.encoder = nn.Dense(6, use_bias=False)
            self.decoder = nn.Dense(4, use_bias=False)

        def encode(self, x: jax.Array) -> jax.Array:
            return self.encoder(x)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.decoder(nn.relu(self.encode(x)))

    assert read(Model(), floats(1, 3)) == {
        "encoder/kernel": [(1, 3, 6)],
        "decoder/kernel": "head: Dense",
    }
    rules = model_rules(Model(), floats(1, 3), method="encode")
    assert [model_reading.path_of(rule) for rule in rules] == ["encoder/kernel"]


def test_no_inputs():
    with pytest.raises(TypeError, match="needs example inputs for a Linen model"):
        model_rules(nn.Dense(4))


def test_a_step_of_training():
    model = nn.Sequential([nn.Dense(6, use_bias=False), nn.relu, nn.Dense(2, use_bias=False)])
    x = np.eye(4, dtype=np.float32)
    tx = muon(0.02, partition=model_rules(model, x))

    def loss(params: Any) -> Any:
        y: Any = model.apply({"params": params}, x)
        return (y * y).mean()

    def step() -> Any:
        params = model.init(KEY, x)["params"]
        grads = jax.grad(loss)(params)
        return first_update(tx, grads, params)["layers_0"], grads["layers_0"]

    got, grads = jax.jit(step)()
    want = -0.02 * 1.5**0.5 * oracle.newton_schulz(grads["kernel"])
    assert oracle.relative_error(got["kernel"], want) < 1e-4
