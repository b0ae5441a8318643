"""Energy of arms from records: joules per sample, joules to target, and ratios to another arm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimtab.core.energy_reading import NO_METER, WINDOW_S, Energy, MeterFacts, Provenance
from trimtab.core.record import RunRecord
from trimtab.core.serialization import from_jsonable
from trimtab.experiments.comparison import comparison_statistics
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, Ratio, RatioRow, Verdict
from trimtab.experiments.comparison.ratio_rows import row_unless_failed
from trimtab.experiments.comparison.verdicts import clear_side, ratio_in_words, too_few, without_control
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, ratio_interval, resolution

# Key in a header's detail: the description of the energy meter.
METER = "meter"
# Minimum fraction of an arm's seconds with measured energy, to extrapolate the remainder by mean power.
_KNOWN = 0.5


def meter_of(races: comparison_statistics.Races) -> MeterFacts:
    """Return the energy meter shared by all runs, or an absent meter if runs used different meters."""
    headers = (record.header for race in races.values() for record in race.values())
    found = [from_jsonable(MeterFacts, header.detail[METER]) for header in headers if header.detail.get(METER)]
    if len({(each.provenance, each.sources) for each in found}) > 1:
        return MeterFacts(Provenance.ABSENT, reason="runs were measured by different meters, which are not combined")
    return _as_all_say(found) if found else NO_METER


def _as_all_say(found: Sequence[MeterFacts]) -> MeterFacts:
    """Return the combined meter of several processes: median idle power, common limits, union of uncounted devices."""
    first, idle = found[0], [each.idle_w for each in found if each.idle_w is not None]
    return replace(
        first,
        idle_w=statistics.median(idle) if idle else None,
        uncounted=tuple(dict.fromkeys(what for each in found for what in each.uncounted)),
        limits=tuple(limit for limit in first.limits if all(limit in each.limits for each in found)),
    )


def of_planning(spent: Mapping[str, Energy], meter: MeterFacts) -> dict[str, Energy]:
    """Return planning energy by plan, limited to plans measured by the same meter as the paired runs."""
    counted = (meter.provenance, meter.sources)
    return {
        key: each
        for key, each in spent.items()
        if each.joules is not None and (each.provenance, each.sources) == counted
    }


def watts(record: RunRecord) -> float | None:
    """Return an arm's mean power over blocks with known energy, or None if these cover less than half of the time."""
    blocks = comparison_statistics.blocks(record)
    known = [block for block in blocks if math.isfinite(block.energy_j)]
    seconds, all_s = (math.fsum(block.seconds for block in each) for each in (known, blocks))
    return math.fsum(block.energy_j for block in known) / seconds if seconds > _KNOWN * all_s else None


def short_blocks(record: RunRecord) -> tuple[int, int]:
    """Return (blocks too short for the energy meter, all blocks) of an arm, without the first block."""
    found = comparison_statistics.blocks(record)
    found = found[1:] or found
    short = [block for block in found if math.isnan(block.energy_j) and block.seconds < WINDOW_S]
    return len(short), len(found)


def joules_to(record: RunRecord, seconds: float) -> float | None:
    """Return the energy of the first `seconds` of training, with unmeasured blocks at the arm's mean power."""
    power_w = watts(record)
    if power_w is None or not math.isfinite(seconds):
        return None
    joules, left_s = [], seconds
    for block in comparison_statistics.blocks(record):
        share = min(1.0, left_s / block.seconds) if block.seconds > 0 else 0.0
        whole = block.energy_j if math.isfinite(block.energy_j) else power_w * block.seconds
        joules.append(share * whole)
        left_s -= block.seconds
        if left_s <= 0:
            break
    return math.fsum(joules)


def energy_control(races: comparison_statistics.Races) -> Interval | None:
    """Return the A/A interval of the reference's energy, or None without a control or after a failure."""
    ratios = comparison_statistics.energy_ratios(races, "self", "reference")
    return ratio_interval(ratios) if len(ratios) > 1 and not comparison_statistics.failed_in(races, "self") else None


def energy_row(
    races: comparison_statistics.Races,
    arm: str,
    against: str,
    plan_kind: str,
    meter: MeterFacts,
    control: Interval | None,
) -> RatioRow | None:
    """Return the ratio of joules per sample (below 1 is better), or None without energy figures.

    Args:
        races: records by seed and arm.
        arm, against: names of the arms.
        plan_kind: "equivalent", "tuned" or "".
        meter: the meter of the runs, from `meter_of`.
        control: the A/A interval, from `energy_control`.
    """
    ratios = [] if meter.is_absent else comparison_statistics.energy_ratios(races, arm, against)
    if not ratios:
        return None
    ratio = comparison_statistics.as_ratio(ratio_interval(ratios), ratios)
    if meter.provenance is Provenance.MEASURED:
        verdict = energy_verdict(ratio, control, arm, against)
    else:
        sentence = "estimated from a given power, so the ratio only reflects the times"
        verdict = Verdict(NO_VERDICT, sentence, "energy.estimated")
    return row_unless_failed(RatioRow("energy", arm, against, plan_kind, ratio, verdict), races)


def energy_verdict(ratio: Ratio, control: Interval | None, arm: str, against: str) -> Verdict:
    """Return gain, harm or no gain; no verdict below five pairs of the ratio or of the A/A control."""
    found = f"{arm} takes {ratio_in_words(ratio)} the energy of {against}"
    if comparison_statistics.bounds(ratio) is None:
        return too_few(ratio)
    if control is None or control.n < MIN_PAIRS_FOR_VERDICT:
        return without_control(control, f"{ratio_in_words(ratio)} the energy")
    # Samples per joule are judged like samples per second: above 1 is better.
    side = clear_side(ratio.inverse, Interval(1 / control.mean, 1 / control.high, 1 / control.low, control.n))
    if isinstance(side, Verdict):
        return side
    if side:
        kind = "gain" if side > 0 else "harm"
        return Verdict(kind, found, f"energy.{kind}")
    sentence = f"{found}, not significant; the A/A control resolves {100 * resolution(control):.2g}%"
    return Verdict("no gain", sentence, "energy.not_significant")
