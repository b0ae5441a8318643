"""`trimtab compare`: plan, race the arms for several seeds, and say what the figures allow.

    plans (tiers S and F, one for the strong peer) -> memory and phases, apart -> races, one per seed -> steps by phase
    -> Comparison

Every stage leaves its result in the output folder; a comparison started again with the same folder goes on where it
was cut off. Several ranks run the same one in step; rank 0 alone reads and writes there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch

from trimtab.api import Metering
from trimtab.core import checks
from trimtab.core.codec import read_json, to_json, to_jsonable, write_whole
from trimtab.core.energy import NO_METER, MeterFacts
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress, silent
from trimtab.core.record import BRIEF, RunRecord
from trimtab.core.step_memory import StepMemory
from trimtab.decide.ranks import replicated
from trimtab.distributed.alone import ALONE, Together
from trimtab.experiments.claim import claim
from trimtab.experiments.comparison.energy_rows import METER
from trimtab.experiments.comparison.notes import WHY_TIMED
from trimtab.experiments.comparison.rank_notes import Ranks
from trimtab.experiments.comparison.result import Comparison
from trimtab.experiments.comparison.summary import summarise
from trimtab.experiments.gain import gain_in
from trimtab.experiments.planning import Plans, given_plan, make_plans
from trimtab.experiments.racing.folder import RaceFolder, environment_of, read_back, reference_s
from trimtab.experiments.racing.lengths import lengths, seeds_in_time
from trimtab.experiments.racing.loops import PlanLoop, StrongPlanLoop
from trimtab.experiments.racing.meter import race_meter
from trimtab.experiments.racing.own_step import check_step
from trimtab.experiments.racing.peer_arms import HAND_TUNED, PEERS, USUAL_PEERS, require_peers
from trimtab.experiments.racing.race import Entry
from trimtab.experiments.ranks import job_plans, refuse_on_ranks, task_of_rank
from trimtab.experiments.timeline import step_memory
from trimtab.recipes.loop import MakeLoop
from trimtab.recipes.paper import PaperLoop
from trimtab.recipes.reference import ReferenceLoop
from trimtab.recipes.replica import ReplicaLoop
from trimtab.recipes.strict import StrictLoop
from trimtab.tasks.task import Task, TaskData

# What tier F may change where nothing else was asked for.
USUAL_ADAPT = ("learning_rate",)
# Where the reference trains longer than this, the paper's recipe is only timed: whole, it would double the race. With a
# cap it takes no longer than that.
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
        adapt: what a tier-F plan may change, which is then made and raced; (): none is. peers: whether other recipes
            take part. against: which, by name, each of which the task must have; None: the usual ones that it has.
        cap_s: training seconds after which an arm is censored. reference_cap_s: after which the reference is; None: as
            any other. What is to be many times as fast is not held up by what it is raced against, nor cut off with it.
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
        checks.integer("pairs", self.num_pairs, high=1000)
        for name in self.against or ():
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
        if self.reference_cap_s is not None and not self.reference_cap_s >= self.cap_s:
            given, expected = f"{self.reference_cap_s:g}", f"no less than --cap, {self.cap_s:g}"
            raise ValueGivenError("reference_cap", given=given, expected=expected)

    @property
    def raced(self) -> tuple[str, ...]:
        """The peers that take part."""
        asked = USUAL_PEERS if self.against is None else self.against
        return asked if self.peers else ()


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
    require_peers(task, settings.raced if settings.against is not None else ())
    begun = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ranks = together.num_ranks
    if ranks > 1:
        refuse_on_ranks(task, ranks, adapts=bool(settings.adapt), peers=settings.peers)
    progress(f"reading {task.name}")
    data = together.in_turn(task.load_data)

    def claimed() -> Plans | None:
        given = None if plan is None else given_plan(task_of_rank(task, ranks), replicated(plan, ranks), ranks)
        out.mkdir(parents=True, exist_ok=True)
        claim(out, task, data, asdict(settings), budget or Budget(), objective or Objective(), plan, ranks)
        return given

    given = together.made(Plans, claimed)
    kept = RaceFolder(out, task, data, device, progress, together)
    done = sum(kept.of_race(seed, brief=_is_brief(settings, seed)).exists() for seed in range(settings.num_pairs))
    if done:
        progress(f"going on with {done} races from {out}")
    if done < settings.num_pairs:
        check_step(task, data, device)
    made = partial(_plans, task, data, device, settings, budget, objective, metering, progress, together)
    plans = given or kept.plans(made)
    alike = {"num_ranks": ranks, "dear": device.type == "cuda"}
    facts = kept.facts(_entries(task, plans, settings, brief=False, **alike))
    step_s = reference_s(plans, facts, ranks)
    metered = race_meter(device, metering, together) if done < settings.num_pairs else (None, NO_METER)
    races: dict[int, dict[str, RunRecord]] = {}
    for seed in seeds_in_time(settings.num_pairs, quick=settings.quick, begun=begun, together=together):
        how = {"brief": _is_brief(settings, seed)}
        entries = _entries(task, plans, settings, step_s, **alike, **how)
        entries = [_metered(e, metered[1]) for e in entries if not facts[e.name].error]
        how |= {"cap_s": settings.cap_s, "reference_cap_s": settings.reference_cap_s}
        races[seed] = kept.race(entries, seed, settings.num_pairs, meter=metered[0], **how)
    memory = {} if ranks > 1 else _memory(task, data, device, plans, out, progress)
    told = {"progress": progress, "together": together}
    is_left_out = settings.quick or bool(facts["plan_S"].error)
    gain = None if is_left_out else gain_in(out, task, data, device, plans.plans["S"], **told)

    def found() -> Comparison:
        seen, on = environment_of(races), Ranks(ranks, together.crowded)
        said = summarise(task, data, plans, races, facts, command=command, environment=seen, ranks=on)
        where = kept.held[1]
        lies = (f"training data in the races: {where.reason}",) if where.changed else ()
        return replace(said, memory=memory, gain=gain, notes=(*said.notes, *lies, *read_back(done, len(races), out)))

    return together.made(Comparison, found)


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


def _is_brief(settings: Settings, seed: int) -> bool:
    return settings.whole_pairs is not None and seed >= settings.whole_pairs


def _plans(
    task: Task,
    data: TaskData,
    device: torch.device,
    settings: Settings,
    budget: Budget | None,
    objective: Objective | None,
    metering: Metering | None,
    progress: Callable[[str], None],
    together: Together,
) -> Plans:
    limits, weights = budget or Budget(), objective or Objective()
    if together.num_ranks > 1:
        return job_plans(task, limits, weights, progress, together)
    how = {
        "adapt": settings.adapt,
        "strong": "strong" in settings.raced,
        "budget": limits,
        "objective": weights,
        "progress": progress,
    }
    return make_plans(task, data, device, metering=metering, **how)


def _entries(
    task: Task,
    plans: Plans,
    settings: Settings,
    step_s: float | None = None,
    *,
    brief: bool,
    num_ranks: int = 1,
    dear: bool = False,
) -> list[Entry]:
    plain: MakeLoop = ReferenceLoop if num_ranks == 1 else ReplicaLoop
    rows, baseline = task.budget_rows, plans.plans["S"].baseline
    step_s = step_s or (baseline.step_s if baseline else 1.0)
    few, control = lengths(task, step_s, quick=settings.quick, brief=brief, dear=dear)
    too_long = "" if rows / task.batch_rows * step_s < _LONG_RACE_S else _TOO_LONG

    def own_few(tier: str) -> int:
        """Return the rows of a plan's short arm, on a GPU by its own step: of fewer seconds joules are not read."""
        plan = plans.plans[tier]
        if not dear or plan.measured is None:
            return few
        return lengths(task, plan.measured.step_s, quick=settings.quick, brief=brief, dear=dear).few

    def entry(
        name: str, make: MakeLoop, wanted: int, *, timed: int = 0, why: str = "", short: int = 0, **options: bool
    ) -> Entry:
        """Return an arm of all its rows, or of a few that are only timed."""
        budget = min(wanted, timed or wanted, (short or few) if brief else wanted)
        detail = {BRIEF: True} | ({WHY_TIMED: why} if why else {}) if budget < wanted else {}
        return Entry(name, make, budget, is_timed_only=budget < wanted, detail=detail, **options)

    same = partial(PlanLoop, plan=plans.plans["S"], total_samples=rows)
    entries = [entry("reference", plain, rows), entry("self", plain, rows, timed=control)]
    unchanged = _UNCHANGED if too_long and not plans.plans["S"].changes else ""
    entries.append(entry("plan_S", same, rows, timed=control if unchanged else 0, why=unchanged, short=own_few("S")))
    if "F" in plans.plans:
        has_schedule = plans.plans["F"].schedule.value != "user"
        horizon = min(rows, task.adapted_rows or rows) if has_schedule else rows  # only a schedule has to end somewhere
        freed = partial(PlanLoop, plan=plans.plans["F"], total_samples=horizon)
        entries.append(entry("plan_F", freed, horizon, short=own_few("F")))
    if "strict" in settings.raced:
        entries.append(entry("strict", StrictLoop, rows))
    if "paper" in settings.raced:
        why = "" if math.isfinite(settings.cap_s) else too_long
        entries.append(entry("paper", PaperLoop, rows, timed=few if why else 0, why=why))
    for name, recipe in task.recipes.items():
        if name in settings.raced:
            entries.append(entry(name, HAND_TUNED[name], min(rows, recipe.budget_rows)))
    if "strong" in settings.raced and task.strong is not None and "strong" in plans.plans:
        planned = partial(StrongPlanLoop, plan=plans.plans["strong"])
        timed = {"timed": control, "short": own_few("strong")}
        entries.append(entry("strong_plan", planned, min(rows, task.strong.budget_rows), **timed))
    return entries


def _metered(entry: Entry, meter: MeterFacts) -> Entry:
    """Return the arm with what counts its joules in its record, or why nothing does."""
    return replace(entry, detail=entry.detail | {METER: to_jsonable(meter)})
