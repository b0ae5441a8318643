"""Choice of the ZeRO stage: the best plan within the limits per stage, and the best stage.

The single-process profile of a rank's part of the batch is converted to a rank at a stage by the difference between
traces; step times add communication (`trimtab.planner.communication_cost`). Plans with a dry run use measured values;
plans with the same way to shard are corrected by the dry run's prediction errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from trimtab.core.choice import Choice, MeasuredCost, Note, Rejected, Scalar
from trimtab.core.errors import InfeasibleError
from trimtab.core.hardware import LinkCalibration
from trimtab.core.objective import Budget, Objective
from trimtab.core.parallelism import StepShape
from trimtab.core.units import format_bytes, format_seconds
from trimtab.planner.communication_cost import WindowCost
from trimtab.planner.multi_rank_plan import (
    WAYS,
    WORTH,
    CompletedDryRuns,
    DryRunResult,
    RankPeakMemory,
    Way,
    at_stage,
    profile_for_stage,
    saying_missed,
    ways_to_send,
    with_fastest_communication,
)
from trimtab.planner.plan_choice import choose_each
from trimtab.planner.search_space import WORTH_A_RUN
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile

_MARKS = Plan.effects()
# Only reduction once per step: otherwise DeepSpeed's stage 2 sends all gradients of every micro-batch to all ranks.
DEEPSPEED_WAYS: tuple[Way, ...] = ((1, True), (2, True), (3, True))
# Excess of a rank's peak over its trace with gloo, whose threads release sent tensors some milliseconds late: up to
# 11.0 % with reduction once per step and 25.5 % with reduction after each micro-batch, as medians over steps of five
# models on two ranks (benchmarks/results/rank_memory-epyc-2core-2026-11-24.json); single steps took up to 26 and 42 %.
GLOO_ONCE, GLOO_EACH = 0.12, 0.26
# From benchmarks/results/published_ranks-2026-11-24.json: twenty pairs of world sizes.
_NOT_TOLD = (
    "Stragglers and network contention are not predicted: published jobs lost 4 percentage points more of their speed "
    "(median of 20)."
)
_SHARED = ("nothing", "optimizer state", "optimizer state and gradients", "optimizer state, gradients and parameters")


@dataclass(frozen=True)
class _Job:
    """Ranks to plan for; fields as in `choose_stage`."""

    ranks: int
    calibration: LinkCalibration
    shape_of: Callable[[Plan], StepShape | None]
    engine: str
    rehearsed: CompletedDryRuns = field(default_factory=CompletedDryRuns)


@dataclass(frozen=True)
class StageCost:
    """A way to shard the model, with its best plan and the cost of a step, predicted or measured.

    Args:
        way: ZeRO stage, and reduction once per step.
        margin: relative margin on the predicted peak before comparison with a limit.
        slower: ratio of measured to predicted step time of similar plans.
    """

    way: Way
    plan: Plan
    cost: WindowCost
    margin: float = 0.0
    ran: DryRunResult | None = None
    slower: float = 1.0

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory of a rank; None if unknown."""
        if self.ran is not None and self.ran.peaks:
            return self.ran.peak_bytes
        return None if self.plan.predicted is None else self.plan.predicted.peak_bytes

    @property
    def window_s(self) -> float:
        """Seconds of a step."""
        return self.slower * self.cost.total_s if self.ran is None else self.ran.window_s

    @property
    def limit_s(self) -> float:
        """Seconds of a step for comparison with a limit, with a margin if from a data sheet."""
        return self.window_s if self.ran else (1 + (self.plan.seconds_margin or 0.0)) * self.window_s

    @property
    def figures(self) -> str:
        """Time and memory in words."""
        return f"{format_seconds(self.window_s)} per step, {format_bytes(self.peak_bytes)} per rank"

    def __str__(self) -> str:
        return f"{self.figures}, measured in a dry run" if self.ran else self.figures


@dataclass(frozen=True)
class RefusedStage:
    """A way to shard the model that was refused."""

    way: Way
    refusal: str
    code: str

    def __str__(self) -> str:
        return self.refusal


Stages = tuple[StageCost | RefusedStage, ...]


