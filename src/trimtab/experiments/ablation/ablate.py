"""`trimtab ablate`: effect of every change of a plan, added to the loop alone and removed from the plan (table III).

    plan -> an arm per set of changes -> peak memory, measured separately -> paired runs, a set per seed -> `Ablation`

Every phase writes its result to the output folder, as in a comparison, so that a restart resumes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trimtab.checkpoint.run_lock import lock_run_folder
from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.progress import Progress, silent
from trimtab.core.record import BRIEF, RunRecord
from trimtab.experiments.ablation.ablation_design import REFERENCE, AblationDesign, changes_of, plans_of
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.ablation.ablation_summary import AblationRuns, nothing_to_ablate, summarise
from trimtab.experiments.baselines.loop import MakeLoop
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.output_folder import claim_folder
from trimtab.experiments.paired_runs.custom_step_check import check_step
from trimtab.experiments.paired_runs.paired_run import PairedArm, seeds_in_time, short_arm_lengths
from trimtab.experiments.paired_runs.plan_loops import PlanLoop
from trimtab.experiments.paired_runs.results_folder import ResultsFolder, read_back, reference_s
from trimtab.experiments.task_plans import Plans, make_plans, require_fits
from trimtab.plans.plan import Plan
from trimtab.tasks.placement import device_here, placement_of
from trimtab.tasks.task import Task


@dataclass(frozen=True)
class AblateSettings:
    """Options of an ablation.

    Args:
        num_seeds: paired runs, a seed each; 5 for a verdict, 8 for a claim.
        whole_seeds: number of full runs to the end of the budget, for quality (None: all; 0: no quality). The
            remaining
            runs take a few steps per arm.
        quick: short arms, and at least one seed but no more than fit in about two minutes including planning.
        adapt: True if the plan may change the learning rate and its schedule.
        pairwise: True to run every pair of changes together too.
        cap_s: training seconds after which an arm is stopped (censored).
    """

    num_seeds: int = 5
    whole_seeds: int | None = None
    quick: bool = False
    adapt: bool = False
    pairwise: bool = False
    cap_s: float = math.inf

    def __post_init__(self) -> None:
        validation.integer("seeds", self.num_seeds, high=1000)
        if self.whole_seeds is not None:
            validation.integer("whole", self.whole_seeds, low=0, high=self.num_seeds)
        if self.quick and self.whole_seeds != 0:
            raise ValueGivenError(
                "quick",
                problem="--quick measures only throughput and memory, and cannot be combined with --whole.",
                hint="Remove one of the two options.",
                code="option.conflict",
            )
        if not self.cap_s > 0:
            raise ValueGivenError("cap", got=f"{self.cap_s:g}", expected="seconds above zero", code="cap.not_positive")

    def is_brief(self, seed: int) -> bool:
        """Return True if the arms of a seed's run take only a few steps."""
        return self.whole_seeds is not None and seed >= self.whole_seeds


def ablate(
    task: Task,
    out: Path,
    settings: AblateSettings,
    *,
    command: str,
    budget: Budget | None = None,
    plan: Plan | None = None,
    progress: Progress = silent,
) -> Ablation:
    """Run or resume an ablation in the folder `out`, and return the result.

    Args:
        task: the task.
        out: output folder, locked while the ablation runs.
        settings: options of the ablation.
        command: command line, recorded in the report.
        budget: limits of the plan.
        plan: the plan to ablate; None to make a plan.
        progress: receives progress messages.

    Raises:
        InUseError: another ablation runs in the folder.
    """
    begun, budget = time.perf_counter(), budget or Budget()
    if plan is not None:
        require_fits(task, plan)
    with lock_run_folder(out, "--out"):
        return _ablated(task, out, settings, command, budget, plan, progress, begun)


def _ablated(
    task: Task,
    out: Path,
    settings: AblateSettings,
    command: str,
    budget: Budget,
    plan: Plan | None,
    progress: Progress,
    begun: float,
) -> Ablation:
    """Run the ablation for `ablate` in a locked folder."""
    progress(f"loading the data of {task.name}")
    device, data = device_here(), task.load_data()
    fixed = {name: value for name, value in asdict(settings).items() if not name.endswith("_seeds")}
    claim_folder(out, task, data, {"ablation": fixed}, budget, Objective(), plan)
    kept = ResultsFolder(out, task, data, device, progress)
    done = sum(kept.of_race(seed, brief=settings.is_brief(seed)).exists() for seed in range(settings.num_seeds))
    if done:
        progress(f"resuming with {done} completed runs in {out}")
    if done < settings.num_seeds:
        check_step(task, data, device)
    adapt = ("learning_rate",) if settings.adapt else ()
    how = {"adapt": adapt, "strong": False, "budget": budget, "progress": progress}
    plans = kept.plans(partial(make_plans, task, data, device, **how)) if plan is None else Plans({"equivalent": plan})
    chosen = _whole(plans)
    design = AblationDesign(changes_of(chosen, task.reference), settings.pairwise)
    if not design.changes:
        return nothing_to_ablate(task, data, chosen, command)
    raced = _raced(task, kept, plans, design, settings, budget, begun)
    where = placement_of(data, device)
    lies = (f"Placement of the training data: {where.reason}",) if where.changed else ()
    return summarise(task, data, raced, command, (*lies, *read_back(done, len(raced.races), out)))


