"""Conversion of a single-process profile to the profile of a rank, by the difference between memory traces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.core.choice import is_recorded
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.planner.search_space import is_in_conflict
from trimtab.plans.profile import SAME_BYTES, Candidate, Profile, RecomputableBlocks, TracedCandidate, Trial
from trimtab.settings import OWN_PHASE

# ZeRO stage, and True if gradients are reduced once per window, as stages 0 and 1 always do.
Way = tuple[int, bool]
WAYS: tuple[Way, ...] = ((0, True), (1, True), (2, True), (2, False), (3, True), (3, False))


@dataclass(frozen=True)
class RankPeakMemory:
    """Peak memory of a rank as a function of the micro-batch size, traced without a run.

    Args:
        whole: peak of a window with a single micro-batch.
        sliced: peak of a window with several micro-batches.
    """

    candidate: Candidate
    way: Way
    whole: PeakMemoryModel
    sliced: PeakMemoryModel


_BUT = (*SAME_BYTES, "recompute", *OWN_PHASE)


def steps_shards_fused(optimizer: str) -> bool:
    """Return True if torch's FSDP2 has a fused optimizer step for shards; SGD has none (torch 2.13)."""
    return optimizer != "SGD"


def profile_for_stage(profile: Profile, engine: str, stage: int) -> Profile:
    """Return the part of a profile that is compatible with an engine's ZeRO stage.

    CUDA graphs are single-process. Shards have no memory layout and, with torch's SGD, no fused step; DeepSpeed casts
    precision itself. If nothing was tried and only a fused step was traced, the traced bytes stand for the plain step.
    """
    fuses = steps_shards_fused(profile.loop.optimizer) or profile.loop.is_fused
    if stage >= 2 and not fuses and not profile.trials:
        plain = (replace(each, candidate=each.candidate.having(fused_optimizer=False)) for each in profile.traces)
        profile = replace(profile, traces=tuple(plain))

    def goes(candidate: Candidate) -> bool:
        has_layout = candidate.memory_layout != "keep" and (stage >= 2 or engine == "deepspeed")
        fits = not has_layout and (stage < 2 or fuses or not candidate.fused_optimizer)
        if is_in_conflict(candidate, zero_stage=stage, engine=engine):
            return False
        return fits and not (engine == "deepspeed" and (candidate.precision == "fp16" or candidate.compiled))

    return replace(
        profile,
        trials=tuple(trial for trial in of_any_rank(profile).trials if goes(trial.candidate)),
        traces=tuple(traced for traced in profile.traces if goes(traced.candidate)),
        recomputables=tuple(each for each in profile.recomputables if goes(each.candidate)),
    )


def of_any_rank(profile: Profile) -> Profile:
    """Return a profile without CUDA graph trials, which are single-process."""
    return replace(profile, trials=tuple(t for t in profile.trials if not is_recorded(t.candidate.compiled)))


def at_stage(profile: Profile, traces: Sequence[RankPeakMemory]) -> Profile:
    """Return the profile of a rank: peaks are shifted by the difference between the rank's and the process's trace.

    Finals are left out, because they compared single-process loops; candidates without a trace get no peak.
    """

    def of(candidate: Candidate) -> tuple[TracedCandidate, RankPeakMemory] | None:
        alone = next((each for each in profile.traces if each.candidate.alike(candidate, *_BUT)), None)
        shared = next((each for each in traces if each.candidate.alike(candidate, *_BUT)), None)
        return None if alone is None or shared is None else (alone, shared)

    def difference(candidate: Candidate) -> int | None:
        pair = of(candidate)
        if pair is None:
            return None
        alone, shared = pair
        rows, is_whole = candidate.micro_batch, candidate.micro_batch >= profile.loop.batch_size
        model = alone.whole if is_whole else alone.sliced or alone.whole
        return (shared.whole if is_whole else shared.sliced).peak_bytes(rows) - model.peak_bytes(rows)

    def moved(trial: Trial) -> Trial:
        more = difference(trial.candidate)
        is_unknown = trial.peak_bytes is None or more is None
        return replace(trial, peak_bytes=None if is_unknown else (trial.peak_bytes or 0) + (more or 0))

    def shared(traced: TracedCandidate) -> TracedCandidate | None:
        pair = of(traced.candidate)
        if pair is None:
            return None
        return replace(traced, whole=pair[1].whole, sliced=traced.sliced and pair[1].sliced, step=None)

    def chained(each: RecomputableBlocks) -> RecomputableBlocks:
        wholly = difference(each.candidate.having(micro_batch=profile.loop.batch_size))
        slicing = difference(each.candidate.having(micro_batch=max(1, profile.loop.batch_size // 2)))
        if wholly is None or slicing is None or each.whole is None:
            return replace(each, whole=None, sliced=None, schedules=(), refusal=each.refusal or "a rank was not traced")
        sliced = None if each.sliced is None else each.sliced.holding(slicing)
        return replace(each, whole=each.whole.holding(wholly), sliced=sliced)

    return replace(
        profile,
        trials=tuple(moved(trial) for trial in profile.trials if trial.stage not in profile.finals),
        traces=tuple(found for found in map(shared, profile.traces) if found is not None),
        recomputables=tuple(map(chained, profile.recomputables)),
    )
