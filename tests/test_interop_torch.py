"""Arrays, parameters and optimizer states to torch and back, bit for bit."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from running import apply_compiled, run

from muon_optax import muon, recipes
from muon_optax.interop import TensorRule, TorchLayout
from muon_optax.interop import torch as interop

torch = pytest.importorskip("torch", reason="torch isn't installed")

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint8", "int8", "bool", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]


def bits(x: Any) -> bytes:
    return np.asarray(x).tobytes()


def same_bits(one: Any, other: Any) -> bool:
    """Whether two nests of tensors, numbers and strings are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        equal = one.dtype == other.dtype and one.shape == other.shape
        flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        return equal and torch.equal(*flat)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_bits(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_bits, one, other))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (3, 5), (2, 1, 4)])
@pytest.mark.parametrize("copy", [True, False])
def test_arrays_go_there_and_back(dtype, shape, copy):
    values = np.random.default_rng(0).normal(size=shape) * 3
    x = jnp.asarray(values).astype(dtype)
    tensor = interop.to_torch(x, copy=copy)
    assert str(tensor.dtype) == f"torch.{dtype}"
    assert tuple(tensor.shape) == shape
    back = interop.from_torch(tensor, copy=copy)
    assert back.dtype == x.dtype
    assert bits(back) == bits(x)


def test_copies_share_nothing():
    x = jnp.ones((3, 4))
    tensor = interop.to_torch(x)
    tensor.zero_()
    assert x.all()
    y = interop.from_torch(tensor)
    tensor.fill_(2.0)
    assert not y.any()


def test_without_a_copy_memory_is_shared():
    tensor = torch.ones(64, 64)
    assert interop.from_torch(tensor, copy=False).unsafe_buffer_pointer() == tensor.data_ptr()
    x = jnp.ones((64, 64))
    assert interop.to_torch(x, copy=False).data_ptr() == x.unsafe_buffer_pointer()


def test_views_and_conjugates_are_read_as_they_look():
    x = torch.randn(4, 6, dtype=torch.complex64)
    np.testing.assert_array_equal(interop.from_torch(x[1:, ::2].mH), x[1:, ::2].mH.resolve_conj())


def test_sharded_arrays_are_gathered():
    mesh = jax.make_mesh((4,), ("fsdp",))
    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), NamedSharding(mesh, PartitionSpec("fsdp")))
    np.testing.assert_array_equal(interop.to_torch(x), np.arange(32.0).reshape(8, 4))


def test_no_dtype_is_changed_silently():
    with pytest.raises(
        TypeError, match=r"float64, which JAX would round to float32; set jax_enable"
    ):
        interop.from_torch(torch.ones(2, dtype=torch.float64))
    with pytest.raises(TypeError, match="int64"):
        interop.from_torch(torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match="no dtype bits8"):
        interop.from_torch(torch.empty(2, dtype=torch.bits8))
    with pytest.raises(TypeError, match="no dtype int4"):
        interop.to_torch(jnp.ones(2, jnp.int4))
    with jax.enable_x64(True):
        assert interop.from_torch(torch.ones(2, dtype=torch.float64)).dtype == jnp.float64


class Net(torch.nn.Module):
    def __init__(self, dtype: Any = torch.float32):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.norm = torch.nn.LayerNorm(4)
        self.up = torch.nn.Linear(4, 6, bias=False)
        self.conv = torch.nn.Conv2d(2, 3, (2, 5))
        self.to(dtype)


def flax_params(dtype: Any = jnp.float32) -> Any:
    """What Net is called in Flax."""
    linear = {"kernel": (4, 4), "bias": (4,)}
    shapes = {
        "embed": {"embedding": (11, 4)},
        "layers_0": linear,
        "layers_1": linear,
        "norm": {"scale": (4,), "bias": (4,)},
        "up": {"kernel": (4, 6)},
        "conv": {"kernel": (2, 5, 2, 3), "bias": (3,)},
    }
    make = lambda shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    return jax.tree.map(make, shapes, is_leaf=lambda x: isinstance(x, tuple))


LAYOUT = TorchLayout(rename=((r"layers_(\d+)", r"layers.\1"),))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_state_dicts_go_there_and_back(dtype):
    tensors = Net(getattr(torch, dtype)).state_dict()
    params = interop.from_state_dict(tensors, flax_params(dtype), LAYOUT)
    square = tensors["layers.1.weight"].float().numpy()
    np.testing.assert_array_equal(np.float32(params["layers_1"]["kernel"]), square.T)
    kernel = np.asarray(params["conv"]["kernel"], np.float32)
    np.testing.assert_array_equal(kernel[1, 4, 0, 2], tensors["conv.weight"].float()[2, 0, 1, 4])
    back = interop.to_state_dict(params, LAYOUT)
    assert all(t.is_contiguous() for t in back.values())
    assert same_bits({key: back[key] for key in tensors}, dict(tensors))
    assert back.keys() == tensors.keys()


