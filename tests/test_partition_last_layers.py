"""Last layers of a model, each told by another evidence of the tree."""

import pytest
from model_roles import TORCH_BLOCK, in_model, role_in_model, roles

NARROW = [
    ("bbox_embed/0/layers/2", (64, 4)),  # a box from each of several decoder layers
    ("parameter_projection/0", (9, 1)),  # even of few inputs: one row is a vector
    ("horizon", (64, 2)),
]


@pytest.mark.parametrize(("path", "shape"), NARROW)
def test_one_to_four_outputs_are_a_head(path, shape):
    taken = {"boxes/kernel": (shape[1], 64)}  # so that no size is free
    assert in_model({f"{path}/kernel": shape, **taken})[f"{path}/kernel"] == "few_outputs"
    torch = {f"{path}/weight": shape[::-1], f"{path}/bias": shape[1:]}
    taken = {"boxes/weight": (64, shape[1]), "boxes/bias": (64,)}
    assert in_model(torch | taken, TORCH_BLOCK)[f"{path}/weight"] == "few_outputs"


def test_gates_and_first_layers_are_not_narrow():
    gates = {"layers/0/mlp/shared_gate/kernel": (64, 1), "layers/0/attn/mix/kernel": (64, 4)}
    assert set(in_model(gates).values()) == {"matrix"}
    first = {"position/weight": (64, 2), "position/bias": (64,)}
    assert in_model(first, TORCH_BLOCK)["position/weight"] == "transposed_matrix"


@pytest.mark.parametrize("shape", [(5000, 48), (48, 5000)])
def test_a_matrix_with_the_vocabulary_on_any_side_is_a_head(shape):
    """MobileBERT's `predictions.dense` is [in, out] where all others are [out, in]."""
    shapes = {"words_embedding/weight": (5000, 16), "cls/dense/weight": shape}
    assert in_model(shapes, TORCH_BLOCK)["cls/dense/weight"] == "head"


@pytest.mark.parametrize("name", ["proj_out", "to_pixels/out", "final_layer/linear"])
def test_a_last_layer_that_gives_what_the_first_takes(name):
    """Diffusion transformers; a norm of the heads may be as wide as a patch."""
    norm = {"layers/0/attn/norm_q/weight": (24,)}
    linear = {"x_embedder/weight": (64, 24), "x_embedder/bias": (64,), f"{name}/weight": (24, 64)}
    assert in_model(linear | norm, TORCH_BLOCK)[f"{name}/weight"] == "output"
    conv = {"patch_embed/proj/weight": (64, 6, 2, 2), f"{name}/weight": (24, 64)}
    assert in_model(conv | norm, TORCH_BLOCK)[f"{name}/weight"] == "output"


def test_auxiliary_heads_give_what_the_last_head_gives():
    """Inception's `aux1/fc2`: numbered as repeated layers are."""
    shapes = {
        "aux1/fc1/kernel": (64, 256),
        "aux1/fc2/kernel": (256, 10),
        "aux2/fc1/kernel": (64, 256),
        "aux2/fc2/kernel": (256, 10),
        "fc/kernel": (64, 10),
    }
    found = in_model(shapes)
    assert [p for p, role in found.items() if role in ("head", "output")] == [
        "aux1/fc2/kernel",
        "aux2/fc2/kernel",
        "fc/kernel",
    ]


@pytest.mark.parametrize("name", ["dense", "DecoderLSTMCell_0/Dense_0"])
@pytest.mark.parametrize("head", [{}, {"logits/kernel": (64, 9)}])
def test_the_layer_that_gives_the_data_is_doubtful(name, head):
    cell = {"lstm_cell/kernel": (20, 256), "lstm_cell/recurrent_kernel": (64, 256)}
    found = roles({**cell, f"{name}/kernel": (64, 20), **head})
    assert found[f"{name}/kernel"] == "data_output"


def test_the_last_layer_of_an_autoencoder_with_a_classifier_is_doubtful():
    """Its means and deviations may be in one layer, of which the decoder takes a half."""
    encoder = {"inlet/kernel": (784, 400), "moments/kernel": (400, 40)}
    decoder = {"widen/kernel": (20, 300), "pixels_again/kernel": (300, 784)}
    found = roles({**encoder, **decoder, "classifier/kernel": (20, 10)})
    assert found["pixels_again/kernel"] == "data_output"
    assert found["moments/kernel"] == "wide_output"
    assert found["classifier/kernel"] == "head"


