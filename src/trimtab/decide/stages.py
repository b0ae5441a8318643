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
from trimtab.core.parallelism import StepShape
from trimtab.core.plan import Choice, Measured, Plan, Rejected
from trimtab.core.profile import Profile
from trimtab.core.rank_trace import WAYS, RankTrace, Way
from trimtab.core.units import format_bytes, format_seconds
from trimtab.decide.communication import WindowCost
from trimtab.decide.planner import choose_each
from trimtab.decide.rank_profile import at_stage, taken
from trimtab.decide.ranks import WORTH, sending, ways_to_send
from trimtab.decide.space import WORTH_A_RUN

_MARKS = Plan.marks()
# DeepSpeed's, each reduced once a window: by itself its stage 2 sends all gradients of every micro-batch to all ranks.
DEEPSPEED_WAYS: tuple[Way, ...] = ((1, True), (2, True), (3, True))
# What a rank's shards took beyond their trace over gloo, whose threads let go of what they sent some milliseconds late:
# up to 11.0% reduced once a window and 25.5% reduced after each micro-batch, as medians over windows of five models on
# two ranks (benchmarks/results/rank_memory-epyc-2core-2026-11-24.json); single windows took up to 26 and 42%.
GLOO_ONCE, GLOO_EACH = 0.12, 0.26
# By benchmarks/results/published_ranks-2026-11-24.json: twenty pairs of numbers of ranks.
_NOT_TOLD = "no straggler and no busy network is in it: published jobs lost 4 points more of their speed (median of 20)"
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
    """A way to share the model, and what a window is predicted to take by the best plan that it has.

    Args:
        margin: by which its peak is raised before it is held against a limit.
    """

    way: Way
    plan: Plan
    cost: WindowCost
    margin: float = 0.0

    @property
    def peak_bytes(self) -> int | None:
        """Of a rank; None: not known."""
        return None if self.plan.predicted is None else self.plan.predicted.peak_bytes

    @property
    def limit_s(self) -> float:
        """Seconds of a window that are held against a limit: told by a data sheet, with a margin."""
        return (1 + (self.plan.seconds_margin or 0.0)) * self.cost.total_s

    def __str__(self) -> str:
        return f"{format_seconds(self.cost.total_s)} a window, {_bytes(self.peak_bytes)} a rank"


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
            given=f"limits that no ZeRO stage of {ranks} ranks meets; the last: {found[-1]}",
            expected="a budget that some stage meets, or more ranks",
        )
    scores = {each.way: _score(each, unit or feasible[0], profile.objective) for each in feasible}
    worth = (1 + WORTH) * min(scores.values())
    chosen = next(each for each in feasible if scores[each.way] <= worth)
    return _with_stage(chosen, found, calibration, is_limited=profile.budget.memory_bytes is not None), found


def ways_of(engine: str) -> tuple[Way, ...]:
    """Return the ways to share that are considered with an engine."""
    return DEEPSPEED_WAYS if engine == "deepspeed" else WAYS


def held_with(device_kind: str, way: Way) -> float:
    """Return by what share a rank's told peak is raised before it is held against a limit."""
    stage, reduces_once = way
    if device_kind != "cpu" or stage < 2:
        return 0.0
    return GLOO_ONCE if reduces_once else GLOO_EACH


def _considered(profile: Profile, traces: Sequence[RankTrace], job: _Job, way: Way) -> list[StageCost] | RefusedStage:
    """Return what the plans of a way take that meet the limits, of large micro-batches first; or why there is none.

    Of each size, as its window sends by how many it has; and where memory is weighed the fastest of each too, which a
    limit on time may leave alone.
    """
    there = at_stage(taken(profile, job.engine, way[0]), [trace for trace in traces if trace.way == way])
    margin, memory = held_with(profile.device.kind, way), profile.budget.memory_bytes
    limit = None if memory is None else math.floor(memory / (1 + margin))
    try:
        objectives = dict.fromkeys((profile.objective, Objective()))
        plans = [plan for objective in objectives for plan in choose_each(there, objective, Budget(limit))]
    except InfeasibleError as error:
        less = f" ({format_bytes(memory)}, less what {100 * margin:.0f}% on top may take)" if margin and memory else ""
        return RefusedStage(way, error.given + less)
    plans.sort(key=lambda plan: plan.num_micro_batches)
    costs = [cost for plan in plans if (cost := _cost(plan, job, way, margin)) is not None]
    if not costs:
        return RefusedStage(way, "the seconds of its step are not known")
    if profile.objective.memory > 0 and not (costs := [each for each in costs if each.peak_bytes is not None]):
        return RefusedStage(way, "its peak memory, which is weighed, is not known")
    limit_s = math.inf if profile.budget.time is None else profile.budget.time
    if not (in_time := [each for each in costs if each.limit_s <= limit_s]):
        fastest = min(costs, key=lambda each: each.limit_s)
        told = f", with {100 * more:.2g}% on top:" if (more := fastest.plan.seconds_margin) else ","
        return RefusedStage(
            way, f"{format_seconds(fastest.cost.total_s)} a window{told} over {format_seconds(limit_s)}"
        )
    return in_time


