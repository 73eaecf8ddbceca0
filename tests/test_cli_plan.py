"""`plan` and `report` on the command line: their figures, and the files they read."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from commands import data_of, rules_file, run, write
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file
from shown import plan, report

from muon_optax.cli import main
from muon_optax.models import MODELS, model_shapes

Files = dict[str, tuple[int, ...]]
TORCH: Files = {
    "model.embed_tokens.weight": (100, 64),
    "model.layers.0.self_attn.k_proj.weight": (16, 64),
    "model.layers.0.mlp.down_proj.weight": (64, 256),
    "model.layers.0.input_layernorm.weight": (64,),
    "vision.conv1.weight": (32, 16, 1, 1),
    "vision.convdw.weight": (32, 1, 3, 3),
    "vision.proj.weight": (32, 3, 4, 4),
}


def header_of(shapes: Files, dtype: str = "BF16", itemsize: int = 2) -> tuple[dict[str, Any], int]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return header, end


@pytest.fixture
def weights(tmp_path) -> Path:
    header, held = header_of(TORCH)
    return write(tmp_path / "weights.safetensors", header, held)


# Figures


def test_bytes_of_llama_are_the_formulas():
    found = data_of("plan", "--model", "llama3-8b", "--mesh", "fsdp=8", "--device", "h100")
    sizes = {  # L matrices of m x n
        (4096, 4096): 64,
        (4096, 1024): 64,
        (4096, 14336): 64,
        (14336, 4096): 32,
    }
    n, b = 8, 2
    want = sum(
        2 * count // n * rows * cols * b * (n - 1) // n for (rows, cols), count in sizes.items()
    )
    assert found["totals"]["bytes"] == want
    assert {tuple(row["matrix"]): row["count"] for row in found["rows"]} == sizes
    assert {row["strategy"] for row in found["rows"]} == {"all_to_all"}
    assert (found["model"], found["mesh"], found["device"]) == ("llama3-8b", {"fsdp": 8}, "h100")


def test_the_plan_is_the_librarys():
    shapes = model_shapes("llama3-8b", scanned=True, dtype="float32")
    mesh = AbstractMesh((2, 4), ("replica", "fsdp"))
    where = jax.tree.map(
        lambda x: NamedSharding(mesh, P(*[None] * (len(x.shape) - 1), "fsdp")), shapes.params
    )
    made = plan(
        shapes.params,
        where,
        muon_weight_dimension_numbers=shapes.views,
        ns_coeffs="tight",
        ns_dtype="bfloat16",
        strategy="gather",
        device="tpu_v5p",
    )
    argv = ["plan", "--model", "llama3-8b", "--scanned", "--dtype", "float32"]
    argv += ["--mesh", "replica=2,fsdp=4", "--fsdp", "columns", "--device", "tpu_v5p"]
    argv += ["--ns-coeffs", "tight", "--ns-dtype", "bfloat16", "--strategy", "gather"]
    found = data_of(*argv)
    assert found["totals"] == made.to_dict()["totals"]
    assert found["rows"] == json.loads(json.dumps(made.to_dict()["rows"]))


def test_the_table_says_what_and_where():
    code, out, err = run("plan", "--model", "llama3-8b", "--mesh", "replica=4,fsdp=16")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "llama3-8b: 8,030,261,248 parameters on replica=4, fsdp=16"
    assert "all_to_all / replica" in out
    assert lines[-2].endswith("on h100")
    assert lines[-1].endswith("with shard_moments_over='replica'")
    assert "on one device" in run("plan", "--model", "gpt2-124m")[1]


def test_rich_draws_it_where_someone_looks(monkeypatch, capsys):
    argv = ["report", "--model", "gpt2-124m", "--scanned"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(argv)
    assert "───" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "rich", None)
    main(argv)
    assert capsys.readouterr().out == run(*argv)[1]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_reported_as_the_library_does(model):
    shapes = model_shapes(model, scanned=True)
    want = report(shapes.params, muon_weight_dimension_numbers=shapes.views)
    found = data_of("report", "--model", model, "--scanned")
    assert [row["scales"] for row in found["rows"]] == [list(row.scales) for row in want.rows]
    assert found["totals"] == {k: list(v) for k, v in want.totals.items()}
    assert {row["reason"] for row in found["rows"] if row["optimizer"] == "adam"} <= {
        "fewer than two dims",
        "embedding",
        "table",
        "head",
        "bias or scale",
    }


def test_json_goes_to_a_file_beside_the_table(tmp_path):
    path = tmp_path / "plan.json"
    code, out, _ = run("plan", "--model", "vit-l", "--mesh", "fsdp=8", "--json", path)
    assert code == 0
    assert out.startswith("vit-l: 304,326,632 parameters")
    assert json.loads(path.read_text())["totals"]["bytes"] > 0
    assert run("report", "--model", "vit-l", "--json", tmp_path)[0] == 2


# Files


def rows_of(*argv: Any) -> dict[str, dict[str, Any]]:
    return {row["path"].split(".")[-2]: row for row in data_of("report", *argv)["rows"]}


def test_torch_weights_are_out_by_in(weights):
    rows = rows_of("--shapes", weights, "--torch")
    assert rows["k_proj"]["matrices"] == [[1, 64, 16]]
    assert rows["k_proj"]["scales"] == [1.0]
    assert rows["down_proj"]["matrices"] == [[1, 256, 64]]
    assert rows["conv1"]["matrices"] == [[1, 16, 32]]
    assert rows["conv1"]["scales"] == [2**0.5]
    assert rows["convdw"]["reason"] == "depthwise kernel"
    assert rows["proj"]["reason"] == "no matrix view declared"
    assert rows["embed_tokens"]["reason"] == "embedding"
    plain = rows_of("--shapes", weights)
    assert plain["k_proj"]["matrices"] == [[1, 64, 16]]  # from 64, which the norm is wide
    assert plain["k_proj"]["scales"] == [1.0]
    assert plain["conv1"]["optimizer"] == "adam"


def gpt2_names(width: int) -> Files:
    """A block of the published GPT-2, whose Conv1D keeps [in, out], and its tied table."""
    matrices = {
        "h.0.attn.c_attn": (width, 3 * width),
        "h.0.attn.c_proj": (width, width),
        "h.0.mlp.c_fc": (width, 4 * width),
        "h.0.mlp.c_proj": (4 * width, width),
    }
    vectors = {f"{name}.bias": shape[1:] for name, shape in matrices.items()}
    return {f"{name}.weight": shape for name, shape in matrices.items()} | vectors


def test_conv1d_weights_are_in_by_out_as_their_biases_say(tmp_path):
    header, held = header_of({**gpt2_names(64), "wte.weight": (5000, 64)})
    path = write(tmp_path / "gpt2.safetensors", header, held)
    rows = {row["path"]: row for row in data_of("report", "--shapes", path, "--torch")["rows"]}
    found = {
        name: (row["matrices"], row["scales"]) for name, row in rows.items() if row["matrices"]
    }
    assert found == {
        "h.0.attn.c_attn.weight": ([[1, 64, 192]], [3**0.5]),
        "h.0.attn.c_proj.weight": ([[1, 64, 64]], [1.0]),
        "h.0.mlp.c_fc.weight": ([[1, 64, 256]], [2.0]),
        "h.0.mlp.c_proj.weight": ([[1, 256, 64]], [1.0]),
    }
    plans = data_of("plan", "--shapes", path, "--torch", "--mesh", "tensor=4")["rows"]
    specs = {leaf.split(".")[-2]: row["spec"] for row in plans for leaf in row["leaves"]}
    assert specs == {"c_attn": "-, tensor", "c_fc": "-, tensor", "c_proj": "tensor, -"}


@pytest.mark.parametrize(
    ("shape", "bias", "matrices"),
    [
        ((16, 32, 2, 2), (32,), [[1, 64, 32]]),  # ConvTranspose2d(16, 32, 2)
        ((32, 16, 2, 2), (32,), [[1, 64, 32]]),  # Conv2d(16, 32, 2)
        ((16, 16, 2, 3), (16,), [[1, 96, 16]]),
    ],
)
@pytest.mark.parametrize("name", ["conv", "conv_transpose"])
def test_transposed_convolutions_are_in_by_out(shape, bias, matrices, name, tmp_path):
    header, held = header_of({f"up.{name}.weight": shape, f"up.{name}.bias": bias})
    path = write(tmp_path / "unet.safetensors", header, held)
    row = rows_of("--shapes", path, "--torch")[name]
    assert row["matrices"] == matrices


def test_what_lacks_a_view_is_told(weights):
    said = "leaves with three or more dims and no declared matrix view get AdamW; "
    for argv in (["report"], ["plan", "--mesh", "fsdp=2"]):
        _, out, err = run(*argv, "--shapes", weights, "--torch")
        (line,) = [line for line in (out + err).splitlines() if said in line]
        assert line.endswith(": vision.proj.weight (32, 3, 4, 4)")


def test_llama_as_published_for_torch_costs_what_the_model_by_name_does(tmp_path):
    """The names and [out, in] shapes of the checkpoint, without its 16 GB."""
    layer = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    names = {f"model.layers.{i}.{k}.weight": v for i in range(32) for k, v in layer.items()}
    names |= {"model.embed_tokens.weight": (128256, 4096), "lm_head.weight": (128256, 4096)}
    path = write(
        tmp_path / "llama.safetensors", header_of({**names, "model.norm.weight": (4096,)})[0]
    )
    own, named = ["--shapes", path, "--torch"], ["--model", "llama3-8b"]
    totals = [data_of("plan", *which, "--mesh", "fsdp=64")["totals"] for which in (own, named)]
    assert totals[0] == totals[1]
    scales = [
        sorted(scale for row in data_of("report", *which)["rows"] for scale in row["scales"])
        for which in (own, named)
    ]
    assert scales[0] == scales[1]
    assert run("report", *own)[1].startswith("llama.safetensors: 8,030,261,248 parameters\n")


def test_a_header_alone_is_enough_and_parts_make_one_model(tmp_path):
    names = sorted(TORCH)
    for i, part in enumerate((names[:3], names[3:])):
        header, held = header_of({name: TORCH[name] for name in part}, "F32", 4)
        write(tmp_path / f"{i}.safetensors", header, held * i)
    found = data_of(
        "plan", "--shapes", tmp_path / "0.safetensors", tmp_path / "1.safetensors", "--torch"
    )
    assert found["model"] == "0.safetensors + 1"
    assert {leaf for row in found["rows"] for leaf in row["leaves"]} == {
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "vision.conv1.weight",
    }
    assert {row["dtype"] for row in found["rows"]} == {"float32"}
    code, _, err = run("plan", "--shapes", *[tmp_path / "0.safetensors"] * 2)
    assert code == 2
    assert "is in an earlier file too" in err


def test_a_real_file_of_safetensors_reads_the_same(tmp_path):
    path = tmp_path / "real.safetensors"
    save_file({"up": np.ones((4, 8), np.float32), "norm": np.ones(3, np.float16)}, path)
    rows = data_of("report", "--shapes", path)["rows"]
    assert [(r["path"], r["shape"], r["dtype"]) for r in rows] == [
        ("norm", [3], "float16"),
        ("up", [4, 8], "float32"),
    ]


def deepseek_header(weights: tuple[str, int], scales: tuple[str, int]) -> tuple[Any, int]:
    """As DeepSeek-V3 is published, float8 weights with a float32 scale for each 128 x 128."""
    layer = "model.layers.0.mlp"
    shapes = {f"{layer}.up_proj": (512, 256), f"{layer}.down_proj": (256, 512)}
    header, end = {}, 0
    for name, shape in shapes.items():
        blocks = tuple(size // 128 for size in shape)
        for key, (dtype, itemsize), dims in [
            ("weight", weights, shape),
            ("weight_scale_inv", scales, blocks),
        ]:
            start, end = end, end + itemsize * math.prod(dims)
            offsets = [start, end]
            header[f"{name}.{key}"] = {"dtype": dtype, "shape": dims, "data_offsets": offsets}
    return header, end


@pytest.mark.parametrize("scales", [("F32", 4), ("F8_E8M0", 1)])
def test_a_published_float8_file_is_planned_as_trained(scales, tmp_path):
    path = write(tmp_path / "f8.safetensors", *deepseek_header(("F8_E4M3", 1), scales))
    code, _, err = run("plan", "--shapes", path, "--torch")
    assert code == 2
    assert "up_proj.weight: dtype float8_e4m3fn: Muon needs 16 bits or more" in err
    assert "--dtype" in err

    def weights_of(*argv: Any) -> list[tuple[Any, ...]]:
        rows = data_of("plan", *argv, "--torch", "--mesh", "fsdp=4")["rows"]
        keys = ("leaves", "matrix", "dtype", "bytes", "flops")
        return [tuple(row[k] for k in keys) for row in rows if row["leaves"][0].endswith("weight")]

    trained = write(tmp_path / "bf16.safetensors", *deepseek_header(("BF16", 2), ("BF16", 2)))
    for dtype in ("bfloat16", "float32"):
        found = weights_of("--shapes", path, "--dtype", dtype)
        assert {row[2] for row in found} == {dtype}
        if dtype == "bfloat16":
            assert found == weights_of("--shapes", trained)
    rows = data_of("report", "--shapes", path, "--torch", "--dtype", "bfloat16")["rows"]
    kinds = {row["path"]: row["optimizer"] for row in rows if row["path"].endswith("weight")}
    assert set(kinds.values()) == {"muon"}


def test_a_dtype_for_a_whole_file_leaves_integers_alone(tmp_path):
    path = tmp_path / "real.safetensors"
    save_file({"up": np.ones((4, 8), np.float32), "ids": np.ones(3, np.int32)}, path)
    rows = data_of("report", "--shapes", path, "--dtype", "bfloat16")["rows"]
    assert {r["path"]: r["dtype"] for r in rows} == {"up": "bfloat16", "ids": "int32"}


def test_json_of_shapes(tmp_path):
    path = tmp_path / "shapes.json"
    nested = {"mlp": {"up": [64, 256], "down": {"shape": [256, 64], "dtype": "float32"}}}
    path.write_text(json.dumps({**nested, "norm": [64], "ids": {"shape": [4], "dtype": "int32"}}))
    rows = {r["path"]: r for r in data_of("report", "--shapes", path, "--dtype", "float16")["rows"]}
    assert {k: (r["dtype"], r["optimizer"]) for k, r in rows.items()} == {
        "ids": ("int32", "frozen"),
        "mlp/down": ("float32", "muon"),
        "mlp/up": ("float16", "muon"),
        "norm": ("float16", "adam"),
    }


RULES = """
[[rules]]
pattern = "k_proj"
label = "adam"
reason = "mine"
[[rules]]
pattern = "embed_tokens"
label = "frozen"
[[views]]
pattern = "vision.proj"
reduction_axis = [1, 2, 3]
output_axis = 0
[[views]]
pattern = "down_proj"
split = [32, 32]
[[shardings]]
pattern = "down_proj"
spec = [["rows", "fsdp"], ""]
"""


def test_rules_views_and_shardings(weights, tmp_path):
    rules = rules_file(tmp_path, RULES)
    rows = rows_of("--shapes", weights, "--torch", "--rules", rules)
    assert (rows["k_proj"]["optimizer"], rows["k_proj"]["reason"]) == ("adam", "mine")
    assert rows["embed_tokens"]["optimizer"] == "frozen"
    assert rows["proj"]["matrices"] == [[1, 48, 32]]
    assert rows["down_proj"]["matrices"] == [[2, 256, 32]]  # torch's axes are the default here
    argv = ["plan", "--shapes", weights, "--torch", "--rules", rules, "--mesh", "rows=2,fsdp=4"]
    specs = {row["leaves"][0]: row["spec"] for row in data_of(*argv)["rows"]}
    assert specs["model.layers.0.mlp.down_proj.weight"] == "rows*fsdp, -"
    assert specs["vision.conv1.weight"] == "fsdp, -, -, -"


def test_a_rule_that_loses_to_a_view_is_told(tmp_path):
    rules = rules_file(
        tmp_path,
        '[[rules]]\npattern="up"\nlabel="frozen"\n[[rules]]\npattern="down"\nlabel="muon"\n'
        '[[views]]\npattern="up"\n[[views]]\npattern="down"\n',
    )
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"a": {"up": [8, 16], "down": [16, 8]}, "b": {"up": [8, 16]}}')
    for command in ("plan", "report"):
        code, _, err = run(command, "--shapes", shapes, "--rules", rules)
        assert code == 0
        said = "note: [[views]] beat [[rules]], which say otherwise of"
        assert err == f"{said}: a/up (8, 16), b/up (8, 16)\n"
    rows = data_of("report", "--shapes", shapes, "--rules", rules)["rows"]
    assert [row["optimizer"] for row in rows] == ["muon"] * 3


def test_rules_go_before_the_models_own(tmp_path):
    rules = rules_file(
        tmp_path,
        '[[rules]]\npattern="router"\nlabel="adam"\n[[views]]\npattern="kv_b/kernel"\n'
        "reduction_axis=1\noutput_axis=2\n",
    )
    argv = ["report", "--model", "deepseek-v3", "--scanned", "--rules", rules]
    rows = {row["path"]: row for row in data_of(*argv)["rows"]}
    assert rows["moe_blocks/mlp/router/kernel"]["optimizer"] == "adam"
    assert rows["moe_blocks/attn/kv_b/kernel"]["matrices"] == [[58, 512, 32768]]
    assert rows["moe_blocks/mlp/experts/up/kernel"]["matrices"] == [[14848, 7168, 2048]]


# The page

ROOT = Path(__file__).parents[1]


def test_the_pages_commands_run(tmp_path, monkeypatch):
    text = (ROOT / "docs" / "command_line.md").read_text()
    (rules,) = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "rules.toml").write_text(rules)
    header, held = header_of({"attn.qkv_proj.weight": (96, 64), "moe.router.weight": (8, 64)})
    write(tmp_path / "weights.safetensors", header, held)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^python -m muon_optax (.*)$", text, re.MULTILINE)
    assert len(commands) == 3
    for command in commands:
        assert run(*command.split())[0] == 0
    (row,) = data_of(*commands[-1].split())["rows"]
    assert (row["leaves"], row["spec"]) == (["attn.qkv_proj.weight"], "fsdp, -")
    assert all(f"`{name}`" in text for name in MODELS)
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    assert {str(x.dtype) for x in names["saved"].values()} == {"float8_e4m3fn", "float32"}


# As a process


@pytest.mark.parametrize("command", ["plan", "report"])
def test_help(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit code: 0, 1 where no leaf gets Muon, 2 for errors." in text
    assert "deepseek-v3" in text


def test_a_reader_that_leaves_ends_it_quietly():
    argv = [sys.executable, "-m", "muon_optax", "report", "--model", "gpt2-124m"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 141
