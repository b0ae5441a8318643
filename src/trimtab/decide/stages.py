"""Which ZeRO stage ranks share a model by: of each stage the best plan within the limits, and of these the best.

A profile of one rank's share of the batch, alone, becomes that of a rank at a stage by what traces of both differ in;
seconds are those of the plan, with the communication of its window beside them (`trimtab.decide.communication`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trimtab.core.errors import InfeasibleError
from trimtab.core.link import Calibration
from trimtab.core.objective import Budget, Objective
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.core.plan import Choice, Measured, Plan, Rejected
from trimtab.core.profile import Candidate, Profile, Recomputable, Traced, Trial
from trimtab.core.rank_trace import WAYS, RankTrace, Way
from trimtab.core.units import format_bytes, format_seconds
from trimtab.decide.communication import WindowCost, window_s
from trimtab.decide.planner import choose
from trimtab.decide.ranks import WORTH, sending, ways_to_send

_MARKS = Plan.marks()
_BUT = ("micro_batch", "allocator", "fused_optimizer", "recompute")
# DeepSpeed's, each reduced once a window: by itself its stage 2 sends all gradients of every micro-batch to all ranks.
DEEPSPEED_WAYS: tuple[Way, ...] = ((1, True), (2, True), (3, True))
_SHARED = ("nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and parameters")


@dataclass(frozen=True)
class _Job:
    """Ranks that a plan is made for, as of `choose_stage`."""

    ranks: int
    calibration: Calibration
    shape_of: Callable[[Plan], StepShape | None]
    engine: str


@dataclass(frozen=True)
class StageCost:
    """A way to share the model, and what a window is predicted to take by the best plan that it has."""

    way: Way
    plan: Plan
    cost: WindowCost

    @property
    def peak_bytes(self) -> int:
        """Of a rank."""
        return (self.plan.predicted and self.plan.predicted.peak_bytes) or 0

    def __str__(self) -> str:
        return f"{format_seconds(self.cost.total_s)} a window, {format_bytes(self.peak_bytes)} a rank"


@dataclass(frozen=True)
class RefusedStage:
    """A way to share the model that cannot be taken, and why."""

    way: Way
    refusal: str

    def __str__(self) -> str:
        return self.refusal


Stages = tuple[StageCost | RefusedStage, ...]


def choose_stage(
    profile: Profile,
    traces: Sequence[RankTrace],
    ranks: int,
    calibration: Calibration,
    shape_of: Callable[[Plan], StepShape | None],
    engine: str = "torch",
) -> tuple[Plan, Stages]:
    """Return the plan of so many ranks, and what each way to share the model takes.

    Args:
        profile: of one rank's share of the batch, on one process; its own limits and weights count. traces: of a rank.
        shape_of: returns a plan's step as communication sees it. engine: what is to share it; traces are torch's.

    Raises:
        InfeasibleError: no stage meets the limits.
    """
    job = _Job(ranks, calibration, shape_of, engine)
    found = tuple(_cost(profile, traces, job, way) for way in ways_of(engine))
    feasible = [each for each in found if isinstance(each, StageCost)]
    if not feasible:
        raise InfeasibleError(
            "budget",
            given=f"limits that no ZeRO stage of {ranks} ranks meets; the last: {found[-1]}",
            expected="a budget that some stage meets, or more ranks",
        )
    scores = {each.way: _score(each, feasible[0], profile.objective) for each in feasible}
    worth = (1 + WORTH) * min(scores.values())
    chosen = next(each for each in feasible if scores[each.way] <= worth)
    return _with_stage(chosen, found, calibration), found


def ways_of(engine: str) -> tuple[Way, ...]:
    """Return the ways to share that are considered with an engine."""
    return DEEPSPEED_WAYS if engine == "deepspeed" else WAYS


def _score(each: StageCost, unit: StageCost, objective: Objective) -> float:
    """Return time and memory by their weights, in units of the first stage that fits."""
    time = each.cost.total_s / unit.cost.total_s
    memory = each.peak_bytes / max(1, unit.peak_bytes)
    return objective.time * time + objective.memory * memory


def _cost(profile: Profile, traces: Sequence[RankTrace], job: _Job, way: Way) -> StageCost | RefusedStage:
    stage, reduces_once = way
    there = at_stage(_taken(profile, job.engine, stage), [trace for trace in traces if trace.way == way])
    try:
        plan = choose(there, profile.objective, Budget(profile.budget.memory_bytes))
    except InfeasibleError as error:
        return RefusedStage(way, error.given)
    if not reduces_once and plan.num_micro_batches == 1:
        return RefusedStage(way, "windows of one micro-batch are reduced once")
    shape = job.shape_of(plan)
    if shape is None or plan.predicted is None:
        return RefusedStage(way, "the seconds of its step are not known")
    plan = replace(plan, num_ranks=job.ranks, zero_stage=Choice(stage, "as considered", _MARKS["zero_stage"]))
    if job.engine == "deepspeed":
        reason = (
            "as asked; a rank's bytes and seconds are those of torch's sharding, with nothing sent beside the "
            "computation, as DeepSpeed is configured: of its own none were traced"
        )
        plan = replace(plan, engine=Choice(job.engine, reason, _MARKS["engine"], changed=True))
    plan, cost = _window(plan, job.calibration, shape, reduces_once=reduces_once)
    limit_s = math.inf if profile.budget.time is None else profile.budget.time
    if cost.total_s > limit_s:
        return RefusedStage(way, f"{format_seconds(cost.total_s)} a window, over {format_seconds(limit_s)}")
    peak = None if plan.predicted is None else plan.predicted.peak_bytes
    bare = replace(plan, baseline=None, measured=None, verified=None, front=(), stands_between=None)
    return StageCost(way, replace(bare, predicted=Measured(cost.total_s, peak)), cost)


def _window(plan: Plan, calibration: Calibration, shape: StepShape, *, reduces_once: bool) -> tuple[Plan, WindowCost]:
    """Return the plan with the way its gradients are sent, and what a window takes."""
    stage, is_torch = int(plan.zero_stage.value or 0), plan.engine.value == "torch"
    if stage < 2 and is_torch:
        sent = sending(plan, calibration, shape)
        way = ways_to_send(sent, calibration, shape)[str(sent.reduce_dtype.value), _bucket(sent)]
        return sent, replace(way.cost, exposed_s=way.cost.exposed_s + way.cast_s)
    how = Parallelism(plan.num_ranks, stage, overlaps=is_torch, reduces_once=reduces_once)
    k, share = plan.num_micro_batches, calibration.overlap_share
    return plan, window_s(how, calibration.link, shape, k, overlap_share=share)


def _bucket(plan: Plan) -> int | None:
    return None if plan.bucket_bytes.value is None else int(plan.bucket_bytes.value)


def _taken(profile: Profile, engine: str, stage: int) -> Profile:
    """Return a profile of what goes with an engine's stage alone: shards have no layout, and DeepSpeed casts itself."""

    def goes(candidate: Candidate) -> bool:
        fits = stage < 2 or candidate.memory_layout == "keep"
        return fits and not (engine == "deepspeed" and (candidate.precision == "fp16" or candidate.compiled))

    return replace(
        profile,
        trials=tuple(trial for trial in profile.trials if goes(trial.candidate)),
        traces=tuple(traced for traced in profile.traces if goes(traced.candidate)),
        recomputables=tuple(each for each in profile.recomputables if goes(each.candidate)),
    )


