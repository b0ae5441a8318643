"""Candidates to trace for a target device, now or later from a recorded profile.

If memory is limited, blocks are traced as well, and their recomputation time is predicted from their operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from trimtab.core.memory_model import Operation, StepWork
from trimtab.planner.cost_model import CostModel, seconds_of
from trimtab.planner.search import chunk_candidates, mode_candidates, next_recomputables
from trimtab.plans.profile import SAME_BYTES, Candidate, Profile, RecomputableBlocks, TracedBlocks, TracedCandidate

Trace = Callable[[Sequence[Candidate]], Sequence[TracedCandidate]]
TraceBlocks = Callable[[Candidate], TracedBlocks | str]

# precision -> precision with the same operators and bytes, in other kernels
_TWINS = {"tf32": "fp32", "fp16": "bf16"}
RECORDED = ("fp32", "bf16")


def traced_for(profile: Profile, trace: Trace) -> Profile:
    """Return the profile with traces by `trace`: of each precision, and of the fastest with a chunked loss head."""

    def traced(profile: Profile, candidates: Sequence[Candidate]) -> Profile:
        """Trace candidates; precisions with the same operators share a trace."""
        apart = [c for c in candidates if twin_of(c) == c or twin_of(c) not in candidates]
        found = {each.candidate: each for each in trace(apart)}
        twins = ((c, found.get(c) or found.get(twin_of(c))) for c in candidates)
        traces = tuple(_as_twin(twin, c) for c, twin in twins if twin is not None)
        return replace(profile, traces=(*profile.traces, *traces))

    profile = traced(profile, modes(profile))
    for candidate in chunks_to_trace(profile):
        profile = traced(profile, [candidate])
    return profile


def with_blocks(profile: Profile, trace: TraceBlocks) -> Profile:
    """Return the profile with the blocks of candidates that need less memory; `trace` returns them, or a refusal."""
    wanted = next_recomputables(profile, None, profile.objective, profile.budget)
    found = tuple(_recomputable(profile, candidate, trace(candidate)) for candidate in wanted)
    return replace(profile, recomputables=(*profile.recomputables, *found))


def _recomputable(profile: Profile, candidate: Candidate, traced: TracedBlocks | str) -> RecomputableBlocks:
    # The import loads numpy, which plans without a memory limit do not need.
    from trimtab.planner.recompute_solver import by_shares

    step_s = CostModel(profile).predict(candidate).step_s
    if isinstance(traced, str) or not step_s:
        return RecomputableBlocks(
            candidate, refusal=traced if isinstance(traced, str) else "the step time could not be predicted"
        )
    forwards = [_chord(profile, candidate, operations) for operations in traced.forwards]
    kept, in_part = (_chord(profile, candidate, operations) for operations in (traced.kept, traced.in_part))

    def forward_s(index: int, rows: int) -> float:
        return forwards[index](rows)

    def part_s(index: int, rows: int) -> float:
        whole_s = sum(each(rows) for each in forwards)
        return max(0.0, in_part(rows) - kept(rows)) * forwards[index](rows) / whole_s if whole_s else 0.0

    whole, sliced = (chain.with_seconds(forward_s, part_s) for chain in (traced.whole, traced.sliced))
    schedules = by_shares(whole.at(profile.loop.batch_size))
    return RecomputableBlocks(candidate, traced.blocks, whole, sliced, step_s, schedules)


def _chord(profile: Profile, candidate: Candidate, operations: tuple[Operation, ...]) -> Callable[[int], float]:
    """Return a linear function of the micro-batch size for the seconds of operators: exact at one sample and at all.

    Never too small between: every operator takes at least a few microseconds.
    """
    more = profile.loop.batch_size
    one_s, all_s = (seconds_of(operations, profile.device, candidate.precision, rows) or 0.0 for rows in (1, more))
    return lambda rows: one_s + (all_s - one_s) * (rows - 1) / max(1, more - 1)


def modes(profile: Profile) -> list[Candidate]:
    """Return the precisions worth tracing, with a fused step; memory layouts do not differ in a data sheet."""
    device = profile.device
    found = [mode for mode in mode_candidates(profile) if mode.memory_layout == "keep"]
    # bf16 is as fast as fp16 and has the range of fp32
    if (device.peak("bf16") or 0.0) >= (device.peak("fp16") or 0.0) > 0:
        found = [mode for mode in found if mode.precision != "fp16" or profile.reference.precision == "fp16"]
    return [_fused(profile, mode) for mode in found]


def chunks_to_trace(profile: Profile) -> tuple[Candidate, ...]:
    """Return the chunked loss heads to trace for the fastest precision on a target device.

    Only the largest chunks, which read the head's weights least often, if memory is not weighed and the whole batch
    fits.
    """
    model, limit = CostModel(profile), profile.budget.memory_bytes
    whole = [mode.having(micro_batch=profile.loop.batch_size) for mode in model.modes]
    fastest = min(whole, key=lambda mode: model.predict(mode).step_s or math.inf, default=None)
    if fastest is None:
        return ()
    fits = limit is None or model.is_within(fastest, limit)
    chunked = chunk_candidates(profile, fastest)
    return chunked[:1] if fits and profile.objective.memory == 0 else chunked


def recorded_candidates(profile: Profile) -> Iterator[tuple[Candidate, ...]]:
    """Yield groups of candidates to trace for any later target device; a group differs only in precision."""
    bare = replace(profile, trials=())
    base = _fused(bare, bare.reference_candidate.having(allocator="keep"))
    whole = tuple(base.having(precision=precision) for precision in RECORDED)
    yield whole
    for chunked in chunk_candidates(bare, base):
        yield tuple(chunked.having(precision=precision) for precision in RECORDED)


def recorded_traces(profile: Profile) -> Trace:
    """Return a function that looks up recorded CUDA traces in the profile."""

    def trace(candidates: Sequence[Candidate]) -> list[TracedCandidate]:
        has = {each.candidate: each for each in profile.target_device_traces}
        found = [(c, has.get(c) or has.get(twin_of(c))) for c in candidates]
        return [_as_twin(each, c) for c, each in found if each is not None]

    return trace


def recorded_blocks(profile: Profile) -> TraceBlocks:
    """Return a function that looks up recorded CUDA blocks in the profile."""

    def trace(candidate: Candidate) -> TracedBlocks | str:
        both = (candidate, twin_of(candidate))
        found = (each for c in both for each in profile.target_device_blocks if each.candidate.alike(c, *SAME_BYTES))
        blocks = next(found, None)
        return "the profile has no trace of the blocks" if blocks is None else blocks_as_twin(blocks, candidate)

    return trace


def _fused(profile: Profile, candidate: Candidate) -> Candidate:
    return candidate.having(fused_optimizer=profile.loop.supports_fused or profile.loop.is_fused)


def _as_twin(traced: TracedCandidate, candidate: Candidate) -> TracedCandidate:
    """Return a trace as that of a candidate, in the precision traced or in the one with the same operators."""
    work = traced.work and StepWork(
        *(_in_kind(each, candidate) for each in (traced.work.micro_batch, traced.work.step))
    )
    return replace(traced, candidate=candidate, work=work)


def blocks_as_twin(traced: TracedBlocks, candidate: Candidate) -> TracedBlocks:
    """Return blocks as those of a candidate, in the precision traced or in the one with the same operators."""
    forwards = tuple(_in_kind(each, candidate) for each in traced.forwards)
    kept, in_part = (_in_kind(each, candidate) for each in (traced.kept, traced.in_part))
    return replace(traced, candidate=candidate, forwards=forwards, kept=kept, in_part=in_part)


def _in_kind(operations: tuple[Operation, ...], candidate: Candidate) -> tuple[Operation, ...]:
    """Return operators with half precisions replaced by the candidate's; a device may lack the peak of the other."""
    if candidate.precision not in ("bf16", "fp16"):
        return operations
    return tuple(
        replace(each, precision=candidate.precision) if each.precision in ("bf16", "fp16") else each
        for each in operations
    )


def twin_of(candidate: Candidate) -> Candidate:
    """Return the candidate in the precision that has the same operators, possibly unchanged."""
    return candidate.having(precision=_TWINS.get(candidate.precision, candidate.precision))