def test_a_bottleneck_beside_the_rows_of_a_table_gives_no_data():
    table = {"embed/embedding": (50, 16), "lm_head/kernel": (16, 50)}
    pairs = {"mix/kernel": (16, 13), "unmix/kernel": (13, 16)}
    pairs |= {"gate/kernel": (16, 1), "expand/kernel": (1, 16)}
    found = roles({**table, **pairs, "up/kernel": (16, 24), "down/kernel": (24, 16)})
    assert {found[path] for path in pairs} == {"matrix"}


def test_the_layers_of_a_funnel_lead_on_to_its_head():
    funnel = {"stem/kernel": (784, 512), "mid/kernel": (512, 256), "low/kernel": (256, 128)}
    found = roles({**funnel, "classifier/kernel": (128, 10)})
    assert {found[path] for path in funnel} == {"matrix"}


def test_a_layer_as_wide_as_the_rows_of_tables_goes_on_beside_them():
    """DLRM's dense features, which are multiplied with what its tables give."""
    tables = {f"emb_l/{n}/weight": (rows, 16) for n, rows in enumerate((900, 30, 5))}
    bottom = {"bot_l/0/weight": (48, 13), "bot_l/0/bias": (48,)}
    bottom |= {"bot_l/2/weight": (16, 48), "bot_l/2/bias": (16,)}
    top = {"top_l/0/weight": (48, 22), "top_l/0/bias": (48,)}
    top |= {"top_l/2/weight": (1, 48), "top_l/2/bias": (1,)}
    found = roles({**tables, **bottom, **top})
    assert found["bot_l/2/weight"] == "transposed_matrix"
    assert found["top_l/2/weight"] in ("head", "few_outputs")


def test_a_shift_and_a_scale_before_the_last_layer_are_not_lost_in_silence():
    """DiT's `proj_out_1`, called as its `proj_out_2` is."""
    outputs = {"proj_out_1/kernel": (64, 128), "proj_out_2/kernel": (64, 16)}
    found = in_model(outputs)
    assert found == {"proj_out_1/kernel": "wide_output", "proj_out_2/kernel": "head"}


def test_a_sequence_of_layers_called_an_embedding_is_no_table():
    """T5's spectrogram decoder; tables beside each other don't fit as layers do."""
    layers = {"conditioning_emb/0/weight": (256, 64), "conditioning_emb/2/weight": (256, 256)}
    found = in_model(layers, TORCH_BLOCK)
    assert found["conditioning_emb/0/weight"] == "transposed_matrix"
    assert found["conditioning_emb/2/weight"] == "matrix"
    tables = {"code_emb/0/weight": (256, 64), "code_emb/1/weight": (100, 64)}
    assert set(in_model(tables, TORCH_BLOCK).values()) == {"embedding"}


def test_the_last_of_layers_that_differ_in_a_number_gives_the_output():
    """Graph networks: nothing but its place and its size says so."""
    layers = {f"convs/{n}/lin/weight": (64, 64) for n in range(2)}
    layers |= {"convs/2/lin/weight": (7, 64), "convs/2/bias": (7,), "entry/weight": (64, 30)}
    found = roles({**layers, "entry/bias": (64,)})
    assert found["convs/2/lin/weight"] == "wide_output"
    assert found["convs/1/lin/weight"] == "matrix"


def test_tables_of_users_and_items():
    """Their rows are concatenated, so that no layer takes as many inputs as one of them has."""
    bags = {"features_embedding/user/weight": (40, 16), "features_embedding/item/weight": (30, 16)}
    towers = {"user_tower/ids/weight": (5000, 16), "item_tower/id_lookup/weight": (90, 16)}
    mlp = {"mlp/0/weight": (80, 64), "mlp/0/bias": (80,), "mlp/2/weight": (80, 80)}
    found = roles({**bags, **towers, **mlp, "fc/weight": (1, 80), "fc/bias": (1,)})
    assert {found[path] for path in (*bags, "item_tower/id_lookup/weight")} <= {
        "embedding",
        "table",
    }
    assert found["user_tower/ids/weight"] == "tall_table"
    assert found["mlp/0/weight"] == "transposed_matrix"


