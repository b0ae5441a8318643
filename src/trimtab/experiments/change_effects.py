"""Effects of the changes of a plan, as queries on an ablation: every change alone, in the plan, and pairs together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from trimtab.experiments import result_table
from trimtab.experiments.result_table import BASELINE, PLANNED, ResultTable
from trimtab.planner.statistics import Interval, ratio_interval

ALONE, IN_PLAN, TOGETHER = "alone", "in the plan", "together"


@dataclass(frozen=True)
class ChangeEffect:
    """Effect of a change: two arms that differ in this change only.

    Args:
        change: name of the setting; for two settings together, both.
        setting: ALONE (added to the baseline), IN_PLAN (the plan against the plan without the change) or TOGETHER (the
            speed of two changes over the product of their speeds alone).
        arm, against: the arm with the change and the arm without it.
        speed: relative speed, or for TOGETHER the ratio of speeds.
        memory: relative peak memory; None if unknown or TOGETHER.
    """

    change: str
    setting: str
    arm: str
    against: str
    speed: Interval | None
    memory: float | None


def effects_of(
    table: ResultTable, changes: Mapping[str, Collection[str]], failures: Collection[str]
) -> Iterator[ChangeEffect]:
    """Yield the effect of every change of an ablation, alone and in the plan, and of pairs together.

    Args:
        table: the measured values.
        changes: changes of every arm.
        failures: arms that failed.
    """
    arms = {frozenset(kept): arm for arm, kept in changes.items() if arm not in failures}
    whole = frozenset(changes.get(PLANNED, ()))
    for change in changes.get(PLANNED, ()):
        if (alone := arms.get(frozenset({change}))) is not None:
            yield _effect(table, change, ALONE, alone, BASELINE)
        without = BASELINE if len(whole) == 1 else arms.get(whole - {change})
        if without is not None and len(whole) > 1 and PLANNED not in failures:
            yield _effect(table, change, IN_PLAN, PLANNED, without)
    for pair in itertools.combinations(changes.get(PLANNED, ()), 2):
        both, *single = (arms.get(frozenset(each)) for each in (pair, pair[:1], pair[1:]))
        if both is not None and single[0] is not None and single[1] is not None:
            ratio = _interaction(table, both, (single[0], single[1]))
            yield ChangeEffect(" and ".join(pair), TOGETHER, both, BASELINE, ratio, None)


def _effect(table: ResultTable, change: str, setting: str, arm: str, against: str) -> ChangeEffect:
    speed, memory = result_table.speed(table, arm, against), result_table.memory(table, arm, against)
    return ChangeEffect(change, setting, arm, against, speed, memory)


def _interaction(table: ResultTable, both: str, single: tuple[str, str]) -> Interval | None:
    """Return the speed of two changes over the product of their speeds alone, paired by seed."""
    speeds = [result_table.speeds(table, arm, BASELINE) for arm in (both, *single)]
    seeds = [seed for seed in speeds[0] if all(seed in each for each in speeds)]
    ratios = [math.exp(math.log(speeds[0][s]) - math.log(speeds[1][s]) - math.log(speeds[2][s])) for s in seeds]
    return ratio_interval(ratios) if ratios else None
