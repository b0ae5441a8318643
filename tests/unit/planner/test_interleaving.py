"""Drawn orders: everybody once a lap, nobody after himself, and no place or neighbour favoured in the long run."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from trimtab.planner.statistics import drawn_turns


def laps(names, number):
    draw, before, orders = random.Random(0), None, []
    for lap in range(number):
        orders.append(drawn_turns(names, lap, draw, before))
        before = orders[-1][-1]
    return orders


@pytest.mark.parametrize("names", ["abc", "abcde"])
def test_nobody_follows_himself_and_nobody_is_favoured(names):
    orders = laps(names, 6000)
    assert all(sorted(order) == list(names) for order in orders)
    sequence = list(itertools.chain(*orders))
    follows = Counter(itertools.pairwise(sequence))
    assert all(follows[name, name] == 0 for name in names)
    expected = len(sequence) / (len(names) * (len(names) - 1))
    assert all(abs(follows[pair] / expected - 1) < 0.1 for pair in itertools.permutations(names, 2))
    for name in names:
        mean = sum(order.index(name) for order in orders) / len(orders)
        assert mean == pytest.approx((len(names) - 1) / 2, abs=0.05)


def test_two_go_forwards_and_backwards_in_turn():
    assert ["".join(order) for order in laps("ab", 4)] == ["ab", "ba", "ab", "ba"]


def test_one_alone_runs():
    assert laps("a", 3) == [["a"]] * 3