def test_a_projection_to_few_outputs_is_doubtful_by_any_name():
    shapes = {"to_answer/weight": (5, 64), "to_answer/bias": (5,)}
    assert in_model(shapes, TORCH_BLOCK)["to_answer/weight"] == "wide_output"


def test_arrays_with_an_entry_a_channel_are_no_matrices():
    """RWKV's `time_faaaa` and `time_decay`, [heads, head_dim]."""
    shapes = {"layers/0/att/time_faaaa": (8, 8), "layers/0/att/time_decay": (4, 20)}
    assert set(in_model(shapes, TORCH_BLOCK).values()) == {"bias"}


def test_a_table_of_positions_makes_no_matrix_of_its_shape_a_head():
    shapes = {"pos_embed": (8, 4), "up": (4, 8)}
    assert roles(shapes) == {"pos_embed": "embedding", "up": "matrix"}
    two = {"tokens": (8, 4), "up": (4, 8), "down": (8, 4)}  # these lead there and back
    assert roles(two) == {"tokens": "table", "up": "matrix", "down": "matrix"}


@pytest.mark.parametrize("name", ["final_proj", "last/linear", "output_layer", "proj_out"])
def test_last_layers_as_wide_as_the_model_are_doubtful(name):
    assert role_in_model(f"{name}/kernel", (64, 64)) == "inner_head"
    assert role_in_model(f"layers/0/{name}/kernel", (64, 64)) == "matrix"


def test_a_residual_beside_a_doubtful_output_is_doubtful():
    shapes = {"horizon/output_layer/kernel": (64, 64), "horizon/residual_layer/kernel": (64, 64)}
    assert set(in_model(shapes).values()) == {"inner_head"}


@pytest.mark.parametrize("name", ["decoder_pred", "predict_notes", "lm_heads/0", "lm_heads/1"])
def test_compound_and_plural_names_of_heads(name):
    assert role_in_model(f"{name}/kernel", (64, 64)) == "head"


@pytest.mark.parametrize("name", ["predictor_embed", "time_mapper", "cond_embeds_mapper"])
def test_compound_names_of_hidden_layers(name):
    shapes = {f"{name}/weight": (64, 64), f"{name}/bias": (64,)}
    assert in_model(shapes, TORCH_BLOCK)[f"{name}/weight"] == "matrix"


def test_a_mapper_of_embeddings_is_no_table_without_a_bias_either():
    assert role_in_model("cond_embeds_mapper/weight", (128, 64), TORCH_BLOCK) == "transposed_matrix"


def test_layers_that_make_biases_are_no_tables():
    """Swin's position bias by an MLP, and FiLM's scale and shift in one layer."""
    shapes = {
        "layers/0/attn/position_bias_mlp/2/weight": (3, 64),
        "layers/0/film/scale_bias/weight": (512, 1024),
        "layers/0/film/condition/weight": (1024, 64),
    }
    found = in_model(shapes, TORCH_BLOCK)
    assert set(found.values()) == {"transposed_matrix"}


def test_a_projection_that_ends_a_model_is_doubtful():
    """UniSpeech's `ctc_proj`, of 80 classes; CLIP's projections are nearly as wide as the model."""
    head = {"lm_head/kernel": (64, 300)}
    assert in_model({"ctc_proj/kernel": (64, 7), **head})["ctc_proj/kernel"] == "wide_output"
    assert in_model({"text_proj/kernel": (64, 48), **head})["text_proj/kernel"] == "matrix"


def test_keys_of_a_state_dict_tell_the_order_where_no_bias_does():
    flat = roles({"blocks.0.mixer.weight": (96, 64), "blocks.0.other.weight": (64, 80)})
    assert set(flat.values()) == {"transposed_matrix"}
    nested = roles({"blocks/0/mixer/weight": (96, 64), "blocks/0/other/weight": (64, 80)})
    assert "matrix_of_unknown_order" in nested.values()


def test_a_convolution_of_two_dims_is_depthwise():
    assert role_in_model("layers/0/conv_1d/w", (4, 64)) == "depthwise"
    assert role_in_model("layers/0/conv_1d/w", (64, 64)) == "matrix"


def test_a_table_of_queries_may_be_beside_projections():
    shapes = {
        "pool/query": (20, 64),
        "pool/ln_k/weight": (64,),
        "pool/ln_q/weight": (64,),
        "pool/attn/out_proj/weight": (64, 64),
    }
    assert in_model(shapes, TORCH_BLOCK)["pool/query"] == "table"


