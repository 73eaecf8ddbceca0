"""Bytes, FLOPs and seconds of the strategies, against the formulas."""

import dataclasses
import math

import pytest

from muon_optax import DeviceModel
from muon_optax.orthogonalization import NewtonSchulz, resolve_schedule
from muon_optax.sharding.planning.costs import estimate
from muon_optax.sharding.planning.device_models import DEVICES, device_model
from muon_optax.sharding.planning.workload import Workload
from muon_optax.sharding.strategies import STRATEGIES

JORDAN = NewtonSchulz(resolve_schedule("jordan"))
POLAR_8 = NewtonSchulz(resolve_schedule("polar_express", 8))
DEVICE = DeviceModel("test", 4e12, 1e12, 1e9, latency=1e-3)
SIZES = (("r", 2), ("f", 4), ("o", 1))
M, N = 64, 256
FLOPS = JORDAN.flops(M, N)


def work(*, shared: bool = False, itemsize: int = 4, **changes) -> Workload:
    share = ("r",) if shared else ()
    return dataclasses.replace(Workload(M, N, itemsize, FLOPS, ("f",), share, SIZES), **changes)


def cost(strategy, count, its, device=DEVICE, iteration=JORDAN):
    its = dataclasses.replace(its, newton_schulz=iteration)
    return estimate(STRATEGIES[strategy], count, its, device)


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("count", [1, 3, 4, 7, 8, 19])
def test_an_exchange_within_one_replica(count, itemsize):
    matrix, rounds = M * N * itemsize, math.ceil(count / 4)
    its = work(itemsize=itemsize)
    found = cost("gather", count, its)
    assert (found.bytes, found.flops) == (count * matrix * 3 // 4, count * FLOPS)
    found = cost("all_to_all", count, its)
    assert (found.bytes, found.flops) == (2 * rounds * matrix * 3 // 4, rounds * FLOPS)
    found = cost("gram", count, its)
    assert found.bytes == 2 * 2 * (4 * rounds) * M * M * 4 * 3 // 4  # two passes, in and out
    each = 6 if itemsize == 2 else 4  # in half precision Q comes in two parts
    matmuls, steps = 2 * each * M * M * N, (8 * 5 - 6 * 2) * M**3
    assert found.flops == count * matmuls // 4 + rounds * steps


@pytest.mark.parametrize("count", [1, 2, 8, 11, 19])
def test_work_shared_over_replicas(count):
    matrix, mine = M * N * 4, math.ceil(count / 2)
    rounds = math.ceil(mine / 4)
    found = cost("gather", count, work(shared=True))
    back = 2 * mine * matrix // 4 // 2
    assert (found.bytes, found.flops) == (mine * matrix * 3 // 4 + back, mine * FLOPS)
    found = cost("all_to_all", count, work(shared=True))
    assert (found.bytes, found.flops) == (2 * rounds * matrix * 3 // 4 + back, rounds * FLOPS)


def test_whole_matrices_cost_no_bytes():
    found = cost("local", 5, work(shard_axes=()))
    assert (found.bytes, found.flops) == (0, 5 * FLOPS)
    assert found.seconds == pytest.approx(5 * FLOPS / 1e12)


def test_results_that_end_whole_come_back_once():
    matrix = M * N * 4
    its = work(gathered_axes=("f",))
    assert cost("all_to_all", 8, its).bytes == 2 * (matrix // 4 + matrix) * 3
    assert cost("gather", 8, its).bytes == 8 * matrix * 3 // 4


def test_more_passes_cost_more_grams():
    passes = len(POLAR_8.schedule.restarts) + 1
    found = cost("gram", 4, work(flops=POLAR_8.flops(M, N)), iteration=POLAR_8)
    assert passes > 2
    assert found.bytes == 2 * passes * 4 * M * M * 4 * 3 // 4
    assert found.flops == passes * 4 * M * M * N + (8 * 8 - 6 * passes) * M**3


def test_seconds_add_products_exchanges_and_latencies():
    its = work(shared=True)
    device = DeviceModel("test", 4e12, 1e12, 1e9, latency=1e-3, axis_bandwidth=(("r", 1e7),))
    found = cost("all_to_all", 8, its, device)
    inside, back = 2 * M * N * 4 * 3 // 4, 8 * M * N * 4 // 4 // 2
    expected = found.flops / 1e12 + inside / 1e9 + back / 1e7 + 3 * 1e-3
    assert found.bytes == inside + back
    assert found.seconds == pytest.approx(expected)
    grams = cost("gram", 8, work())
    expected = grams.flops / 1e12 + grams.bytes / 1e9 + (2 * 2 + 2) * 1e-3
    assert grams.seconds == pytest.approx(expected)
    half = cost("all_to_all", 8, work(shared=True, itemsize=2), device)
    assert half.seconds == pytest.approx(
        found.flops / 4e12 + (inside / 1e9 + back / 1e7) / 2 + 3e-3
    )


@pytest.mark.parametrize(
    ("axes", "bandwidth"),
    [
        (("tensor",), 300.0),
        (("fsdp",), 300.0),
        (("replica",), 25.0),
        (("replica", "tensor"), 25.0),
        (("one",), 300.0),
        ((), 300.0),
    ],
)
def test_an_exchange_is_as_fast_as_its_slowest_axis(axes, bandwidth):
    device = DeviceModel("test", 1.0, 1.0, 300.0, node_size=8, slow_bandwidth=25.0)
    sizes = {"one": 1, "replica": 4, "fsdp": 4, "tensor": 2}
    assert device.bandwidth_over(axes, sizes) == bandwidth


def test_a_bandwidth_given_for_an_axis_is_taken():
    device = DeviceModel(
        "test",
        1.0,
        1.0,
        300.0,
        node_size=8,
        slow_bandwidth=25.0,
        axis_bandwidth=(("replica", 90.0),),
    )
    sizes = {"replica": 4, "fsdp": 4, "tensor": 2}
    assert device.bandwidth_over(("replica",), sizes) == 90.0
    assert device.bandwidth_over(("replica", "fsdp"), sizes) == 90.0


def test_every_accelerator_of_the_issue_has_a_model():
    names = {"h100", "a100", "tpu_v4", "tpu_v5e", "tpu_v5p", "tpu_v6e", "cpu"}
    assert set(DEVICES) >= names
    assert all(device_model(name).name == name for name in names)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("TPU v4", "tpu_v4"),
        ("TPU v5", "tpu_v5p"),
        ("TPU v5 lite", "tpu_v5e"),
        ("TPU v5e", "tpu_v5e"),
        ("TPU v6 lite", "tpu_v6e"),
        ("cpu", "cpu"),
        ("something new", "h100"),
    ],
)
def test_auto_goes_by_the_kind_of_device(kind, name):
    assert device_model("auto", kind).name == name


def test_a_model_of_ones_own_is_taken_as_it_is():
    assert device_model(DEVICE) is DEVICE
    assert device_model("auto").name == "cpu"
    with pytest.raises(ValueError, match=r"auto.*h100.*DeviceModel.*'h1000'"):
        device_model("h1000")


@pytest.mark.parametrize(
    ("figures", "error", "message"),
    [
        ({"half_flops": "fast"}, TypeError, "half_flops must be a number, got 'fast'"),
        ({"single_flops": -1.0}, ValueError, "single_flops must be finite and not negative"),
        ({"bandwidth": 0}, ValueError, "bandwidth must be above 0, got 0"),
        ({"node_size": 0}, ValueError, "node_size must be above 0"),
        ({"slow_bandwidth": math.nan}, ValueError, "slow_bandwidth must be finite"),
        ({"latency": -1e-5}, ValueError, "latency must be finite and not negative"),
        ({"axis_bandwidth": (("r", 0.0),)}, ValueError, "axis_bandwidth of r must be above 0"),
    ],
)
def test_figures_that_no_device_has(figures, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(DEVICE, **figures)
