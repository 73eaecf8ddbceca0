"""Hidden matrices that may be tables or last layers by the leaves around them: on Muon, warned."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_roles import BLOCK, MATRICES, TORCH_BLOCK, Shapes, exact_roles
from shown import report

from muon_optax import MuonDimensionNumbers, MuonWarning, muon
from muon_optax.partition import assign, find_warnings

BIASED: Shapes = TORCH_BLOCK | {
    "layers/0/attn/q/bias": (64,),
    "layers/0/mlp/up/bias": (256,),
    "layers/0/mlp/down/bias": (64,),
}


def role(path: str, shape: tuple[int, ...], block: Shapes, **others: tuple[int, ...]) -> str:
    named = {name.replace("__", "/"): size for name, size in others.items()}
    return exact_roles(block | named | {path: shape})[path]


@pytest.mark.parametrize("block", [BLOCK, TORCH_BLOCK])
@pytest.mark.parametrize("path", ["aux", "layers/0/attn/xa", "stem/proj"])
def test_an_array_of_its_own_among_weights_is_doubtful(path, block):
    assert role(path, (30, 64), block).removeprefix("transposed_") == "bare_parameter"


def test_arrays_of_their_own_are_layers_where_most_are():
    """As in models that are written without a library: `params["wq"]`."""
    shapes = {"wq": (64, 64), "w1": (64, 256), "w2": (256, 64), "scale": (64,)}
    assert set(exact_roles(shapes).values()) == {"matrix", "vector"}
    assert set(exact_roles(shapes | {"other/kernel": (64, 64)}).values()) <= {"matrix", "vector"}


def test_an_array_of_a_recurrent_cell_is_no_table():
    assert role("gru/w_i", (64, 192), BLOCK) == "matrix"


def test_a_matrix_without_a_bias_among_those_with_one_is_doubtful():
    found = role("xa/weight", (256, 64), BIASED, next__weight=(8, 256))
    assert found == "transposed_possible_table"
    assert role("xa/weight", (64, 64), BIASED) == "possible_table"
    assert role("xa/weight", (64, 64), TORCH_BLOCK) == "matrix"  # none has one
    assert role("layers/0/mlp/xa/weight", (64, 64), BIASED) == "matrix"
    assert role("attn_pool/attn/q_proj/weight", (64, 64), BIASED) == "matrix"
    assert role("xa/weight", (64, 64), BIASED, xa__bias=(64,)) == "matrix"


def test_a_matrix_of_sizes_that_only_its_twins_have_is_doubtful():
    """As T5's biases of relative positions, a table in the encoder and one in the decoder."""
    block = TORCH_BLOCK | {path.replace("0", "1", 1): n for path, n in TORCH_BLOCK.items()}
    twin = {"blocks__1__self_attn__xa__weight": (32, 8)}
    found = role("layers/0/self_attn/xa/weight", (32, 8), block, **twin)
    assert found == "transposed_possible_table"
    assert role("layers/0/mlp/xa/weight", (1024, 64), block) == "transposed_possible_table"
    assert role("layers/0/mlp/kv_b_proj/weight", (1024, 64), block) == "transposed_matrix"
    assert role("layers/0/mlp/xa/weight", (300, 64), block) == "transposed_matrix"
    assert role("layers/0/mlp/xa/kernel", (64, 1024), BLOCK) == "matrix"  # no table is so called


def test_layers_of_one_shape_are_no_tables():
    """As in an example: eight arrays, and no layer of another shape to share a size with."""
    assert set(exact_roles({f"layer_{i}": (64, 256) for i in range(8)}).values()) == {"matrix"}


NOWHERE = ["to_xa", "xa_proj", "up", "xa_proj/linear"]


@pytest.mark.parametrize("name", NOWHERE)
def test_outputs_that_nothing_takes_are_doubtful_under_names_of_hidden_layers(name):
    assert role(f"{name}/kernel", (64, 48), BLOCK) == "possible_head"
    found = role(f"{name}/weight", (48, 64), BIASED, **{f"{name.replace('/', '__')}__bias": (48,)})
    assert found == "transposed_possible_head"


@pytest.mark.parametrize("name", NOWHERE)
def test_outputs_that_another_layer_takes_are_not_doubtful(name):
    assert role(f"{name}/kernel", (64, 48), BLOCK, next__kernel=(48, 64)) in MATRICES
    assert role(f"{name}/kernel", (48, 64), BLOCK) in MATRICES  # to the width of the norms
    assert role(f"layers/0/mlp/{name}/kernel", (64, 48), BLOCK) in MATRICES


def test_layers_in_repeated_ones_take_nothing_from_outside():
    """A layer to the width between `up` and `down` is a last one: `to_pixels` of so many."""
    assert role("to_xa/kernel", (64, 256), BLOCK) == "possible_head"


def test_few_outputs_that_a_first_layer_takes_are_doubtful():
    norms = {"norm__scale": (16,)}  # so that no width leads back
    assert role("xa_proj/kernel", (64, 16), BLOCK, into__kernel=(16, 64)) == "possible_head"
    assert role("xa_proj/kernel", (64, 16), BLOCK, into__kernel=(16, 64), **norms) == "matrix"


@pytest.mark.parametrize(
    ("path", "shape"),
    [
        ("time_proj/kernel", (64, 384)),
        ("norm_out/linear/kernel", (64, 48)),
        ("attn_pool/kv/kernel", (64, 128)),
        ("lstm_cell/kernel", (64, 512)),
    ],
)
def test_shifts_gates_and_attention_go_elsewhere(path, shape):
    assert role(path, shape, BLOCK) == "matrix"


