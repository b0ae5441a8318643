"""In which order arms that are timed against one another run, lap by lap.

A block finds caches, heap and clock as the block before it left them. Were the order A B C, C B A for ever, the first
and the last arm would follow themselves in every other lap and the middle ones never: a bias, the same in every race.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def turns(arms: Sequence[T], lap: int, seed: int, last: T | None = None) -> list[T]:
    """Return the arms in the order they run in this lap; `last` ran last before it and is not first.

    The rows of a balanced square (Williams 1949: 0, 1, n-1, 2, n-2, ... and its rotations), in which every arm follows
    every other once; forwards and backwards in turn, so that drift is shared. The starting arm moves with the lap, the
    other way on the way back, which spreads the borders between laps over all pairs too; and with the seed.
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
    """Return the arms in an order drawn for this lap, in which `last`, which ran last before it, is not first.

    For few laps of few arms, which no square balances: what no plan evens out is left to chance, and shows as noise in
    place of bias. Two arms, of which one would be first for ever, go forwards and backwards in turn: each follows
    itself as often as the other does.
    """
    order = list(arms)
    if len(order) < 3:
        return order if lap % 2 == 0 else order[::-1]
    draw.shuffle(order)
    while order[0] is last:
        draw.shuffle(order)
    return order
