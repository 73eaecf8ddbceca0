"""Layers whose weights torch keeps in another order than Linear and Conv do."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

from muon_optax import muon, recipes
from muon_optax.interop import TensorRule, TorchLayout, conv1d_rules, default_torch_rules
from muon_optax.interop import torch as interop

torch = pytest.importorskip("torch", reason="torch isn't installed")


class Conv1D(torch.nn.Module):
    """As transformers defines it: the weight is [in, out]."""

    def __init__(self, outputs: int, inputs: int):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(inputs, outputs) / 4)
        self.bias = torch.nn.Parameter(torch.randn(outputs))

    def forward(self, x: Any) -> Any:
        return torch.addmm(self.bias, x, self.weight)


class Block(torch.nn.Module):
    """The matrices of a block of GPT-2, in the order of a forward pass."""

    def __init__(self, width: int):
        super().__init__()
        self.attn = torch.nn.ModuleDict(
            {"c_attn": Conv1D(3 * width, width), "c_proj": Conv1D(width, width)}
        )
        self.mlp = torch.nn.ModuleDict(
            {"c_fc": Conv1D(4 * width, width), "c_proj": Conv1D(width, 4 * width)}
        )

    def forward(self, x: Any) -> Any:
        x = self.attn["c_proj"](self.attn["c_attn"](x)[:, : x.shape[1]])
        return self.mlp["c_proj"](self.mlp["c_fc"](x))


class Gpt2(torch.nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.wte = torch.nn.Embedding(11, width)
        self.h = torch.nn.ModuleList(Block(width) for _ in range(2))
        self.head = torch.nn.Linear(width, width)

    def forward(self, tokens: Any) -> Any:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(x)


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def dense(inputs: int, outputs: int) -> dict[str, Any]:
    return {"kernel": zeros(inputs, outputs), "bias": zeros(outputs)}


def gpt2_params(width: int = 8) -> Any:
    block = {
        "attn": {"c_attn": dense(width, 3 * width), "c_proj": dense(width, width)},
        "mlp": {"c_fc": dense(width, 4 * width), "c_proj": dense(4 * width, width)},
    }
    return {
        "wte": {"embedding": zeros(11, width)},
        "h": {"0": block, "1": block},
        "head": dense(width, width),
    }


@jax.jit
def gpt2_of(params: Any, tokens: Any) -> Any:
    def apply(layer, x):
        return x @ layer["kernel"] + layer["bias"]

    x = params["wte"]["embedding"][tokens]
    for block in params["h"].values():
        x = apply(block["attn"]["c_attn"], x)[:, : x.shape[1]]
        x = apply(block["attn"]["c_proj"], x)
        x = apply(block["mlp"]["c_proj"], apply(block["mlp"]["c_fc"], x))
    return apply(params["head"], x)


GPT2 = TorchLayout((*conv1d_rules(), *default_torch_rules()))
WEIGHTS = ["attn/c_attn", "attn/c_proj", "mlp/c_fc", "mlp/c_proj"]


def named(message: str) -> list[str]:
    """The leaves that an error lists."""
    return [line.split(":")[0].strip() for line in message.splitlines()[1:]]


def test_conv1d_there_and_back():
    torch.manual_seed(0)
    net, tokens = Gpt2(), np.array([1, 5, 7])
    params = interop.from_state_dict(net.state_dict(), gpt2_params(), GPT2)
    with torch.no_grad():
        want = net(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(gpt2_of(params, tokens), want, rtol=1e-5, atol=1e-4)
    back = interop.to_state_dict(params, GPT2)
    assert back.keys() == net.state_dict().keys()
    assert all(torch.equal(back[key], x) for key, x in net.state_dict().items())


# The names of kernels for which a user has given a rule: none, or those that an error listed once.
MENDED = {
    (): [f"h/{i}/{name}/kernel" for i in range(2) for name in WEIGHTS],
    ("c_attn", "c_fc", "mlp/c_proj"): [f"h/{i}/attn/c_proj/kernel" for i in range(2)],
    ("c_attn", "c_proj"): [f"h/{i}/mlp/c_fc/kernel" for i in range(2)],
}


@pytest.mark.parametrize("names", MENDED)
def test_every_conv1d_without_a_rule_is_listed_the_square_one_too(names):
    rules = conv1d_rules(*names) if names else ()
    layout = TorchLayout((*rules, *default_torch_rules()))
    with pytest.raises(ValueError, match=r"conv1d_rules\(\)") as error:
        interop.from_state_dict(Gpt2().state_dict(), gpt2_params(), layout)
    assert named(str(error.value)) == MENDED[names]


def test_what_biases_do_not_tell_is_read_as_the_rules_say():
    """Squares of Linear layers, also beside a Conv1D of another module, and rules of one's own."""
    torch.manual_seed(0)
    net = Gpt2()
    params = interop.from_state_dict(net.state_dict(), gpt2_params(), GPT2)
    np.testing.assert_array_equal(np.transpose(params["head"]["kernel"]), net.head.weight.detach())
    square = {"kernel": zeros(4, 4), "bias": zeros(4)}
    both = {"lin": square, "up": dense(4, 8)}
    tensors = {"lin.weight": torch.randn(4, 4), "lin.bias": torch.zeros(4)}
    linear = {"up.weight": torch.randn(8, 4), "up.bias": torch.zeros(8)}
    conv1d = {"up.weight": torch.randn(4, 8), "up.bias": torch.zeros(8)}
    found = interop.from_state_dict({**tensors, **linear}, both)
    np.testing.assert_array_equal(np.transpose(found["lin"]["kernel"]), tensors["lin.weight"])
    own = TorchLayout((TensorRule("lin/kernel", (1, 0), "weight"), *conv1d_rules("up")))
    found = interop.from_state_dict({**tensors, **conv1d}, both, own)
    np.testing.assert_array_equal(np.transpose(found["lin"]["kernel"]), tensors["lin.weight"])
    with pytest.raises(ValueError, match=r"lin/kernel: lin\.weight is \[in, out\] in torch"):
        interop.from_state_dict(
            {**tensors, **conv1d}, both, TorchLayout((*conv1d_rules("up"), *default_torch_rules()))
        )


