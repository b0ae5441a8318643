"""A plan carried to tier F: what the user freed is tried on their own data, and kept where it is measurably better."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from trimtab.calibrate.rate_range import range_test
from trimtab.calibrate.short_race import short_race
from trimtab.calibrate.subject import Subject
from trimtab.core import checks
from trimtab.core.errors import ValueGivenError
from trimtab.core.plan import KEEP_OPTIMIZER, Plan
from trimtab.decide.learning_rate import choose_rate
from trimtab.decide.planner import adapt_learning_rate, adapt_optimizer
from trimtab.decide.short_race import judge
from trimtab.runtime.muon import hidden_matrices

ADAPTATIONS = ("learning_rate", "batch", "optimizer")
# Of them, those that are tried by training a little.
TRAINED = frozenset({"learning_rate", "optimizer"})
_MUON = replace(KEEP_OPTIMIZER, value="muon", reason="raced", changed=True)


def adaptations(adapt: str | Collection[str] | None, data: Iterable[Any] | None) -> frozenset[str]:
    """Return what was freed.

    Raises:
        ValueGivenError: something that cannot be, or what needs training batches without them.
    """
    names = (adapt,) if isinstance(adapt, str) or not isinstance(adapt, Collection) else tuple(adapt)
    freed = frozenset(checks.one_of("adapt", name, ADAPTATIONS) for name in names if name is not None)
    if freed & TRAINED and data is None:
        raise ValueGivenError("data", given="nothing", expected="training batches", way_out="plan(..., data=loader)")
    return freed


def adapted(
    subject: Subject, base: Plan, freed: Collection[str], data: Iterable[Any], progress: Callable[[str], None]
) -> Plan:
    """Return a tier-S plan carried to tier F by what is found on `data`; leaves no trace.

    A peak learning rate by a range test; Muon by a race against the plan without it, each at a rate of its own range
    test where the rate is freed too.

    Raises:
        ModelError, OptimizerError: there is nothing that Muon could step. ValueGivenError: too few batches.
    """
    by_range = "learning_rate" in freed
    stands = find_rate(subject, base, data, progress) if by_range else base
    if "optimizer" not in freed:
        return stands
    begin = time.perf_counter()
    hidden_matrices(subject.model, subject.optimizer)
    rival = replace(base, optimizer=_MUON)
    rival = find_rate(subject, rival, data, progress) if by_range else rival
    verdict = judge(short_race(subject, stands, rival, data, progress), "Muon")
    return adapt_optimizer(stands, rival, verdict, time.perf_counter() - begin)


def find_rate(subject: Subject, base: Plan, data: Iterable[Any], progress: Callable[[str], None]) -> Plan:
    """Return a plan with a peak learning rate by a range test, and a schedule."""
    begin = time.perf_counter()
    points = range_test(subject, base, data, progress)
    return adapt_learning_rate(base, choose_rate(points), time.perf_counter() - begin)
