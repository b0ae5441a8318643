"""Conversion of a single-process plan and profile to several ranks, and results of dry runs on them.

Predictions choose the gradient communication and the profile of a rank at a ZeRO stage; measured steps of a dry run
replace the predictions of the plans that ran, and correct similar plans.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from trimtab.core.choice import Choice, Note, Rejected, Scalar, is_recorded
from trimtab.core.hardware import LinkCalibration
from trimtab.core.memory_model import PeakMemoryModel
from trimtab.core.parallelism import Parallelism, StepShape
from trimtab.core.units import format_bytes, format_seconds
from trimtab.planner.communication_cost import WindowCost, bucket_sizes, window_s
from trimtab.planner.search_space import is_in_conflict
from trimtab.planner.statistics import (
    MIN_PAIRS_FOR_VERDICT,
    Interval,
    is_gain,
    paired_ratios,
    ratio_interval,
    resolution,
)
from trimtab.plans.plan import Plan, without_graphs
from trimtab.plans.profile import SAME_BYTES, Candidate, Profile, RecomputableBlocks, TracedCandidate, Trial
from trimtab.settings import OWN_PHASE
from trimtab.settings.sharding import KEPT

# Bucket sizes to consider, in bytes; None is torch's default.
BUCKETS = (None, 2**20, 2**22, 2**27)
# Steps are predicted and not run, so a smaller relative saving changes nothing.
WORTH = 0.05
_MARKS = Plan.effects()


class GradientCommunication(NamedTuple):
    """A way to send gradients, and its predicted cost."""

    reduce_dtype: str
    bucket_bytes: int | None
    cost: WindowCost
    cast_s: float

    @property
    def total_s(self) -> float:
        """Seconds of a step."""
        return self.cost.total_s + self.cast_s


def for_replicas(plan: Plan, num_ranks: int, why: str = "") -> Plan:
    """Return a plan of one rank's part of a batch for ranks with a full replica; a plan with a ZeRO stage is unchanged.

    `why` is the reason for not considering sharding; "" if sharding was not requested.
    """
    if plan.zero_stage.value is not None or num_ranks == 1:
        return plan
    reason = "DDP: every rank holds the whole model, and gradients are reduced once per step"
    reason += f"; {why}" if why else ""
    stage = Choice(0, reason, _MARKS["zero_stage"], code="ranks.replicated")
    single = without_graphs(plan, "communication between ranks is not captured in CUDA graphs")
    return single.having(num_ranks=num_ranks, zero_stage=stage)


def for_one_process(plan: Plan) -> Plan:
    """Return a multi-rank plan as a single-process plan, the inverse of `for_replicas`."""
    kept: dict[str, Any] = {
        name: Choice(value, "a single process", _MARKS[name], code="ranks.one_process")
        for name, value in {"zero_stage": None, **KEPT}.items()
    }
    return replace(plan, num_ranks=1, **kept)


def with_fastest_communication(plan: Plan, calibration: LinkCalibration, shape: StepShape) -> Plan:
    """Return the plan with the fastest predicted way to send gradients, if the saving justifies a change."""
    ways = ways_to_send(plan, calibration, shape)
    usual = ways["fp32", None]
    best = min(ways.values(), key=lambda way: (way.total_s, way.reduce_dtype != "fp32", way.bucket_bytes or 0))
    chosen = best if best.total_s < (1 - WORTH) * usual.total_s else usual
    before, after = format_seconds(usual.total_s), format_seconds(chosen.total_s)
    won = Note("predicted.best", f"a step is predicted to take {after} instead of {before}")
    if chosen is usual:
        text = f"no other dtype or bucket size is predicted to make a step {100 * WORTH:.0f}% shorter"
        won = Note("predicted.no_gain", text)
    link, size = calibration.link, format_bytes(sum(shape.block_bytes))
    gathered = " and gathered parameters" if int(plan.zero_stage.value or 0) >= 2 else ""
    traffic = (
        f"sending {size} of gradients{gathered} over {link.name} ({format_seconds(link.latency_s)} per hop, "
        f"{format_bytes(int(link.bytes_per_s))}/s) takes {format_seconds(usual.cost.communication_s)}; {won.text}"
    )
    plan = plan.having(reduce_dtype=_choice("reduce_dtype", chosen, ways, replace(won, text=traffic)))
    if int(plan.zero_stage.value or 0) >= 2:
        return plan
    return plan.having(bucket_bytes=_choice("bucket_bytes", chosen, ways, won))


def ways_to_send(
    plan: Plan, calibration: LinkCalibration, shape: StepShape
) -> Mapping[tuple[str, int | None], GradientCommunication]:
    """Return the cost of all ways to send gradients, by (reduce_dtype, bucket_bytes)."""
    stage, k, is_torch = int(plan.zero_stage.value or 0), plan.num_micro_batches, plan.engine.value == "torch"
    reduces_once, size = bool(plan.reduces_once.value), sum(shape.block_bytes)
    dtypes = ("fp32", "bf16") if is_torch else ("fp32",)
    found = {}
    for dtype, bucket in itertools.product(dtypes, BUCKETS if is_torch and stage < 2 else (None,)):
        how = Parallelism(plan.num_ranks, stage, dtype, bucket, overlaps=is_torch, reduces_once=reduces_once)
        cost = window_s(how, calibration.link, shape, k, overlap_share=calibration.overlap_share)
        # Casting all gradients to bf16 and back; replicas use a hook per bucket.
        hooks = len(bucket_sizes(size, bucket)) if stage < 2 else 0
        cast_s = calibration.cast_s_per_byte * size + calibration.hook_s * hooks
        casts = (1 if reduces_once else k) if dtype == "bf16" else 0
        found[dtype, bucket] = GradientCommunication(dtype, bucket, cost, casts * cast_s)
    return found


def _choice(
    name: str, chosen: GradientCommunication, ways: Mapping[tuple[str, int | None], GradientCommunication], why: Note
) -> Choice:
    value: Scalar = getattr(chosen, name)
    others: dict[Scalar, float] = {}
    for way in ways.values():
        other = getattr(way, name)
        if other != value:
            others[other] = min(way.total_s, others.get(other, way.total_s))
    rejected = tuple(
        Rejected(other, f"predicted at {format_seconds(seconds)} per step at best", "predicted.worse")
        for other, seconds in others.items()
    )
    changed = value != ("fp32" if name == "reduce_dtype" else None)
    return Choice(value, why.text, _MARKS[name], changed, rejected, why.code)


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
        if is_in_conflict(candidate, profile.loop.batch_size, zero_stage=stage, engine=engine):
            return False
        return fits and not (engine == "deepspeed" and (candidate.precision == "fp16" or candidate.compiled))

    return replace(
        profile,
        trials=tuple(trial for trial in of_any_rank(profile).trials if goes(trial.candidate)),
        traces=tuple(traced for traced in profile.traces if goes(traced.candidate)),
        recomputables=tuple(each for each in profile.recomputables if goes(each.candidate)),
        host_link=profile.host_link if stage < 2 else None,  # The weights gathered in a forward would be offloaded.
    )


def of_any_rank(profile: Profile) -> Profile:
    """Return a profile without trials valid for a single process only, such as of CUDA graphs."""

    def holds(candidate: Candidate) -> bool:
        is_single = is_in_conflict(candidate, profile.loop.batch_size, zero_stage=0, num_ranks=2)
        return not is_recorded(candidate.compiled) and not is_single

    return replace(profile, trials=tuple(trial for trial in profile.trials if holds(trial.candidate)))


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


@dataclass(frozen=True)
class DryRunResult:
    """Dry run of a plan: a few steps on all ranks before training; identical on every rank.

    Args:
        plan: the plan, with the gradient communication that the dry run selected.
        block_s: seconds per step on the slowest rank, by block of steps; () if it did not run.
        peaks: peak bytes of each measured step, on the rank with the largest peak; () if not measured.
        slower: ratio of measured to predicted seconds of the plan as first proposed; None if unknown.
        refusal: reason for not running, or "".
        code: stable identifier of the refusal, "dry_run.out_of_memory" or "dry_run.failed"; "" if the plan ran.
    """

    plan: Plan
    block_s: tuple[float, ...] = ()
    peaks: tuple[int, ...] = ()
    slower: float | None = None
    refusal: str = ""
    took_s: float = 0.0
    code: str = ""

    @property
    def window_s(self) -> float:
        """Median seconds per step."""
        return statistics.median(self.block_s)

    @property
    def peak_bytes(self) -> int | None:
        """Median peak of the measured steps; None if not measured. The maximum is not reproducible over gloo."""
        return statistics.median_high(self.peaks) if self.peaks else None


# Dry runs, refused ones included, after which a plan is chosen among those that ran, if any meets the limits.
MOST_REHEARSALS = 4
_SENDING = ("reduce_dtype", "bucket_bytes")


@dataclass(frozen=True)
class CompletedDryRuns:
    """Dry runs of a job, in order.

    Args:
        only: choose only among plans that ran.
        as_usual: plans that did not run send gradients by default.
    """

    ran: tuple[DryRunResult, ...] = ()
    only: bool = False
    as_usual: bool = False

    def of(self, plan: Plan) -> DryRunResult | None:
        """Return the dry run of a plan, with any way to send gradients; None if there is none."""
        return next((each for each in reversed(self.ran) if _alike(each.plan, plan)), None)

    def refusal_of(self, plan: Plan) -> Note | None:
        """Return the reason for not running a plan, or None.

        A plan with the same way to shard and no higher predicted peak was refused in a dry run.
        """
        held = None if plan.predicted is None else plan.predicted.peak_bytes
        for each in self.ran:
            told = each.plan.predicted and each.plan.predicted.peak_bytes
            if each.refusal and way_of(each.plan) == way_of(plan) and held is not None and held >= (told or 0):
                text = f"a plan with no more predicted memory failed in its dry run: {each.refusal}"
                return Note("dry_run.failed", text)
        return None

    def beyond_bytes(self, way: Way) -> tuple[int, ...]:
        """Return the distinct excesses of measured over predicted peaks for a way to shard.

        They are sent tensors released late, whose size does not depend on the micro-batch.
        """
        found = dict.fromkeys(
            each.peak_bytes - each.plan.predicted.peak_bytes
            for each in self._that_ran(way)
            if each.peak_bytes is not None and each.plan.predicted and each.plan.predicted.peak_bytes is not None
        )
        return tuple(found)

    def slower(self, way: Way) -> float:
        """Return the ratio of measured to predicted step time for a way to shard.

        From the last dry run of the same way, or otherwise of the same engine (stages 0 and 1, or stages 2 and 3),
        because predictions exclude an engine's own host time. For an engine without a dry run, the smallest known
        ratio: ranks that compete for memory and cores slow every engine. 1 without dry runs.
        """
        of_engine = [each for each in self.ran if way_of(each.plan)[0] // 2 == way[0] // 2]
        for like in (self._that_ran(way), of_engine):
            if found := [each.slower for each in like if each.slower is not None]:
                return found[-1]
        return min((each.slower for each in self.ran if each.slower is not None), default=1.0)

    def _that_ran(self, way: Way) -> list[DryRunResult]:
        return [each for each in self.ran if each.block_s and way_of(each.plan) == way]


def way_of(plan: Plan) -> Way:
    """Return a plan's way to shard the model: ZeRO stage, and reduction once per step."""
    return int(plan.zero_stage.value or 0), bool(plan.reduces_once.value)