def gpt2_run() -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(0)
    net = Gpt2()
    parts = [
        [(n, p) for n, p in net.named_parameters() if (p.ndim == 2 and "wte" not in n) == is_muon]
        for is_muon in (True, False)
    ]
    optimizers = [torch.optim.Muon(parts[0], lr=0.02), torch.optim.AdamW(parts[1], lr=0.02)]
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        for optimizer in optimizers:
            optimizer.step()
    return net, [optimizer.state_dict() for optimizer in optimizers], optimizers


def hidden(params: Any) -> Any:
    return jax.tree.map_with_path(
        lambda path, x: "muon" if x.ndim == 2 and "wte" not in str(path) else "adam", params
    )


def test_optimizer_states_of_conv1d():
    net, dumps, _ = gpt2_run()
    params = interop.from_state_dict(net.state_dict(), gpt2_params(), GPT2)
    fresh = recipes.torch_muon(0.02, partition=hidden).init(params)
    state = interop.from_optimizer_state(fresh, params, dumps, count=2, layout=GPT2)
    names = [dict(net.named_parameters()), dumps[0]["param_groups"][0]["param_names"]]
    buffers = {name: dumps[0]["state"][i]["momentum_buffer"] for i, name in enumerate(names[1])}
    mu = state.inner_states["muon"].inner_state[0].mu
    block = mu["h"]["1"]
    np.testing.assert_array_equal(
        block["attn"]["c_proj"]["kernel"], buffers["h.1.attn.c_proj.weight"]
    )
    np.testing.assert_array_equal(np.transpose(mu["head"]["kernel"]), buffers["head.weight"])
    with pytest.raises(ValueError, match=r"conv1d_rules\(\)") as error:
        interop.from_optimizer_state(fresh, params, dumps, count=2)
    assert named(str(error.value)) == MENDED[()]


