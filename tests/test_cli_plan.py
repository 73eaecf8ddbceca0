"""`plan` and `report` on the command line: their figures, their files, and hostile input."""

import contextlib
import io
import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from muon_optax import plan, report
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


def run(*argv: Any) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in argv])
    return code, out.getvalue(), err.getvalue()


def data_of(*argv: Any) -> dict[str, Any]:
    code, out, _ = run(*argv, "--json", "-")
    assert code == 0
    return json.loads(out)


def header_of(shapes: Files, dtype: str = "BF16", itemsize: int = 2) -> tuple[dict[str, Any], int]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + itemsize * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return header, end


def write(path: Path, header: Any, held: int = 0, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    prefix = struct.pack("<Q", len(text) if length is None else length)
    path.write_bytes(prefix + text + bytes(held))
    return path


@pytest.fixture
def weights(tmp_path) -> Path:
    header, held = header_of(TORCH)
    return write(tmp_path / "weights.safetensors", header, held)


def rules_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return path


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
    assert lines[-1].endswith("on h100")
    assert "on one device" in run("plan", "--model", "gpt2-124m")[1]


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
    assert plain["k_proj"]["matrices"] == [[1, 16, 64]]
    assert plain["k_proj"]["scales"] == [2.0]
    assert plain["conv1"]["optimizer"] == "adam"


def test_what_lacks_a_view_is_told(weights):
    _, _, err = run("report", "--shapes", weights, "--torch")
    said = "note: leaves with three or more dims and no [[views]] entry get AdamW: "
    assert err == f"{said}vision.proj.weight\n"


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


# Exit codes and errors


def test_no_leaf_for_muon_is_exit_code_1(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text('{"norm": [64]}')
    assert run("plan", "--shapes", path)[0] == 1
    assert run("report", "--shapes", path)[0] == 1


def error_of(*argv: Any) -> str:
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err.removeprefix("error: ").rstrip()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *((["--mesh", m], "written like replica=4,fsdp=16") for m in ("", "fsdp", "fsdp=0", "=2")),
        *((["--mesh", m], "written like") for m in ("fsdp=-1", "fsdp=²", "fsdp=2,fsdp=2", "a b=2")),
        (["--mesh", "fsdp=9999999"], "131,072 devices at most"),
        (["--mesh", "rows=2"], "mesh axes must be among ('replica', 'data'"),
        (["--device", "abacus"], "device must be one of"),
        (["--model", "gpt5"], "model must be one of"),
        (["--ns-coeffs", "best"], "ns_coeffs='best' is no schedule"),
        (["--ns-dtype", "int8"], "--ns-dtype must be a floating-point dtype, got 'int8'"),
        (["--dtype", "real"], "--dtype must be a floating-point dtype, got 'real'"),
        (["--torch"], "--torch is for --shapes"),
        (["--shapes-file"], "--scanned is for --model"),
    ],
)
def test_bad_arguments_are_told_in_one_line(argv, message, weights):
    if argv == ["--shapes-file"]:
        given = ["--shapes", weights, "--scanned"]
    else:
        given = argv if "--model" in argv else ["--model", "gpt2-124m", *argv]
    assert message in error_of("plan", *given)


def tensor(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]} | changes}


@pytest.mark.parametrize(
    ("header", "length", "held", "message"),
    [
        (tensor(), 2**63, 16, "not a whole safetensors header: it says 9,223,372,036,854,775,808"),
        (tensor(), 10**6, 16, "not a whole safetensors header"),
        (tensor(), None, 15, "truncated or damaged: 16 bytes of tensors expected, 15 there"),
        (tensor(), None, 17, "truncated or damaged"),
        (b"no JSON", None, 0, "not JSON"),
        (b'{"\xff": 1}', None, 0, "not UTF-8"),
        (b"[" * 100_000, None, 0, "nested too deeply"),
        (b"[1, 2]", None, 0, "must be a JSON object"),
        (b'{"w": 1, "w": 2}', None, 0, "the name 'w' comes twice"),
        ({"w": 1}, None, 0, "must have dtype, shape and data_offsets"),
        ({"a\x1b[2J\n": tensor()["w"]}, None, 0, r"printable characters, got 'a\x1b[2J\n'"),
        ({"": tensor()["w"]}, None, 0, "printable characters"),
        (tensor(dtype="Q4"), None, 0, "dtype 'Q4', must be one of"),
        (tensor(dtype=["F32"]), None, 0, "dtype ['F32'], must be one of"),
        (tensor(shape=[-2, 2]), None, 0, "list of sizes as shape, got [-2, 2]"),
        (tensor(shape=[True, 2]), None, 0, "list of sizes"),
        (tensor(shape=[2.0, 2]), None, 0, "list of sizes"),
        (tensor(shape="22"), None, 0, "list of sizes"),
        (tensor(shape=[2**62, 2**62]), None, 0, "impossible shape"),
        (tensor(shape=[1] * 65), None, 0, "impossible shape"),
        (tensor(data_offsets=[0, 15]), None, 0, "needs 16 bytes"),
        (tensor(data_offsets=[16, 0]), None, 0, "needs 16 bytes"),
        (tensor(data_offsets=[-16, 0]), None, 0, "needs 16 bytes"),
        (tensor(data_offsets=None), None, 0, "needs 16 bytes"),
    ],
)
def test_damaged_safetensors(header, length, held, message, tmp_path):
    path = write(tmp_path / "w.safetensors", header, held, length)
    error = error_of("plan", "--shapes", path)
    assert error.startswith(f"{path}: ")
    assert message in error