def box_heads(sequence: str, outputs: int) -> dict[str, tuple[int, ...]]:
    """MLPs of three layers with biases, one after each of two decoder layers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(2):
        for place, size in enumerate((64, 64, outputs)):
            shapes[f"{sequence}/{head}/layers/{place}/weight"] = (size, 64)
            shapes[f"{sequence}/{head}/layers/{place}/bias"] = (size,)
    return shapes


@pytest.mark.parametrize("name", ["bbox_embed", "corners", "decoder/regress"])
def test_the_last_layers_of_several_alike_heads(name):
    """D-FINE's `bbox_embed/1/layers/2` [4 x 33, 256]: the last number counts the layers."""
    found = in_model(box_heads(name, 36), TORCH_BLOCK)
    lasts = {path for path, role in found.items() if role == "wide_output"}
    assert lasts == {f"{name}/{head}/layers/2/weight" for head in range(2)}


def test_mlps_that_lead_back_to_the_width_have_no_last_layer():
    found = in_model(box_heads("refine", 64), TORCH_BLOCK)
    assert set(found.values()) == {"matrix", "vector"}


@pytest.mark.parametrize("name", ["proj_out", "output", "last_skip/out"])
@pytest.mark.parametrize("factor", [2, 3, 4, 6])
def test_outputs_that_are_a_fraction_of_the_inputs_are_no_shift_and_scale(name, factor):
    """StableAudio's `proj_out` [256, 6 x 256], where convolutions give 256 as well."""
    data = 96 // factor
    shapes = {
        "proj_in/weight": (96, data),
        "preprocess_conv/weight": (data, data, 1),
        "postprocess_conv/weight": (data, data, 1),
        "norm/weight": (96,),
        f"{name}/weight": (data, 96),
    }
    assert in_model(shapes, TORCH_BLOCK)[f"{name}/weight"] == "transposed_inner_head"


def test_a_shift_and_a_scale_before_the_last_layer_are_hidden():
    shapes = {"norm_out/linear/weight": (128, 64), "norm_out/linear/bias": (128,)}
    assert set(in_model(shapes, TORCH_BLOCK).values()) == {"transposed_matrix", "vector"}


@pytest.mark.parametrize("name", ["decoder_embed", "decoder_embedding_layer"])
def test_the_layer_into_a_decoder_is_no_last_one(name):
    """SegGPT's `decoder_embed` [16384, 4096] makes a map that convolutions take."""
    shapes = {
        f"{name}/weight": (64 * 16 * 16, 64),
        f"{name}/bias": (64 * 16 * 16,),
        "decoder_pred/conv/weight": (64, 64, 3, 3),
    }
    assert in_model(shapes, TORCH_BLOCK)[f"{name}/weight"] == "transposed_matrix"


def test_a_last_layer_after_features_of_several_layers_concatenated():
    """GraphSAGE with jumping knowledge: `lin` [41, 3 x 256] after three layers."""
    shapes = {f"convs/{i}/lin_l/weight": (40, 64 if i == 0 else 40) for i in range(3)}
    assert in_model(shapes | {"lin/weight": (7, 120)}, TORCH_BLOCK)["lin/weight"] == "output"
    assert in_model({"lin/weight": (7, 120)}, TORCH_BLOCK)["lin/weight"] == "unconnected"


def test_attention_vectors_take_no_outputs():
    """GATv2's `att` [1, heads, dims] has a dim for each output of its layer."""
    shapes: dict[str, tuple[int, ...]] = {"convs/2/att": (1, 8, 7)}
    for place, (outputs, inputs) in enumerate([(64, 300), (64, 64), (56, 64)]):
        shapes[f"convs/{place}/lin/weight"] = (outputs, inputs)
        shapes[f"convs/{place}/lin/bias"] = (outputs,)
    assert in_model(shapes, TORCH_BLOCK)["convs/2/lin/weight"] == "wide_output"


def test_as_many_outputs_as_a_table_has_rows_are_a_head_whatever_it_takes():
    shapes = {"words/embedding/weight": (1000, 64), "to_words/w/weight": (1000, 80)}
    assert in_model(shapes, TORCH_BLOCK)["to_words/w/weight"] == "output"


