"""Kinds of leaves that a scan of 2,800 models showed to be taken for what they are not."""

import jax
import jax.numpy as jnp
import pytest
from model_roles import BLOCK, TORCH_BLOCK, Shapes, exact_roles
from shown import report

MIXERS: Shapes = {"seasonal/weight": (96, 96), "trend/weight": (96, 96)}
FUNNEL: Shapes = {"fc1/weight": (128, 784), "fc1/bias": (128,)}


@pytest.mark.parametrize("name", ["projection", "to_xa", "horizon_proj"])
def test_a_last_layer_without_norms_around_is_doubtful(name):
    """Its inputs are features of several steps, flattened, so that no layer gives as many."""
    found = exact_roles(MIXERS | {f"{name}/weight": (10, 672), f"{name}/bias": (10,)})
    assert found[f"{name}/weight"] == "transposed_possible_head"
    taken = {"next/weight": (96, 10), "next/bias": (96,)}
    found = exact_roles(MIXERS | taken | {f"{name}/weight": (10, 672), f"{name}/bias": (10,)})
    assert found[f"{name}/weight"] == "transposed_matrix"


def test_layers_of_a_funnel_without_norms_are_not_doubtful():
    found = exact_roles(FUNNEL | {"fc2/weight": (64, 128), "last/weight": (10, 64)})
    assert (found["fc1/weight"], found["fc2/weight"]) == ("transposed_matrix",) * 2
    assert found["last/weight"] == "head"


@pytest.mark.parametrize("name", ["class_layers/out", "cls_layers/linear", "score_layers/xa"])
def test_modules_of_a_head_that_are_called_layers_are_no_scanned_layers(name):
    """MONAI's DenseNet: `class_layers` is a sequence with names, made once."""
    found = exact_roles(TORCH_BLOCK | {f"{name}/weight": (5, 64), f"{name}/bias": (5,)})
    assert found[f"{name}/weight"] in ("head", "output")
    found = exact_roles(TORCH_BLOCK | {"mix_layers/xa/weight": (5, 64), "mix_layers/xa/bias": (5,)})
    assert found["mix_layers/xa/weight"] == "transposed_matrix"


@pytest.mark.parametrize("original", ["original", "original1"])
def test_parametrized_weights_are_read_by_the_layer_that_has_them(original):
    """`torch.nn.utils.parametrize`: normalised, orthogonal, spectrally normalised weights."""
    tail = f"parametrizations/weight/{original}"
    found = exact_roles(TORCH_BLOCK | {f"to_pred/linear/{tail}": (10, 64)})
    assert found[f"to_pred/linear/{tail}"] == "head"
    found = exact_roles(TORCH_BLOCK | {f"layers/0/mlp/xa/{tail}": (256, 64)})
    assert found[f"layers/0/mlp/xa/{tail}"] == "transposed_matrix"


@pytest.mark.parametrize("scale", ["logit_scale", "class_logits_bias_scale"])
def test_scales_of_the_logits_are_no_widths(scale):
    """Normalised transformers multiply each logit: nothing else is as wide."""
    found = exact_roles(TORCH_BLOCK | {"to_classes/weight": (100, 64), scale: (100,)})
    assert found["to_classes/weight"] in ("head", "output", "transposed_possible_head")
    with_norm = {"to_classes/weight": (100, 64), "norm/weight": (100,)}
    assert exact_roles(TORCH_BLOCK | with_norm)["to_classes/weight"] == "transposed_matrix"


@pytest.mark.parametrize("name", ["projection", "proj_to_clip_embeddings"])
def test_a_projection_to_what_a_first_layer_reads_is_doubtful(name):
    """Inverted transformers of time series, and priors that predict embeddings."""
    last = {f"{name}/weight": (96, 64), f"{name}/bias": (96,)}
    first = {"value_embedding/weight": (64, 96), "value_embedding/bias": (64,)}
    found = exact_roles(TORCH_BLOCK | last | first)
    assert found[f"{name}/weight"] == "transposed_data_output"
    bottleneck = {"back/weight": (64, 96), "back/bias": (64,)}
    found = exact_roles(TORCH_BLOCK | last | bottleneck)
    assert found[f"{name}/weight"] == "transposed_matrix"


