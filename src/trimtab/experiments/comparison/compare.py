"""`trimtab compare`: make plans, run all arms in paired runs for several seeds and summarise the results.

    plans (equivalent, tuned, and the plan for the hand-tuned recipe) -> memory and phases, measured separately
    -> paired runs, a set per seed -> step time by phase -> `Comparison`

Every phase writes its result to the output folder, so a restart with the same folder resumes an interrupted
comparison. With several ranks, all ranks run the same arm in step and only rank 0 reads and writes the folder.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trimtab.api import Metering, start
from trimtab.checkpoint.run_lock import lock_run_folder
from trimtab.core import validation
from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.errors import ValueGivenError
from trimtab.core.memory_model import StepMemory
from trimtab.core.objective import Budget, Objective
from trimtab.core.progress import Progress, silent
from trimtab.core.record import BRIEF, RunRecord
from trimtab.core.serialization import read_json, to_json, to_jsonable, write_whole
from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.experiments.baselines.loop import MakeLoop, autocast, hold_strict_fp32, move
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.experiments.comparison.caveats import WHY_TIMED, RankConditions
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison.comparison_summary import summarise
from trimtab.experiments.comparison.ratio_rows import METER
from trimtab.experiments.gain_timing import gain_in
from trimtab.experiments.output_folder import claim_folder
from trimtab.experiments.paired_runs.custom_step_check import check_step
from trimtab.experiments.paired_runs.paired_run import PairedArm, race_meter, seeds_in_time, short_arm_lengths
from trimtab.experiments.paired_runs.plan_loops import (
    HAND_TUNED,
    PlanLoop,
    TunedRecipePlanLoop,
    require_peers,
    usual_peers,
)
from trimtab.experiments.paired_runs.results_folder import ResultsFolder, environment_of, read_back, reference_s
from trimtab.experiments.task_plans import Plans, given_plan, make_plans
from trimtab.experiments.task_ranks import job_plans, refuse_on_ranks, require_same_task, task_of_rank
from trimtab.measure.memory_trace import Prepare, as_it_is, trace_step
from trimtab.planner.multi_rank_plan import for_replicas
from trimtab.plans.plan import Plan
from trimtab.settings.recompute import use_plan
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task, TaskData
from trimtab.training.batch import BY_CONTAINERS

# The baseline in strict fp32: TF32 is disabled everywhere.


class StrictLoop(ReferenceLoop):
    """Baseline loop with strict fp32 until `close`.

    Raises:
        ValueGivenError: The declared precision of the task's reference is not fp32.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        if task.reference.precision != "fp32":
            raise ValueGivenError(
                "task.reference.precision",
                got=task.reference.precision,
                expected="fp32, which alone can be strict",
                hint="Leave out strict: the reference is what it is compared against.",
            )
        super().__init__(task, device)
        self._put_back = hold_strict_fp32()


# Validated options of a comparison.

# Training settings that a tuned plan may change by default.
USUAL_ADAPT = ("learning_rate",)


@dataclass(frozen=True)
class CompareOptions:
    """Options of a comparison.

    Args:
        num_pairs: paired runs, a seed each; 5 for a verdict, 8 for a claim.
        whole_pairs: number of full runs to the end of the budget (None: all). The remaining runs take a few steps per
            arm, enough for throughput at a tenth of the cost.
        quick: short arms, and at least one pair but no more than fit in about two minutes including planning.
        adapt: training settings a tuned plan may change; () runs no tuned plan.
        peers: True to run baseline recipes.
        cap_s: training seconds after which an arm is stopped (censored).
        against: names of the baseline recipes, required in the task; None for the default recipes present in the task.
        reference_cap_s: time cap of the reference, at least `cap_s`; None for the same cap. A higher cap lets a slow
            reference reach the target without delaying the stop of the remaining arms.
    """

    num_pairs: int = 5
    whole_pairs: int | None = None
    quick: bool = False
    adapt: tuple[str, ...] = USUAL_ADAPT
    peers: bool = True
    cap_s: float = math.inf
    against: tuple[str, ...] | None = None
    reference_cap_s: float | None = None

    def __post_init__(self) -> None:
        validation.integer("pairs", self.num_pairs, high=1000)
        if self.whole_pairs is not None:
            validation.integer("whole", self.whole_pairs, low=0, high=self.num_pairs)
        if self.quick and (self.whole_pairs != 0 or self.adapt or self.peers):
            raise ValueGivenError(
                "quick",
                problem="--quick measures only throughput and memory of the equivalent plan, and cannot be combined "
                "with --whole, --adapt or --peers.",
                hint="Remove --quick, or the other options.",
                code="option.conflict",
            )
        if not self.cap_s > 0:
            raise ValueGivenError("cap", got=f"{self.cap_s:g}", expected="seconds above zero", code="cap.not_positive")
        if self.reference_cap_s is not None and not self.reference_cap_s >= self.cap_s:
            raise ValueGivenError(
                "reference_cap",
                got=f"{self.reference_cap_s:g} s",
                expected=f"at least the value of --cap, {self.cap_s:g} s",
                hint="Raise --reference-cap, or remove it to use --cap for all arms.",
                code="cap.too_small",
            )

    def raced(self, task: Task) -> tuple[str, ...]:
        """Return the baseline recipes to run, by name."""
        asked = usual_peers(task) if self.against is None else self.against
        return asked if self.peers else ()


# Arms of a comparison: the training loop and the number of samples of every arm.

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


# Memory of a step by part and over time, from a trace, so that it is equal on every machine.


def step_memory(task: Task, data: TaskData, device: torch.device, plan: Plan | None) -> StepMemory | None:
    """Return the memory of a step of the task's plain loop, or of a plan's loop; None if it cannot be traced.

    A custom step function is not traced; the declared loss and optimizer are traced instead.
    """
    try:
        return _traced(task, data, device, plan)
    except Exception:  # A step that cannot be started or traced is left out of the report.
        return None


def _traced(task: Task, data: TaskData, device: torch.device, plan: Plan | None) -> StepMemory:
    torch.manual_seed(0)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    batch = move(next(data.batches(0, task.batch_size)), device)
    with contextlib.ExitStack() as stack:
        count, rows, forward = 1, task.batch_size, lambda: autocast(task.reference.precision, device)
        prepare: Prepare = as_it_is
        if plan is not None:
            run = stack.enter_context(start(model, optimizer, plan, total_samples=task.budget_samples))
            count, rows, forward = plan.num_micro_batches, plan.micro_batch_of(rows), run.autocast
            # The traced copy of the model lacks recomputation, so it is applied again.
            if plan.recompute.value is not None:
                prepare = partial(use_plan, plan=plan)
        micro = next(BY_CONTAINERS.slices(batch, task.batch_size, rows))[0]
        return trace_step(
            model,
            optimizer,
            task.loss_fn,
            micro,
            autocast=forward,
            num_micro_batches=min(count, 2),
            counts_scratch=device.type == "cpu",
            prepare=prepare,
        )


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