@pytest.mark.parametrize("size", [0, 1, 7])
def test_files_too_short_for_a_header(size, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"\x01" * size)
    assert "not a whole safetensors header" in error_of("report", "--shapes", path)


def test_a_header_that_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**40))
        file.truncate(2**40 + 8)  # sparse
    assert "at most 100,000,000 are allowed" in error_of("report", "--shapes", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object of names and shapes, got []"),
        ("{", "not JSON"),
        ('{"w": 3}', "list of sizes as shape, got 3"),
        ('{"w": NaN}', "list of sizes as shape, got nan"),
        ('{"w": {"shape": [2], "dtype": "real"}}', "unknown dtype: 'real'"),
        ('{"w": {"shape": [2], "dtype": 4}}', "unknown dtype: 4"),
        ('{"w": {"shape": [2], "size": 4}}', "has ['size'] beside shape and dtype"),
        ('{"a/b": [2], "a": {"b": [2]}}', "the name 'a/b' comes twice"),
        ('{"a": ' * 50_000, "nested too deeply"),
        ('{"w": [' + "9" * 5000 + "]}", "digits"),
        ('{"w": [99999999999999999999]}', "list of sizes"),
    ],
)
def test_damaged_json(text, message, tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text(text)
    assert message in error_of("plan", "--shapes", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[rules]", "at line 1"),
        ('[[rulez]]\npattern="w"', "the tables are [[rules]], [[views]] and [[shardings]]"),
        ('rules = "w"', "rules must be written as [[rules]] tables"),
        ('[rules]\npattern="w"', "must be written as [[rules]]"),
        ('[[rules]]\nlabel="adam"', "[[rules]] number 1: pattern is missing"),
        ('[[rules]]\npattern=3\nlabel="adam"', "pattern must be a string, got 3"),
        ('[[rules]]\npattern="a//b"\nlabel="adam"', "empty segment"),
        ('[[rules]]\npattern="w"\nlabel="sgd"', "label must be one of"),
        ('[[rules]]\npattern="w"\nlabel="adam"\nwhy="x"', "keys must be among"),
        ('[[rules]]\npattern="w"\nlabel="adam"\nreason="\\u001b"', "reason must be a string"),
        ('[[views]]\npattern="w"\nsplit=3', "split must be a list of sizes, got 3"),
        ('[[views]]\npattern="w"\nsplit=[1.5]', "split must be an integer or a list"),
        ('[[views]]\npattern="w"\nheads=true', "heads must be an integer, got True"),
        ('[[views]]\npattern="w"\naxis="in"', "axis must be 'output' or 'reduction'"),
        ('[[views]]\npattern="w"\nheads=0', "must be positive integers"),
        ('[[shardings]]\npattern="w"\nspec="fsdp"', "spec must be a list of mesh axes"),
        ('[[shardings]]\npattern="w"\nspec=[1]', "spec must be a list of mesh axes"),
        ('[[shardings]]\npattern="w"\nspec=["a", "a"]', "spec must name each mesh axis once"),
        ("x = " + "[" * 20_000, "nested too deeply"),
    ],
)
def test_wrong_rules(text, message, tmp_path):
    rules = rules_file(tmp_path, text)
    error = error_of("report", "--model", "gpt2-124m", "--rules", rules)
    assert error.startswith(f"{rules}: ")
    assert message in error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[rules]]\npattern="nobody"\nlabel="adam"', "rules match no leaf"),
        ('[[views]]\npattern="nobody"', "[[views]] 'nobody'"),
        ('[[shardings]]\npattern="nobody"\nspec=[]', "[[shardings]] 'nobody'"),
        ('[[rules]]\npattern="bias"\nlabel="muon"', "h/bias: shape (4,), labelled 'muon'"),
        ('[[views]]\npattern="up"\nreduction_axis=7', "h/up: reduction axes must be"),
        ('[[views]]\npattern="up"\nsplit=[5]', "h/up: split=(5,)"),
        ('[[shardings]]\npattern="up"\nspec=["x"]', "h/up: Resource axis: x"),
        ('[[shardings]]\npattern="up"\nspec=["","","fsdp"]', "h/up: "),
        ('[[shardings]]\npattern="odd"\nspec=["fsdp"]', "h/odd: dim 0 of shape (5, 8) must be"),
    ],
)
def test_rules_that_do_not_fit_name_the_leaf(text, message, tmp_path):
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"h": {"up": [8, 8], "odd": [5, 8], "bias": [4]}}')
    argv = ["plan", "--shapes", shapes, "--rules", rules_file(tmp_path, text), "--mesh", "fsdp=2"]
    code, out, err = run(*argv)
    assert (code, out) == (2, "")
    assert message in err


