"""`plan` and `report`: exit codes, one-line errors, and hostile files."""

import json
import os
import struct
from typing import Any

import hypothesis.strategies as st
import pytest
from commands import error_of, rules_file, run, write
from hypothesis import HealthCheck, given, settings


def test_no_leaf_for_muon_is_exit_code_1(tmp_path):
    path = tmp_path / "shapes.json"
    path.write_text('{"norm": [64]}')
    assert run("plan", "--shapes", path)[0] == 1
    assert run("report", "--shapes", path)[0] == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        *((["--mesh", m], "written like replica=4,fsdp=16") for m in ("", "fsdp", "fsdp=0", "=2")),
        *((["--mesh", m], "written like") for m in ("fsdp=-1", "fsdp=²", "fsdp=2,fsdp=2", "a b=2")),
        (["--mesh", "fsdp=9999999"], "131,072 devices at most"),
        (["--fsdp", "columns"], "--fsdp is for a --mesh with an axis fsdp, got None"),
        (["--fsdp", "rows", "--mesh", "tp=2"], "--mesh with an axis fsdp, got 'tp=2'"),
        (["--mesh", "rows=2"], "mesh axes must be among ('replica', 'data'"),
        (["--device", "abacus"], "device must be one of"),
        (["--model", "gpt5"], "model must be one of"),
        (["--ns-coeffs", "best"], "ns_coeffs='best' is no schedule"),
        (["--ns-dtype", "int8"], "--ns-dtype must be a floating-point dtype of 16 bits or more"),
        (["--ns-dtype", "float8_e4m3fn"], "16 bits or more, got 'float8_e4m3fn'"),
        (["--dtype", "real"], "--dtype must be a floating-point dtype of 16 bits or more"),
        (["--torch"], "--torch is for --shapes"),
        (["--shapes", "w.json", "--scanned"], "--scanned is for --model"),
    ],
)
def test_bad_arguments_are_told_in_one_line(argv, message):
    model = [] if "--model" in argv or "--shapes" in argv else ["--model", "gpt2-124m"]
    assert message in error_of("plan", *model, *argv)


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
        (
            '[[views]]\npattern="nobody"',
            "match no leaf of h/bias, h/odd, h/up:\n  'nobody' -> 'muon'",
        ),
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


def test_shardings_need_a_mesh(tmp_path):
    shapes = tmp_path / "shapes.json"
    shapes.write_text('{"up": [8, 8]}')
    rules = rules_file(tmp_path, '[[shardings]]\npattern="up"\nspec=["fsdp"]')
    argv = ["--shapes", shapes, "--rules", rules]
    assert error_of("plan", *argv) == "the file of rules has [[shardings]], which need --mesh"
    assert run("report", *argv)[0] == run("plan", *argv, "--mesh", "fsdp=2")[0] == 0


@pytest.mark.parametrize("shape", [[22728, 2232030060], [2**31, 2**31], [6, 2**60]])
def test_sizes_beyond_any_machine_have_a_plan(tmp_path, shape):
    shapes = tmp_path / "shapes.json"
    shapes.write_text(json.dumps({"up": shape}))
    for mesh in ("fsdp=2,tp=3", "fsdp=2"):
        code, out, err = run("plan", "--shapes", shapes, "--mesh", mesh)
        assert (code, err) == (0, "")
        assert "PFLOP" in out


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