def _raced(
    task: Task,
    kept: ResultsFolder,
    plans: Plans,
    design: AblationDesign,
    settings: AblateSettings,
    budget: Budget,
    begun: float,
) -> AblationRuns:
    """Run every possible arm: peak memory first, then the paired runs."""
    plan = _whole(plans)
    arms, refusals = plans_of(plan, design, task.reference)
    makes = _loops(arms, task.budget_samples)
    facts = kept.facts([PairedArm(name, make, task.budget_samples) for name, make in makes.items()], peaks_alone=arms)
    refusals |= {name: fact.error for name, fact in facts.items() if fact.error}
    step_s = reference_s(plans, facts)
    races: dict[int, dict[str, RunRecord]] = {}
    for seed in seeds_in_time(settings.num_seeds, quick=settings.quick, begun=begun):
        is_brief = settings.is_brief(seed)
        how = {"quick": settings.quick, "brief": is_brief, "dear": kept.device.type == "cuda"}
        rows, own_s = short_arm_lengths(task, step_s, **how), _step_within(plans, step_s, dear=how["dear"])
        within = short_arm_lengths(task, own_s, **how).few
        within = within if within < task.budget_samples else rows.few
        few = _brief_rows(design, makes, rows.few, within) if is_brief else dict.fromkeys(makes, task.budget_samples)
        entries = _entries(task, design, makes, few, rows.control)
        entries = [each for each in entries if design.controls.get(each.name, each.name) not in refusals]
        races[seed] = kept.race(entries, seed, settings.num_seeds, brief=is_brief, cap_s=settings.cap_s)
    return AblationRuns(plan, design, races, facts, refusals, budget)


def _whole(plans: Plans) -> Plan:
    """Return the plan to ablate: the tuned plan if there is one."""
    return plans.plans.get("tuned", plans.plans["equivalent"])


def _loops(arms: Mapping[str, Plan], rows: int) -> dict[str, MakeLoop]:
    """Return the loop builders of all arms, with the reference first."""
    plans: dict[str, MakeLoop] = {name: partial(PlanLoop, plan=plan, total_samples=rows) for name, plan in arms.items()}
    return {REFERENCE: ReferenceLoop} | plans


def _step_within(plans: Plans, reference_s: float, *, dear: bool) -> float:
    """Return the step seconds used for the length of the plan's short arms; on a GPU the plan's own, if faster.

    With the reference's step time, a much faster plan would finish in a single block, and its ratio would rest on that
    block. The measurement of a given plan may come from another machine and is not used.
    """
    measured = _whole(plans).measured
    own_s = measured.step_s if measured is not None and plans.profiles else reference_s
    return min(own_s, reference_s) if dear else reference_s


def _brief_rows(design: AblationDesign, makes: Mapping[str, MakeLoop], few: int, within: int) -> dict[str, int]:
    """Return the samples of every arm in a short run; arms with most changes are assumed as fast as the plan."""
    held = design.arms
    return {name: within if 2 * len(held.get(name, ())) > len(design.changes) else few for name in makes}


def _entries(
    task: Task, design: AblationDesign, makes: Mapping[str, MakeLoop], rows: Mapping[str, int], control_rows: int
) -> list[PairedArm]:
    """Return all arms with their samples, and the A/A controls, with equal length in short runs."""
    again = {name: rows[base] for name, base in design.controls.items()}
    is_brief = any(each < task.budget_samples for each in rows.values())
    budgets = dict(rows) | {name: each if is_brief else min(each, control_rows) for name, each in again.items()}
    return [
        PairedArm(
            name,
            makes[design.controls.get(name, name)],
            wanted,
            is_timed_only=wanted < task.budget_samples,
            detail={BRIEF: True} if wanted < task.budget_samples else {},
        )
        for name, wanted in budgets.items()
    ]