def _alike(one: Plan, other: Plan) -> bool:
    names = (name for name in Plan.effects() if name not in _SENDING)
    same = all(getattr(one, name).value == getattr(other, name).value for name in names)
    return same and one.recompute_blocks == other.recompute_blocks


def by_default(plan: Plan) -> Plan | None:
    """Return the plan with torch's default way to send gradients; None if the plan already sends so."""
    changed = [name for name in _SENDING if getattr(plan, name).value != KEPT[name]]
    if not changed:
        return None
    return replace(
        plan, **{name: replace(getattr(plan, name), value=KEPT[name], changed=False, rejected=()) for name in changed}
    )


def plan_for_gradients(changed: Plan, usual: Plan, block_s: Sequence[Sequence[float]]) -> Plan:
    """Return the plan to use for sending gradients: the changed plan if measurably better.

    `block_s` are seconds per step in interleaved blocks: of `changed`, of `usual`, and of `usual` again (A/A control).
    """
    theirs, ours, again = block_s
    effect, control = ratio_interval(paired_ratios(theirs, ours)), ratio_interval(paired_ratios(again, ours))
    measured = f"dry run of {effect.n} pairs of blocks"
    if effect.n >= MIN_PAIRS_FOR_VERDICT:
        measured += f": {effect.mean:.2f}x the speed of {_sent(usual)} (95% {effect.low:.2f} to {effect.high:.2f}; the "
        measured += f"A/A control resolves gains above {100 * resolution(control):.0f}%)"
    why = _not_worth_it(effect, control)
    if why is None:
        return _with_finding(changed, Note("dry_run.faster", measured))
    kept = _with_finding(usual, Note(why.code, f"{_sent(changed)} was rejected, {why.text}: {measured}"))
    one, other = (format_seconds(statistics.median_high(each)) for each in (theirs, ours))
    rejected = dict[str, Choice]()
    for name in _SENDING:
        value, default = getattr(changed, name).value, getattr(usual, name).value
        if value != default:
            text = f"{one} per step in the dry run, and {other} with {default}"
            rejected[name] = replace(getattr(kept, name), rejected=(Rejected(value, text, "dry_run.no_gain"),))
    return replace(kept, **rejected)  # type: ignore[arg-type]


