"""Caveats of a comparison, in sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trimtab.core.units import format_seconds
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.comparison.comparison_result import TargetRow
from trimtab.experiments.task_plans import Plans
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, ratio_interval
from trimtab.planner.tuned_plan import tried_settings
from trimtab.plans.plan import Plan
from trimtab.profiling.training_settings_search import RACED
from trimtab.tasks.task import Task

# Caveats of a comparison on several ranks.

# A larger difference in term counts between ranks weights samples differently from a single process.
_UNEVEN = 1e-6


@dataclass(frozen=True)
class RankConditions:
    """Number of ranks, and the oversubscribed resource ("cores", "devices" or "")."""

    num: int = 1
    crowded: str = ""

    @property
    def headline(self) -> str:
        """The note about ranks in a report's headline, or ""."""
        if self.num == 1:
            return ""
        on = f"Measured on {self.num} ranks; the reference is the loop in DistributedDataParallel."
        return f"{on} {self.warning}" if self.crowded else on

    @property
    def warning(self) -> str:
        """The note about oversubscribed ranks."""
        return f"The ranks share {self.crowded}, so their times do not measure scaling."


ONE_RANK = RankConditions()


def rank_notes(ranks: RankConditions, plans: Plans, facts: Mapping[str, ArmMetrics], batch_size: int) -> list[str]:
    """Return the caveats; empty on a single rank."""
    if ranks.num == 1:
        return []
    found = [
        f"Each of {ranks.num} ranks trains on its shard of every batch; the reference is the task's loop in "
        "DistributedDataParallel with default settings.",
        "Block times are of the slowest rank, peaks of the rank with the largest peak, CPU time is summed over ranks; "
        "phases, FLOP and held-out metrics are of rank 0, and utilisation is per rank.",
        "The memory of a step was not traced, because traces support one process only.",
    ]
    if ranks.crowded:
        found.insert(1, ranks.warning)
    if plans.profiles:
        found.append(
            "Trials and predictions of the plan cover the shard of rank 0 without communication and without buckets."
        )
    if batch_size % ranks.num or _is_uneven(facts.get("reference")):
        found.append(
            "Ranks have different numbers of samples or loss terms. DistributedDataParallel averages gradients over "
            "ranks, so the reference weights samples differently; the plan weights them equally, as one process does."
        )
    return found


def _is_uneven(fact: ArmMetrics | None) -> bool:
    terms = fact.terms_by_rank if fact else ()
    return bool(terms) and not math.isclose(min(terms), max(terms), rel_tol=_UNEVEN)


# Key in a header's detail: the reason why an arm was only timed in a full run.
WHY_TIMED = "why_timed"
_ENDS = {"cap": "stopped at the time cap", "diverged": "diverged"}


def notes(task: Task, plans: Plans, targets: Sequence[TargetRow], races: comparison_statistics.Races) -> list[str]:
    """Return all caveats of a comparison."""
    found = [f"{name}: {reason}" for name, reason in ends(races).items()]
    if any(row.left_censored for row in targets):
        found.append(
            "If a run had reached a target by its first evaluation, the time shown is an upper bound (left-censored)."
        )
    if "tuned" in plans.plans:
        freed = plans.plans["tuned"]
        search = _search(freed)
        took = format_seconds(freed.search_s)
        charged = f"planning with {search} ({took})" if search else "planning"
        found.append(f"Times to target of the tuned plan include {charged} in every pair.")
    if races and all(comparison_statistics.is_brief(record) for race in races.values() for record in race.values()):
        found.append(
            "All arms were only timed for a few steps: times to target and the final metric were not measured."
        )
    found += _given(plans) + _planned(task) + _horizon(races) + _only_timed(task, races) + _rates(task, races)
    return found + _unlike_trials(plans, races) + sources(races) + missing_variance(plans, races)


def _given(plans: Plans) -> list[str]:
    """Return a caveat for a plan from a file: the source of its planning time."""
    plan = plans.plans["equivalent"]
    if "equivalent" in plans.profiles:
        return []
    if not plan.planning_s:
        return ["The plan was read from a file, which records no planning time."]
    return [f"The plan was read from a file; its planning time of {format_seconds(plan.planning_s)} is from the file."]