def test_strange_names_are_doubtful_where_layers_are_arrays_of_their_own():
    shapes = {"wq": (64, 64), "wo": (64, 64), "w1": (64, 256), "w2": (256, 64)}
    assert set(exact_roles(shapes).values()) == {"matrix"}
    found = exact_roles(shapes | {"orders": (30, 64), "q_einsum": (64, 64)})
    assert (found["orders"], found["q_einsum"]) == ("bare_parameter", "matrix")


def test_a_table_of_as_many_rows_as_another_is_none_of_a_layer():
    """A matrix for each relation, beside its embedding: knowledge graphs."""
    tables = {"relation_embedding/weight": (30, 64), "entity_embedding/weight": (2500, 64)}
    found = exact_roles(tables | {"trans_w/weight": (30, 4096)})
    assert found["trans_w/weight"] == "output"
    biased = {"mix/weight": (30, 4096), "mix/bias": (30,)}
    assert exact_roles(tables | biased)["mix/weight"] == "transposed_matrix"


def test_the_only_layer_of_a_head_is_doubtful_where_there_is_no_other_head():
    alone = {"head/base_block/weight": (64, 64), "head/base_block/bias": (64,)}
    found = exact_roles(TORCH_BLOCK | alone)
    assert found["head/base_block/weight"] == "inner_head"
    found = exact_roles(TORCH_BLOCK | alone | {"decoder/weight": (1000, 64)})
    assert found["head/base_block/weight"] == "matrix"


def test_a_square_layer_with_a_bias_is_no_norm_by_its_name():
    found = exact_roles(BLOCK | {"sp_norm/weight": (64, 64), "sp_norm/bias": (64,)})
    assert found["sp_norm/weight"] == "matrix"
    assert exact_roles(BLOCK | {"sp_norm/weight": (4, 64)})["sp_norm/weight"] == "norm"


@pytest.mark.parametrize("name", ["s_scale", "s_bias"])
def test_layers_that_make_the_scale_of_a_norm_are_hidden(name):
    """AlphaFold 3's adaptive norm: a layer for the scale and one for the shift."""
    found = exact_roles(TORCH_BLOCK | {f"layers/0/adaln/{name}/weight": (64, 64)})
    assert found[f"layers/0/adaln/{name}/weight"] == "matrix"


@pytest.mark.parametrize("name", ["atom_to_token", "single_to_pair_codes", "latents_to_features"])
def test_layers_that_lead_to_tokens_are_no_tables(name):
    path = f"input_embedder/{name}/weight"
    assert exact_roles(TORCH_BLOCK | {path: (256, 64)})[path] in (
        "transposed_possible_table",
        "transposed_possible_head",
        "transposed_matrix",
    )


@pytest.mark.parametrize("shape", [(3, 3, 0, 8), (0, 1, 8), (4, 8, 0)])
def test_leaves_of_no_elements_are_no_obstacle(shape):
    params = {"mix": {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32)}}
    params["conv"] = {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}
    rows = {row.path: row.optimizer for row in report(params).rows}
    assert rows == {"conv/kernel": "adam", "mix/kernel": "muon"}


POLICY: Shapes = {
    "Dense_0/kernel": (17, 64),
    "Dense_0/bias": (64,),
    "Dense_1/kernel": (64, 64),
    "Dense_1/bias": (64,),
    "Dense_2/kernel": (64, 6),
    "Dense_2/bias": (6,),
}


@pytest.mark.parametrize("name", ["log_std", "actor_logstd", "std"])
def test_deviations_of_a_policy_are_no_widths(name):
    """Linen's actors have one for each action, and their last layer has no name of a head."""
    assert exact_roles(POLICY | {name: (6,)})["Dense_2/kernel"] in ("head", "output")
    with_norm = exact_roles(POLICY | {"norm/scale": (6,)})
    assert with_norm["Dense_2/kernel"] == "matrix"


@pytest.mark.parametrize("shape", [(4, 512), (512, 4)])
@pytest.mark.parametrize("name", ["conv1d_kernel", "conv_weight", "short_conv_kernel"])
def test_depthwise_convolutions_over_time_as_arrays_of_a_layer(name, shape):
    """KerasHub's Qwen 3.5 keeps them as [channels, window]."""
    path = f"layers/0/linear_attn/{name}"
    assert exact_roles(BLOCK | {path: shape})[path] == "depthwise"
    assert exact_roles(BLOCK | {path: (64, 64)})[path] == "matrix"