def _not_worth_it(effect: Interval, control: Interval) -> Note | None:
    """Return the reason why a change is not measurably worth it, or None."""
    if effect.n < MIN_PAIRS_FOR_VERDICT:
        return Note("dry_run.too_few_pairs", f"because a verdict needs {MIN_PAIRS_FOR_VERDICT} pairs")
    if effect.mean < 1 / (1 - WORTH):
        return Note("dry_run.small_gain", f"because the gain is below {1 / (1 - WORTH):.2f}x")
    return None if is_gain(effect, control) else Note("dry_run.not_significant", "because the gain is not significant")


def saying_unrehearsed(plan: Plan, why: str) -> Plan:
    """Return the plan with a note on why its changes to gradient communication were not tested in a dry run."""
    return _with_finding(plan, Note("dry_run.not_run", f"not tested in a dry run: {why}"))


def _with_finding(plan: Plan, found: Note) -> Plan:
    """Return the plan with a finding appended to the reasons of its gradient communication choices."""
    stage = int(plan.zero_stage.value or 0)
    choices: dict[str, Choice] = {name: getattr(plan, name) for name in _SENDING[: 2 if stage < 2 else 1]}
    changed = {
        name: replace(choice, reason=f"{choice.reason}; {found.text}", code=found.code)
        for name, choice in choices.items()
    }
    return replace(plan, **changed)  # type: ignore[arg-type]


def _sent(plan: Plan) -> str:
    size = plan.bucket_bytes.value
    return f"{plan.reduce_dtype.value} in buckets of {'the default size' if size is None else f'{size} bytes'}"


def saying_missed(plan: Plan, ran: DryRunResult) -> str:
    """Return the prediction errors of a plan, compared with its dry run, in words."""
    told = plan.predicted
    if told is None:
        return "nothing was predicted"
    found = [f"predicted {format_seconds(told.step_s)} ({_off(told.step_s, ran.window_s)})"]
    if told.peak_bytes is not None and ran.peak_bytes is not None:
        off = f"{_off(told.peak_bytes, ran.peak_bytes)} for the median of {len(ran.peaks)} steps"
        if len(ran.peaks) > 1:
            off += f", {_off(told.peak_bytes, max(ran.peaks))} for the largest"
        found.append(f"{format_bytes(told.peak_bytes)} ({off})")
    return " and ".join(found)


def _off(told: float, taken: float) -> str:
    share = 100 * (told / taken - 1)
    return f"{abs(share):.0f}% too {'low' if share < 0 else 'high'}"
