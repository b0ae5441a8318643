"""Interleaving order of timed candidates, round by round.

A block inherits caches, heap and clock state from the previous block. With a fixed alternation A B C, C B A, the first
and last candidate would follow themselves in every second round and the middle candidates never: a bias that does not
average out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(arms: Sequence[T], lap: int, seed: int, last: T | None = None) -> list[T]:
    """Return the candidates in the order of a round; the candidate `last` is not first.

    Rows of a balanced Latin square (Williams 1949: 0, 1, n-1, 2, n-2, ... and rotations): every candidate follows every
    candidate once. Rounds alternate forwards and backwards, to share drift. The starting candidate depends on the seed
    and the round, and moves in the opposite direction in backward rounds, to balance the pairs between rounds too.

    Args:
        arms: candidates.
        lap: index of the round.
        seed: offset of the start.
        last: final candidate of the previous round.
    """
    count, pair = len(arms), lap // 2
    start = seed + (-pair - 1 if lap % 2 else pair)
    order = [arms[(start + step) % count] for step in _zigzag(count)]
    if lap % 2:
        order.reverse()
    return [*order[1:], order[0]] if count > 1 and order[0] is last else order


def _zigzag(count: int) -> list[int]:
    """Return 0, 1, -1, 2, -2, ... of `count` numbers."""
    return [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(count)]


def drawn_turns(arms: Sequence[T], lap: int, draw: random.Random, last: T | None = None) -> list[T]:
    """Return the candidates in a random order; the candidate `last` is not first.

    For few rounds of few candidates, too few for a balanced Latin square: random order turns the remaining bias into
    noise. Two candidates alternate forwards and backwards, and follow themselves equally often.

    Args:
        arms: candidates.
        lap: index of the round.
        draw: random generator.
        last: final candidate of the previous round.
    """
    order = list(arms)
    if len(order) < 3:
        return order if lap % 2 == 0 else order[::-1]
    draw.shuffle(order)
    while order[0] is last:
        draw.shuffle(order)
    return order