def choose_stage(
    profile: Profile,
    traces: Sequence[RankPeakMemory],
    ranks: int,
    calibration: LinkCalibration,
    shape_of: Callable[[Plan], StepShape | None],
    engine: str = "torch",
    rehearsed: CompletedDryRuns | None = None,
) -> tuple[Plan, Stages]:
    """Return the plan for several ranks, and the cost of every way to shard the model.

    Args:
        profile: single-process profile of a rank's part of the batch; its own limits and weights apply.
        shape_of: returns the times and sizes of a plan's micro-batch for the communication model; None if unknown.

    Raises:
        InfeasibleError: no stage meets the limits.
    """
    job = _Job(ranks, calibration, shape_of, engine, rehearsed or CompletedDryRuns())
    each_way = [(way, _considered(profile, traces, job, way)) for way in ways_of(engine)]
    unit = next((costs[0] for _, costs in each_way if not isinstance(costs, RefusedStage)), None)
    found = tuple(
        costs if isinstance(costs, RefusedStage) else _best(way, costs, unit or costs[0], profile.objective)
        for way, costs in each_way
    )
    feasible = [each for each in found if isinstance(each, StageCost)]
    if not feasible:
        raise InfeasibleError(
            "budget",
            problem=f"No ZeRO stage on {ranks} ranks meets the budget. Stage {found[-1].way[0]}: {found[-1]}.",
            hint="Raise the budget, or use more ranks.",
        )
    scores = {each.way: _score(each, unit or feasible[0], profile.objective) for each in feasible}
    worth = (1 + WORTH) * min(scores.values())
    chosen = next(each for each in feasible if scores[each.way] <= worth)
    return _with_stage(chosen, found, calibration, is_limited=profile.budget.memory_bytes is not None), found


def ways_of(engine: str) -> tuple[Way, ...]:
    """Return the ways to shard the model that an engine supports."""
    return DEEPSPEED_WAYS if engine == "deepspeed" else WAYS


def held_with(device_kind: str, way: Way) -> float:
    """Return the relative margin on a rank's predicted peak before comparison with a limit."""
    if device_kind != "cpu" or way[0] < 2:
        return 0.0
    return GLOO_ONCE if way[1] else GLOO_EACH


def _considered(
    profile: Profile, traces: Sequence[RankPeakMemory], job: _Job, way: Way
) -> list[StageCost] | RefusedStage:
    """Return the costs of a way's plans that meet the limits, the largest micro-batches first; or a refusal.

    A plan per micro-batch size, because communication depends on their number; if memory is weighed, also the fastest.
    """
    try:
        costs = _within(profile, traces, job, way)
    except InfeasibleError as error:
        return RefusedStage(way, error.got, error.code)
    if not costs:
        return RefusedStage(way, "the step time is unknown", "time.unknown")
    if not (fitting := [each for each in costs if _misfit(each, profile, job) is None]):
        misfit = _misfit(costs[0], profile, job)
        assert misfit is not None
        return RefusedStage(way, misfit.text, misfit.code)
    costs = fitting
    if profile.objective.memory > 0 and not (costs := [each for each in costs if each.peak_bytes is not None]):
        return RefusedStage(way, "the peak memory is unknown, and the objective weights it", "memory.unknown")
    limit_s = math.inf if profile.budget.time is None else profile.budget.time
    if not (in_time := [each for each in costs if each.limit_s <= limit_s]):
        fastest = min(costs, key=lambda each: each.limit_s)
        margin = f" plus a margin of {100 * more:.2g}%" if (more := fastest.plan.seconds_margin) else ""
        text = f"{format_seconds(fastest.window_s)} per step{margin} is over the budget of {format_seconds(limit_s)}"
        return RefusedStage(way, text, "budget.time")
    return in_time


