"""What the ZeRO stage of ranks is chosen by: a profile of one rank's share, and traces of what a rank holds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trimtab.calibrate.step_shape import step_shape
from trimtab.calibrate.tracing import MIN_ROWS, trace_here
from trimtab.core.errors import DependencyError, InfeasibleError, ModelError
from trimtab.core.link import Calibration
from trimtab.core.parallelism import StepShape
from trimtab.core.plan import Plan
from trimtab.core.profile import Candidate, Profile, Traced
from trimtab.core.rank_trace import WAYS, RankTrace, Way
from trimtab.decide.planner import choose
from trimtab.decide.rehearsing import Rehearsed
from trimtab.decide.stages import choose_stage
from trimtab.distributed.rank_memory import trace_ways
from trimtab.runtime.batches import to_device
from trimtab.runtime.batching import BY_CONTAINERS
from trimtab.runtime.engine import LossFn

RankLoop = tuple[nn.Module, Optimizer, LossFn, Any]  # of one rank, with its share of a batch, on the model's device

NO_JOULES = "energy counts, and no trace tells what another stage takes"
ADAPTS = "a plan that adapts, or measures noise, is made for replicas"
_BUT = ("micro_batch", "allocator", "fused_optimizer")  # as what the stage is chosen by does


@dataclass(frozen=True)
class Share:
    """What rank 0 found of its share of a batch; the stage is chosen by it once the link is timed.

    Args:
        profile: of one process, its limits and weights with it. traces: of a rank at every stage. shape_of: returns a
            plan's step as communication sees it.
    """

    profile: Profile
    traces: tuple[RankTrace, ...]
    shape_of: Callable[[Plan], StepShape | None]

    def plan(self, ranks: int, calibration: Calibration, rehearsed: Rehearsed | None = None) -> Plan:
        """Return the plan of so many ranks.

        Args:
            rehearsed: what they ran of such plans.

        Raises:
            InfeasibleError: no stage meets the limits.
        """
        given = (self.profile, self.traces, ranks, calibration, self.shape_of)
        return choose_stage(*given, rehearsed=rehearsed)[0]


def share_of(profile: Profile, loop: RankLoop, progress: Callable[[str], None], *, adapts: bool = False) -> Share | str:
    """Return what this job's stage is chosen by, or why its ranks hold the whole model: "" where memory is ample.

    Nothing is traced unless memory is limited or weighed, or a window's seconds are limited, to which sending adds.

    Args:
        adapts: whether the plan is to change more than the maths allow, or to measure noise.
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
        return f"what a rank holds at another stage is not known: {error.given}"
    found = replace(found, profiling_s=found.profiling_s + time.perf_counter() - start)
    return Share(found, traces, functools.partial(step_shape, model, found))


def of_replicas(profile: Profile, why: str) -> Plan:
    """Return the plan of one process, for ranks that hold the whole model.

    Args:
        why: no other stage is weighed; "" where none was asked for.

    Raises:
        InfeasibleError: no settings meet the limits; says why there is no other stage.
    """
    try:
        return choose(profile, profile.objective, profile.budget)
    except InfeasibleError as error:
        given = f"{error.given}, on ranks that hold the whole model: {why}" if why else error.given
        raise InfeasibleError(error.field, given=given, expected=error.expected, way_out=error.way_out) from error


def with_traces(profile: Profile, loop: RankLoop, progress: Callable[[str], None]) -> Profile:
    """Return the profile with traces of all that ran and can be traced, to hold a rank's against.

    Raises:
        ModelError: a step cannot be traced.
    """
    traces = list[Traced]()
    for candidate in _unlike(trial.candidate for trial in profile.trials if trial.block_s):
        progress(f"tracing: {candidate.describe()}")
        traced = trace_here(*loop, candidate)
        traces += [] if traced is None else [traced]
    return replace(profile, traces=tuple(traces))


def traces_of_ranks(
    profile: Profile, loop: RankLoop, ranks: int, progress: Callable[[str], None], ways: Sequence[Way] = WAYS
) -> tuple[RankTrace, ...]:
    """Return what a rank of so many holds, of each candidate that is traced for one process.

    Args:
        ways: to share the model.

    Raises:
        ModelError: a step cannot be traced. DependencyError: a torch that has no group without peers.
    """
    traces = list[RankTrace]()
    for candidate in _unlike(traced.candidate for traced in profile.traces):
        progress(f"tracing {ranks} ranks: {candidate.describe()}")
        traces += trace_ways(*loop, candidate, ranks, ways=ways, counts_scratch=profile.device.kind == "cpu")
    if not traces:
        samples = BY_CONTAINERS.read(loop[3]).samples
        given = f"a step of {samples or 'an unknown number of'} rows that cannot be traced"
        raise ModelError("model", given=given, expected=f"one whose ranks can be: of {MIN_ROWS} rows at the least")
    return tuple(traces)


def _unlike(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Return those that differ in what a trace shows."""
    found: list[Candidate] = []
    for each in candidates:
        plain = replace(each, recompute=None)
        if not each.compiled and not any(plain.alike(other, *_BUT) for other in found):
            found.append(plain)
    return found
