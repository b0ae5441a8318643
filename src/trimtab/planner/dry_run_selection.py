"""Dry-run results: measured steps on all ranks replace predictions of the plans that ran, and correct similar plans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.core.choice import Choice, Note, Rejected
from trimtab.core.units import format_bytes, format_seconds
from trimtab.planner.multi_rank_plan import WORTH
from trimtab.planner.rank_profile import Way
from trimtab.planner.statistics import (
    MIN_PAIRS_FOR_VERDICT,
    Interval,
    is_gain,
    paired_ratios,
    ratio_interval,
    resolution,
)
from trimtab.plans.plan import Plan
from trimtab.settings.sharding import KEPT


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
        off = _off(told.peak_bytes, ran.peak_bytes)
        found.append(f"{format_bytes(told.peak_bytes)} ({off} for the median of {len(ran.peaks)} steps)")
    return " and ".join(found)


def _off(told: float, taken: float) -> str:
    share = 100 * (told / taken - 1)
    return f"{abs(share):.0f}% too {'low' if share < 0 else 'high'}"
