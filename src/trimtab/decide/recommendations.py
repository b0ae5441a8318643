"""Recommendations for changes that trimtab cannot apply itself."""

from __future__ import annotations

import math
from collections.abc import Iterator

from trimtab.core.plan import MeasuredCost
from trimtab.core.profile import Candidate, Profile
from trimtab.core.units import format_bytes
from trimtab.decide.statistics import resolution
from trimtab.decide.trial_statistics import control_interval, speed_ratio

# Least fractions worth a recommendation. WORTH_ADVICE: of step time (waiting for data), peak memory (attention scores)
# or batch elements. WORTH_PADDING: of step time. WORTH_PIECES: of reserved memory.
WORTH_ADVICE, WORTH_PADDING, WORTH_PIECES = 0.05, 0.01, 0.1
# Resolution of the A/A control above which the machine counts as busy; least speed of a rival worth another look.
BUSY, WORTH_ANOTHER_LOOK = 0.1, 1.05
MULTIPLE = 64  # Matrix units and their kernels are fastest at sizes that are multiples of this.


def padded(words: int) -> int:
    """Return the vocabulary size rounded up to a multiple of `MULTIPLE`."""
    return -(-words // MULTIPLE) * MULTIPLE


def advice_of(
    profile: Profile, reference: MeasuredCost | None, chosen: MeasuredCost | None, winner: Candidate
) -> tuple[str, ...]:
    """Return the recommendations, with measured gains if available.

    Args:
        profile: measurements of the loop.
        reference: cost of a step of the unchanged loop.
        chosen: cost of a planned step.
        winner: planned candidate.
    """
    found = (*_noise(profile, winner), *_data(profile), *_attention(profile, reference), *_vocabulary(profile, chosen))
    return (*found, *_pieces(profile, winner), *_power_limit(profile))


def _noise(profile: Profile, winner: Candidate) -> Iterator[str]:
    """Recommend planning again if timing was noisy and a rival was faster on average, but not significantly."""
    if not profile.finals or winner != profile.reference_candidate:
        return
    stage = profile.finals[-1]
    reference, *others = profile.stage(stage)
    apart = resolution(control_interval(profile, stage))
    rivals = [trial for trial in others if not trial.control and trial.block_s and reference.block_s]
    fastest = max((speed_ratio(trial, reference).mean for trial in rivals), default=1.0)
    if math.isfinite(apart) and apart > BUSY and fastest > WORTH_ANOTHER_LOOK:
        yield (
            f"the machine was busy: in trials the loop was up to {100 * apart:.0f}% from itself, and {fastest:.2f}x "
            "its speed, which a rival had on average, cannot be told from that: plan again while nothing else runs"
        )


def _data(profile: Profile) -> Iterator[str]:
    longest = profile.loop.longest or 0.0
    if longest > 1 + WORTH_ADVICE:
        yield (
            f"a batch that was drawn has {longest:.2f} times the elements of the one that all was measured on: plan "
            "with longest_batch, or time and memory are those of a shorter one"
        )
    data, whole = profile.phases_s.get("data", 0.0), sum(profile.phases_s.values())
    if whole > 0 and data / whole > WORTH_ADVICE:
        share = f"{100 * data / whole:.0f}%"
        yield f"the step waits {share} of its time for data: more loader workers, or pinned memory on a GPU"


def _attention(profile: Profile, reference: MeasuredCost | None) -> Iterator[str]:
    scores, peak = profile.loop.scores_bytes, reference and reference.peak_bytes
    if peak and scores > WORTH_ADVICE * peak:
        kept = f"{format_bytes(scores)}, {100 * scores / peak:.0f}% of its peak"
        yield f"attention is written out and keeps its scores, {kept}: scaled_dot_product_attention of torch keeps none"


def _pieces(profile: Profile, winner: Candidate) -> Iterator[str]:
    """Recommend expandable segments if much reserved memory of the winner lies in unused pieces."""
    known = [t for t in profile.trials if t.candidate == winner and t.peak_bytes and t.unused_bytes is not None]
    unused, whole = (known[-1].unused_bytes or 0, known[-1].peak_bytes or 1) if known else (0, 1)
    if unused > WORTH_PIECES * whole:
        size = f"{format_bytes(unused)}, {100 * unused / whole:.0f}% of what a step reserves"
        yield f"{size}, lies in pieces that no tensor is in: PYTORCH_ALLOC_CONF=expandable_segments:True joins them"


def _power_limit(profile: Profile) -> Iterator[str]:
    """Recommend a lower power limit if energy is weighed. Only the machine's owner may set it, never trimtab."""
    if profile.objective.energy == 0 and profile.budget.energy is None:
        return
    for limit in profile.meter.limits:
        lowest = "" if limit.lowest_w is None else f" down to {limit.lowest_w:.0f} W"
        settable = limit.lowest_w is None or limit.lowest_w < limit.watts
        if settable:
            yield (
                f"{limit.device} may draw {limit.watts:.0f} W, and its owner may allow it less{lowest}: fewer joules a "
                "step, mostly, for more seconds; plan again under it, as it was not tried"
            )


def _vocabulary(profile: Profile, chosen: MeasuredCost | None) -> Iterator[str]:
    logits, saves_s = profile.loop.logits, profile.loop.padding_saves_s or 0.0
    if logits and chosen and saves_s > WORTH_PADDING * chosen.step_s:
        words, share = logits[1], f"{100 * saves_s / chosen.step_s:.1f}%"
        yield (
            f"the vocabulary has {words:,} words: padded to a multiple of {MULTIPLE}, {padded(words):,}, the head's "
            f"products alone were {share} of a step faster, by a few hundred tokens of it"
        )
