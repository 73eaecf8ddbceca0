"""Rules read from torch modules on the meta device; their oracle is what torch computes."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import model_reading
import numpy as np
import pytest
from model_reading import check_outer
from running import first_update

torch = pytest.importorskip("torch")

from shown import report  # noqa: E402
from torch import nn  # noqa: E402

from muon_optax import MatrixView, MuonWarning, model_rules, muon  # noqa: E402


def params_of(model: Any) -> dict[str, Any]:
    return {
        name: jax.ShapeDtypeStruct(tuple(p.shape), jnp.float32)
        for name, p in model.named_parameters()
    }


def read(make: Callable[[], Any]) -> dict[str, Any]:
    with torch.device("meta"):
        model = make()
    return model_reading.said(model_rules(model), params_of(model))


MODULES = {
    "Linear": (lambda: nn.Linear(4, 6), {"weight": [(1, 4, 6)], "bias": "bias of Linear"}),
    "Bilinear": (lambda: nn.Bilinear(2, 3, 5, bias=False), {"weight": [(1, 6, 5)]}),
    "Embedding": (lambda: nn.Embedding(9, 4), {"weight": "embedding table of Embedding"}),
    "EmbeddingBag": (lambda: nn.EmbeddingBag(9, 4), {"weight": "embedding table of EmbeddingBag"}),
    "Conv2d": (lambda: nn.Conv2d(4, 6, (3, 2), bias=False), {"weight": [(1, 24, 6)]}),
    "Conv2d of grey images": (lambda: nn.Conv2d(1, 6, 3, bias=False), {"weight": [(1, 9, 6)]}),
    "Conv1d, grouped": (lambda: nn.Conv1d(4, 6, 3, groups=2, bias=False), {"weight": [(2, 6, 3)]}),
    "Conv1d, depthwise": (
        lambda: nn.Conv1d(4, 8, 3, groups=4, bias=False),
        {"weight": "depthwise kernel of Conv1d"},
    ),
    "ConvTranspose1d": (
        lambda: nn.ConvTranspose1d(4, 6, 3, bias=False),
        {"weight": [(1, 12, 6)]},
    ),
    "ConvTranspose1d, grouped": (
        lambda: nn.ConvTranspose1d(4, 6, 3, groups=2, bias=False),
        {"weight": [(2, 6, 3)]},
    ),
    "ConvTranspose1d, depthwise": (
        lambda: nn.ConvTranspose1d(4, 4, 3, groups=4, bias=False),
        {"weight": "depthwise kernel of ConvTranspose1d"},
    ),
    "LayerNorm of two dims": (
        lambda: nn.LayerNorm([4, 6]),
        {"weight": "norm of LayerNorm", "bias": "norm of LayerNorm"},
    ),
    "BatchNorm": (
        lambda: nn.BatchNorm2d(4),
        {"weight": "norm of BatchNorm2d", "bias": "norm of BatchNorm2d"},
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(6, 2, bias=False),
        {"in_proj_weight": [(3, 6, 6)], "out_proj.weight": [(1, 6, 6)]},
    ),
    "MultiheadAttention of other sizes": (
        lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=5, bias=False),
        {f"{name}_proj_weight": [(1, n, 6)] for name, n in {"q": 6, "k": 4, "v": 5}.items()}
        | {"out_proj.weight": [(1, 6, 6)]},
    ),
    "LSTM": (
        lambda: nn.LSTM(4, 6, proj_size=3, bias=False),
        {"weight_ih_l0": [(4, 4, 6)], "weight_hh_l0": [(4, 3, 6)], "weight_hr_l0": [(1, 6, 3)]},
    ),
    "GRU": (
        lambda: nn.GRU(4, 6, bidirectional=True, bias=False),
        {
            f"weight_{kind}_l0{way}": [(3, n, 6)]
            for kind, n in {"ih": 4, "hh": 6}.items()
            for way in ("", "_reverse")
        },
    ),
    "GRUCell": (
        lambda: nn.GRUCell(4, 6),
        {"weight_ih": [(3, 4, 6)], "weight_hh": [(3, 6, 6)]}
        | {f"bias_{kind}": "bias of GRUCell" for kind in ("ih", "hh")},
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 6, 3, bias=False)),
        {
            "parametrizations.weight.original0": "at most one dim above 1",
            "parametrizations.weight.original1": [(1, 12, 6)],
        },
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, expected = MODULES[name]
    assert read(make) == expected


ONE_POSITION: dict[str, tuple[tuple[int, ...], Any, Any]] = {
    "Linear": ((1, 4), lambda x: x, lambda y: y),
    "Conv2d": ((1, 4, 3, 2), lambda x: x.reshape(-1), lambda y: y),
    "Conv1d, grouped": ((1, 4, 3), lambda x: x.reshape(2, 6), lambda y: y),
    "ConvTranspose1d": ((1, 4, 3), lambda x: x[0, :, ::-1].reshape(-1), lambda y: y[..., 2]),
    "ConvTranspose1d, grouped": (
        (1, 4, 3),
        lambda x: x[0, :, ::-1].reshape(2, 6),
        lambda y: y[..., 2],
    ),
}


@pytest.mark.parametrize("name", ONE_POSITION)
def test_views_by_what_torch_computes(name):
    """The oracle of `model_reading`, of one output of a window."""
    shape, taken, picked = ONE_POSITION[name]
    torch.manual_seed(0)
    model = MODULES[name][0]()
    x = torch.randn(shape)
    y = picked(model(x))
    (y * torch.randn_like(y)).sum().backward()
    view = model_reading.views_of(model_rules(model), params_of(model))["weight"]
    check_outer(view, model.weight.grad.numpy(), taken(x.numpy()))


def test_conv1d_of_transformers(monkeypatch):
    """GPT-2's weights are [in, out]: the class is known by its name and module."""
    found = ModuleType("transformers.pytorch_utils")
    monkeypatch.setitem(sys.modules, found.__name__, found)

    class Conv1D(nn.Module):
        def __init__(self, nf: int, nx: int):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(nx, nf))
            self.bias = nn.Parameter(torch.zeros(nf))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)
            self.c_fc, self.lm_head = nn.Linear(8, 16), nn.Linear(16, 9, bias=False)

    Conv1D.__module__ = found.__name__
    assert read(Block) == {
        "c_attn.weight": [(1, 8, 24)],
        "c_attn.bias": "bias of Conv1D",
        "c_proj.weight": [(1, 8, 8)],
        "c_proj.bias": "bias of Conv1D",
        "c_fc.weight": [(1, 8, 16)],
        "c_fc.bias": "bias of Linear",
        "lm_head.weight": "head: Linear",
    }