def _within(profile: Profile, traces: Sequence[RankPeakMemory], job: _Job, way: Way) -> list[StageCost]:
    """Return the costs of a way's plans predicted to meet the memory limit, largest first; InfeasibleError if none."""
    there = at_stage(profile_for_stage(profile, job.engine, way[0]), [trace for trace in traces if trace.way == way])
    margin, memory = held_with(profile.device.kind, way), profile.budget.memory_bytes
    beyond = job.rehearsed.beyond_bytes(way)
    limits: list[int | None] = [None if memory is None else math.floor(memory / (1 + margin))]
    # Plans with a dry run were found within one of these limits, and may meet it although other plans do not.
    if memory is not None:
        limits += [max(1, memory - more) for more in beyond]
    plans, refusal = list[Plan](), None
    for limit in dict.fromkeys(limits):
        for objective in dict.fromkeys((profile.objective, Objective())):
            try:
                plans += choose_each(there, objective, Budget(limit))
            except InfeasibleError as error:
                less = f" ({format_bytes(memory)} less a margin of {100 * margin:.0f}%)" if margin else ""
                less = f" ({format_bytes(memory)} less the prediction error of a dry run)" if beyond else less
                text = error.got + less * bool(memory)
                refusal = InfeasibleError(error.field, got=text, expected=error.expected, code=error.code)
    if refusal is not None and not plans:
        raise refusal
    plans.sort(key=lambda plan: plan.num_micro_batches)
    margin = 0.0 if beyond else margin
    return [cost for plan in plans if (cost := _cost(plan, job, way, margin)) is not None]


def _misfit(each: StageCost, profile: Profile, job: _Job) -> Note | None:
    """Return the reason for refusing a plan after dry runs, or None."""
    memory = profile.budget.memory_bytes
    if each.ran is None:
        more, held = max(job.rehearsed.beyond_bytes(each.way), default=0), each.peak_bytes
        if memory is not None and held is not None and held + more > memory:
            text = (
                f"{format_bytes(held)} plus the prediction error of a dry run, {format_bytes(more)}, is over the budget"
            )
            return Note("budget.memory", text)
        if job.rehearsed.only:
            return Note("dry_run.not_run", "no dry run of this plan")
        return job.rehearsed.refusal_of(each.plan)
    if each.ran.refusal:
        return Note("dry_run.failed", f"the dry run failed: {each.ran.refusal}")
    peak = each.ran.peak_bytes
    if peak is None or memory is None or peak <= memory:
        return None
    measured = f"{format_bytes(peak)} per rank, the median of {len(each.ran.peaks)} steps in a dry run,"
    return Note("budget.memory", f"{measured} is over the budget of {format_bytes(memory)}")


def _best(way: Way, costs: Sequence[StageCost], unit: StageCost, objective: Objective) -> StageCost | RefusedStage:
    """Return the best plan of a way; a nearly as good plan with fewer micro-batches is preferred."""
    scores = [_score(each, unit, objective) for each in costs]
    best = costs[next(i for i, score in enumerate(scores) if score <= min(scores) / WORTH_A_RUN)]
    if not way[1] and best.plan.num_micro_batches == 1:
        return RefusedStage(way, "a step of a single micro-batch is reduced once in any case", "ranks.one_micro_batch")
    return _with_size(best, costs)


def _score(each: StageCost, unit: StageCost, objective: Objective) -> float:
    """Return weighted time and memory relative to `unit`; memory must be known if weighed."""
    time = each.window_s / unit.window_s
    memory = (each.peak_bytes or 0) / max(1, unit.peak_bytes or 0) if objective.memory > 0 else 0.0
    return objective.time * time + objective.memory * memory


def _cost(plan: Plan, job: _Job, way: Way, margin: float) -> StageCost | None:
    shape = job.shape_of(plan)
    if shape is None or plan.predicted is None:
        return None
    peak, (stage, reduces_once) = plan.predicted.peak_bytes, way
    plan = plan.having(
        num_ranks=job.ranks,
        zero_stage=Choice(stage, "considered", _MARKS["zero_stage"]),
        reduces_once=replace(plan.reduces_once, value=reduces_once, changed=not reduces_once),
    )
    if job.engine == "deepspeed":
        reason = (
            "as requested. DeepSpeed was not traced: memory and time are predicted from torch's sharding, without "
            "overlap of communication with computation"
        )
        engine = Choice(job.engine, reason, _MARKS["engine"], changed=True, code="engine.requested")
        plan = plan.having(engine=engine)
    ran = job.rehearsed.of(plan)
    if ran is not None:
        plan = replace(plan, **{name: getattr(ran.plan, name) for name in ("reduce_dtype", "bucket_bytes")})
    elif job.engine == "torch" and not job.rehearsed.as_usual:
        plan = with_fastest_communication(plan, job.calibration, shape)
    bucket = None if plan.bucket_bytes.value is None else int(plan.bucket_bytes.value)
    sent = ways_to_send(plan, job.calibration, shape)[str(plan.reduce_dtype.value), bucket]
    cost = replace(sent.cost, exposed_s=sent.cost.exposed_s + sent.cast_s)
    measured = None if ran is None or ran.refusal else MeasuredCost(ran.window_s, ran.peak_bytes)
    bare = replace(
        plan, baseline=None, measured=measured, verified=None, timing_noise=None, front=(), stands_between=None
    )
    told = replace(bare, predicted=MeasuredCost(cost.total_s, peak))
    slower = 1.0 if ran is not None else job.rehearsed.slower(way)
    return StageCost(way, told, cost, margin, ran, slower)


