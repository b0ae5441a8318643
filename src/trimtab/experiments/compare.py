"""`trimtab compare`: plan, race the arms for several seeds, and say what the figures allow.

    plans (tiers S and F, one for the strong peer) -> memory and phases, apart -> races, one per seed -> steps by phase
    -> Comparison

Every stage leaves its result in the output folder; a comparison started again with the same folder goes on where it
was cut off. Several ranks run the same one in step; rank 0 alone reads and writes there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trimtab.api import Metering
from trimtab.calibrate.failures import describe
from trimtab.core import checks
from trimtab.core.codec import read_json, to_json, to_jsonable, write_whole
from trimtab.core.energy import NO_METER, MeterFacts
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress, silent
from trimtab.core.record import BRIEF, RunRecord, read_record, write_record
from trimtab.core.step_memory import StepMemory
from trimtab.decide.ranks import replicated
from trimtab.distributed.alone import ALONE, Together
from trimtab.experiments.arm_facts import ArmFacts
from trimtab.experiments.claim import claim
from trimtab.experiments.energy_rows import METER
from trimtab.experiments.failures import end_with
from trimtab.experiments.gain import gain_in
from trimtab.experiments.inspect_arm import measure_arm
from trimtab.experiments.loops import PlanLoop, StrongPlanLoop
from trimtab.experiments.notes import WHY_TIMED
from trimtab.experiments.own_step import check_step
from trimtab.experiments.planning import Plans, given_plan, make_plans
from trimtab.experiments.race import Entry, race
from trimtab.experiments.race_meter import RaceMeter, race_meter
from trimtab.experiments.rank_notes import Ranks
from trimtab.experiments.ranks import job_plans, refuse_on_ranks, task_of_rank
from trimtab.experiments.result import Comparison
from trimtab.experiments.summary import summarise
from trimtab.experiments.timeline import step_memory
from trimtab.measure.machine import environment
from trimtab.recipes.loop import MakeLoop
from trimtab.recipes.muon import MuonLoop
from trimtab.recipes.paper import PaperLoop
from trimtab.recipes.reference import ReferenceLoop
from trimtab.recipes.replica import ReplicaLoop
from trimtab.recipes.strict import StrictLoop
from trimtab.recipes.strong import StrongLoop
from trimtab.tasks.placement import placed, placement_of
from trimtab.tasks.task import StrongRecipe, Task, TaskData

# Recipes that the reference and the plans can be raced against, and those that are where nothing else was asked for.
PEERS = ("strict", "paper", "strong", "muon")
USUAL_PEERS = ("paper", "strong")
# What a short arm runs: steps, and seconds of the reference, so that fast steps fill more than one block too.
_FEW_STEPS, _FEW_S = 60, 6.0
_QUICK_STEPS, _QUICK_S = 4, 3.5
# And in a race whose other arms run to the end: the control is what that race can resolve, and laps are what it lacks.
_CONTROL_S = 60.0
# A first look ends about here: with fewer pairs where planning left no more time.
_QUICK_END_S = 110.0
# Where the reference trains longer than this, the paper's recipe is only timed: whole, it would double the race.
_LONG_RACE_S = 120.0
_TOO_LONG = f"the reference trains longer than {_LONG_RACE_S:.0f} s"
_UNCHANGED = "its plan changes nothing, and the reference trains long: to its end it would be the reference once more"


@dataclass(frozen=True)
class Settings:
    """How much to run.

    Args:
        num_pairs: races, one per seed; 5 for a verdict, 8 for a claim.
        whole_pairs: how many of them run to the end of the budget (None: all); the others run a few steps an arm, which
            is enough for throughput and costs a tenth.
        quick: short arms, and no more pairs than fit about two minutes with the planning (one at the least).
        adapt: whether to make and race a tier-F plan. peers: whether other recipes take part. against: which.
        cap_s: training seconds after which an arm is censored.
    """

    num_pairs: int = 5
    whole_pairs: int | None = None
    quick: bool = False
    adapt: bool = True
    peers: bool = True
    cap_s: float = math.inf
    against: tuple[str, ...] = USUAL_PEERS

    def __post_init__(self) -> None:
        checks.integer("pairs", self.num_pairs, high=1000)
        for name in self.against:
            checks.one_of("against", name, PEERS)
        if self.whole_pairs is not None:
            checks.integer("whole", self.whole_pairs, low=0, high=self.num_pairs)
        if self.quick and (self.whole_pairs != 0 or self.adapt or self.peers):
            raise ValueGivenError(
                "quick",
                given="whole pairs, tier F or peers with it",
                expected="throughput and memory of tier S alone",
                way_out="Leave out --quick, or --whole, --adapt and --peers.",
            )
        if not self.cap_s > 0:
            raise ValueGivenError("cap", given=f"{self.cap_s:g}", expected="seconds above zero")

    @property
    def raced(self) -> tuple[str, ...]:
        """The peers that take part."""
        return self.against if self.peers else ()


def compare(
    task: Task,
    out: Path,
    settings: Settings,
    *,
    command: str,
    budget: Budget | None = None,
    objective: Objective | None = None,
    plan: Plan | None = None,
    progress: Progress = silent,
    together: Together = ALONE,
    metering: Metering | None = None,
) -> Comparison:
    """Run (or go on with) a comparison in the folder `out`; returns what it found, on every rank.

    Args:
        plan: what is raced, in place of one that is made here. together: the ranks that run it, each calling this.
        metering: how joules are known; by default by the meters there are.
    """
    _require_peers(task, settings)
    begun, race_s = time.perf_counter(), 0.0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = together.num_ranks
    if ranks > 1:
        refuse_on_ranks(task, ranks, adapts=settings.adapt, peers=settings.peers)
    progress(f"reading {task.name}")
    data = together.in_turn(task.load_data)

    def claimed() -> Plans | None:
        given = None if plan is None else given_plan(task_of_rank(task, ranks), replicated(plan, ranks), ranks)
        out.mkdir(parents=True, exist_ok=True)
        claim(out, task, data, asdict(settings), budget or Budget(), objective or Objective(), plan, ranks)
        return given

    given = together.made(Plans, claimed)
    seeds = range(settings.num_pairs)
    done = sum(_folder(out, settings, seed).exists() for seed in seeds)
    if done:
        progress(f"going on with {done} races from {out}")
    if done < len(seeds):
        check_step(task, data, device)
    plans = given or _plans(task, data, device, out, settings, budget, objective, metering, progress, together)
    entries = _entries(task, plans, settings, brief=False, num_ranks=ranks)
    facts = _facts(entries, task, data, device, out, progress, together)
    step_s = _reference_s(plans, facts, ranks)
    metered = race_meter(device, metering, together) if done < len(seeds) else (None, NO_METER)
    races: dict[int, dict[str, RunRecord]] = {}
    for seed in seeds:
        race_begun = time.perf_counter()
        if settings.quick and races and together.each(race_begun - begun + race_s)[0] > _QUICK_END_S:
            break
        entries = _entries(task, plans, settings, step_s, brief=_is_brief(settings, seed), num_ranks=ranks)
        entries = [_metered(e, metered[1]) for e in entries if not facts[e.name].error]
        folder = _folder(out, settings, seed)
        races[seed] = _race(entries, task, data, seed, device, folder, settings, progress, together, metered[0])
        race_s = time.perf_counter() - race_begun
    memory = {} if ranks > 1 else _memory(task, data, device, plans, out, progress)
    told = {"progress": progress, "together": together}
    is_left_out = settings.quick or bool(facts["plan_S"].error)
    gain = None if is_left_out else gain_in(out, task, data, device, plans.plans["S"], **told)

    def found() -> Comparison:
        seen, on = _environment(races), Ranks(ranks, together.crowded)
        said = summarise(task, data, plans, races, facts, command=command, environment=seen, ranks=on)
        where = placement_of(data, device)
        lies = (f"training data in the races: {where.reason}",) if where.changed else ()
        return replace(said, memory=memory, gain=gain, notes=(*said.notes, *lies, *_read_back(done, len(races), out)))

    return together.made(Comparison, found)


def _require_peers(task: Task, settings: Settings) -> None:
    """Raise where a recipe was asked for by name that the task does not have."""
    if "muon" in settings.raced and task.muon is None:
        given, has = f"muon of {task.name}, which has no recipe with it", ", ".join(p for p in PEERS if p != "muon")
        raise ValueGivenError("against", given=given, expected=has, way_out="Task(..., muon=StrongRecipe(...)).")


def _memory(
    task: Task, data: TaskData, device: torch.device, plans: Plans, out: Path, progress: Callable[[str], None]
) -> dict[str, StepMemory]:
    """Return what a step of the reference holds, and one of the plan."""
    found = {}
    for name, plan in (("reference", None), ("plan_S", plans.plans["S"])):
        path = out / f"memory-{name}.json"
        if not path.exists():
            progress(f"what a step of {name} holds")
            step = step_memory(task, data, device, plan)
            if step is None:
                continue
            write_whole(path, to_json(step))
        found[name] = read_json(StepMemory, path)
    return found


def _read_back(done: int, races: int, out: Path) -> tuple[str, ...]:
    if not done:
        return ()
    return (f"{done} of {races} races were read back from {out}, where an earlier run of this comparison left them",)


def _environment(races: Mapping[int, Mapping[str, RunRecord]]) -> Mapping[str, str]:
    """Return where the races ran, which may have been another day than today."""
    headers = [record.header for race in races.values() for record in race.values()]
    return next((header.environment for header in headers if header.environment), environment())


def _folder(out: Path, settings: Settings, seed: int) -> Path:
    return out / (f"brief-{seed}" if _is_brief(settings, seed) else f"race-{seed}")


def _is_brief(settings: Settings, seed: int) -> bool:
    return settings.whole_pairs is not None and seed >= settings.whole_pairs


def _plans(
    task: Task,
    data: TaskData,
    device: torch.device,
    out: Path,
    settings: Settings,
    budget: Budget | None,
    objective: Objective | None,
    metering: Metering | None,
    progress: Callable[[str], None],
    together: Together,
) -> Plans:
    path = out / "plans.json"
    if (kept := together.read(Plans, path)) is not None:
        return kept
    limits, weights = budget or Budget(), objective or Objective()
    if together.num_ranks > 1:
        plans = job_plans(task, limits, weights, progress, together)
    else:
        adapt = ("learning_rate",) if settings.adapt else ()
        how = {
            "adapt": adapt,
            "strong": "strong" in settings.raced,
            "budget": limits,
            "objective": weights,
            "progress": progress,
        }
        plans = make_plans(task, data, device, metering=metering, **how)
    together.write(path, plans, indent=1)
    return plans


def _reference_s(plans: Plans, facts: Mapping[str, ArmFacts], num_ranks: int) -> float:
    """Return about how long a step of the reference takes here.

    A plan that was given may be from elsewhere, and one of several ranks was made for a share that nobody else runs.
    """
    baseline = plans.plans["S"].baseline if plans.profiles and num_ranks == 1 else None
    return baseline.step_s if baseline else sum(facts["reference"].phases_s.values()) or 1.0


def _entries(
    task: Task, plans: Plans, settings: Settings, step_s: float | None = None, *, brief: bool, num_ranks: int = 1
) -> list[Entry]:
    plain: MakeLoop = ReferenceLoop if num_ranks == 1 else ReplicaLoop
    rows, baseline = task.budget_rows, plans.plans["S"].baseline
    step_s = step_s or (baseline.step_s if baseline else 1.0)
    steps, seconds = (_QUICK_STEPS, _QUICK_S) if settings.quick else (_FEW_STEPS, _FEW_S)
    few, control = (
        min(rows, max(steps, math.ceil(s / step_s)) * task.batch_rows)
        for s in (seconds, seconds if brief else max(seconds, _CONTROL_S))
    )
    too_long = "" if rows / task.batch_rows * step_s < _LONG_RACE_S else _TOO_LONG

    def entry(name: str, make: MakeLoop, wanted: int, *, timed: int = 0, why: str = "", **options: bool) -> Entry:
        """Return an arm of all its rows, or of a few that are only timed."""
        budget = min(wanted, timed or wanted, few if brief else wanted)
        detail = {BRIEF: True} | ({WHY_TIMED: why} if why else {}) if budget < wanted else {}
        return Entry(name, make, budget, is_timed_only=budget < wanted, detail=detail, **options)

    same = partial(PlanLoop, plan=plans.plans["S"], total_samples=rows)
    entries = [entry("reference", plain, rows), entry("self", plain, rows, timed=control)]
    unchanged = _UNCHANGED if too_long and not plans.plans["S"].changes else ""
    entries.append(entry("plan_S", same, rows, timed=control if unchanged else 0, why=unchanged))
    if "F" in plans.plans:
        has_schedule = plans.plans["F"].schedule.value != "user"
        horizon = min(rows, task.adapted_rows or rows) if has_schedule else rows  # only a schedule has to end somewhere
        freed = partial(PlanLoop, plan=plans.plans["F"], total_samples=horizon)
        entries.append(entry("plan_F", freed, horizon))
    if "strict" in settings.raced:
        entries.append(entry("strict", StrictLoop, rows))
    if "paper" in settings.raced:
        entries.append(entry("paper", PaperLoop, rows, timed=few if too_long else 0, why=too_long))
    recipes: tuple[tuple[str, MakeLoop, StrongRecipe | None], ...]
    recipes = (("strong", StrongLoop, task.strong), ("muon", MuonLoop, task.muon))
    for name, make, recipe in recipes:
        if name in settings.raced and recipe is not None:
            entries.append(entry(name, make, min(rows, recipe.budget_rows)))
    if "strong" in settings.raced and task.strong is not None and "strong" in plans.plans:
        planned = partial(StrongPlanLoop, plan=plans.plans["strong"])
        entries.append(entry("strong_plan", planned, min(rows, task.strong.budget_rows), timed=control))
    return entries


def _metered(entry: Entry, meter: MeterFacts) -> Entry:
    """Return the arm with what counts its joules in its record, or why nothing does."""
    return replace(entry, detail=entry.detail | {METER: to_jsonable(meter)})


def _facts(
    entries: list[Entry],
    task: Task,
    data: TaskData,
    device: torch.device,
    out: Path,
    progress: Callable[[str], None],
    together: Together,
) -> dict[str, ArmFacts]:
    facts = {}
    for entry in entries:
        path = out / f"arm-{entry.name}.json"
        fact = together.read(ArmFacts, path)
        if fact is None or not fact.is_current:
            progress(f"memory and phases of {entry.name}")
            fact = _measured(entry, task, data, device, together)
            together.write(path, fact, indent=1)
        facts[entry.name] = fact
    return facts


def _measured(entry: Entry, task: Task, data: TaskData, device: torch.device, together: Together) -> ArmFacts:
    try:
        return measure_arm(entry.make, task, data, device, together)
    except Exception as error:  # a peer that cannot run here is reported as such; without the reference nothing is
        is_reference = entry.name == "reference"
        if is_reference or not together.may_leave(error):
            end_with(error, together, is_reference=is_reference)
        return ArmFacts(None, error=describe(error))


def _race(
    entries: list[Entry],
    task: Task,
    data: TaskData,
    seed: int,
    device: torch.device,
    folder: Path,
    settings: Settings,
    progress: Progress,
    together: Together,
    meter: RaceMeter | None,
) -> dict[str, RunRecord]:
    def told(text: str, share: float | None = None) -> None:
        whole = (seed + (share or 0.0)) / settings.num_pairs
        progress(f"race {seed + 1} of {settings.num_pairs}: {text}", whole)

    if together.each(folder.exists())[0]:
        return {path.stem: read_record(path) for path in sorted(folder.glob("*.jsonl"))}
    records = race(
        entries,
        task,
        placed(data, device)[0],
        seed,
        device,
        cap_s=settings.cap_s,
        environment=environment() | ({"ranks": str(together.num_ranks)} if together.num_ranks > 1 else {}),
        progress=told,
        together=together,
        meter=meter,
    )
    if together.rank == 0:
        _write_race(folder, records)
    return {record.header.name: record for record in records}


def _write_race(folder: Path, records: list[RunRecord]) -> None:
    partial_folder = folder.with_suffix(".partial")
    partial_folder.mkdir(exist_ok=True)
    for record in records:
        path = partial_folder / f"{record.header.name}.jsonl"
        path.unlink(missing_ok=True)
        write_record(path, record)
    partial_folder.rename(folder)  # a race counts only when all its arms are on disk