def test_experts_of_transformers():
    """Stacks of experts say whether they are transposed and how gate and up are ordered."""

    class Experts(nn.Module):
        def __init__(self, is_transposed: bool, is_concatenated: bool):
            super().__init__()
            self.is_transposed, self.is_concatenated = is_transposed, is_concatenated
            sizes = [(2, 8, 12), (2, 6, 8)] if is_transposed else [(2, 12, 8), (2, 8, 6)]
            self.gate_up_proj, self.down_proj = (nn.Parameter(torch.empty(s)) for s in sizes)

    for is_transposed in (True, False):
        for is_concatenated in (True, False):
            with torch.device("meta"):
                model = Experts(is_transposed, is_concatenated)
            found = model_reading.said(model_rules(model), params_of(model))
            assert found == {"gate_up_proj": [(4, 8, 6)], "down_proj": [(2, 6, 8)]}
            views = {r.view.groups for r in model_rules(model) if isinstance(r.view, MatrixView)}
            assert views == ({1} if is_concatenated else {6})


def test_tied_weights_and_heads():
    class Model(nn.Module):
        def __init__(self, is_tied: bool):
            super().__init__()
            self.decoder = nn.Linear(4, 9, bias=False)
            self.embed = nn.Embedding(9, 4)
            self.hidden = nn.Linear(4, 4, bias=False)
            if is_tied:
                self.decoder.weight = self.embed.weight

        def get_output_embeddings(self) -> nn.Module:
            return self.decoder

    assert read(lambda: Model(False)) == {
        "decoder.weight": "head: Linear",
        "embed.weight": "embedding table of Embedding",
        "hidden.weight": [(1, 4, 4)],
    }
    assert read(lambda: Model(True)) == {
        "decoder.weight": "embedding table of Embedding",
        "hidden.weight": [(1, 4, 4)],
    }


