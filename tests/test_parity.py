"""Runs of torch's FSDP2 against muon_optax, and what happens when torch's side goes wrong."""

import dataclasses
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from reference import relative_error

from muon_optax import recipes
from muon_optax.interop.parity import launch
from muon_optax.interop.parity.case import Case, parse_mesh, read_cases, write_cases
from muon_optax.interop.parity.launch import ParityError, run_cases, run_ranks
from muon_optax.interop.parity.replay import exact_update, need_devices, replay
from muon_optax.interop.parity.verdict import TOLERANCES, Row, Verdict

FSDP2 = parse_mesh("fsdp=2")


def cases(mesh: str, *kinds: str, recipe: str = "torch_muon") -> list[Case]:
    return [
        Case(recipe, parse_mesh(mesh), "torch", "float32")
        if kind == "torch"
        else Case(recipe, parse_mesh(mesh), "reference", kind)  # pyright: ignore[reportArgumentType]
        for kind in kinds
    ]


def largest(verdict: Verdict, field: str) -> float:
    return max(getattr(row, field) for row in verdict.rows)


def check(verdict: Verdict) -> None:
    """The bars, in numbers of their own."""
    assert verdict.passed, str(verdict.table(worst=True))
    if verdict.case.optimizer == "reference":
        in_float32 = verdict.case.dtype == "float32"
        assert largest(verdict, "parameter") < (1e-5 if in_float32 else 1e-11)
        assert largest(verdict, "momentum") < (1e-6 if in_float32 else 1e-11)
        return
    assert abs(verdict.bias) < 5e-3
    if verdict.case.optimizer == "muon_fsdp2":
        return
    assert {row.leaf for row in verdict.rows if row.update > 4e-2} <= {"expand/kernel"}
    for row in verdict.rows:  # [N, 1]: torch's sums of bfloat16 over shards are off, not we
        assert row.update < 4e-2 or (row.verdict == "TORCH" and row.update < 0.1)


def run_and_check(folder: Path, chosen: list[Case]) -> None:
    pytest.importorskip("torch", reason="torch isn't installed")
    run_cases(folder, chosen)
    for i, case in enumerate(chosen):
        check(replay(case, folder / f"{i}.npz"))


def test_four_ranks(tmp_path):
    """1-D FSDP, HSDP, and FSDP x TP; two ranks are in the tests of the command."""
    chosen = cases("fsdp=4", "float64", "torch")
    chosen += cases("replica=2,fsdp=2", "float32", "float64")
    chosen += cases("fsdp=2,tp=2", "float32", "float64")
    if importlib.util.find_spec("muon_fsdp2"):
        chosen.append(Case("torch_muon", parse_mesh("fsdp=4"), "muon_fsdp2"))
    run_and_check(tmp_path, chosen)
    for i in (1, 2, 4):
        check_gradients(np.load(tmp_path / f"{i}.npz"))


def check_gradients(record: Any) -> None:
    """The last gradients of a sharded run are those of the whole model in one process."""
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    module = importlib.import_module("muon_optax.interop.parity.module")
    model = module.Model()
    params = {name: torch.from_numpy(record[f"param/9/{name}"]) for name in model.state_dict()}
    model.load_state_dict(params)
    loss = module.loss_of(model, module.batch(0, 10))
    loss.backward()
    np.testing.assert_allclose(loss.item(), record["loss/10"], rtol=1e-6)
    for name, p in model.named_parameters():
        assert relative_error(record[f"grad/10/{name}"], p.grad.numpy()) < 1e-5


def test_torch_raises_for_a_row_over_two_ranks():
    """Why [1, N] weights are AdamW's in the runs with torch.optim.Muon; they are Muon's here."""
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    dist = importlib.import_module("torch.distributed")
    tensor = importlib.import_module("torch.distributed.tensor")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    # This process is the first of two ranks; it sends nothing, and waits for nothing.
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        row = tensor.distribute_tensor(torch.ones(1, 8), mesh, [tensor.Shard(0)])
        p = torch.nn.Parameter(row)
        p.grad = row.clone()
        if torch.__version__ < "2.14":
            with pytest.raises(RuntimeError, match="placement"):
                torch.optim.Muon([p]).step()
    finally:
        dist.destroy_process_group()