def test_what_is_no_file(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    rules = tmp_path / "rules.toml"
    rules.write_bytes(b"\xff\xfe")
    for option, path, message in (
        ("--shapes", tmp_path, "not a regular file"),
        ("--shapes", fifo, "not a regular file"),
        ("--shapes", tmp_path / "nothing.json", "No such file"),
        ("--rules", tmp_path, "not a regular file"),
        ("--rules", tmp_path / "nothing.toml", "No such file"),
        ("--rules", rules, "not UTF-8"),
    ):
        model = [] if option == "--shapes" else ["--model", "gpt2-124m"]
        assert message in error_of("report", *model, option, path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=3), x, max_size=3),
    max_leaves=6,
)
SIZES = st.lists(st.integers(0, 2**40) | JSON, max_size=3)
ENTRY = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "F8_E4M3", "I64"]) | JSON, "shape": SIZES},
    optional={"data_offsets": st.lists(st.integers(0, 64), max_size=3) | JSON},
)
HOSTILE = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def survives(*argv: Any) -> None:
    code, out, err = run(*argv)
    assert code in (0, 1, 2)
    assert (code == 2) == err.startswith("error: ")
    assert (out + err).replace("\n", "").isprintable()


@HOSTILE
@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=3), st.binary(max_size=40))
def test_any_header(tmp_path, header, tail):
    path = write(tmp_path / "w.safetensors", header)
    survives("plan", "--shapes", path, "--mesh", "fsdp=2")
    path.write_bytes(path.read_bytes()[: len(tail)] + tail)
    survives("plan", "--shapes", path)


@HOSTILE
@given(
    st.dictionaries(st.text(max_size=4), SIZES | ENTRY | JSON, max_size=3), st.binary(max_size=9)
)
def test_any_json(tmp_path, shapes, tail):
    path = tmp_path / "shapes.json"
    path.write_text(json.dumps(shapes))
    survives("plan", "--shapes", path, "--mesh", "fsdp=2,tp=3")
    path.write_bytes(path.read_bytes() + tail)
    survives("report", "--shapes", path, "--torch")


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


FIELDS = ("pattern", "label", "reason", "spec", "split", "heads", "groups", "axis", "output_axis")
KEYS = st.sampled_from(FIELDS)
VALUES = st.sampled_from(["up", "adam", "muon", "fsdp", [0, 1], ["fsdp"], [8, 8]]) | JSON


@HOSTILE
@given(st.sampled_from(["rules", "views", "shardings"]), st.dictionaries(KEYS, VALUES, max_size=4))
def test_any_rules(tmp_path, table, row):
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"up": [8, 16], "norm": [8]}')
    rules = tmp_path / "rules.toml"
    rules.write_text(f"{table} = [{toml(row)}]", errors="replace")
    survives("plan", "--shapes", shapes, "--mesh", "fsdp=2", "--rules", rules)


@HOSTILE
@given(st.text(max_size=12) | st.from_regex(r"(fsdp|tp|x)=\d{1,3}(,(fsdp|dp)=\d{1,3})?"))
def test_any_mesh(tmp_path, mesh):
    path = tmp_path / "shapes.json"
    path.write_text('{"up": [8, 16]}')
    survives("plan", "--shapes", path, f"--mesh={mesh}")


# As a process


def test_neither_torch_nor_a_device_is_touched():
    code = (
        "import sys; from muon_optax.cli import main; "
        "codes = [main([c, '--model', 'gpt2-124m', *m]) for c, m in "
        "(('plan', ['--mesh', 'fsdp=8']), ('report', []))]; "
        "sys.exit(any(codes) or 'torch' in sys.modules)"
    )
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}  # any use of a device would raise
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "a device receives" in done.stdout


@pytest.mark.parametrize("command", ["plan", "report"])
def test_help(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "Exit code: 0, 1 where no leaf gets Muon, 2 for errors." in text
    assert "deepseek-v3" in text