def at_stage(profile: Profile, traces: Sequence[RankTrace]) -> Profile:
    """Return a profile of one process as that of a rank: each peak moved by what traces of both differ in.

    What was decided by running it against the loop was decided of one process, and is not in it.

    Args:
        traces: of one way to share. What none tells of has no peak.
    """

    def of(candidate: Candidate) -> tuple[Traced, RankTrace] | None:
        alone = next((each for each in profile.traces if each.candidate.alike(candidate, *_BUT)), None)
        shared = next((each for each in traces if each.candidate.alike(candidate, *_BUT)), None)
        return None if alone is None or shared is None else (alone, shared)

    def difference(candidate: Candidate) -> int | None:
        pair = of(candidate)
        if pair is None:
            return None
        alone, shared = pair
        rows, is_whole = candidate.micro_batch, candidate.micro_batch >= profile.loop.batch_rows
        model = alone.whole if is_whole else alone.sliced or alone.whole
        return (shared.whole if is_whole else shared.sliced).peak_bytes(rows) - model.peak_bytes(rows)

    def moved(trial: Trial) -> Trial:
        more = difference(trial.candidate)
        known = trial.peak_bytes is not None and more is not None
        return replace(trial, peak_bytes=(trial.peak_bytes or 0) + (more or 0) if known else None)

    def shared(traced: Traced) -> Traced | None:
        pair = of(traced.candidate)
        if pair is None:
            return None
        return replace(traced, whole=pair[1].whole, sliced=traced.sliced and pair[1].sliced, step=None)

    def chained(each: Recomputable) -> Recomputable:
        wholly = difference(replace(each.candidate, micro_batch=profile.loop.batch_rows))
        slicing = difference(replace(each.candidate, micro_batch=max(1, profile.loop.batch_rows // 2)))
        if wholly is None or slicing is None or each.whole is None:
            return replace(each, whole=None, sliced=None, schedules=(), refusal=each.refusal or "no trace of a rank")
        sliced = None if each.sliced is None else each.sliced.holding(slicing)
        return replace(each, whole=each.whole.holding(wholly), sliced=sliced)

    return replace(
        profile,
        trials=tuple(moved(trial) for trial in profile.trials if trial.stage not in profile.finals),
        traces=tuple(found for found in map(shared, profile.traces) if found is not None),
        recomputables=tuple(map(chained, profile.recomputables)),
    )


def _with_stage(chosen: StageCost, found: Stages, calibration: Calibration) -> Plan:
    stage, reduces_once = chosen.way
    others = [each for each in found if each.way[0] != stage]
    losers = tuple(Rejected(each.way[0], str(each)) for each in others if each.way[1])
    reason = f"{chosen}, of which communication is waited for {format_seconds(chosen.cost.exposed_s)}"
    same = [each for each in found if each.way[0] == stage and each.way != chosen.way]
    once = tuple(Rejected(each.way[1], str(each)) for each in same)
    plan = replace(
        chosen.plan,
        zero_stage=Choice(
            stage, f"{reason}, over {calibration.link.name}", _MARKS["zero_stage"], changed=stage > 0, losers=losers
        ),
    )
    if stage < 2:
        return plan
    return replace(plan, reduces_once=Choice(reduces_once, str(chosen), _MARKS["reduces_once"], not reduces_once, once))


def stages_text(found: Stages) -> str:
    """Return a table of what each way takes."""
    return "\n".join(["a rank at each ZeRO stage, predicted:", *(f"  {_line(each)}" for each in found)])


def _line(each: StageCost | RefusedStage) -> str:
    stage, reduces_once = each.way
    once = "" if reduces_once else ", reduced after each micro-batch"
    way = f"stage {stage}: shards {_SHARED[stage]}{once}"
    if isinstance(each, RefusedStage):
        return f"{way:<78}  {each}"
    cost, plan = each.cost, each.plan
    figures = f"{format_bytes(each.peak_bytes):>9}  {format_seconds(cost.total_s):>9} a window"
    waits = f"{100 * cost.exposed_s / cost.total_s:3.0f}% waiting to send"
    return f"{way:<78}  {figures}, {waits}; {plan.num_micro_batches} x {plan.micro_batch.value} rows"
