"""The pages in docs/: their code runs, their tables and messages are what the library says."""

import ast
import doctest
import functools
import importlib.util
import inspect
import itertools
import math
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
import sharded
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from running import first_update
from shown import plan, report

import muon_optax
from muon_optax import (
    Attention,
    HeadWeight,
    MatrixView,
    MuonDimensionNumbers,
    interop,
    muon,
    recipes,
    scale_by_muon,
)
from muon_optax.inspect.tables import quantity
from muon_optax.orthogonalization import SCHEDULES
from muon_optax.transforms.shape_scale import Scale
from muon_optax.transforms.stage import MatrixTransformation

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
# These have tests beside what they describe.
ELSEWHERE = {"torch.md", "command_line.md", "multiprocess.md"}
PAGES = sorted(page.name for page in DOCS.glob("*.md") if page.name not in ELSEWHERE)


@pytest.fixture(autouse=True, scope="module")
def _quick_to_compile():
    """The code is small: compiling it takes most of the time."""
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, True)
    yield
    jax.config.update(name, before)


@functools.cache
def run_page(name: str) -> dict[str, Any]:
    """Runs a page's code from top to bottom as one program; prompts show what is printed."""
    names: dict[str, Any] = {}
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    report: list[str] = []
    for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(), re.DOTALL):
        if not _has_packages(block):
            continue
        if not block.startswith(">>>"):
            exec(compile(block, name, "exec"), names)
            continue
        test = doctest.DocTestParser().get_doctest(block, names, name, name, 0)
        runner.run(test, out=report.append, clear_globs=False)
        names.update(test.globs)
    assert not report, "".join(report)
    return names


def _has_packages(block: str) -> bool:
    """Whether what a block imports is installed: torch and Haiku are not everywhere."""
    packages = re.findall(r"^(?:>>> )?(?:import|from) (\w+)", block, re.MULTILINE)
    return all(importlib.util.find_spec(package) for package in packages)


@pytest.mark.parametrize("name", PAGES)
def test_the_code_of_a_page_runs(name):
    run_page(name)


def rows_of(name: str, header: str) -> list[list[str]]:
    """The cells of the table in a page whose header line begins like this."""
    lines = iter((DOCS / name).read_text().splitlines())
    assert any(line.startswith(header) for line in lines), header
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[1:]]


def evaluated(cell: str, *modules: Any) -> Any:
    """What a cell's code gives, with the names of some modules, optax and the heads of a model."""
    names = {name: thing for module in modules for name, thing in vars(module).items()}
    names |= {"optax": optax, "heads": HEADS}
    return eval(cell.strip("`"), names)


def test_the_intervals_of_the_schedules():
    rows = rows_of("algorithm.md", "| `ns_coeffs` | steps")
    assert [row[0].strip("`") for row in rows] == list(SCHEDULES)
    before = np.union1d(np.geomspace(1e-3, 1, 100001), np.linspace(1e-3, 1, 100001))
    for name, steps, norm, interval, _ in rows:
        schedule = SCHEDULES[name.strip("`")]
        assert (int(steps), norm.strip("`")) == (len(schedule.rows), schedule.preconditioning)
        sigma = before / schedule.norm_factor
        for a, b, c in schedule.rows:
            sigma = a * sigma + b * sigma**3 + c * sigma**5
        assert interval == f"{sigma.min():.3f}–{sigma.max():.3f}", name


def test_the_norms_of_a_gaussian():
    sigma = np.linalg.svd(np.random.default_rng(0).normal(size=(512, 512)), compute_uv=False)
    norms = [np.linalg.norm(sigma, order) / sigma[0] for order in (2, 8)]
    assert [f"{norm:.2g}" for norm in norms] == ["11", "1.5"]


def test_what_small_values_are_multiplied_by():
    gains = [math.prod(row[0] for row in s.rows) for s in SCHEDULES.values() if len(s.rows) == 5]
    assert 450 < min(gains) < max(gains) < 1100


def test_the_matrices_of_the_views():
    rows = rows_of("matrix_views.md", "| leaf | shape | view")
    assert len(rows) >= 15
    for _, shape, view, matrices in rows:
        leaf = jax.ShapeDtypeStruct(eval(f"({shape},)"), "float32")
        declared = evaluated(view, muon_optax)
        (row,) = report(leaf, muon_weight_dimension_numbers=declared).rows
        assert ", ".join(" × ".join(map(str, m)) for m in row.matrices) == matrices


def test_the_factors_of_the_scales():
    rows = rows_of("scaling.md", "| `scale` | factor")
    assert [row[0].strip("`") for row in rows] == list(get_args(Scale))
    for scale, (_, _, sizes, _) in zip(get_args(Scale), rows, strict=True):
        shapes = [(1024, 1024), (1024, 4096), (4096, 1024)]
        leaves = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        scales = [row.scales[0] for row in report(leaves, scale=scale).rows]
        rms = [s / max(shape) ** 0.5 for s, shape in zip(scales, shapes, strict=True)]
        assert sizes == ", ".join(f"{x:.3g}" for x in rms)


