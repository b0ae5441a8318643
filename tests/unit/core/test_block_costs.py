"""A chain for any rows of a micro-batch, from two."""

from __future__ import annotations

import pytest
from raising import raises

from trimtab.core.block_costs import BlockChain, BlockChainModel, BlockCost, ExpensivePart
from trimtab.core.errors import ValueGivenError


def chain(rows):
    """Return one whose bytes are 3 and 2 a row, with 7 that rows do not change; and 0.5 s besides those of rows."""
    part = ExpensivePart(rows, rows, 0.3 + 0.2 * rows)
    stage = BlockCost(0.5 + 0.1 * rows, 2 * rows, 7 + 3 * rows, 9 + 3 * rows, 2 * rows, rows, 50, part=part)
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
        assert found.stages[0].part.saved_bytes == rows
        assert found.stages[0].part.recompute_s == pytest.approx(0.3 + 0.2 * rows)
        assert found.stages[1].part is None


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