def test_states_of_conv1d_go_back_in_the_order_of_the_running_optimizers():
    net, dumps, _ = gpt2_run()
    params = interop.from_state_dict(net.state_dict(), gpt2_params(), GPT2)
    fresh = recipes.torch_muon(0.02, partition=hidden).init(params)
    state = interop.from_optimizer_state(fresh, params, dumps, count=2, layout=GPT2)
    back = interop.to_optimizer_state(state, params, dumps, layout=GPT2)
    for dump, old in zip(back, dumps, strict=True):
        for i, buffers in old["state"].items():
            assert all(torch.equal(dump["state"][i][name], x) for name, x in buffers.items())
    with pytest.raises(ValueError, match=r"conv1d_rules\(\)") as error:
        interop.to_optimizer_state(state, params, dumps)
    keys = [f"{path.removesuffix('kernel')}weight".replace("/", ".") for path in MENDED[()]]
    assert named(str(error.value)) == keys


def test_a_prefix_of_keys():
    """As docs/torch.md says."""
    layout = TorchLayout(GPT2.rules, rename=((r"^(?!head\.)", "transformer."),))
    keys = set(interop.to_state_dict(gpt2_params(), layout))
    own = Gpt2().state_dict()
    assert keys == {k if k.startswith("head.") else f"transformer.{k}" for k in own}
    found = interop.from_state_dict(
        {k if k.startswith("head.") else f"transformer.{k}": x for k, x in own.items()},
        gpt2_params(),
        layout,
    )
    np.testing.assert_array_equal(found["wte"]["embedding"], own["wte.weight"])


def test_rules_for_conv1d_of_other_names():
    layout = TorchLayout((*conv1d_rules("fused_*"), *default_torch_rules()))
    assert layout.place(("fused_qkv", "kernel"), (4, 4)).axes is None
    assert layout.place(("c_proj", "kernel"), (4, 4)).axes == (1, 0)
    assert layout.place(("fused_qkv", "bias"), (4,)).key == "fused_qkv.bias"


# ConvTranspose


@pytest.mark.parametrize("channels", [(3, 3), (3, 5)])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("name", ["ConvTranspose_0", "deconv1", "conv_transpose", "TransposedConv"])
def test_transposed_convolutions_there_and_back(name, rank, channels):
    torch.manual_seed(0)
    inputs, outputs = channels
    window, strides = (2, 3, 4)[:rank], (2, 1, 3)[:rank]
    kind = getattr(torch.nn, f"ConvTranspose{rank}d")
    net = torch.nn.ModuleDict({name: kind(inputs, outputs, window, strides)})
    tensors = net.state_dict()
    like = {name: {"kernel": zeros(*window, inputs, outputs), "bias": zeros(outputs)}}
    params = interop.from_state_dict(tensors, like)
    size = (*(2, 4, 5, 6)[: rank + 1], inputs)
    x = np.random.default_rng(0).normal(size=size).astype("float32")
    module: Any = nn.ConvTranspose(outputs, window, strides, padding="VALID")
    got = jax.jit(module.apply)({"params": params[name]}, x)
    with torch.no_grad():
        want = net[name](torch.from_numpy(np.moveaxis(x, -1, 1))).numpy()
    np.testing.assert_allclose(got, np.moveaxis(want, 1, -1), rtol=1e-4, atol=1e-5)
    back = interop.to_state_dict(params)
    assert all(torch.equal(back[key], x) for key, x in tensors.items())


def test_transposed_convolutions_of_nnx_and_with_a_transposed_kernel():
    torch.manual_seed(0)
    net = torch.nn.ConvTranspose2d(3, 3, (2, 3), 2)
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 3)).astype("float32")
    with torch.no_grad():
        want = np.moveaxis(net(torch.from_numpy(np.moveaxis(x, -1, 1))).numpy(), 1, -1)
    tensors = {f"up.{key}": tensor for key, tensor in net.state_dict().items()}
    for flag in (False, True):
        options: Any = {"padding": "VALID", "transpose_kernel": flag}
        make = functools.partial(nnx.ConvTranspose, 3, 3, (2, 3), 2, **options)
        module = nnx.jit(make)(rngs=nnx.Rngs(0))
        axes = (3, 2, 0, 1) if flag else (2, 3, 0, 1)
        rule = TensorRule("up/kernel", axes, "weight", () if flag else (0, 1))
        like = {"up": nnx.to_pure_dict(nnx.state(module, nnx.Param))}
        params = interop.from_state_dict(tensors, like, TorchLayout((rule,)))
        nnx.update(module, params["up"])
        got = nnx.jit(lambda module, x: module(x))(module, x)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("outputs", "name", "message"),
    [
        (5, "conv_up", r"conv_up\.weight has shape.*; is \[in, out, \*window\]"),
        (3, "deconv", r"conv_up/kernel: deconv\.weight is \[in, out, \*window\]"),
    ],
)
def test_a_transposed_convolution_read_as_a_convolution_is_told(outputs, name, message):
    own = torch.nn.ConvTranspose2d(3, outputs, 2).state_dict()
    tensors = {f"{name}.{k}": x for k, x in own.items()}
    like = {"conv_up": {"kernel": zeros(2, 2, 3, outputs), "bias": zeros(outputs)}}
    rename = ((r"^conv_up", name),)
    with pytest.raises(ValueError, match=message):
        interop.from_state_dict(tensors, like, TorchLayout(rename=rename))
    rule = TensorRule("conv_up/kernel", (2, 3, 0, 1), "weight", (0, 1))
    found = interop.from_state_dict(tensors, like, TorchLayout((rule,), rename))
    kernel = np.asarray(found["conv_up"]["kernel"])
    want = own["weight"].detach().numpy()
    np.testing.assert_array_equal(kernel, want.transpose(2, 3, 0, 1)[::-1, ::-1])