DENSE_NET: Shapes = {
    "stem_conv/kernel": (7, 7, 3, 64),
    "head/kernel": (1024, 10),
    **{f"conv{i}_block{k}_1_conv/kernel": (1, 1, 32 * k + 32, 128) for i in (2, 3) for k in (1, 2)},
    **{f"conv{i}_block{k}_1_bn/gamma": (128,) for i in (2, 3) for k in (1, 2)},
}


@pytest.mark.parametrize("count", [1, 6])
def test_convolutions_whose_outputs_are_concatenated_are_no_last_layers(count):
    """DenseNet's, in a flat tree whose names hide that blocks are repeated."""
    growth = {f"conv4_block{k}_2_conv/kernel": (3, 3, 128, 48) for k in range(count)}
    found = exact_roles(DENSE_NET | growth)
    wanted = "output" if count == 1 else "undeclared"
    assert {found[path] for path in growth} == {wanted}


@pytest.mark.parametrize(("inputs", "role"), [(49 * 48, "undeclared"), (50 * 48, "output")])
def test_a_map_that_a_layer_takes_flattened_is_no_last_one(inputs, role):
    net = {"Conv_0/kernel": (3, 3, 3, 32), "Conv_1/kernel": (3, 3, 32, 48)}
    layers = {"Dense_0/kernel": (inputs, 256), "Dense_1/kernel": (256, 10)}
    assert exact_roles(net | layers)["Conv_1/kernel"] == role


@pytest.mark.parametrize(("channels", "role"), [(64, "output"), (16, "undeclared")])
def test_a_last_convolution_gives_the_channels_of_an_image(channels, role):
    """What takes them is the first convolution, and their number is that of the window."""
    net = {"Conv_0/kernel": (3, 3, 3, channels), "Conv_1/kernel": (3, 3, channels, channels)}
    assert exact_roles(net | {"Conv_2/kernel": (3, 3, channels, 3)})["Conv_2/kernel"] == role


@pytest.mark.parametrize("shape", [(6, 64), (64, 6)])
@pytest.mark.parametrize("name", ["attention_norm", "ffn_norm"])
def test_scanned_norms_whose_scale_is_called_a_kernel(name, shape):
    """EasyLM's RMSNorm: `attention_norm/kernel`, a row or a column a layer."""
    path = f"h/scan_decoder/{name}/kernel"
    assert exact_roles(BLOCK | {path: shape})[path] == "norm"
    linear = "h/scan_decoder/norm_proj/kernel"
    assert exact_roles(BLOCK | {linear: shape})[linear] != "norm"


def test_the_last_of_counted_hidden_layers_is_a_head():
    """Brax' MLP: `hidden_0` to `hidden_3`, the last of which gives the actions."""
    shapes = {"hidden_0/kernel": (87, 32), "hidden_1/kernel": (32, 32)}
    biases = {"hidden_0/bias": (32,), "hidden_1/bias": (32,), "hidden_2/bias": (16,)}
    found = exact_roles(shapes | {"hidden_2/kernel": (32, 16)} | biases)
    assert found["hidden_2/kernel"] in ("head", "output")
    assert {found[path] for path in shapes} == {"matrix"}


def test_blocks_of_bare_arrays_are_not_doubtful_beside_layers():
    """A model that is written without a library, of which one layer comes from one."""
    block = {"q": (64, 64), "value": (64, 64), "out": (64, 64), "up": (64, 256), "down": (256, 64)}
    shapes = {f"layer_{i}/{name}": shape for i in range(4) for name, shape in block.items()}
    found = exact_roles(shapes | {"patch/kernel": (48, 64), "patch/bias": (64,)})
    assert {found[name] for name in shapes} == {"matrix"}


def test_a_layer_that_gives_what_a_table_gives_is_not_doubtful():
    """As wide as the embeddings is what goes through the layers, not data that is predicted."""
    shapes = {"embed/embedding": (32, 64), "up/kernel": (64, 256), "down/kernel": (256, 64)}
    assert set(exact_roles(shapes).values()) == {"embedding", "matrix"}
