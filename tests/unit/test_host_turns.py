"""Trainings that a benchmark has in turns: each has as many steps, and what ends one of them ends all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 12


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.micro import hosts

    return hosts


def trained(hosts: Any, step: Callable[[str, int], bool]) -> tuple[Any, list[str]]:
    """Train all arms in threads, as long as `step` says so; return the turns, and whose they were."""
    turns, taken = hosts.Turns(ROUNDS), []

    def training(arm: str) -> Callable[[Callable[[], None]], None]:
        def train(stepped: Callable[[], None]) -> None:
            for index in range(ROUNDS):
                if not step(arm, index):
                    return
                taken.append(arm)
                stepped()

        return train

    threads = [threading.Thread(target=turns.train, args=(arm, training(arm)), daemon=True) for arm in hosts.ARMS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    return turns, taken


def test_a_step_of_each_is_had_in_every_round_and_each_order_as_often(hosts):
    turns, taken = trained(hosts, lambda arm, index: True)
    orders = [tuple(taken[at : at + len(hosts.ARMS)]) for at in range(0, len(taken), len(hosts.ARMS))]
    assert {order: orders.count(order) for order in orders} == dict.fromkeys(hosts.ORDERS, ROUNDS // len(hosts.ORDERS))
    assert {arm: len(seconds) for arm, seconds in turns.finished().items()} == dict.fromkeys(hosts.ARMS, ROUNDS)


def test_what_one_raises_ends_all_and_is_raised(hosts):
    def step(arm: str, index: int) -> bool:
        if (arm, index) == ("ours", 3):
            raise KeyError("of ours")
        return True

    turns, _ = trained(hosts, step)
    with pytest.raises(KeyError, match="of ours"):
        turns.finished()


def test_a_training_that_ends_early_leaves_nobody_waiting(hosts):
    turns, _ = trained(hosts, lambda arm, index: (arm, index) != ("control", 4))
    with pytest.raises(RuntimeError, match="'control' ended before its last step"):
        turns.finished()
    assert hosts.QUICK_ROUNDS % len(hosts.ORDERS) == 0
