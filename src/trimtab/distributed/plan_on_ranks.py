"""Planning on several ranks: rank 0 plans for its part of a batch, and all ranks time the link and do dry runs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from trimtab.core.errors import DependencyError, InfeasibleError, ModelError, ValueGivenError
from trimtab.core.hardware import LinkCalibration
from trimtab.core.parallelism import StepShape
from trimtab.core.serialization import from_json, to_json
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.dry_run import DryRuns, RankLoop
from trimtab.distributed.process_group import from_first
from trimtab.distributed.rank_memory import trace_ways
from trimtab.planner.multi_rank_plan import (
    MOST_REHEARSALS,
    WAYS,
    CompletedDryRuns,
    DryRunResult,
    RankPeakMemory,
    Way,
    by_default,
    for_replicas,
    saying_unrehearsed,
    with_fastest_communication,
)
from trimtab.planner.plan_choice import choose
from trimtab.planner.zero_stage import choose_stage
from trimtab.plans.plan import Plan
from trimtab.plans.profile import SAME_BYTES, Candidate, Profile, TracedCandidate
from trimtab.profiling.candidate_traces import MIN_SAMPLES, trace_here
from trimtab.profiling.communication_profile import step_shape
from trimtab.settings import OWN_PHASE
from trimtab.training.batch import BY_CONTAINERS, to_device

# Sent by rank 0 if the way to shard the model is chosen after the link is timed.
_TO_CHOOSE = ""


@dataclass(frozen=True)
class BroadcastPlan:
    """Plan sent by rank 0 to all ranks, as JSON.

    Args:
        shape: times and sizes of the plan's micro-batch; None if nothing was timed.
        kept: reason for not considering sharding; "" if sharding was not requested.
    """

    plan: Plan
    shape: StepShape | None = None
    kept: str = ""


@dataclass(frozen=True)
class _NextPlan:
    """Next plan for a dry run, or the final plan."""

    plan: Plan
    is_last: bool


def plan_together(
    make: Callable[[], BroadcastPlan | StageMeasurements],
    device: torch.device,
    rehearsal: Callable[[], DryRuns] | None = None,
) -> Plan:
    """Return the plan of a job, the same on every rank; a collective.

    Args:
        make: called on rank 0 only; returns a single-process plan for replicas of the model, or the inputs for choosing
            a way to shard the model.
        rehearsal: returns the dry run, called on all ranks before the first run; None: choose by predictions only.

    Raises:
        InfeasibleError: on rank 0, no plan meets the limits.
        RankError: rank 0 could not make a plan (on the remaining ranks), or a rank ended during a dry run.
    """
    ranks, shares = dist.get_world_size(), list[StageMeasurements]()

    def made() -> str:
        found = make()
        if isinstance(found, StageMeasurements):
            shares.append(found)
            return _TO_CHOOSE
        return to_json(replace(found, plan=for_replicas(found.plan, ranks, found.kept)))

    text = from_first(made)
    if text == _TO_CHOOSE:
        calibration = _timed(device)
        if isinstance(calibration, LinkCalibration) and rehearsal is not None:
            return _rehearsed(shares, ranks, calibration, rehearsal())

        def chosen() -> str:
            if isinstance(calibration, LinkCalibration):
                return to_json(shares[0].plan(ranks, calibration))
            plan = for_replicas(of_replicas(shares[0].profile, calibration), ranks, calibration)
            return to_json(_as_by_default(plan, calibration))

        return from_json(Plan, from_first(chosen))
    found = from_json(BroadcastPlan, text)
    if found.shape is None or found.plan.zero_stage.value != 0:
        return found.plan
    calibration = _timed(device)
    if not isinstance(calibration, LinkCalibration):
        return _as_by_default(found.plan, calibration)
    plan = with_fastest_communication(found.plan, calibration, found.shape)
    usual = by_default(plan)
    if usual is None or rehearsal is None:
        return plan
    refusal = (dry_run := rehearsal()).refusal()
    ran = None if refusal else dry_run.of(plan, counts_memory=False)
    if ran is None or ran.refusal:
        return saying_unrehearsed(usual, refusal or (ran.refusal if ran else ""))
    return replace(ran.plan, planning_s=plan.planning_s + ran.took_s)


def _rehearsed(
    shares: Sequence[StageMeasurements], ranks: int, calibration: LinkCalibration, rehearsal: DryRuns
) -> Plan:
    """Return the best plan by dry runs; rank 0 chooses the next plan for all ranks to run."""
    refusal, ran = rehearsal.refusal(), tuple[DryRunResult, ...]()

    def asked() -> str:
        found = _next_plan(shares[0], ranks, calibration, ran, refusal)
        spent = replace(found.plan, planning_s=found.plan.planning_s + sum(each.took_s for each in ran))
        return to_json(replace(found, plan=spent) if found.is_last else found)

    while not (next_one := from_json(_NextPlan, from_first(asked))).is_last:
        found, usual = rehearsal.of(next_one.plan, counts_memory=True), by_default(next_one.plan)
        if found.refusal and usual is not None:
            again = rehearsal.of(saying_unrehearsed(usual, found.refusal), counts_memory=True)
            # The prediction belongs to the refused plan, so it says nothing about this plan's speed.
            found = replace(again, slower=None, took_s=found.took_s + again.took_s)
        ran += (found,)
    return next_one.plan


def _next_plan(
    share: StageMeasurements, ranks: int, calibration: LinkCalibration, ran: tuple[DryRunResult, ...], refusal: str
) -> _NextPlan:
    """Return the next plan for a dry run, or the final plan."""
    if not refusal and len(ran) >= MOST_REHEARSALS:
        try:
            return _NextPlan(share.plan(ranks, calibration, CompletedDryRuns(ran, only=True)), is_last=True)
        except InfeasibleError:
            refusal = f"none of the first {len(ran)} plans stayed within the limits in a dry run, and no more are tried"
    found = CompletedDryRuns(ran, as_usual=bool(refusal))
    plan = share.plan(ranks, calibration, found)
    if not refusal:
        return _NextPlan(plan, is_last=found.of(plan) is not None)
    stage = replace(plan.zero_stage, reason=f"{plan.zero_stage.reason}; not tested in a dry run: {refusal}")
    return _NextPlan(saying_unrehearsed(plan, refusal).having(zero_stage=stage), is_last=True)


def _timed(device: torch.device) -> LinkCalibration | str:
    """Return the measured link, or the reason why it is unknown; the same on every rank."""
    try:
        return calibrate(device)
    except ValueGivenError as error:
        return f"the bandwidth between the ranks could not be measured ({str(error).rstrip('.')})"


def _as_by_default(plan: Plan, why: str) -> Plan:
    return plan.having(reduce_dtype=replace(plan.reduce_dtype, reason=f"torch's default, because {why}"))


NO_JOULES = "other ZeRO stages were not considered, because their energy cannot be predicted"
ADAPTS = "other ZeRO stages were not considered: a plan that adapts, or measures noise, needs replicas of the model"


@dataclass(frozen=True)
class StageMeasurements:
    """Rank 0's measurements for choosing the stage once the link is timed.

    Args:
        traces: memory traces of a rank at every stage.
        shape_of: returns the times and sizes of a plan's micro-batch for the communication model; None if unknown.
    """

    profile: Profile
    traces: tuple[RankPeakMemory, ...]
    shape_of: Callable[[Plan], StepShape | None]

    def plan(self, ranks: int, calibration: LinkCalibration, rehearsed: CompletedDryRuns | None = None) -> Plan:
        """Return the plan for several ranks; `InfeasibleError` if no stage meets the limits."""
        given = (self.profile, self.traces, ranks, calibration, self.shape_of)
        return choose_stage(*given, rehearsed=rehearsed)[0]


def share_of(
    profile: Profile, loop: RankLoop, progress: Callable[[str], None], *, adapts: bool = False
) -> StageMeasurements | str:
    """Return the inputs for choosing the stage, or the reason to replicate the model; "" if memory is ample.

    Traces are made only if memory is limited or weighed, or time per step is limited, because communication adds to it.

    Args:
        adapts: the plan also changes training settings, or measures noise.
    """
    if profile.budget.memory_bytes is None and profile.objective.memory == 0 and profile.budget.time is None:
        return ""
    if profile.objective.energy > 0 or profile.budget.energy is not None:
        return NO_JOULES
    if adapts:
        return ADAPTS
    start, (model, optimizer, loss_fn, batch) = time.perf_counter(), loop
    there = (model, optimizer, loss_fn, to_device(batch, next(model.parameters()).device))
    try:
        found = with_traces(profile, there, progress)
        traces = traces_of_ranks(found, there, dist.get_world_size(), progress)
    except (DependencyError, ModelError) as error:
        return f"other ZeRO stages were not considered, because their memory is unknown ({error.reason})"
    found = replace(found, profiling_s=found.profiling_s + time.perf_counter() - start)
    return StageMeasurements(found, traces, functools.partial(step_shape, model, found))


def of_replicas(profile: Profile, why: str) -> Plan:
    """Return a single-process plan for ranks that replicate the model; `InfeasibleError`, with `why`, if none fits.

    `why` is the reason for not considering sharding; "" if sharding was not requested.
    """
    try:
        return choose(profile, profile.objective, profile.budget)
    except InfeasibleError as error:
        if not why:
            raise
        problem = f"{str(error).removesuffix(error.hint).rstrip()} Each rank holds the whole model: {why}."
        how = {"got": error.got, "expected": error.expected, "hint": error.hint, "code": error.code}
        raise InfeasibleError(error.field, problem=problem, **how) from error


def with_traces(profile: Profile, loop: RankLoop, progress: Callable[[str], None]) -> Profile:
    """Return the profile with traces of all traceable candidates that ran, for comparison with a rank's traces.

    A trace applies no settings of `OWN_PHASE`, so candidates with another value than the loop's are left out.
    """
    own, traces = profile.reference_candidate, list[TracedCandidate]()
    ran = (trial.candidate for trial in profile.trials if trial.block_s)
    for candidate in _unlike(each for each in ran if not set(each.differences(own)) & set(OWN_PHASE)):
        progress(f"tracing: {candidate.describe()}")
        traced = trace_here(*loop, candidate)
        traces += [] if traced is None else [traced]
    return replace(profile, traces=tuple(traces))


def traces_of_ranks(
    profile: Profile, loop: RankLoop, ranks: int, progress: Callable[[str], None], ways: Sequence[Way] = WAYS
) -> tuple[RankPeakMemory, ...]:
    """Return a rank's memory traces per candidate traced in one process; `ModelError` if a step cannot be traced."""
    traces = list[RankPeakMemory]()
    for candidate in _unlike(traced.candidate for traced in profile.traces):
        progress(f"tracing {ranks} ranks: {candidate.describe()}")
        traces += trace_ways(*loop, candidate, ranks, ways=ways, counts_scratch=profile.device.kind == "cpu")
    if not traces:
        samples = BY_CONTAINERS.read(loop[3]).samples or "an unknown number of"
        raise ModelError(
            "model",
            problem=f"The memory of a rank cannot be traced with {samples} samples per rank.",
            hint=f"Use a batch with at least {MIN_SAMPLES} samples per rank.",
            code="batch.too_small_to_trace",
        )
    return tuple(traces)


def _unlike(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates with different traces."""
    found: list[Candidate] = []
    for each in candidates:
        plain = each.having(recompute=None)
        if not each.compiled and not any(plain.alike(other, *SAME_BYTES) for other in found):
            found.append(plain)
    return found