def test_linear_layers_compute_the_same():
    net = Net()
    params = interop.from_state_dict(net.state_dict(), flax_params(), LAYOUT)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    kernel, bias = (np.asarray(params["layers_0"][name]) for name in ("kernel", "bias"))
    got = x @ kernel + bias
    np.testing.assert_allclose(got, net.layers[0](torch.tensor(x)).detach(), rtol=1e-5, atol=1e-6)


def test_parameters_lie_where_the_likes_lie():
    mesh = jax.make_mesh((2,), ("fsdp",))
    shardings = NamedSharding(mesh, PartitionSpec("fsdp"))
    like = {"kernel": jax.ShapeDtypeStruct((4, 6), jnp.float32, sharding=shardings)}
    params = interop.from_state_dict(torch.nn.Linear(4, 6, bias=False).state_dict(), like)
    assert params["kernel"].sharding == shardings


def test_trees_of_torchs_own_names_need_no_rules():
    tensors = dict(Net().state_dict())
    like = {k: jax.ShapeDtypeStruct(tuple(t.shape), jnp.float32) for k, t in tensors.items()}
    plain = TorchLayout(rules=())
    back = interop.to_state_dict(interop.from_state_dict(tensors, like, plain), plain)
    assert same_bits({key: back[key] for key in tensors}, tensors)


def test_what_does_not_fit_is_listed_with_its_path():
    tensors = dict(Net().state_dict())
    del tensors["up.weight"]
    tensors["extra.bias"] = torch.zeros(2)
    tensors["norm.bias"] = torch.zeros(5)
    tensors["norm.weight"] = torch.zeros(4, dtype=torch.float16)
    tensors["conv.weight"] = tensors["conv.weight"].permute(2, 3, 1, 0)
    with pytest.raises(ValueError, match="doesn't fit") as error:
        interop.from_state_dict(tensors, flax_params(), LAYOUT)
    text = str(error.value)
    assert "up/kernel: no key up.weight; there are embed.weight" in text
    assert "extra.bias: no leaf has this key" in text
    assert "norm/bias: norm.bias has shape (5,), expected (4,)" in text
    assert "norm/scale: norm.weight has dtype float16, expected float32" in text
    assert "conv/kernel: conv.weight has shape (2, 5, 2, 3), expected (3, 2, 2, 5)" in text


def test_layouts_are_checked():
    with pytest.raises(ValueError, match="must be a permutation, got \\(0, 0\\)"):
        TensorRule("kernel", (0, 0))
    with pytest.raises(ValueError, match="qkv/kernel: shape \\(4, 2, 3\\): no rule says"):
        interop.to_state_dict({"qkv": {"kernel": jnp.ones((4, 2, 3))}})
    with pytest.raises(ValueError, match=r"w: shape \(4,\): the rule's axes \(1, 0\)"):
        interop.to_state_dict({"w": jnp.ones(4)}, TorchLayout((TensorRule("w", (1, 0)),)))
    same = TorchLayout(rename=((r"^.*$", "w"),))
    with pytest.raises(ValueError, match="b: has the key of a, w"):
        interop.to_state_dict({"a": jnp.ones(1), "b": jnp.ones(1)}, same)


HIDDEN = ("layers.0.weight", "layers.1.weight", "up.weight")


def torch_run(steps: int, *, muon_class: Any = torch.optim.Muon, seed: int = 0) -> Any:
    """A module, its two optimizers after some steps, and their parameters' names."""
    torch.manual_seed(seed)
    net = Net()
    named = dict(net.named_parameters())
    names = [HIDDEN, tuple(name for name in named if name not in HIDDEN)]
    optimizers = [
        muon_class([named[n] for n in names[0]], lr=0.02),
        torch.optim.AdamW([named[n] for n in names[1]], lr=0.02),
    ]
    step(net, optimizers, steps)
    return net, optimizers, names


def step(net: Any, optimizers: Any, steps: int) -> list[dict[str, Any]]:
    """Steps on gradients that the parameters' names and shapes alone decide."""
    seen = []
    for _ in range(steps):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        seen.append({name: p.grad.clone() for name, p in net.named_parameters()})
        for optimizer in optimizers:
            optimizer.step()
    return seen


def jax_side(net: Any) -> tuple[Any, Any]:
    params = interop.from_state_dict(net.state_dict(), flax_params(), LAYOUT)
    return params, recipes.torch_muon(0.02, partition=labels)