def test_the_head_of_a_vgg():
    def vgg() -> Any:
        layers = [nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10)]
        return nn.ModuleDict({"features": nn.Conv2d(3, 8, 3), "classifier": nn.Sequential(*layers)})

    found = read(vgg)
    assert {n: found[f"classifier.{n}.weight"] for n in (0, 2, 4)} == {
        0: [(1, 32, 16)],
        2: [(1, 16, 16)],
        4: "head: Linear",
    }


def test_an_encoder_has_no_head():
    """A bias of relative positions, the last layer defined, takes what no layer makes."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(9, 8)
            self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
            self.up, self.down = nn.Linear(8, 12, bias=False), nn.Linear(12, 8, bias=False)
            self.rel_pos_bias = nn.Linear(5, 2, bias=False)

    assert [p for p, why in read(Encoder).items() if isinstance(why, str)] == ["embed.weight"]


def test_adapters_of_peft():
    """PEFT's factors are Linears below `lora_A` and `lora_B`, the layer itself a `base_layer`."""

    def adapted() -> Any:
        factors = {"lora_A": nn.Linear(8, 2, bias=False), "lora_B": nn.Linear(2, 8, bias=False)}
        lora = {name: nn.ModuleDict({"default": layer}) for name, layer in factors.items()}
        q = nn.ModuleDict({"base_layer": nn.Linear(8, 8, bias=False), **lora})
        return nn.ModuleDict({"q_proj": q, "o_proj": nn.Linear(8, 8, bias=False)})

    assert read(adapted) == {
        "q_proj.base_layer.weight": [(1, 8, 8)],
        "q_proj.lora_A.default.weight": "LoRA factor",
        "q_proj.lora_B.default.weight": "LoRA factor",
        "o_proj.weight": [(1, 8, 8)],
    }


def test_bare_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cls_token = nn.Parameter(torch.empty(1, 1, 8))
            self.rel_pos_h = nn.Parameter(torch.empty(27, 8))
            self.mix_h = nn.Parameter(torch.empty(27, 8))
            self.gamma = nn.Parameter(torch.empty(8))
            self.linear = nn.Linear(8, 8, bias=False)

    with pytest.warns(MuonWarning, match=r"which get AdamW; put a Rule in front.*: mix_h \(27"):
        found = read(Model)
    assert found == {
        "cls_token": "at most one dim above 1",
        "rel_pos_h": "table",
        "mix_h": "unknown use in Model",
        "gamma": "fewer than two dims",
        "linear.weight": [(1, 8, 8)],
    }


def test_no_inputs_are_taken():
    with pytest.raises(TypeError, match="give it no inputs"):
        model_rules(nn.Linear(2, 2), torch.ones(2))


def test_the_report_and_a_step_scale_by_outputs():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Linear(64, 8, bias=False))
    rules = model_rules(model)
    params = {name: jnp.asarray(np.eye(*p.shape)) for name, p in params_of(model).items()}
    scales = {row.path: row.scales for row in report(params, partition=rules).rows}
    assert scales == {"0.weight": (4.0,), "1.weight": ()}
    updates: Any = first_update(muon(1.0, partition=rules), params, jit=True)
    sigma = np.linalg.svd(updates["0.weight"], compute_uv=False)
    np.testing.assert_allclose(sigma, 4, rtol=0.3)