def test_the_strategies_of_the_layouts():
    rows = rows_of("sharding.md", "| layout | spec of")
    for _, spec, axes, want in rows:
        sizes = dict(pair.split("=") for pair in axes.strip("`").split(", "))
        mesh = AbstractMesh(tuple(map(int, sizes.values())), tuple(sizes))
        param, *momentum = re.findall(r"`(.*?)`", spec)
        where, *there = (
            NamedSharding(mesh, eval(each, {"P": PartitionSpec})) for each in (param, *momentum)
        )
        is_stack = len(where.spec) == 3
        shape = (8, 4096, 14336) if is_stack else (4096, 14336)
        leaves = [jax.ShapeDtypeStruct(shape, "bfloat16")] * (1 if is_stack else 8)
        options = {"device": "h100", "muon_weight_dimension_numbers": MatrixView(-2, -1)}
        made = plan(leaves, where, mu_shardings=there[0] if there else None, **options)
        row, *moves = made.rows
        assert {move.strategy for move in moves} <= {"reshard"}
        shared = f" / {', '.join(row.share_axes)}" if row.share_axes else ""
        assert want == f"{row.strategy}{shared}, {quantity(made.bytes, 'B')}", spec


def test_the_figures_of_a_bad_step():
    compare = run_page("clipping.md")["compare"]
    for leaf, after, *figures in rows_of("clipping.md", "| leaf | steps after"):
        got = compare(leaf.strip("`"), 20 + int(after))
        np.testing.assert_allclose([float(x) for x in figures], got, atol=0.011)


# Two hidden matrices, and a leaf for each rule by which recipes differ.
SHAPES = {"up": (8, 16), "down": (16, 8), "embed_tokens": (8, 4), "lm_head": (4, 8), "bias": (16,)}
TREE = {
    name: np.random.default_rng(i).normal(size=shape).astype("float32")
    for i, (name, shape) in enumerate(SHAPES.items())
}
HIDDEN = {name: TREE[name] for name in ("up", "bias")}
HEADS = {"": Attention(4, {"up": HeadWeight("query", 1), "down": HeadWeight("key", 0)})}
LOGITS = {"": np.array([50.0, 150.0, -1.0, 300.0], "float32")}


def test_what_optax_users_write():
    for theirs, ours in rows_of("migration.md", "| `optax.contrib` |"):
        want = first_update(evaluated(theirs, optax.contrib), HIDDEN, jit=True)
        got = first_update(evaluated(ours, muon_optax), HIDDEN, jit=True)
        for name in HIDDEN:
            assert reference.relative_error(got[name], want[name]) <= 1e-5, theirs


def test_recipes_written_out():
    rows = rows_of("migration.md", "| from | recipe |")
    found = [re.match(r"`(\w+)\(", row[1]) for row in rows]
    assert {match[1] for match in found if match} == set(recipes.__all__) - {"optax_muon"}
    for _, recipe, written in rows:
        assert program(recipe) == program(written), recipe


def program(call: str) -> str:
    """The first update of an optimizer, compiled as far as to be compared."""
    tx = evaluated(call, muon_optax, recipes)
    state = jax.eval_shape(tx.init, TREE)
    return jax.jit(tx.update).lower(TREE, state, TREE, max_logits=LOGITS).as_text()


def test_the_states_of_the_variants():
    """Of a matrix of 6 inputs and 10 outputs; the first of two where a piece has two."""
    matrix = jax.ShapeDtypeStruct((6, 10), "bfloat16")
    arguments: dict[str, Any] = {
        "hyperball": {"learning_rate": 0.1},
        "add_cautious_weight_decay": {"weight_decay": 0.1},
        "qk_clip": {"heads": {}},
    }
    for cell, _, state, *_ in rows_of("variants.md", "| piece | what it changes"):
        name = cell.strip("`")
        if name in ("coupled_decay", "BlockPeriodic"):  # a schedule, an option
            continue
        tx = getattr(muon_optax, name)(**arguments.get(name, {}))
        found = jax.tree.leaves(jax.eval_shape(tx.init, matrix))
        moments = [x for x in found if x.dtype == jnp.float32]
        formula = state.split(",")[0].replace("bytes", "").replace("none", "0")
        formula = formula.replace("×", "*").replace("in *", "6 *")
        assert sum(4 * x.size for x in moments) == eval(formula, {"out": 10}), name


def test_the_pieces_of_other_systems():
    for _, piece in rows_of("variants.md", "| system | piece"):
        assert isinstance(evaluated(piece.split("`")[1], muon_optax), MatrixTransformation)


def test_torchs_arguments_are_muons():
    rows = rows_of("migration.md", "| `torch.optim.Muon` | `muon`")
    ours = [re.findall(r"`(\w+)`", row[1]) for row in rows]
    assert set(itertools.chain(*ours)) <= set(inspect.signature(muon).parameters)


