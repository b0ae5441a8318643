"""How many blocks of windows a rehearsal runs where they take long."""

from __future__ import annotations

import contextlib

import pytest

from trimtab.core.plan import Plan
from trimtab.distributed import dry_run


class Runs:
    """A run whose blocks take long by the clock it moves."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def block_s(self) -> float:
        self.clock[0] += self.seconds
        return self.seconds


def plan(**how) -> Plan:
    return Plan.fixed(8, num_ranks=2, zero_stage=0, **how)


@pytest.mark.parametrize(
    ("arms", "seconds", "laps"),
    [
        (("plan", "usual", "control"), 0.25, 9),
        (("plan", "usual", "control"), 3.0, 6),  # of 9 s each
        (("plan", "usual", "control"), 30.0, 5),  # as few as a verdict takes
        (("plan",), 0.25, 5),
        (("plan",), 100.0, 1),
    ],
)
@pytest.mark.parametrize("reopens", [False, True])
def test_pairs_are_never_fewer_than_a_verdict_takes(monkeypatch, arms, seconds, laps, reopens):
    clock = [0.0]
    monkeypatch.setattr(dry_run.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dry_run.time, "perf_counter", lambda: clock[0])
    found = dry_run.DryRuns(lambda: None)
    monkeypatch.setattr(found, "_running", lambda plan: contextlib.nullcontext(Runs(clock, seconds)))
    plans = {"plan": plan(reduce_dtype="bf16")} | dict.fromkeys(arms[1:], plan())
    block_s = found._laps({name: plans[name] for name in arms}, reopens=reopens)
    assert {name: len(taken) for name, taken in block_s.items()} == dict.fromkeys(arms, laps)