def _best(way: Way, costs: Sequence[StageCost], unit: StageCost, objective: Objective) -> StageCost | RefusedStage:
    """Return the best of a way, or who is as good to what is worth a run and splits less."""
    scores = [_score(each, unit, objective) for each in costs]
    best = costs[next(i for i, score in enumerate(scores) if score <= min(scores) / WORTH_A_RUN)]
    if not way[1] and best.plan.num_micro_batches == 1:
        return RefusedStage(way, "windows of one micro-batch are reduced once")
    return _with_size(best, costs)


def _score(each: StageCost, unit: StageCost, objective: Objective) -> float:
    """Return time and memory by their weights, in units of the first that fits; of a weighed memory both are known."""
    time = each.cost.total_s / unit.cost.total_s
    memory = (each.peak_bytes or 0) / max(1, unit.peak_bytes or 0) if objective.memory > 0 else 0.0
    return objective.time * time + objective.memory * memory


def _cost(plan: Plan, job: _Job, way: Way, margin: float) -> StageCost | None:
    """Return what a plan of one rank's share takes when it is shared; None where its seconds are not known."""
    shape = job.shape_of(plan)
    if shape is None or plan.predicted is None:
        return None
    peak, (stage, reduces_once) = plan.predicted.peak_bytes, way
    plan = replace(
        plan,
        num_ranks=job.ranks,
        zero_stage=Choice(stage, "as considered", _MARKS["zero_stage"]),
        reduces_once=replace(plan.reduces_once, value=reduces_once, changed=not reduces_once),
    )
    if job.engine == "deepspeed":
        reason = (
            "as asked; a rank's bytes and seconds are those of torch's sharding, with nothing sent beside the "
            "computation, as DeepSpeed is configured: of its own none were traced"
        )
        plan = replace(plan, engine=Choice(job.engine, reason, _MARKS["engine"], changed=True))
    plan, cost = _window(plan, job.calibration, shape)
    bare = replace(plan, baseline=None, measured=None, verified=None, front=(), stands_between=None)
    return StageCost(way, replace(bare, predicted=Measured(cost.total_s, peak)), cost, margin)


def _window(plan: Plan, calibration: Calibration, shape: StepShape) -> tuple[Plan, WindowCost]:
    """Return the plan with the way its gradients are sent, and what a window takes."""
    sent = sending(plan, calibration, shape) if plan.engine.value == "torch" else plan
    bucket = None if sent.bucket_bytes.value is None else int(sent.bucket_bytes.value)
    way = ways_to_send(sent, calibration, shape)[str(sent.reduce_dtype.value), bucket]
    return sent, replace(way.cost, exposed_s=way.cost.exposed_s + way.cast_s)


def _with_size(best: StageCost, costs: Sequence[StageCost]) -> StageCost:
    """Return it with what windows of other micro-batches would take, sent as they would be."""
    size = best.plan.micro_batch
    others = {each.plan.micro_batch.value: Rejected(each.plan.micro_batch.value, str(each)) for each in reversed(costs)}
    losers = {loser.value: loser for loser in size.losers} | others
    losers.pop(size.value, None)
    with_sent = f"{size.reason}; with what is sent, {best}" if len(others) > 1 else size.reason
    chosen = replace(size, reason=with_sent, losers=tuple(losers.values()))
    return replace(best, plan=replace(best.plan, micro_batch=chosen))


def _with_stage(chosen: StageCost, found: Stages, calibration: Calibration, *, is_limited: bool) -> Plan:
    stage, reduces_once = chosen.way
    others = [each for each in found if each.way[0] != stage]
    losers = tuple(Rejected(each.way[0], str(each)) for each in others if each.way[1])
    reason = f"{chosen}, of which communication is waited for {format_seconds(chosen.cost.exposed_s)}"
    link = f"over {calibration.link.name}"
    if chosen.margin and is_limited:
        link += (
            f"; held against the limit with {100 * chosen.margin:.0f}% on top, as gloo may let go late of what it sent"
        )
    same = [each for each in found if each.way[0] == stage and each.way != chosen.way]
    once = tuple(Rejected(each.way[1], str(each)) for each in same)
    plan = replace(
        chosen.plan,
        zero_stage=Choice(stage, f"{reason}, {link}", _MARKS["zero_stage"], changed=stage > 0, losers=losers),
    )
    if stage < 2:
        return plan
    return replace(plan, reduces_once=Choice(reduces_once, str(chosen), _MARKS["reduces_once"], not reduces_once, once))


def stages_text(found: Stages) -> str:
    """Return a table of what each way takes, and what is not in it."""
    return "\n".join(
        ["a rank at each ZeRO stage, predicted:", *(f"  {_line(each)}" for each in found), f"  {_NOT_TOLD}"]
    )


def _line(each: StageCost | RefusedStage) -> str:
    stage, reduces_once = each.way
    once = "" if reduces_once else ", reduced after each micro-batch"
    way = f"stage {stage}: shards {_SHARED[stage]}{once}"
    if isinstance(each, RefusedStage):
        return f"{way:<78}  {each}"
    cost, plan = each.cost, each.plan
    figures = f"{_bytes(each.peak_bytes):>9}  {format_seconds(cost.total_s):>9} a window"
    waits = f"{100 * cost.exposed_s / cost.total_s:3.0f}% waiting to send"
    sent = "" if plan.reduce_dtype.value == "fp32" else f", gradients sent in {plan.reduce_dtype.value}"
    return f"{way:<78}  {figures}, {waits}; {plan.num_micro_batches} x {plan.micro_batch.value} rows{sent}"


def _bytes(value: int | None) -> str:
    return "not known" if value is None else format_bytes(value)