def test_momentum_of_a_transposed_convolution_goes_there_and_back():
    torch.manual_seed(0)
    net = torch.nn.ModuleDict({"deconv": torch.nn.ConvTranspose2d(3, 3, 2, bias=False)})
    optimizer = torch.optim.AdamW(net.named_parameters())
    weight = net["deconv"].weight
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    dump = optimizer.state_dict()
    params = {"deconv": {"kernel": zeros(2, 2, 3, 3)}}
    tx = muon(0.1, partition=lambda params: jax.tree.map(lambda _: "adam", params))
    with pytest.warns(match="no leaf gets Muon"):
        fresh = tx.init(params)
    state = interop.from_optimizer_state(fresh, params, dump, count=1)
    mu = state.inner_states["adam"].inner_state[0].mu["deconv"]["kernel"]
    first = dump["state"][0]["exp_avg"].numpy()
    np.testing.assert_array_equal(mu, first.transpose(2, 3, 0, 1)[::-1, ::-1])
    (back,) = interop.to_optimizer_state(state, params, dump)
    assert torch.equal(back["state"][0]["exp_avg"], dump["state"][0]["exp_avg"])


def test_flipped_axes_are_checked():
    for axes, flipped in [((1, 0), (2,)), (None, (0,)), ((1, 0), (-1,))]:
        with pytest.raises(ValueError, match="flipped must be among axes"):
            TensorRule("kernel", axes, "weight", flipped)


# Buffers and ties


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=True)(nn.Dense(3, name="fc")(x))