@pytest.mark.parametrize("name", ["to_pixels", "to_rgb", "decode/to_image"])
def test_a_layer_to_pixels_is_doubtful_beside_a_norm_of_as_many(name):
    """A masked autoencoder's patches are normalised: a norm has as many entries as a patch."""
    shapes = {
        "patch_to_emb/1/weight": (192,),
        "patch_to_emb/2/weight": (64, 192),
        f"{name}/weight": (192, 64),
    }
    assert in_model(shapes, TORCH_BLOCK)[f"{name}/weight"] == "transposed_inner_head"
    assert "inner_head" not in role_in_model("image_to_text/weight", (192, 64), TORCH_BLOCK)


def test_a_narrow_last_layer_is_doubtful_where_only_tables_take_as_many():
    """Latents [8, 64] beside tables whose rows have 8 entries, which nothing tells from layers."""
    tables = {"codes_of/a/weight": (44, 8), "codes_of/t/weight": (1473, 8)}
    last = {"latents_linear/1/weight": (8, 64)}
    found = in_model(tables | last, TORCH_BLOCK)
    assert found["latents_linear/1/weight"] == "transposed_data_output"
    layer = {"codes_of/a/bias": (44,)}
    found = in_model(tables | last | layer, TORCH_BLOCK)
    assert found["latents_linear/1/weight"] == "transposed_matrix"


def test_alike_last_layers_are_heads_where_one_of_them_is():
    """A mask for each frequency band: some are as wide as what another band's layer takes."""
    heads: dict[str, tuple[int, ...]] = {}
    for band, outputs in enumerate([16, 24, 40]):
        heads[f"masks/{band}/mlp/0/weight"] = (256, 64)
        heads[f"masks/{band}/mlp/2/weight"] = (outputs, 256)
    bands = {"split/0/weight": (64, 16), "split/1/weight": (64, 24)}
    found = in_model(heads | bands, TORCH_BLOCK)
    lasts = {path for path, role in found.items() if role == "wide_output"}
    assert lasts == {f"masks/{band}/mlp/2/weight" for band in range(3)}
    found = in_model(heads | bands | {"split/2/weight": (64, 40)}, TORCH_BLOCK)
    assert "wide_output" not in found.values()  # all of them may go on


def test_the_last_of_a_sequence_is_doubtful_where_a_first_layer_takes_what_it_gives():
    """Boxes of 8 that each decoder layer refines, and whose embedding takes as many."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place, outputs in enumerate([64, 64, 8]):
        shapes[f"layers/0/boxes/stack/{place}/weight"] = (outputs, 64)
    first = {"told/weight": (64, 8)}
    last = "layers/0/boxes/stack/2/weight"
    assert in_model(shapes | first, TORCH_BLOCK)[last] == "transposed_data_output"
    inside = {"layers/0/mlp/widen/weight": (64, 8)}
    assert in_model(shapes | first | inside, TORCH_BLOCK)[last] == "transposed_matrix"


def test_a_gated_linear_unit_is_no_vocabulary():
    """Outputs of [512, 64] of which the next layer takes half."""
    shapes = {"cross/net/0/weight": (512, 64), "cross/net/2/weight": (64, 256)}
    biases = {"cross/net/0/bias": (512,), "cross/net/2/bias": (64,)}
    assert in_model(shapes | biases, TORCH_BLOCK)["cross/net/0/weight"] == "transposed_matrix"
    alone = {"cross/net/0/weight": (512, 64), "cross/net/0/bias": (512,)}
    assert in_model(alone, TORCH_BLOCK)["cross/net/0/weight"] == "tall_table"


def test_a_layer_that_is_called_a_reconstruction_is_doubtful_beside_a_norm_of_the_data():
    shapes = {"data_norm/weight": (40,), "reconstruction_layer/weight": (40, 8)}
    found = in_model(shapes, TORCH_BLOCK)
    assert found["reconstruction_layer/weight"] == "transposed_inner_head"


def test_slopes_of_an_activation_are_no_norms():
    """MetricGAN's masks: as many slopes as outputs, which a first layer takes."""
    shapes = {"first/weight": (64, 37), "rows2/weight": (37, 64), "sigmoid/slope": (37,)}
    assert in_model(shapes, TORCH_BLOCK)["rows2/weight"] == "transposed_data_output"
    as_norm = shapes | {"sigmoid/weight": (37,)}
    assert in_model(as_norm, TORCH_BLOCK)["rows2/weight"] == "transposed_matrix"
