"""A chain for any rows of a micro-batch, from two."""

from __future__ import annotations

import pytest
from raising import raises

from trimtab.core.block_costs import (
    BlockChain,
    BlockChainModel,
    BlockCost,
    BlockOperators,
    ExpensiveOperator,
    ExpensivePart,
    KeptResults,
    fastest,
)
from trimtab.core.errors import ValueGivenError


def chain(rows):
    """Return one whose bytes are 3 and 2 a row, with 7 that rows do not change; and 0.5 s besides those of rows."""
    part = ExpensivePart(rows, rows, 0.3 + 0.2 * rows)
    stage = BlockCost(0.5 + 0.1 * rows, 2 * rows, 7 + 3 * rows, 9 + 3 * rows, 2 * rows, rows, 50, parts=(part,))
    return BlockChain((stage, BlockCost(0.0, 0, 4, 4, 4, 4, is_linked=False)), 1000 + rows)


def test_bytes_and_seconds_lie_on_lines():
    model = BlockChainModel(chain(4), chain(8), (4, 8))
    for rows in (1, 4, 6, 8, 32):
        found, expected = model.at(rows), chain(rows)
        assert found.held_bytes == expected.held_bytes
        for ours, theirs in zip(found.stages, expected.stages, strict=True):
            assert ours.forward_s == pytest.approx(theirs.forward_s)
            assert ours.saved_bytes == theirs.saved_bytes
            assert ours.forward_bytes == theirs.forward_bytes
            assert ours.gradient_bytes == theirs.gradient_bytes
            assert ours.is_linked == theirs.is_linked
        assert found.stages[0].parts[0].saved_bytes == rows
        assert found.stages[0].parts[0].recompute_s == pytest.approx(0.3 + 0.2 * rows)
        assert found.stages[1].parts == ()


def test_nothing_is_less_than_none():
    few, many = BlockCost(1.0, 0, 10, 10, 10, 10), BlockCost(3.0, 0, 30, 30, 30, 30)
    (found,) = BlockChainModel(BlockChain((few,), 0), BlockChain((many,), 0), (4, 8)).at(1).stages
    assert found.saved_bytes == 0
    assert found.forward_s == 0


@pytest.mark.parametrize("rows", [(4, 4), (8, 4), (0, 4)])
def test_two_sizes_are_two(rows):
    with raises(ValueGivenError, code="value.invalid", field="rows"):
        BlockChainModel(chain(4), chain(8), rows)


def test_both_sizes_are_of_one_model():
    with raises(ValueGivenError, code="value.invalid", field="stages"):
        BlockChainModel(chain(4), BlockChain(chain(8).stages[:1], 0), (4, 8))


def test_parts_are_those_of_the_chains_that_were_traced():
    def traced(saved):
        stage = BlockCost(0.0, 8, saved, 99, 99, saved // 2, passing_bytes=1)
        return BlockChain((stage, stage), 0)

    plain = BlockChainModel(chain(4), chain(8), (4, 8))
    sets = [
        KeptResults(BlockChainModel(traced(saved), traced(2 * saved), (4, 8)), (results,), (share,))
        for saved, results, share in ((40, None, 0.125), (20, (1,), 0.5), (20, (1,), 0.5), (10, (), 1.0))
    ]
    found = plain.with_parts(sets).with_seconds(lambda index, rows: float(rows)).at(6).stages[0]
    expected = [ExpensivePart(60, 30, 0.75, 1, None, 0.125), ExpensivePart(30, 15, 3.0, 1, (1,), 0.5)]
    assert [*found.parts] == [*expected, ExpensivePart(15, 8, 6.0, 1, (), 1.0)]
    timed = plain.with_parts(sets[:1]).with_seconds(lambda index, rows: 1.0, lambda index, rows: 0.25).at(6)
    assert timed.stages[0].parts[0].recompute_s == 0.25


LARGE, RANDOM, SMALL = (
    ExpensiveOperator(40, 1.0, False, True),
    ExpensiveOperator(20, 1.0, True, True),
    ExpensiveOperator(10, 1.0, False, True),
)
UNNEEDED = ExpensiveOperator(90, 1.0, False, False)


def test_results_are_given_up_by_bytes_per_second():
    found = BlockOperators((SMALL, UNNEEDED, LARGE), 10.0, 0.5).levels(4)
    assert found == [(None, 0.05), ((0, 1), pytest.approx(0.15)), ((1,), pytest.approx(0.25))]


def test_random_numbers_are_kept_or_drawn_again():
    found = BlockOperators((SMALL, RANDOM, LARGE), 10.0, 0.5).levels(4)
    assert [results for results, _ in found] == [None, (0, 1, 2), (0, 1), (0,), ()]
    assert [share for _, share in found] == pytest.approx([0.15, 0.05, 0.15, 0.25, 0.35])


def test_of_many_sets_some_are_taken_from_the_first_to_the_last():
    found = BlockOperators((LARGE,) * 20, 100.0, 0.0).levels(4)
    assert [None if kept is None else len(kept) for kept, _ in found] == [None, 19, 13, 6, 0]
    assert BlockOperators((), 1.0, 0.5).levels(4) == [(None, 0.5)]


def test_the_least_seconds_of_several_runs_count():
    slow = ExpensiveOperator(40, 2.0, False, True)
    assert fastest([BlockOperators((slow, SMALL), 3.0, 0.1), BlockOperators((LARGE, SMALL), 2.5, 0.2)]) == (
        BlockOperators((LARGE, SMALL), 2.5, 0.1)
    )