def _unlike_trials(plans: Plans, races: comparison_statistics.Races) -> list[str]:
    """Return a caveat if the paired runs contradict the speed-up in the equivalent plan's trials.

    The intervals are compared with at least the number of pairs needed for a verdict.
    """
    told, ratios = (
        plans.plans["equivalent"].verified,
        comparison_statistics.throughput_ratios(races, "equivalent_plan", "reference"),
    )
    if told is None or len(ratios) < MIN_PAIRS_FOR_VERDICT:
        return []
    raced = ratio_interval(ratios)
    if told[0] <= raced.high and raced.low <= told[1]:
        return []
    trials, shown = (f"{low:.2f} to {high:.2f}x" for low, high in (told, (raced.low, raced.high)))
    return [
        f"Equivalent plan: planning trials measured {trials} the speed, paired runs {shown}. Paired runs time "
        "steps of a training process; trials alternate few steps of several settings."
    ]


def _search(freed: Plan) -> str:
    """Return the search methods of a tuned plan, or ""."""
    found = set(tried_settings(freed))
    said = ["a learning-rate range test"] if "learning_rate" in found else []
    return " and ".join([*said, *(["short test trainings"] if found & RACED else [])])


def ends(races: comparison_statistics.Races) -> dict[str, str]:
    """Return, by arm, the number of runs stopped at the time cap or diverged."""
    ends: dict[str, list[str]] = {}
    for race in races.values():
        for name, record in race.items():
            ends.setdefault(name, []).append(record.end.reason if record.end else "cut off")
    return {
        name: ", ".join(f"{_ENDS[e]} in {found.count(e)} of {len(found)} runs" for e in _ENDS if e in found)
        for name, found in ends.items()
        if any(e in _ENDS for e in found)
    }


def _planned(task: Task) -> list[str]:
    """Return a caveat if planning assumed a different number of samples than the paired runs."""
    if task.planned_samples in (None, task.budget_samples):
        return []
    times = (
        f"{task.planned_samples / task.budget_samples:g} times the {task.budget_samples:,} samples of the paired runs"
    )
    return [f"Plans were made for a run of {task.planned_samples:,} samples, {times}."]


def _horizon(races: comparison_statistics.Races) -> list[str]:
    """Return a caveat if the tuned plan trains on fewer samples than the reference."""
    pairs = comparison_statistics.to_the_end(races, "tuned_plan", "reference")
    given = {
        (comparison_statistics.given_rows(ours), comparison_statistics.given_rows(theirs)) for ours, theirs in pairs
    }
    return [
        f"The tuned plan trained on {ours:,} samples, the reference on {theirs:,}; the task sets this number, "
        "planning did not tune it."
        for ours, theirs in sorted(given)
        if ours < theirs
    ]


def _only_timed(task: Task, races: comparison_statistics.Races) -> list[str]:
    return [
        f"{name} was only timed for a few steps: {reason}"
        for arm, name in (("equivalent_plan", "Equivalent plan"), *((name, name) for name in task.baselines))
        for reason in sorted({str(r[arm].header.detail.get(WHY_TIMED, "")) for r in races.values() if arm in r})
        if reason
    ]


def _rates(task: Task, races: comparison_statistics.Races) -> list[str]:
    """Return the source of the learning rates of hand-tuned recipes without a sweep."""
    raced = {name for race in races.values() for name in race}
    return [f"{name}: {recipe.rates}" for name, recipe in task.recipes.items() if name in raced and recipe.rates]


def sources(races: comparison_statistics.Races) -> list[str]:
    """Return a caveat if the paired runs used different versions of trimtab's source code."""
    by = {seed: {r.header.environment.get("sources", "") for r in race.values()} for seed, race in races.items()}
    states = sorted(set().union(*by.values()))
    if len(states) < 2:
        return []
    each = (f"{name or 'unknown'} in {sum(name in found for found in by.values())}" for name in states)
    return [f"The paired runs used different versions of trimtab's source code: {', '.join(each)} of {len(races)}."]


def missing_variance(plans: Plans, races: comparison_statistics.Races) -> list[str]:
    """Return the variance missing from the intervals; nothing below two pairs."""
    what = "planning and tuning" if "tuned" in plans.plans else "planning"
    sentence = f"One plan was used for all {len(races)} seeds, so the intervals exclude the variance of {what}."
    return [sentence] if len(races) > 1 else []
