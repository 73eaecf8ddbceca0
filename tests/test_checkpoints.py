"""A run that is saved and restored goes on as if it had never stopped."""

import pathlib
import re
import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import reference
import sharded
from flax import nnx, serialization
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from running import apply_updates
from sharded import FAST, make_mesh

from muon_optax import Rule, check_state, default_rules, muon, recipes, state_shardings
from muon_optax.interop import from_optax
from muon_optax.partition import Label

SHAPES = {"up": (16, 32), "down": (32, 16), "embed": (64, 16), "bias": (32,)}
ROWS = {name: P("f") for name in SHAPES}
BOTH = {"up": P("x", "y"), "down": P("y", "x"), "embed": P(None, "y"), "bias": P("x")}


def parameters() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype("float32") for name, shape in SHAPES.items()}


def make_tx(where: Any = None) -> optax.GradientTransformation:
    rate = optax.linear_schedule(0.1, 0.0, 10)
    inner = muon(rate, FAST, weight_decay=0.1, param_shardings=where)
    return optax.chain(optax.clip_by_global_norm(1.0), inner)


def stepper(tx: Any) -> Any:
    """A compiled step of a model whose gradients don't depend on the mesh."""

    @jax.jit
    def step(params, state, number):
        grads = jax.tree.map(lambda p: jnp.sin(7 * p + number), params)
        updates, state = tx.update(grads, state, params)
        return apply_updates(params, updates), state

    return step


def train(step: Any, params: Any, state: Any, numbers: range) -> tuple[Any, Any]:
    for number in numbers:
        params, state = step(params, state, jnp.float32(number))
    return params, state


def abstract(tx: Any, where: dict[str, NamedSharding]) -> dict[str, Any]:
    """What a checkpoint is read into: shapes, dtypes and shardings."""
    params = {n: jax.ShapeDtypeStruct(s, "float32", sharding=where[n]) for n, s in SHAPES.items()}
    init = jax.jit(tx.init, out_shardings=state_shardings(tx, params))
    return {"params": params, "state": jax.eval_shape(init, params)}


def manager(folder: Any) -> ocp.CheckpointManager:
    return ocp.CheckpointManager(folder, item_handlers=ocp.StandardCheckpointHandler())


def save(folder: Any, **items: Any) -> None:
    with manager(folder) as checkpoints:
        checkpoints.save(1, args=ocp.args.StandardSave(items))


def restore(folder: Any, target: Any) -> Any:
    with manager(folder) as checkpoints:
        return checkpoints.restore(1, args=ocp.args.StandardRestore(target))


def saved_state(folder: Any) -> Any:
    """What the checkpoint says that it has."""
    with manager(folder) as checkpoints:
        metadata: Any = checkpoints.item_metadata(1)
        return metadata["state"]