def test_running_statistics_of_batch_norm():
    """As docs/torch.md says."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    for _ in range(3):
        net(torch.randn(16, 4) * 2 + 1)
    net.eval()
    x = np.random.default_rng(0).normal(size=(5, 4)).astype("float32")
    module: Any = Normed()
    like = jax.eval_shape(module.init, jax.random.key(0), x)
    rename = ((r"^(params|batch_stats)\.", ""), (r"^fc", "0"), (r"^BatchNorm_0", "1"))
    layout = TorchLayout(rename=rename)
    tensors = {k: t for k, t in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    variables = interop.from_state_dict(tensors, like, layout)
    with torch.no_grad():
        want = net(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(jax.jit(module.apply)(variables, x), want, rtol=1e-5, atol=1e-5)
    back = interop.to_state_dict(variables, layout)
    assert {key: torch.equal(x, tensors[key]) for key, x in back.items()} == dict.fromkeys(
        tensors, True
    )
    net.load_state_dict({**net.state_dict(), **back})
    with pytest.raises(ValueError, match=r"1\.num_batches_tracked: no leaf has this key"):
        interop.from_state_dict(net.state_dict(), like, layout)


def test_statistics_of_nnx_norms_and_leaves_that_only_sound_like_them():
    place = TorchLayout().place
    assert place(("bn1", "mean"), (8,)).key == "bn1.running_mean"
    assert place(("layer_norm", "var"), (8,)).key == "layer_norm.running_var"
    assert place(("pixel", "mean"), (3,)).key == "pixel.mean"
    assert place(("bn1", "mean"), (8, 8)).key == "bn1.mean"


def test_extra_keys_are_all_listed():
    """Causal masks and a tied head: what docs/torch.md leaves out by hand."""
    tensors = {**Gpt2().state_dict(), "h.0.attn.bias": torch.ones(1, 1, 4, 4)}
    tensors |= {"lm_head.weight": tensors["wte.weight"]}
    with pytest.raises(ValueError, match="no leaf has this key") as error:
        interop.from_state_dict(tensors, gpt2_params(), GPT2)
    assert named(str(error.value)) == ["h.0.attn.bias", "lm_head.weight"]


# Parameters without a gradient


def test_parameters_that_never_got_a_gradient():
    torch.manual_seed(0)
    net = Gpt2()
    parts = [
        [(n, p) for n, p in net.named_parameters() if (p.ndim == 2 and "wte" not in n) == is_muon]
        for is_muon in (True, False)
    ]
    optimizers = [torch.optim.Muon(parts[0]), torch.optim.AdamW(parts[1])]
    for n, p in net.named_parameters():
        p.grad = None if n.startswith(("h.1", "wte")) else torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    dumps = [optimizer.state_dict() for optimizer in optimizers]
    params = interop.from_state_dict(net.state_dict(), gpt2_params(), GPT2)
    fresh = recipes.torch_muon(0.02, partition=hidden).init(params)
    given: dict[str, Any] = {"count": 1, "layout": GPT2}
    with pytest.raises(ValueError, match="missing='zero' begins it") as error:
        interop.from_optimizer_state(fresh, params, dumps, **given)
    lines = str(error.value).splitlines()[1:]
    assert len(lines) == 4 + 2 * 4 + 2  # kernels, first and second moments of biases, the table
    state = interop.from_optimizer_state(fresh, params, dumps, missing="zero", **given)
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    adam, muons = (state.inner_states[label].inner_state[0] for label in ("adam", "muon"))
    np.testing.assert_array_equal(muons.mu["h"]["1"]["mlp"]["c_fc"]["kernel"], np.zeros((8, 32)))
    np.testing.assert_allclose(muons.mu["head"]["kernel"], np.full((8, 8), 0.05), rtol=1e-6)
    np.testing.assert_array_equal(adam.nu["wte"]["embedding"], np.zeros((11, 8)))
    np.testing.assert_allclose(adam.mu["head"]["bias"], np.full(8, 0.1), rtol=1e-6)
    assert int(adam.count) == int(muons.count) == 1
    dump = interop.to_optimizer_state(state, params, dumps, layout=GPT2)[0]["state"]
    assert all(len(dump[i]) == 1 for i in range(len(parts[0])))


def test_a_parameter_that_no_optimizer_holds_is_not_taken_for_new():
    net, dumps, _ = gpt2_run()
    params = interop.from_state_dict(net.state_dict(), gpt2_params(), GPT2)
    fresh = recipes.torch_muon(0.02, partition=hidden).init(params)
    known = dumps[1]["param_groups"][0]
    del known["param_names"][0], known["params"][0], dumps[1]["state"][0]
    for missing in ("raise", "zero"):
        with pytest.raises(
            ValueError, match=r"(?m)wte\.weight has no exp_avg; it has no state$"
        ) as error:
            interop.from_optimizer_state(
                fresh, params, dumps, count=2, layout=GPT2, missing=missing
            )
        assert len(str(error.value).splitlines()) == 3
    wrong: Any = "zeros"
    with pytest.raises(ValueError, match=re.escape("missing must be one of ('raise', 'zero')")):
        interop.from_optimizer_state(fresh, params, dumps, count=2, layout=GPT2, missing=wrong)


def test_half_a_state_is_an_error_either_way():
    net, dumps, _ = gpt2_run()
    params = interop.from_state_dict(net.state_dict(), gpt2_params(), GPT2)
    fresh = recipes.torch_muon(0.02, partition=hidden).init(params)
    del dumps[1]["state"][0]["exp_avg"]
    with pytest.raises(ValueError, match=r"wte\.weight has no exp_avg; it has \['step', 'exp_avg_"):
        interop.from_optimizer_state(fresh, params, dumps, count=2, layout=GPT2, missing="zero")