def rank_script(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(("import os, subprocess, sys, time", *lines))]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Any, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_dead_rank_ends_all_and_is_quoted(tmp_path):
    script = rank_script(
        "child = subprocess.Popen(['sleep', '60'])",
        f"open({str(tmp_path)!r} + '/pid' + os.environ['RANK'], 'w').write(str(child.pid))",
        f"while len([n for n in os.listdir({str(tmp_path)!r}) if n.startswith('pid')]) < 2:",
        "    time.sleep(0.02)",
        "if os.environ['RANK'] == '1':",
        "    sys.exit('no such device')",
        "time.sleep(60)",
    )
    with pytest.raises(ParityError, match=r"rank 1 exited with code 1.*\n  no such device"):
        run_ranks(script, 2, tmp_path)
    for rank in range(2):
        pid = int((tmp_path / f"pid{rank}").read_text())
        wait_until(lambda pid=pid: not is_alive(pid))


def test_a_killed_rank_is_named(tmp_path):
    script = rank_script("os.kill(os.getpid(), 9)")
    with pytest.raises(ParityError, match=r"rank 0 was ended by SIGKILL.*\n  \(nothing\)"):
        run_ranks(script, 1, tmp_path)


def test_time_is_up(tmp_path):
    script = rank_script("print('waiting for the others', flush=True)", "time.sleep(60)")
    with pytest.raises(ParityError, match=r"ranks \[0, 1\] still run; rank 0 said:\n  waiting"):
        run_ranks(script, 2, tmp_path, timeout=2.0)


WATCHING = "from muon_optax.interop.parity.launch import leave_with_parent; leave_with_parent(); "


@pytest.mark.parametrize(("number", "watching"), [(signal.SIGTERM, ""), (signal.SIGKILL, WATCHING)])
def test_ranks_end_with_their_parent(tmp_path, number, watching):
    """SIGTERM is caught and they are killed; after a SIGKILL they see that the parent is gone."""
    rank = (
        f"import os, time; {watching}"
        f"open({str(tmp_path)!r} + '/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    )
    parent = (
        "import sys; from pathlib import Path; "
        "from muon_optax.interop.parity.launch import run_ranks; "
        f"run_ranks([sys.executable, '-c', {rank!r}], 1, Path({str(tmp_path)!r}))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent])
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text(), 60.0)
    process.send_signal(number)
    assert process.wait(20) == (143 if number == signal.SIGTERM else -9)
    wait_until(lambda: not is_alive(int(pid.read_text())))


def test_a_taken_port_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ParityError, match=f"port {port} can't be used"):
            run_cases(tmp_path, [Case("torch_muon", FSDP2)], port=port)


def test_ranks_meet_at_a_port_or_in_a_file(tmp_path, monkeypatch):
    seen: list[Any] = []
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(launch, "run_ranks", lambda *args, env, **_: seen.append((args, env)))
    case = Case("torch_muon", FSDP2)
    run_cases(tmp_path, [case])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_cases(tmp_path, [case], port=port)
    where = [env["MUON_PARITY_RENDEZVOUS"] for _, env in seen]
    assert where == [f"file://{tmp_path}/store", f"tcp://127.0.0.1:{port}"]
    assert [args[1] for args, _ in seen] == [2, 2]


@pytest.mark.parametrize(
    ("optimizer", "absent", "extra"),
    [("reference", "torch", "torch"), ("muon_fsdp2", "muon_fsdp2", "peers")],
)
def test_absent_packages_are_named(tmp_path, monkeypatch, optimizer, absent, extra):
    find = lambda name: None if name == absent else name  # noqa: E731
    monkeypatch.setattr(launch.importlib.util, "find_spec", find)
    with pytest.raises(ParityError, match=rf"pip install 'muon-optax\[{extra}\]'"):
        run_cases(tmp_path, [Case("torch_muon", FSDP2, optimizer)])


def test_cases_are_checked_and_written_as_they_are(tmp_path):
    chosen = [Case("dion", parse_mesh("fsdp=2, tp=2"), steps=3), Case("moonlight", FSDP2)]
    write_cases(tmp_path / "cases.json", chosen)
    assert read_cases(tmp_path / "cases.json") == chosen
    with pytest.raises(ValueError, match=r"one number of ranks, got \[2, 4\]"):
        run_cases(tmp_path, chosen)
    for text in ("fsdp", "fsdp=two", "tp=2", "tp=2,fsdp=2", "replica=2,fsdp=2,tp=2", "fsdp=0"):
        with pytest.raises(ValueError, match="mesh"):
            parse_mesh(text)
    with pytest.raises(ValueError, match="has the conventions of torch_muon"):
        Case("dion", FSDP2, "torch")
    with pytest.raises(ValueError, match=r"dtype must be one of \('float32', 'float64'\)"):
        Case("dion", FSDP2, dtype="bfloat16")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="steps must be positive"):
        Case("dion", FSDP2, steps=0)


def test_too_few_devices_are_told_of():
    jax.devices()  # JAX has started, whatever test ran before
    with pytest.raises(RuntimeError, match="needs 1000 devices and JAX has started with 8"):
        need_devices(1000)