def labels(params: Any) -> Any:
    def is_hidden(path: Any) -> bool:
        layer, leaf = (key.key for key in path)
        return layer in ("layers_0", "layers_1", "up") and leaf == "kernel"

    return jax.tree_util.tree_map_with_path(
        lambda path, _: "muon" if is_hidden(path) else "adam", params
    )


def test_export_after_import_is_the_identity():
    net, optimizers, names = torch_run(3)
    params, tx = jax_side(net)
    dumps = [optimizer.state_dict() for optimizer in optimizers]
    state = interop.from_optimizer_state(
        tx.init(params), params, dumps, count=3, names=names, layout=LAYOUT
    )
    assert int(state.inner_states["muon"].inner_state[0].count) == 3
    back = interop.to_optimizer_state(state, params, dumps, names=names, layout=LAYOUT)
    assert same_bits(back, dumps)
    fresh = torch_run(0)[1]
    blank = [optimizer.state_dict() for optimizer in fresh]
    assert same_bits(
        interop.to_optimizer_state(state, params, blank, names=names, layout=LAYOUT), dumps
    )
    for optimizer, dump in zip(fresh, back, strict=True):
        optimizer.load_state_dict(dump)
    assert same_bits([optimizer.state_dict() for optimizer in fresh], dumps)


def test_import_after_export_is_the_identity():
    net, optimizers, names = torch_run(0)
    params, tx = jax_side(net)
    grads = [
        jax.tree.map(lambda p, i=i: np.float32(0.1) * p + np.float32(i), jax.device_get(params))
        for i in range(2)
    ]
    _, state, _ = run(tx, params, grads, jit=True)
    blank = [optimizer.state_dict() for optimizer in optimizers]
    dumps = interop.to_optimizer_state(state, params, blank, names=names, layout=LAYOUT)
    back = interop.from_optimizer_state(
        tx.init(params), params, dumps, count=2, names=names, layout=LAYOUT
    )
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert all(map(np.array_equal, jax.tree.leaves(back), jax.tree.leaves(state)))


def test_a_torch_run_goes_on_in_jax():
    net, optimizers, names = torch_run(3)
    params, tx = jax_side(net)
    state = interop.from_optimizer_state(
        tx.init(params),
        params,
        [optimizer.state_dict() for optimizer in optimizers],
        count=3,
        names=names,
        layout=LAYOUT,
    )
    seen = step(net, optimizers, 2)
    grads = [interop.from_state_dict(g, params, LAYOUT) for g in seen]
    update = jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, params)
        params = apply_compiled(params, updates)
    want = interop.from_state_dict(net.state_dict(), params, LAYOUT)
    for got, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-3)  # bfloat16 inside, at a rate of 0.02
    buffers = optimizers[0].state_dict()["state"]
    mu = state.inner_states["muon"].inner_state[0].mu["up"]["kernel"]
    np.testing.assert_allclose(
        np.transpose(mu), buffers[2]["momentum_buffer"], rtol=1e-6, atol=1e-7
    )


def test_names_from_the_state_dict_itself():
    net = Net()
    hidden = [(n, p) for n, p in net.named_parameters() if n in HIDDEN]
    rest = [(n, p) for n, p in net.named_parameters() if n not in HIDDEN]
    optimizers = [torch.optim.Muon(hidden), torch.optim.AdamW(rest)]
    step(net, optimizers, 1)
    params, tx = jax_side(net)
    numbered = [optimizer.state_dict() for optimizer in optimizers]
    keyed = []
    for dump, named in zip(numbered, (hidden, rest), strict=True):
        own = {name: dump["state"][i] for i, (name, _) in enumerate(named)}
        keyed.append({"state": own, "param_groups": [{"params": list(own)}]})
    states = [
        interop.from_optimizer_state(tx.init(params), params, dumps, count=1, layout=LAYOUT)
        for dumps in (numbered, keyed)
    ]
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))


def test_counts_of_schedules_go_on_too():
    net, optimizers, names = torch_run(4)
    params, _ = jax_side(net)
    tx = optax.chain(
        optax.clip(1.0), recipes.torch_muon(optax.linear_schedule(0.1, 0.0, 10), partition=labels)
    )
    dumps = [optimizer.state_dict() for optimizer in optimizers]
    state = interop.from_optimizer_state(
        tx.init(params), params, dumps, count=4, names=names, layout=LAYOUT
    )
    counts = optax.tree.get_all_with_path(state, "count")
    assert [int(count) for _, count in counts] == [4] * 4


