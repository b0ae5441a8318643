"""`trimtab compare`: make plans, run all arms in paired runs for several seeds and summarise the results.

    plans (equivalent, tuned, and the plan for the hand-tuned recipe) -> memory and phases, measured separately
    -> paired runs, a set per seed -> step time by phase -> `Comparison`

Every phase writes its result to the output folder, so a restart with the same folder resumes an interrupted
comparison. With several ranks, all ranks run the same arm in step and only rank 0 reads and writes the folder.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from trimtab.api import Metering
from trimtab.checkpoint.run_lock import lock_run_folder
from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.memory_model import StepMemory
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress, silent
from trimtab.core.record import RunRecord
from trimtab.core.serialization import read_json, to_json, to_jsonable, write_whole
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.experiments.comparison.arm_selection import ArmSelection
from trimtab.experiments.comparison.compare_options import CompareOptions
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison.comparison_summary import summarise
from trimtab.experiments.comparison.energy_rows import METER
from trimtab.experiments.comparison.rank_caveats import RankConditions
from trimtab.experiments.gain_timing import gain_in
from trimtab.experiments.memory_timeline import step_memory
from trimtab.experiments.output_folder import claim_folder
from trimtab.experiments.paired_runs.custom_step_check import check_step
from trimtab.experiments.paired_runs.paired_run import PairedArm
from trimtab.experiments.paired_runs.paired_run_meter import race_meter
from trimtab.experiments.paired_runs.peer_arms import require_peers
from trimtab.experiments.paired_runs.results_folder import ResultsFolder, environment_of, read_back, reference_s
from trimtab.experiments.paired_runs.run_length import seeds_in_time
from trimtab.experiments.task_plans import Plans, given_plan, make_plans
from trimtab.experiments.task_ranks import job_plans, refuse_on_ranks, require_same_task, task_of_rank
from trimtab.planner.multi_rank_plan import for_replicas
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData


def compare(
    task: Task,
    out: Path,
    settings: CompareOptions,
    *,
    command: str,
    budget: Budget | None = None,
    objective: Objective | None = None,
    plan: Plan | None = None,
    progress: Progress = silent,
    together: Coordinator = ALONE,
    metering: Metering | None = None,
) -> Comparison:
    """Run or resume a comparison in the folder `out`, and return the result on every rank.

    Args:
        task: the task to train.
        out: output folder, locked while the comparison runs.
        settings: number of seeds, arms, time caps and other options of the comparison.
        command: the command line, recorded in the report.
        budget: limits on memory and time; no limits by default.
        objective: weights of time, memory and energy in the choice of a plan.
        plan: the plan to measure; by default a plan is made.
        progress: receives progress messages.
        together: the ranks of the job; every rank calls this function.
        metering: source of energy figures; by default the available meters.

    Raises:
        InUseError: another comparison runs in the folder.
    """
    with contextlib.ExitStack() as held:
        return _compared(task, out, settings, command, budget, objective, plan, progress, together, metering, held)


def _compared(
    task: Task,
    out: Path,
    settings: CompareOptions,
    command: str,
    budget: Budget | None,
    objective: Objective | None,
    plan: Plan | None,
    progress: Progress,
    together: Coordinator,
    metering: Metering | None,
    held: contextlib.ExitStack,
) -> Comparison:
    """Run the comparison for `compare`; `held` owns the lock on the folder."""
    require_peers(task, settings.raced(task) if settings.against is not None else ())
    begun = time.perf_counter()
    device = device_here()
    ranks = together.num_ranks
    if ranks > 1:
        refuse_on_ranks(task, ranks, adapts=bool(settings.adapt), peers=settings.peers)
    progress(f"loading the data of {task.name}")
    data = together.in_turn(task.load_data)
    require_same_task(task, data)

    def claimed() -> Plans | None:
        given = None if plan is None else given_plan(task_of_rank(task, ranks), for_replicas(plan, ranks), ranks)
        held.enter_context(lock_run_folder(out, "--out"))
        claim_folder(out, task, data, asdict(settings), budget or Budget(), objective or Objective(), plan, ranks)
        return given

    given = together.made(Plans, claimed)
    kept = ResultsFolder(out, task, data, device, progress, together)
    done = sum(kept.of_race(seed, brief=_is_brief(settings, seed)).exists() for seed in range(settings.num_pairs))
    if done:
        progress(f"resuming with {done} completed runs in {out}")
    if done < settings.num_pairs:
        check_step(task, data, device)
    made = partial(_plans, task, data, device, settings, budget, objective, metering, progress, together)
    plans = given or kept.plans(made)
    alike = {"num_ranks": ranks, "dear": device.type == "cuda"}
    facts = kept.facts(ArmSelection(task, plans, settings, brief=False, **alike).entries())
    step_s = reference_s(plans, facts, ranks)
    metered = race_meter(device, metering, together) if done < settings.num_pairs else (None, NO_METER)
    races: dict[int, dict[str, RunRecord]] = {}
    for seed in seeds_in_time(settings.num_pairs, quick=settings.quick, begun=begun, together=together):
        how = {"brief": _is_brief(settings, seed)}
        entries = ArmSelection(task, plans, settings, step_s, **alike, **how).entries()
        entries = [_metered(e, metered[1]) for e in entries if not facts[e.name].error]
        how |= {"cap_s": settings.cap_s, "reference_cap_s": settings.reference_cap_s}
        races[seed] = kept.race(entries, seed, settings.num_pairs, meter=metered[0], **how)
    memory = {} if ranks > 1 else _memory(task, data, device, plans, out, progress)
    told = {"progress": progress, "together": together}
    is_left_out = settings.quick or bool(facts["equivalent_plan"].error)
    gain = None if is_left_out else gain_in(out, task, data, device, plans.plans["equivalent"], **told)

    def found() -> Comparison:
        seen, on = environment_of(races), RankConditions(ranks, together.crowded)
        said = summarise(task, data, plans, races, facts, command=command, environment=seen, ranks=on)
        where = kept.held[1]
        lies = (f"Placement of the training data: {where.reason}",) if where.changed else ()
        return replace(said, memory=memory, gain=gain, notes=(*said.notes, *lies, *read_back(done, len(races), out)))

    return together.made(Comparison, found)


def _memory(
    task: Task, data: TaskData, device: torch.device, plans: Plans, out: Path, progress: Callable[[str], None]
) -> dict[str, StepMemory]:
    """Return the measured memory of a step of the reference and of the equivalent plan."""
    found = {}
    for name, plan in (("reference", None), ("equivalent_plan", plans.plans["equivalent"])):
        path = out / f"memory-{name}.json"
        if not path.exists():
            progress(f"tracing the memory of a step of {name}")
            step = step_memory(task, data, device, plan)
            if step is None:
                continue
            write_whole(path, to_json(step))
        found[name] = read_json(StepMemory, path)
    return found


def _is_brief(settings: CompareOptions, seed: int) -> bool:
    return settings.whole_pairs is not None and seed >= settings.whole_pairs


def _plans(
    task: Task,
    data: TaskData,
    device: torch.device,
    settings: CompareOptions,
    budget: Budget | None,
    objective: Objective | None,
    metering: Metering | None,
    progress: Callable[[str], None],
    together: Coordinator,
) -> Plans:
    limits, weights = budget or Budget(), objective or Objective()
    if together.num_ranks > 1:
        return job_plans(task, limits, weights, progress, together)
    how = {
        "adapt": settings.adapt,
        "strong": "strong" in settings.raced(task),
        "budget": limits,
        "objective": weights,
        "progress": progress,
    }
    return make_plans(task, data, device, metering=metering, **how)


def _metered(entry: PairedArm, meter: MeterFacts) -> PairedArm:
    """Return the arm with the description of its energy meter added to the record's detail."""
    return replace(entry, detail=entry.detail | {METER: to_jsonable(meter)})
