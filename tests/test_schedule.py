"""The reader of schedules, on a small program whose timeline is known."""

import pytest

from benchmarks.schedule import read_schedule
from muon_optax import DeviceModel

# A matmul takes 2 * 8**3 / 1024 = 1 s; a collective of 7/8 of 64 bytes within a node 1 s, beyond 7.
DEVICE = DeviceModel("slow", 1024, 1024, 56, node_size=8, slow_bandwidth=8, latency=0)
PROGRAM = """HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[4,8], w: bf16[8,8]) -> bf16[8,8] {
  %x = bf16[4,8]{1,0} parameter(0)
  %w = bf16[8,8]{1,0} parameter(1)
  %in = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-to-all-start(%x), replica_groups=[1,8]<=[8]
  FIRST
  %whole = bf16[4,8]{1,0} all-to-all-done(%in)
  %out = ((bf16[4,8]{1,0}), bf16[4,8]{1,0}) all-to-all-start(%whole), replica_groups=[1,8]<=[8]
  %done = bf16[4,8]{1,0} all-to-all-done(%out)
  ROOT %y = bf16[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
MATMUL = "%z = bf16[8,8]{1,0} dot(%w, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("first", "covered", "exposed", "seconds"),
    [("", 0, 2, 3), (MATMUL, 56, 1, 3)],  # in: under the matmul; out: nothing under it
)
def test_a_collective_is_covered_by_the_matmuls_between_its_ends(first, covered, exposed, seconds):
    found = read_schedule(PROGRAM.replace("FIRST", first), DEVICE)
    assert (found.received, found.covered) == (112, covered)
    assert (found.exchange_seconds, found.exposed_seconds, found.seconds) == (2, exposed, seconds)
    assert found.share_covered == covered / 112
    assert found.share_hidden == 1 - exposed / 2


def test_exchanges_beyond_a_node_are_slow():
    text = PROGRAM.replace("FIRST", MATMUL).replace("num_partitions=8", "num_partitions=16")
    text = text.replace("[1,8]<=[8]", "[2,8]<=[8,2]T(1,0)")
    found = read_schedule(text, DEVICE)
    assert (found.exchange_seconds, found.exposed_seconds, found.seconds) == (14, 13, 15)


def test_loops_with_exchanges_run_round_by_round():
    body = PROGRAM.split("ENTRY ")[1].replace("%main (x", "%body (x").replace("FIRST", MATMUL)
    loop = """
ENTRY %main (s: bf16[8,8]) -> bf16[8,8] {
  %s = bf16[8,8]{1,0} parameter(0)
  ROOT %l = bf16[8,8]{1,0} while(%s), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
}
"""
    found = read_schedule(PROGRAM.split("ENTRY ")[0] + body + loop, DEVICE)
    assert (found.received, found.covered, found.seconds) == (5 * 112, 5 * 56, 5 * 3)


def test_a_program_without_an_order_or_exchanges():
    with pytest.raises(ValueError, match="isn't scheduled"):
        read_schedule(PROGRAM.replace("is_scheduled=true, ", ""), DEVICE)
    alone = PROGRAM[: PROGRAM.index("  %in")] + PROGRAM[PROGRAM.index("  ROOT") :]
    found = read_schedule(alone, DEVICE)
    assert (found.share_covered, found.share_hidden, found.seconds) == (1, 1, 1)