def _with_size(best: StageCost, costs: Sequence[StageCost]) -> StageCost:
    """Return the best plan with the costs of the other micro-batch sizes as rejected alternatives."""
    size = best.plan.micro_batch
    rejected: dict[Scalar, Rejected] = {loser.value: loser for loser in size.rejected}
    others = {each.plan.micro_batch.value: each for each in reversed(costs)}
    rejected |= {value: Rejected(value, str(each), "predicted.worse") for value, each in others.items()}
    rejected.pop(size.value, None)
    with_sent = f"{size.reason}; with communication, {best}" if len(others) > 1 else size.reason
    chosen = replace(size, reason=with_sent, rejected=tuple(rejected.values()))
    return replace(best, plan=best.plan.having(micro_batch=chosen))


def _with_stage(chosen: StageCost, found: Stages, calibration: LinkCalibration, *, is_limited: bool) -> Plan:
    stage, reduces_once = chosen.way
    others = [each for each in found if each.way[0] != stage]
    rejected = tuple(_rejected(each.way[0], each) for each in others if each.way[1])
    waits = "predicted " if chosen.ran is not None else ""
    reason = f"{chosen.figures}, including {waits}{format_seconds(chosen.cost.exposed_s)} waiting for communication"
    link = f"over {calibration.link.name}"
    if chosen.ran is not None:
        link += f"; measured in a dry run: {saying_missed(chosen.plan, chosen.ran)}"
    elif chosen.margin and is_limited:
        margin = f"a margin of {100 * chosen.margin:.0f}%"
        link += f"; {margin} is added before comparison with the limit, because gloo releases sent tensors late"
    same = [each for each in found if each.way[0] == stage and each.way != chosen.way]
    once = tuple(_rejected(each.way[1], each) for each in same)
    code = "predicted.best" if chosen.ran is None else "dry_run.best"
    best = Choice(stage, f"{reason}, {link}", _MARKS["zero_stage"], changed=stage > 0, rejected=rejected, code=code)
    plan = chosen.plan.having(zero_stage=best)
    if stage < 2:
        return plan
    reduced = Choice(reduces_once, str(chosen), _MARKS["reduces_once"], not reduces_once, once, code)
    return plan.having(reduces_once=reduced)


def _rejected(value: Scalar, each: StageCost | RefusedStage) -> Rejected:
    return Rejected(value, str(each), each.code if isinstance(each, RefusedStage) else "predicted.worse")


def stages_text(found: Stages) -> str:
    """Return a table of the cost of every way to shard, with its limitations."""
    lines = (f"  {_line(each)}" for each in found)
    return "\n".join(["Cost of a rank at each ZeRO stage, predicted:", *lines, f"  {_NOT_TOLD}"])


def _line(each: StageCost | RefusedStage) -> str:
    stage, reduces_once = each.way
    once = "" if reduces_once else ", gradients reduced after each micro-batch"
    way = f"stage {stage}: shards {_SHARED[stage]}{once}"
    if isinstance(each, RefusedStage):
        return f"{way:<100}  {each}"
    cost, plan = each.cost, each.plan
    figures = f"{format_bytes(each.peak_bytes):>9}  {format_seconds(each.window_s):>9} per step"
    waits = f"{100 * cost.exposed_s / cost.total_s:3.0f}% waiting for communication"
    sent = "" if plan.reduce_dtype.value == "fp32" else f", gradients reduced in {plan.reduce_dtype.value}"
    return f"{way:<100}  {figures}, {waits}; {plan.num_micro_batches} x {plan.micro_batch.value} samples{sent}"