def made_record(path: Path, case: Case) -> dict[str, np.ndarray]:
    """A record of two parameters and one step of zero gradients."""
    rng = np.random.default_rng(0)
    shapes = {"up.weight": (4, 2), "up.bias": (4,)}
    record: dict[str, np.ndarray] = {"muon": np.array(["up.weight"]), "loss/1": np.array(1.0)}
    for name, shape in shapes.items():
        p = rng.normal(size=shape).astype(case.dtype)
        decayed = p * (1 - case.learning_rate * case.weight_decay)
        record |= {f"param/0/{name}": p, f"param/1/{name}": decayed.astype(case.dtype)}
        record |= {f"{kind}/1/{name}": np.zeros_like(p) for kind in ("grad", "momentum")}
    np.savez(path, **record)  # pyright: ignore[reportArgumentType]
    return record


def test_what_differs_fails(tmp_path):
    case = Case("torch_muon", FSDP2, dtype="float64", steps=1)
    record = made_record(tmp_path / "right.npz", case)
    assert replay(case, tmp_path / "right.npz").passed
    for key in ("param/1/up.bias", "momentum/1/up.weight"):
        wrong = record | {key: record[key] + 1e-6}
        np.savez(tmp_path / "wrong.npz", **wrong)  # pyright: ignore[reportArgumentType]
        verdict = replay(case, tmp_path / "wrong.npz")
        assert not verdict.passed
        bad = [row.leaf for row in verdict.rows if row.verdict == "FAIL"]
        assert bad == ["up/bias" if key.endswith("bias") else "up/kernel"]
    nan = record | {"param/1/up.bias": np.full(4, np.nan)}
    np.savez(tmp_path / "nan.npz", **nan)  # pyright: ignore[reportArgumentType]
    assert not replay(case, tmp_path / "nan.npz").passed
    other = record | {"muon": np.array(["up.weight", "up.bias"])}
    np.savez(tmp_path / "other.npz", **other)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="in torch for"):
        replay(case, tmp_path / "other.npz")


def test_a_bias_fails_though_every_row_passes():
    row = Row("w", 1, 1e-3, 0.0, 1e-3, 1e-3, "PASS")
    verdict = Verdict(
        Case("torch_muon", FSDP2, "torch"), TOLERANCES["bfloat16"], (row,), 0.0, (1.0,)
    )
    assert verdict.passed
    assert not dataclasses.replace(verdict, bias=-6e-3).passed
    assert not dataclasses.replace(verdict, bias=float("nan")).passed


def test_tables_and_json():
    rows = (
        Row("w", 1, 0.01, 1e-9, 1e-8, 0.01, "PASS"),
        Row("w", 2, 0.06, 1e-9, 1e-8, 0.07, "TORCH"),
    )
    case = Case("torch_muon", FSDP2, "torch")
    verdict = Verdict(case, TOLERANCES["bfloat16"], rows, 1e-3, (1.0, 0.5))
    text = str(verdict.table())
    assert "w     1     1.0e-02" in text
    assert "PASS: 2 rows, 0 failed, in 1 torch is off by more; bias +1.0e-03" in text
    (line,) = [x for x in str(verdict.table(worst=True)).splitlines() if x.startswith("w ")]
    assert line.split() == ["w", "2", "6.0e-02", "1.0e-09", "1.0e-08", "7.0e-02", "TORCH"]
    assert json.loads(json.dumps(verdict.to_dict()))["case"]["mesh"] == [["fsdp", 2]]
    assert pytest.importorskip("rich").get_console() is not None
    verdict.table().__rich__()


def test_the_exact_update_is_that_of_the_recipe():
    """The oracle that judges torch's own accuracy, against the library in float64."""
    rng = np.random.default_rng(1)
    param, grad = rng.normal(size=(2, 6, 9))
    want = exact_update(Case("torch_muon", FSDP2, "torch"), grad, 0.05 * grad, param)
    with jax.enable_x64(True):
        p, g = jnp.asarray(param), jnp.asarray(grad)
        tx = recipes.torch_muon(0.02, weight_decay=0.1, ns_dtype=None)
        got, _ = jax.jit(tx.update)(g, tx.init(p), p)
    np.testing.assert_allclose(got, want, rtol=1e-10)


def test_nothing_is_left_running():
    """No rank of the runs above is left, those whose tests ran in this process."""
    mine = [
        int(name)
        for name in os.listdir("/proc")
        if name.isdigit() and _parent(int(name)) == os.getpid() and is_alive(int(name))
    ]
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in mine]
    assert not [command for command in commands if b"parity.ranks" in command]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return -1
