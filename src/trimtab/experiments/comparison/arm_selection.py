"""Arms of a comparison: the training loop and the number of samples of every arm."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from trimtab.core.record import BRIEF
from trimtab.experiments.baselines.loop import MakeLoop
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.experiments.baselines.strict import StrictLoop
from trimtab.experiments.comparison.caveats import WHY_TIMED
from trimtab.experiments.comparison.compare_options import CompareOptions
from trimtab.experiments.paired_runs.paired_run import PairedArm
from trimtab.experiments.paired_runs.peer_arms import HAND_TUNED
from trimtab.experiments.paired_runs.plan_loops import PlanLoop, TunedRecipePlanLoop
from trimtab.experiments.paired_runs.run_length import short_arm_lengths
from trimtab.experiments.task_plans import Plans
from trimtab.tasks.task import Task

# If the reference trains longer than this, baselines of the task are only timed, because a full run would double the
# duration. With a time cap they run until the cap.
_LONG_RACE_S = 120.0
_TOO_LONG = f"the reference trains longer than {_LONG_RACE_S:.0f} s"
_UNCHANGED = f"the plan changes nothing, and {_TOO_LONG}; a full run would only repeat the reference"


class ArmSelection:
    """The arms of a paired run.

    Args:
        task: the task to train.
        plans: plans by kind.
        settings: options of the comparison.
        step_s: measured seconds of the reference's step; by default the plan's baseline.
        brief: True if all arms are only timed for a few steps.
        num_ranks: number of ranks.
        dear: True if device time is expensive (a GPU), so that a short arm is as long as an energy meter needs.
    """

    def __init__(
        self,
        task: Task,
        plans: Plans,
        settings: CompareOptions,
        step_s: float | None = None,
        *,
        brief: bool,
        num_ranks: int = 1,
        dear: bool = False,
    ) -> None:
        self._task, self._plans, self._settings = task, plans.plans, settings
        self._rows, self._brief, self._dear, self._num_ranks = task.budget_samples, brief, dear, num_ranks
        baseline = self._plans["equivalent"].baseline
        step_s = step_s or (baseline.step_s if baseline else 1.0)
        self._few, self._control = short_arm_lengths(task, step_s, quick=settings.quick, brief=brief, dear=dear)
        self._too_long = "" if self._rows / task.batch_size * step_s < _LONG_RACE_S else _TOO_LONG

    def entries(self) -> list[PairedArm]:
        """Return the arms, with the reference first."""
        return [*self._references(), *self._planned(), *self._recipes(), *self._planned_peer()]

    def _references(self) -> Iterator[PairedArm]:
        make: MakeLoop = ReferenceLoop if self._num_ranks == 1 else ReplicaLoop
        yield self._entry("reference", make, self._rows)
        yield self._entry("self", make, self._rows, timed=self._control)

    def _planned(self) -> Iterator[PairedArm]:
        same, rows = self._plans["equivalent"], self._rows
        why = _UNCHANGED if self._too_long and not same.changes else ""
        make = partial(PlanLoop, plan=same, total_samples=rows)
        yield self._entry(
            "equivalent_plan", make, rows, timed=self._control if why else 0, why=why, short=self._own_few("equivalent")
        )
        if "tuned" in self._plans:
            freed = self._plans["tuned"]
            has_schedule = freed.schedule.value != "user"  # Only a schedule needs a fixed horizon.
            horizon = min(rows, self._task.adapted_samples or rows) if has_schedule else rows
            make = partial(PlanLoop, plan=freed, total_samples=horizon)
            yield self._entry("tuned_plan", make, horizon, short=self._own_few("tuned"))

    def _recipes(self) -> Iterator[PairedArm]:
        raced = self._settings.raced(self._task)
        if "strict" in raced:
            yield self._entry("strict", StrictLoop, self._rows)
        why = "" if math.isfinite(self._settings.cap_s) else self._too_long
        for name, make in self._task.baselines.items():
            if name in raced:
                yield self._entry(name, make, self._rows, timed=self._few if why else 0, why=why)
        for name, recipe in self._task.recipes.items():
            if name in raced:
                yield self._entry(name, HAND_TUNED[name], min(self._rows, recipe.budget_samples))

    def _planned_peer(self) -> Iterator[PairedArm]:
        strong = self._task.strong
        if "strong" in self._settings.raced(self._task) and strong is not None and "strong" in self._plans:
            make = partial(TunedRecipePlanLoop, plan=self._plans["strong"])
            rows = min(self._rows, strong.budget_samples)
            yield self._entry("strong_plan", make, rows, timed=self._control, short=self._own_few("strong"))

    def _own_few(self, key: str) -> int:
        """Return the samples of a plan's short arm, on a GPU from the plan's own step time.

        A faster plan needs more steps to fill the minimum window of an energy meter.
        """
        plan = self._plans[key]
        if not self._dear or plan.measured is None:
            return self._few
        how = {"quick": self._settings.quick, "brief": self._brief, "dear": self._dear}
        return short_arm_lengths(self._task, plan.measured.step_s, **how).few

    def _entry(
        self, name: str, make: MakeLoop, wanted: int, *, timed: int = 0, why: str = "", short: int = 0
    ) -> PairedArm:
        """Return an arm that trains on all its samples, or is only timed for a few steps.

        Args:
            name: name of the arm.
            make: builds the training loop.
            wanted: samples of a full run.
            timed: samples of an arm that is only timed in every paired run; 0 for a full run.
            why: the reason for only timing the arm.
            short: samples in a brief paired run; 0 for the default.
        """
        rows = min(wanted, timed or wanted, (short or self._few) if self._brief else wanted)
        detail = {BRIEF: True} | ({WHY_TIMED: why} if why else {}) if rows < wanted else {}
        return PairedArm(name, make, rows, is_timed_only=rows < wanted, detail=detail)