@pytest.mark.parametrize("name", ["gate", "router", "mixture_router"])
def test_gates_are_not_doubtful(name):
    """What a gate gives is multiplied with what other layers give, so that few take it."""
    others = {"into__kernel": (8, 64), "lm_head__kernel": (64, 1000)}
    assert role(f"{name}/kernel", (64, 8), BLOCK, **others) == "matrix"
    assert role("xa_proj/kernel", (64, 8), BLOCK, **others) == "possible_head"


@pytest.mark.parametrize("norm", ["refine/convs/1/norm/weight", "refine/last_norm/weight"])
def test_norms_beside_convolutions_alone_are_no_widths(norm):
    """Spectrograms of 16 channels, which convolutions refine, as in Tacotron and FastSpeech."""
    refining = {
        "refine/convs/0/weight": (64, 16, 5),
        "refine/convs/1/weight": (16, 64, 5),
        norm: (16,),
    }
    spectrogram = {"mel_proj/weight": (16, 64), "mel_proj/bias": (16,)}
    found = exact_roles(BIASED | refining | spectrogram)
    assert found["mel_proj/weight"] == "transposed_possible_head"
    hidden = {"refine/mix/weight": (16, 16), "refine/mix/bias": (16,)}
    found = exact_roles(BIASED | refining | spectrogram | hidden)
    assert found["mel_proj/weight"] == "transposed_matrix"


def test_sizes_of_fewer_than_four_layers_show_nothing():
    few = {"w": (4, 6), "mixed/w": (4, 6), "mixed/scale": (6,), "vectors/scale": (4,)}
    assert {exact_roles(few)[path] for path in ("w", "mixed/w")} == {"matrix"}
    found = exact_roles({"next/w": (4, 6)} | few | {"to_xa/w": (4, 5)})
    assert found["to_xa/w"] == "possible_head"


def test_a_single_matrix_shows_nothing():
    assert exact_roles({"to_xa/kernel": (64, 48)}) == {"to_xa/kernel": "matrix"}
    assert exact_roles({"to_xa": (64, 48)}) == {"to_xa": "matrix"}


def test_the_warnings_name_the_leaves_and_the_rule_and_leave_them_on_muon():
    shapes = BIASED | {
        "aux": (30, 64),
        "xa/weight": (64, 64),
        "to_xa/weight": (48, 64),
        "to_xa/bias": (48,),
    }
    params = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items()}
    assignment = assign(params)
    found = {d.path: d for d in assignment.decisions}
    assert {found[path].label for path in ("aux", "xa/weight", "to_xa/weight")} == {"muon"}
    as_out_in = MuonDimensionNumbers(1, 0)  # what it is scaled as, without the doubt too
    (alone,) = assign({"to_xa": params["to_xa/weight"]}, as_out_in).decisions
    assert found["to_xa/weight"].view == alone.view
    array, last, table = find_warnings(params, assignment)
    assert "names of their own" in array
    assert "aux (30, 64)" in array
    assert "partition=(Rule('aux', 'adam'), *default_rules())" in array
    assert "to_xa/weight (48, 64)" in last
    assert "takes their outputs" in last
    assert "xa/weight (64, 64). A rule" in table
    assert "without a bias" in table
    assert "Rule('xa/weight', 'adam')" in table


BASE = {"read/weight": (96, 48), "convs/0/weight": (48, 48, 1), "norm/weight": (96,)}


@pytest.mark.parametrize(
    ("kind", "path", "shape", "beside"),
    [
        ("inner_head", "proj_out/weight", (48, 96), BASE),
        ("data_output", "latents_linear/1/weight", (8, 64), {"codes_of/t/weight": (1473, 8)}),
        ("bare_parameter", "xa", (32, 64), {"xa_bias": (32,)}),
        ("possible_table", "xa/weight", (256, 64), {"next/weight": (8, 256)}),
        ("possible_head", "to_xa/weight", (48, 64), {"to_xa/bias": (48,)}),
        ("possible_head", "to_xa/weight", (96, 64), {"to_xa/bias": (96,)}),
    ],
)
def test_doubtful_matrices_are_scaled_by_their_outputs(kind, path, shape, beside):
    """PyTorch keeps them as [out, in]: the scale is that of `shape[0]` outputs."""
    shapes = BIASED | beside | {path: shape}
    params = {p: jax.ShapeDtypeStruct(n, jnp.float32) for p, n in shapes.items()}
    (row,) = (row for row in report(params).rows if row.path == path)
    outputs, inputs = shape
    assert exact_roles(shapes)[path].removeprefix("transposed_") == kind
    if kind != "bare_parameter":  # whose order nothing tells
        assert row.matrices == ((1, inputs, outputs),)
        assert row.scales == (pytest.approx(max(1, outputs / inputs) ** 0.5),)


def test_matrices_without_names_are_scaled_by_the_outputs_that_a_bias_tells():
    params = [jnp.eye(8, 2), jnp.zeros(8), jnp.eye(4, 8), jnp.zeros(4)]
    tx = muon(1.0, "tight", nesterov=False)
    with pytest.warns(MuonWarning, match="leaves without names"):
        updates: Any = jax.jit(tx.update)(params, tx.init(params), params)[0]
    np.testing.assert_allclose(updates[0], -2.0 * np.eye(8, 2), atol=0.02)  # sqrt(8 / 2)