def test_states_that_do_not_fit_are_listed():
    net, optimizers, names = torch_run(2)
    params, tx = jax_side(net)
    dumps = [optimizer.state_dict() for optimizer in optimizers]

    def message(**changes: Any) -> str:
        given = {"count": 2, "names": names, "layout": LAYOUT} | changes
        with pytest.raises(ValueError, match=r"optimizer|names") as error:
            interop.from_optimizer_state(tx.init(params), params, dumps, **given)
        return str(error.value)

    assert "norm/bias: norm.bias has made 2 updates, and count says 3" in message(count=3)
    assert "optimizer 0 has 3 parameters and 0 names" in message(names=None)
    assert "names has 1 entries for 2 optimizers" in message(names=names[:1])
    other = {"layers.0.bias": "layers.0.weight", "layers.0.weight": "layers.0.bias"}
    text = message(names=[[other.get(name, name) for name in part] for part in names])
    assert "layers_0/kernel: layers.0.weight has buffers of AdamW in torch, and gets Muon" in text
    assert "layers_0/bias: layers.0.bias has buffers of Muon in torch, and gets AdamW" in text
    text = message(names=[names[0], ("other", *names[1][1:])])
    assert "embed/embedding: embed.weight has no exp_avg; it has no state" in text
    assert "other: no leaf has this name" in text
    twice = message(names=[names[0], (names[0][0], *names[1][1:])])
    assert "layers.0.weight: two optimizers have it" in twice
    del dumps[0]["state"][2]
    dumps[0]["state"][0]["momentum_buffer"] = torch.zeros(4, 5)
    dumps[0]["state"][1]["momentum_buffer"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    text = message()
    assert "layers_0/kernel: momentum_buffer of layers.0.weight has shape (4, 5)" in text
    assert "layers_1/kernel: momentum_buffer of layers.1.weight has dtype bfloat16" in text
    assert "up/kernel: up.weight has no momentum_buffer; it has no state" in text
    with pytest.raises(ValueError, match=r"up\.weight: no optimizer has this parameter"):
        interop.to_optimizer_state(
            tx.init(params), params, dumps[1], names=names[1:], layout=LAYOUT
        )


@pytest.mark.parametrize("fields", [interop.MOONLIGHT_FIELDS, interop.DION_FIELDS])
def test_other_systems_names_of_buffers(fields):
    """One optimizer for all, with a sum of gradients as momentum."""
    kernel, scale = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    params = {"up": {"kernel": kernel}, "norm": {"scale": scale}}
    momentum, first, second = torch.randn(3, 2), torch.randn(3), torch.rand(3)
    adam: dict[str, Any] = {fields.first: first, fields.second: second}
    group: dict[str, Any] = {"params": [0, 1], "lr": 0.1}
    if fields.step is None:
        group["step"] = 5
    else:
        adam = {fields.step: 5} | adam
    state = {0: {"use_muon": True, fields.momentum: momentum}, 1: {"use_muon": False} | adam}
    dump = {"state": state, "param_groups": [group]}
    names = [("up.weight", "norm.weight")]
    tx = recipes.moonlight()
    got = interop.from_optimizer_state(
        tx.init(params), params, dump, count=5, names=names, fields=fields
    )
    mu = got.inner_states["muon"].inner_state[0].mu["up"]["kernel"]
    np.testing.assert_array_equal(mu, momentum.T)
    (back,) = interop.to_optimizer_state(got, params, dump, names=names, fields=fields)
    assert same_bits(back, dump)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_momentum_forms_are_converted_only_when_asked(dtype):
    grads = [{"w": np.full((2, 3), g, dtype)} for g in (1.0, -2.0, 3.0)]
    states = {
        form: run(muon(0.1, momentum=form, beta=0.9), grads[0], grads, jit=True)[1]
        for form in ("ema", "sum")
    }
    ways: tuple[tuple[str, Any], ...] = (("sum", "ema"), ("ema", "sum"))
    for here, there in ways:
        got = interop.convert_momentum(states[here], 0.9, to=there)
        mu = [
            np.float32(s.inner_states["muon"].inner_state[0].mu["w"]) for s in (got, states[there])
        ]
        np.testing.assert_allclose(*mu, rtol=1e-6 if dtype == jnp.float32 else 1e-2)
    with pytest.raises(ValueError, match="to must be one of"):
        interop.convert_momentum(states["sum"], 0.9, to="average")  # pyright: ignore[reportArgumentType]


def test_the_page_about_torch_runs():
    page = (Path(__file__).parent.parent / "docs" / "torch.md").read_text()
    found: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code, found)
    before = [optimizer.state_dict() for optimizer in found["optimizers"]]
    assert same_bits(found["dumps"], before)
    assert int(found["state"].inner_states["muon"].inner_state[0].count) == 3
    assert found["written"].keys() == found["tensors"].keys() - {"transformer.h.0.attn.bias"}
    assert same_bits(found["restored"], found["tensors"])
    square = found["params"]["h"]["0"]["attn"]["c_proj"]["kernel"]
    np.testing.assert_array_equal(square, found["tensors"]["transformer.h.0.attn.c_proj.weight"])