def assert_same(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kind", ["explicit", "auto"])
def test_a_run_goes_on_where_it_was_saved_and_on_other_meshes(kind, tmp_path):
    meshes = [
        (make_mesh({"f": 8}, kind), ROWS),
        (make_mesh({"x": 4, "y": 2}, kind), BOTH),
        (make_mesh({"f": 1}, kind), ROWS),
    ]
    layouts = [{n: NamedSharding(mesh, s) for n, s in specs.items()} for mesh, specs in meshes]
    tx = make_tx(layouts[0])
    start = jax.device_put(parameters(), layouts[0])
    step = stepper(tx)
    half = train(step, start, jax.jit(tx.init)(start), range(2))
    save(tmp_path, params=half[0], state=half[1])
    want = train(step, *half, range(2, 4))
    for where in layouts:
        tx = make_tx(where)
        found = restore(tmp_path, abstract(tx, where))
        check_state(tx, found["params"], found["state"])
        assert_same(found, {"params": half[0], "state": half[1]})
        params, state = train(stepper(tx), found["params"], found["state"], range(2, 4))
        for name, sharding in where.items():
            sharded.assert_sharded(params[name], sharding)
        for x, y in zip(jax.tree.leaves((params, state)), jax.tree.leaves(want), strict=True):
            exact = where is layouts[0]
            assert np.array_equal(x, y) if exact else reference.relative_error(x, y) <= 1e-5


def labelled(**labels: Label) -> optax.GradientTransformationExtraArgs:
    return muon(
        0.1, FAST, partition=[*(Rule(*i, "test") for i in labels.items()), *default_rules()]
    )


# Labels before, labels after, and which leaves moved from where to where.
MOVES: dict[str, tuple[dict[str, Label], dict[str, Label], dict[str, str]]] = {
    "muon to adam": ({}, {"up": "adam"}, {"up": "muon adam"}),
    "adam to muon": ({}, {"embed": "muon"}, {"embed": "adam muon"}),
    "both": ({}, {"up": "adam", "embed": "muon"}, {"up": "muon adam", "embed": "adam muon"}),
    "unfrozen": ({"up": "frozen"}, {}, {"up": "frozen muon"}),
    "one of two unfrozen": (
        {"up": "frozen", "embed": "frozen"},
        {"up": "frozen"},
        {"embed": "frozen adam"},
    ),
    "frozen": ({}, {"up": "frozen"}, {"up": "muon frozen"}),
}
MOMENTS = {"muon": ["mu"], "adam": ["mu", "nu"], "frozen": []}


def lines_of(moved: dict[str, str]) -> list[str]:
    """The lines of the error for leaves that moved, such as 'up' by 'muon adam'."""
    lines = []
    for name, move in moved.items():
        had, has = move.split()
        kind = f"float32{SHAPES[name]}"
        places = {
            had: f"{kind} in the state, none wanted",
            has: f"none in the state, {kind} wanted",
        }
        lines += [
            f"  inner_states/{label}/inner_state/0/{moment}/{name}: {words}"
            for label, words in places.items()
            for moment in MOMENTS[label]
        ]
    return sorted(lines)


@pytest.mark.parametrize("move", MOVES)
def test_other_labels_are_an_error_that_lists_the_leaves(move, tmp_path):
    had, has, moved = MOVES[move]
    old, new = labelled(**had), labelled(**has)
    params = jax.tree.map(jnp.asarray, parameters())
    state = old.init(params)
    save(tmp_path, params=params, state=state)
    blob = serialization.msgpack_restore(serialization.to_bytes(state))
    check_state(old, params, saved_state(tmp_path))
    check_state(old, params, blob)
    for found in (saved_state(tmp_path), blob, state):
        with pytest.raises(ValueError, match="can't go on with this optimizer") as error:
            check_state(new, params, found)
        assert str(error.value).splitlines()[1:] == lines_of(moved)


def test_what_orbax_restores_into_other_labels_is_refused(tmp_path):
    """Orbax itself gives None for the moments that the checkpoint lacks."""
    params = jax.tree.map(jnp.asarray, parameters())
    save(tmp_path, state=labelled().init(params))
    new = labelled(up="adam")
    state = restore(tmp_path, {"state": new.init(params)})["state"]
    assert state.inner_states["adam"].inner_state[0].mu["up"] is None
    with pytest.raises(ValueError, match=r"0/mu/up: none in the state, float32\(16, 32\) "):
        check_state(new, params, state)
    with pytest.raises(ValueError, match="up: absent in the state, adam now"):
        new.update(params, state, params)


def test_other_shapes_and_dtypes_are_an_error_that_lists_the_leaves(tmp_path):
    params = jax.tree.map(jnp.asarray, parameters())
    save(tmp_path, state=make_tx().init(params))
    wider = {**params, "up": jnp.ones((16, 48)), "bias": jnp.ones(32, "bfloat16")}
    with pytest.raises(ValueError, match="can't go on") as error:
        check_state(make_tx(), wider, saved_state(tmp_path))
    assert str(error.value).splitlines()[1:] == [
        f"  1/inner_states/{path} wanted"
        for path in (
            "adam/inner_state/0/mu/bias: float32(32,) in the state, bfloat16(32,)",
            "adam/inner_state/0/nu/bias: float32(32,) in the state, bfloat16(32,)",
            "muon/inner_state/0/mu/up: float32(16, 32) in the state, float32(16, 48)",
        )
    ]


def test_what_is_no_array_is_an_error_that_shows_it():
    params = {"up": jnp.ones((4, 8))}
    state: Any = muon(0.1).init(params)
    half = state.inner_states["muon"]
    for count in ("int32", len):  # the first is also the name of the dtype that is wanted
        broken = half._replace(
            inner_state=(half.inner_state[0]._replace(count=count), *half.inner_state[1:])
        )
        found = state._replace(inner_states={**state.inner_states, "muon": broken})
        with pytest.raises(ValueError, match="can't go on with this optimizer") as error:
            check_state(muon(0.1), params, found)
        assert str(error.value).splitlines()[1:] == [
            f"  inner_states/muon/inner_state/0/count: {type(count).__name__} {count!r} in "
            "the state, int32() wanted"
        ]


def test_the_state_of_an_nnx_optimizer(tmp_path):
    rngs = nnx.Rngs(0)
    model = nnx.Dict(up=nnx.Linear(4, 8, rngs=rngs), down=nnx.Linear(8, 4, rngs=rngs))
    params = nnx.state(model, nnx.Param)
    old, new = labelled(), labelled(up="adam")
    state = nnx.state(nnx.Optimizer(model, old, wrt=nnx.Param))["opt_state"]
    other = nnx.state(nnx.Optimizer(model, new, wrt=nnx.Param))["opt_state"]
    save(tmp_path, state=state)
    for found in (state, saved_state(tmp_path), restore(tmp_path, {"state": state})["state"]):
        check_state(old, params, found)
    with pytest.raises(ValueError, match="0/nu/up/kernel: none in the state"):
        check_state(new, params, saved_state(tmp_path))
    # A variable that the checkpoint lacks is one that Orbax itself asks for.
    with pytest.raises(ValueError, match=r"0\.nu\.up\.kernel:\n.*\n(?s:.*)Target: MISSING"):
        restore(tmp_path, {"state": other})


def test_flax_serialization_goes_on_bit_for_bit():
    params = jax.tree.map(jnp.asarray, parameters())
    tx = make_tx()
    step = stepper(tx)
    half = train(step, params, tx.init(params), range(2))
    want = train(step, *half, range(2, 4))
    empty = {"params": params, "state": tx.init(params)}
    blob = serialization.to_bytes({"params": half[0], "state": half[1]})
    found = serialization.from_bytes(empty, blob)
    assert_same((found["params"], found["state"]), half)
    assert_same(train(step, found["params"], found["state"], range(2, 4)), want)


def test_a_checkpoint_of_optax_muon_goes_on_on_a_mesh(tmp_path):
    theirs, params = optax.contrib.muon(0.1, FAST), jax.tree.map(jnp.asarray, parameters())
    step = stepper(theirs)
    half = train(step, params, theirs.init(params), range(2))
    save(tmp_path, params=half[0], state=half[1])
    want = train(step, *half, range(2, 4))
    mesh = make_mesh({"f": 8})
    where = {name: NamedSharding(mesh, spec) for name, spec in ROWS.items()}
    found = restore(tmp_path, abstract(theirs, where))
    ours = recipes.optax_muon(0.1, ns_coeffs=FAST)
    state = from_optax(found["state"], found["params"])
    check_state(ours, found["params"], state)
    got, _ = train(stepper(ours), found["params"], state, range(2, 4))
    for name, x in want[0].items():
        assert reference.relative_error(got[name], x) <= 1e-5


# Saves a state full of ones as step 1, and is killed at a moment of saving one of twos as step 2.
KILLED = """
import os, signal, sys
import jax, jax.numpy as jnp, orbax.checkpoint as ocp
from muon_optax import muon

folder, moment, path = sys.argv[1:]

def kill(event, args):
    if event == moment and str(args[0]).endswith(path) and "/2." in str(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
state = muon(0.1).init({"w": jnp.ones((16, 8)), "b": jnp.ones(8)})
with ocp.CheckpointManager(folder) as checkpoints:
    for step in (1, 2):
        full = jax.tree.map(lambda x: jnp.full_like(x, step), state)
        checkpoints.save(step, args=ocp.args.StandardSave(full))
        checkpoints.wait_until_finished()
"""


@pytest.mark.parametrize(
    ("moment", "path"), [("os.mkdir", "array_metadatas"), ("os.rename", "2.orbax-checkpoint-tmp")]
)
def test_a_kill_during_saving_loses_nothing_already_saved(moment, path, tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path), moment, path]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode == -signal.SIGKILL, process.stderr
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"1", "2.orbax-checkpoint-tmp"}
    empty = muon(0.1).init({"w": jnp.ones((16, 8)), "b": jnp.ones(8)})
    with manager(tmp_path) as checkpoints:
        assert checkpoints.latest_step() == 1
        found = checkpoints.restore(1, args=ocp.args.StandardRestore(empty))
        assert_same(found, jax.tree.map(jnp.ones_like, empty))
        checkpoints.save(2, args=ocp.args.StandardSave(found))
        checkpoints.wait_until_finished()
        assert checkpoints.all_steps() == [1, 2]


def test_the_pages_snippet_reads_what_it_saved():
    page = (pathlib.Path(__file__).parents[1] / "docs" / "multiprocess.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, "multiprocess.md", "exec"), names)
    assert_same(names["restored"], {"params": names["params"], "state": names["state"]})
    for name, sharding in names["shardings"].items():
        sharded.assert_sharded(names["restored"]["params"][name], sharding)
