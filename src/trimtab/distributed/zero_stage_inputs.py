"""Inputs for choosing a ZeRO stage: a profile of a rank's part of the batch, and memory traces of a rank."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trimtab.core.errors import DependencyError, InfeasibleError, ModelError
from trimtab.core.hardware import LinkCalibration
from trimtab.core.parallelism import StepShape
from trimtab.distributed.rank_memory import trace_ways
from trimtab.planner.multi_rank_plan import WAYS, CompletedDryRuns, RankPeakMemory, Way
from trimtab.planner.plan_choice import choose
from trimtab.planner.zero_stage import choose_stage
from trimtab.plans.plan import Plan
from trimtab.plans.profile import SAME_BYTES, Candidate, Profile, TracedCandidate
from trimtab.profiling.candidate_traces import MIN_SAMPLES, trace_here
from trimtab.profiling.communication_profile import step_shape
from trimtab.settings import OWN_PHASE
from trimtab.training.batch import BY_CONTAINERS, to_device
from trimtab.training.run import LossFn

RankLoop = tuple[nn.Module, Optimizer, LossFn, Any]  # of a rank, with its part of a batch on the model's device

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