def test_the_cosine_of_two_conventions():
    """Gradients that have nothing in common: the weights of the mixes are their coordinates."""
    grads = list(np.eye(20))
    ours, theirs = (reference.mixes(grads, bias_correction=is_ours) for is_ours in (True, False))
    pairs = [(ours[t - 1], theirs[t - 1]) for t in (1, 2, 5, 20)]
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
    assert [f"{c:.3f}" for c in cosines] == ["1.000", "0.997", "0.999", "1.000"]


@pytest.mark.parametrize(
    ("shape", "dtype", "least", "most"),
    [
        ((32, 48), "float32", 0, 1e-5),
        ((32, 48), "bfloat16", 1e-3, 5e-2),
        ((6, 10), "bfloat16", 5e-2, 0.3),
    ],
)
def test_how_far_strategies_agree(shape, dtype, least, most):
    """Of gradients of independent normal entries, by the schedules that magnify most."""
    devices = sharded.make_mesh({"x": 2, "rest": 4})
    x = np.random.default_rng(0).normal(size=(4, *shape)).astype("float32")
    errors = [_distance_of_strategies(name, dtype, x, devices) for name in MAGNIFYING]
    assert least <= max(errors) <= most


MAGNIFYING = ("modded_nanogpt", "polar_express", "cans")


def _distance_of_strategies(schedule: Any, dtype: str, x: np.ndarray, mesh: Mesh) -> float:
    options: Any = {"weight_dimension_numbers": MuonDimensionNumbers(1, 2), "ns_dtype": dtype}
    alone = scale_by_muon(schedule, **options)
    gram = scale_by_muon(schedule, strategy="gram", **options)
    placed = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, None, "x")))
    want = np.asarray(first_update(alone, x), float)
    got = np.asarray(jax.jit(lambda x: gram.update(x, gram.init(x))[0])(placed), float)
    norm = functools.partial(np.linalg.norm, axis=(1, 2))
    return float(np.max(norm(got - want) / norm(want)))


@pytest.mark.parametrize(
    ("dtype", "rate", "least", "most"),
    [("bfloat16", 0.999, 1.7, 2.2), ("float16", 0.999, 31, 32), ("bfloat16", 0.95, 0.95, 1.05)],
)
def test_the_second_moment_in_half_precision(dtype, rate, least, most):
    """AdamW steps by its learning rate under a gradient that stays the same."""
    grads = jnp.array([3.3e-3, 1e-3, 1e-4], dtype)
    tx: Any = muon(1.0, mu_dtype="float32", adam_b2=rate, adam_nesterov=False)
    step = lambda state, _: tx.update({"w": jnp.eye(2), "b": grads}, state)[::-1]  # noqa: E731
    _, updates = jax.lax.scan(step, tx.init({"w": jnp.eye(2), "b": grads}), length=6000)
    sizes = -np.asarray(updates["b"][-1], np.float64)
    assert least < sizes.min() <= sizes.max() < most


def public_names() -> Iterator[tuple[Any, str]]:
    for module in (muon_optax, recipes, interop):
        yield from ((module, name) for name in module.__all__)


def test_every_public_name_has_an_example_and_is_in_the_docs():
    pages = [(DOCS / name).read_text() for name in (*PAGES, *ELSEWHERE)]
    words = set(re.findall(r"\w+", " ".join([*pages, (ROOT / "README.md").read_text()])))
    index = set(re.findall(r"\w+", (DOCS / "README.md").read_text()))
    for module, name in public_names():
        thing = getattr(module, name)
        assert name in words, name
        assert name in index, name
        if name != "MuonDimensionNumbers":  # optax's own
            assert ">>> " in thing.__doc__, name


IMPORT = r"^(?:>>> )?(from muon_optax.* import (?:\([^)]*\)|.*))$"


def test_what_pages_import_and_name_is_there():
    pages = [*ROOT.glob("*.md"), *DOCS.glob("*.md"), *(ROOT / "examples").glob("*.md")]
    for page in pages:
        text = page.read_text()
        names = re.findall(r"`(muon_optax(?:\.\w+)+)`", text)
        for code in re.findall(
            r"^(?:>>> )?(from muon_optax.* import (?:\([^)]*\)|.*))$", text, re.M
        ):
            (node,) = ast.parse(code.replace("\n...", "\n")).body
            assert isinstance(node, ast.ImportFrom)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            assert pkgutil.resolve_name(name) is not None, f"{page.name}: {name}"


def test_links_lead_somewhere():
    for page in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            found = page if not path else (page.parent / path).resolve()
            assert target.startswith("http") or found.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors(found), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_has_every_page():
    index = (DOCS / "README.md").read_text()
    for name in {page.name for page in DOCS.glob("*.md")} - {"README.md"}:
        assert f"]({name})" in index, name
