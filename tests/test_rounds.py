"""Rounds of chunks, and which of them are alike, against what they are by hand."""

from typing import Any

from muon_optax.sharding.runtime.rounds import Chunk, Piece, Round, rounds_of, runs

STRATEGY: Any = "one strategy"
MATRICES: Any = "matrices of one sharding"


def chunk(*pieces: tuple[int, int, int], strategy: Any = STRATEGY) -> Chunk:
    """Of (leaf, start, count)."""
    return Chunk(strategy, MATRICES, tuple(Piece(*piece, False) for piece in pieces), 1.0)


def lengths(chunks: list[Chunk]) -> list[int]:
    """Rounds in each run."""
    rounds = rounds_of(chunks)
    found = list(runs(rounds))
    assert [each for run in found for each in run] == rounds
    for run in found:
        assert run == [run[0].moved(k) for k in range(len(run))]
    return [len(run) for run in found]


def test_chunks_pass_from_stage_to_stage():
    a, b = chunk((0, 0, 2)), chunk((1, 0, 2))
    assert rounds_of([a, b]) == [
        Round(a, None, None),
        Round(b, a, None),
        Round(None, b, a),
        Round(None, None, b),
    ]


def test_a_run_is_of_full_rounds_of_one_stack():
    one = [chunk((0, start, 2)) for start in range(0, 12, 2)]
    assert lengths(one) == [1, 1, 4, 1, 1]
    other = [chunk((1, start, 3)) for start in range(0, 12, 3)]
    assert lengths([*one, *other]) == [1, 1, 4, 1, 1, 2, 1, 1]


def test_what_is_not_alike_is_in_no_run():
    rest = [chunk((0, 0, 2)), chunk((0, 2, 2)), chunk((0, 4, 2)), chunk((0, 6, 1))]
    assert max(lengths(rest)) == 1
    gap = [chunk((0, start, 2)) for start in (0, 2, 4, 8)]
    assert max(lengths(gap)) == 1
    kinds = [chunk((0, 2 * k, 2), strategy=k) for k in range(4)]
    assert max(lengths(kinds)) == 1
    leaves = [chunk((2 * k, 0, 1), (2 * k + 1, 0, 1)) for k in range(4)]
    assert max(lengths(leaves)) == 1


def test_rounds_name_their_leaves():
    first, second = chunk((3, 0, 2)), chunk((5, 0, 1), (4, 0, 1))
    found = [each.leaves for each in rounds_of([first, second])]
    assert found == [{3}, {3, 4, 5}, {3, 4, 5}, {4, 5}]
