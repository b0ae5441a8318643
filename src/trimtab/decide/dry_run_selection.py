"""Dry-run results: measured steps on all ranks replace predictions of the plans that ran, and correct similar plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.core.dry_run_result import DryRunResult
from trimtab.core.plan import Choice, Plan, Rejected
from trimtab.core.rank_peak_memory import Way
from trimtab.core.sharding_settings import KEPT
from trimtab.core.units import format_bytes, format_seconds
from trimtab.decide.multi_rank_plan import WORTH
from trimtab.decide.statistics import (
    MIN_PAIRS_FOR_VERDICT,
    Interval,
    is_gain,
    paired_ratios,
    ratio_interval,
    resolution,
)

# Dry runs, refused ones included, after which a plan is chosen among those that ran, if any meets the limits.
MOST_REHEARSALS = 4
_SENDING = ("reduce_dtype", "bucket_bytes")


@dataclass(frozen=True)
class CompletedDryRuns:
    """Dry runs of a job, in order.

    Args:
        ran: dry runs.
        only: choose only among plans that ran.
        as_usual: plans that did not run send gradients by default.
    """

    ran: tuple[DryRunResult, ...] = ()
    only: bool = False
    as_usual: bool = False

    def of(self, plan: Plan) -> DryRunResult | None:
        """Return the dry run of a plan, with any way to send gradients; None if there is none."""
        return next((each for each in reversed(self.ran) if _alike(each.plan, plan)), None)

    def refusal_of(self, plan: Plan) -> str | None:
        """Return the reason for not running a plan, or None.

        A plan with the same way to shard and no higher predicted peak was refused in a dry run.
        """
        held = None if plan.predicted is None else plan.predicted.peak_bytes
        for each in self.ran:
            told = each.plan.predicted and each.plan.predicted.peak_bytes
            if each.refusal and way_of(each.plan) == way_of(plan) and held is not None and held >= (told or 0):
                return f"one that is told to hold no more was refused as rehearsed: {each.refusal}"
        return None

    def beyond_bytes(self, way: Way) -> tuple[int, ...]:
        """Return the distinct excesses of measured over predicted peaks for a way to shard.

        The excess is sent tensors released late: parameters and gradients, whose size does not depend on the
        micro-batch.
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
    names = (name for name in Plan.marks() if name not in _SENDING)
    same = all(getattr(one, name).value == getattr(other, name).value for name in names)
    return same and one.recompute_blocks == other.recompute_blocks


def by_default(plan: Plan) -> Plan | None:
    """Return the plan with torch's default way to send gradients; None if the plan already sends so."""
    changed = [name for name in _SENDING if getattr(plan, name).value != KEPT[name]]
    if not changed:
        return None
    return replace(
        plan, **{name: replace(getattr(plan, name), value=KEPT[name], changed=False, losers=()) for name in changed}
    )


def settled(changed: Plan, usual: Plan, block_s: Sequence[Sequence[float]]) -> Plan:
    """Return the plan to use for sending gradients: the changed plan if measurably better.

    Args:
        changed: plan with a different way to send gradients.
        usual: plan with the default way.
        block_s: seconds per step in interleaved blocks, paired by index: of `changed`, of `usual`, and of `usual` again
            as the A/A control.
    """
    theirs, ours, again = block_s
    effect, control = ratio_interval(paired_ratios(theirs, ours)), ratio_interval(paired_ratios(again, ours))
    told = f"rehearsed in {effect.n} pairs of blocks"
    if effect.n >= MIN_PAIRS_FOR_VERDICT:
        told += f": {effect.mean:.2f} times the speed of {_sent(usual)} (95% {effect.low:.2f} to {effect.high:.2f}; "
        told += f"{100 * resolution(control):.0f}% can be told from nothing)"
    why = _not_worth_it(effect, control)
    if not why:
        return _saying(changed, told)
    kept = _saying(usual, f"{_sent(changed)}, {told}: {why}")
    losers = {
        name: replace(getattr(kept, name), losers=(_loser(changed, usual, name, theirs, ours),))
        for name in _SENDING
        if getattr(changed, name).value != getattr(usual, name).value
    }
    return replace(kept, **losers)


def _not_worth_it(effect: Interval, control: Interval) -> str:
    """Return the reason why a change is not measurably worth it, or ""."""
    if effect.n < MIN_PAIRS_FOR_VERDICT:
        return f"too few for a verdict, which takes {MIN_PAIRS_FOR_VERDICT}"
    if effect.mean < 1 / (1 - WORTH):
        return f"not the {1 / (1 - WORTH):.2f} that a change is to be worth"
    return "" if is_gain(effect, control) else "not to be told from nothing"


def _loser(changed: Plan, usual: Plan, name: str, theirs: Sequence[float], ours: Sequence[float]) -> Rejected:
    value = getattr(changed, name).value
    one, other = format_seconds(sorted(theirs)[len(theirs) // 2]), format_seconds(sorted(ours)[len(ours) // 2])
    return Rejected(value, f"{one} a window as rehearsed, and {other} with {getattr(usual, name).value}")


def saying_unrehearsed(plan: Plan, why: str) -> Plan:
    """Return the plan with a note on why its changes to gradient communication were not tested in a dry run."""
    return _saying(plan, f"not rehearsed: {why}")


def _saying(plan: Plan, text: str) -> Plan:
    """Return the plan with a text appended to the reasons of its gradient communication choices."""
    stage = int(plan.zero_stage.value or 0)
    choices: dict[str, Choice] = {name: getattr(plan, name) for name in _SENDING[: 2 if stage < 2 else 1]}
    said = {name: replace(choice, reason=f"{choice.reason}; {text}") for name, choice in choices.items()}
    return replace(plan, **said)  # type: ignore[arg-type]


def _sent(plan: Plan) -> str:
    size = plan.bucket_bytes.value
    return f"{plan.reduce_dtype.value} in {'the usual buckets' if size is None else f'buckets of {size} bytes'}"


def saying_missed(plan: Plan, ran: DryRunResult) -> str:
    """Return the prediction errors of a plan, compared with its dry run, in words."""
    told = plan.predicted
    if told is None:
        return "nothing was told of it"
    found = [f"told {format_seconds(told.step_s)}, {_off(told.step_s, ran.window_s)}"]
    if told.peak_bytes is not None and ran.peak_bytes is not None:
        found.append(f"and {format_bytes(told.peak_bytes)}, {_off(told.peak_bytes, ran.peak_bytes)}")
        if len(ran.peaks) > 1:
            largest = max(ran.peaks)
            found.append(f"of the median of {len(ran.peaks)} windows, {_off(told.peak_bytes, largest)} of the largest")
    return " ".join(found)


def _off(told: float, taken: float) -> str:
    share = 100 * (told / taken - 1)
    return f"{abs(share):.0f}% too {'little' if share < 0 else 'much'}"
