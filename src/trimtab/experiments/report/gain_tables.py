"""Tables of a gain: by phase, by limiting resource, and by third of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from trimtab.core.step_phases import MEANINGS, TimedGain
from trimtab.experiments.comparison.comparison_result import Ratio, ThirdRow
from trimtab.experiments.phase_attribution import (
    BOUNDS,
    COMPUTE,
    MEMORY,
    UNATTRIBUTED,
    UNBOUND,
    WHOLE,
    Attribution,
    SavedTime,
    attribute,
    bound_seconds,
    is_distorted,
    of_the_roof,
)
from trimtab.experiments.phase_attribution import speedup as speedup_of
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.tables import Table, plan_kind_title
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval

_NAMES = {WHOLE: "whole step, without phase timing", UNATTRIBUTED: "overhead of phase timing (not attributed)"}
_SAVED = ("Reference", "Plan", "Saved", "95% interval", "Share of the gain")
_NO_INTERVAL, _NO_SHARE, _UNKNOWN = "none", "not reported", "unknown"
_NOT_APART = "No times by module: the model is compiled, or the task has a step function."
_DISTORTED = (
    "Phase timing makes a step wait longer for the CPU, so these phases differ from those of the untimed loops, and no "
    "shares are reported."
)


def phase_gain_table(gain: TimedGain) -> Table:
    """Return the seconds saved by phase of a step."""
    found = attribute(gain)
    rows = (*found.phases, found.unattributed, found.whole)
    return Table(
        "Seconds per batch saved by phase",
        ("Phase", *_SAVED),
        tuple((_NAMES.get(row.phase, row.phase), *_saved(row)) for row in rows),
        "No phases were measured.",
        f"Mean of {len(gain.plan.laps)} interleaved paired rounds with one seed and arms that are built once, so the "
        "intervals exclude the effect of memory layout. The rows add up to the last row. Shares are reported only "
        f"for a significant saving. {_clock(found)}",
        _SAVED,
    )


def _clock(found: Attribution) -> str:
    arms = (("reference", found.reference_clock), ("plan", found.plan_clock))
    costs = (
        f"{say.percent(each.mean - 1)} ({_between(each, _longer)}) of the step of the {name}" for name, each in arms
    )
    said = f"Overhead of phase timing: {', '.join(costs)}."
    return f"{said} {_DISTORTED}" if found.is_distorted else said


def _longer(ratio: float) -> str:
    return say.percent(ratio - 1)


def _saved(row: SavedTime) -> tuple[str, ...]:
    share = _NO_SHARE if row.share is None else say.share(row.share)
    shown = (say.signed_seconds(each) for each in (row.reference_s, row.plan_s, row.saved.mean))
    return *shown, _between(row.saved, say.signed_seconds), share


def _between(interval: Interval, words: Callable[[float], str]) -> str:
    if interval.n < MIN_PAIRS_FOR_VERDICT or not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        return _NO_INTERVAL
    return f"{words(interval.low)} to {words(interval.high)}"


def part_table(gain: TimedGain, *, folded: bool) -> Table:
    """Return the seconds saved in forward and backward by class of module."""
    rows = tuple((_part(row.phase), *_saved(row)) for row in attribute(gain).parts)
    note = (
        "Time of a module without its submodules. The backward of a module begins when the gradient of its output "
        "arrives; operations between two modules count for the later one."
    )
    return Table("By class of module", ("Module", *_SAVED), rows, _NOT_APART, note, _SAVED, folded=folded)


def _part(name: str) -> str:
    phase, _, part = name.partition(" ")
    return f"{phase}: {part or 'outside modules'}"


def bound_table(gain: TimedGain) -> Table:
    """Return the seconds of a step of both arms by limiting resource (compute, memory, communication, ...)."""
    columns, title = ("Bound by", "Reference", "Plan"), "Limiting resource"
    if is_distorted(gain):
        return Table(title, columns, (), f"Not reported. {_DISTORTED}", "", columns[1:])
    arms = [bound_seconds(gain.reference), bound_seconds(gain.plan)]
    rows = tuple((name, *(_of_step(arm, name) for arm in arms)) for name in _in_any(arms))
    return Table(title, columns, rows, "The roofline bounds are unknown.", _roofs(gain), columns[1:])


def _in_any(found: Iterable[Mapping[str, float]]) -> tuple[str, ...]:
    """Return the roofline bounds (compute, memory, ...) that any of the mappings contains, in display order."""
    present = {name for each in found for name in each}
    return tuple(name for name in BOUNDS if name in present)


def _is_unknown(found: Mapping[str, float], name: str) -> bool:
    """Return True if an arm's seconds of this bound are part of its seconds with an unknown bound."""
    return name in (COMPUTE, MEMORY) and UNBOUND in found and name not in found


def _of_step(found: Mapping[str, float], name: str) -> str:
    if _is_unknown(found, name):
        return _UNKNOWN
    seconds = found.get(name, 0.0)
    return f"{say.seconds(seconds)} ({say.share(seconds / math.fsum(found.values()))})"


def _roofs(gain: TimedGain) -> str:
    device = gain.device
    said = (
        "By roofline: each operator takes the time of its FLOP or of the bytes of its arguments and results, "
        f"whichever is longer at the peaks of {say.one_line(device.name)} ({say.one_line(device.source)}). The "
        "seconds of a phase are split in proportion to its operators' times."
    )
    for name, arm in (("reference", gain.reference), ("plan", gain.plan)):
        if found := of_the_roof(arm):
            shares = ", ".join(f"{phase} {say.share(share)}" for phase, share in found.items())
            said += f" Lower bound of the operators' time over the measured time of the {name}: {shares}."
    return said + " Above 100%, caches serve part of the bytes."


def gain_notes(gain: TimedGain) -> tuple[str, ...]:
    """Return notes on missing figures with reasons, and the meaning of the phases."""
    theirs, ours = set(gain.reference.notes), set(gain.plan.notes)
    told = (("both", theirs & ours), ("the reference", theirs - ours), ("the plan", ours - theirs))
    notes = (f"{whose}: {say.one_line(note)}" for whose, found in told for note in sorted(found))
    seen = [phase for phase in MEANINGS if phase in gain.reference.has or phase in gain.plan.has]
    return (*notes, "; ".join(f"{phase}: {MEANINGS[phase]}" for phase in seen))


def thirds_table(thirds: Sequence[ThirdRow], plan_kind: str) -> Table:
    """Return the gain in the early, middle and late third of training, for a kind of plan."""
    rows = [row for row in thirds if row.plan_kind == plan_kind]
    columns = ("Third", "Samples per second", "Progress", "Progress per second", "Fraction of the saving", "n")
    note = (
        "Thirds of each run by samples; the arm over the reference, above 1 is better, paired by seed, with the 95% "
        "interval. Progress: improvement of the held-out metric in the third, on a log scale for relative metrics. "
        "Fraction of the saving: part of the seconds saved by a full run over the same samples."
    )
    shown = tuple(_third(row) for row in rows)
    of = plan_kind_title(plan_kind) if plan_kind else "Paper recipe (P1)"
    return Table(f"Early, middle and late: {of}", columns, shown, "No run completed its budget.", note, columns[1:])


def _third(row: ThirdRow) -> tuple[str, ...]:
    ratios = (row.speed, row.progress, row.progress_per_s)
    n = next((str(ratio.n) for ratio in ratios if ratio is not None), "0")
    saved = say.UNMEASURED if row.saved is None else _figure(row.saved, say.share)
    return (row.third, *(_with_interval(ratio, row.why) for ratio in ratios), saved, n)


def _with_interval(ratio: Ratio | None, why: str) -> str:
    if ratio is None:
        return f"unknown: {say.one_line(why)}" if why else say.UNMEASURED
    return _figure(ratio, say.ratio)


def _figure(ratio: Ratio, words: Callable[[float], str]) -> str:
    return _beside(*say.estimate(ratio, words))


def _beside(value: str, interval: str) -> str:
    return value if interval == _NO_INTERVAL else f"{value} ({interval})"


def side_by_side(gains: Sequence[TimedGain]) -> Table:
    """Return tasks side by side: fractions of a step by phase and bound, and the saved time."""
    founds = [attribute(gain) for gain in gains]
    phases = [phase for phase in MEANINGS if any(row.phase == phase for found in founds for row in found.phases)]
    rows = [(phase, *(cell for found in founds for cell in _phase_cells(found, phase))) for phase in phases]
    bounds = [
        ({}, {}) if is_distorted(gain) else (bound_seconds(gain.reference), bound_seconds(gain.plan)) for gain in gains
    ]
    names = _in_any(each for pair in bounds for each in pair)
    rows += [(name, *(cell for pair in bounds for cell in _bound_cells(pair, name))) for name in names]
    rows.append(("speed-up", *(cell for gain in gains for cell in ("", _speedup_cell(gain), ""))))
    columns = [f"{_title(gain)}: {name}" for gain in gains for name in ("reference", "plan", "of the gain")]
    note = "Fractions of a step; then the phase's fraction of the seconds saved, if the saving is significant."
    return Table("Side by side", ("", *columns), tuple(rows), "No task was measured.", note, tuple(columns))


def _title(gain: TimedGain) -> str:
    return f"{say.one_line(gain.task)} {gain.on_ranks}".rstrip()


def _speedup_cell(gain: TimedGain) -> str:
    found = speedup_of(gain)
    return _beside(say.ratio(found.mean), _between(found, say.ratio))


def _phase_cells(found: Attribution, phase: str) -> tuple[str, str, str]:
    row = next((row for row in found.phases if row.phase == phase), None)
    if found.is_distorted:
        return _NO_SHARE, _NO_SHARE, _NO_SHARE
    if row is None:
        return "none", "none", ""
    wholes = [math.fsum(getattr(each, name) for each in found.phases) for name in ("reference_s", "plan_s")]
    share = _NO_SHARE if row.share is None else say.share(row.share)
    return say.share(row.reference_s / wholes[0]), say.share(row.plan_s / wholes[1]), share


def _bound_cells(pair: tuple[dict[str, float], dict[str, float]], name: str) -> tuple[str, str, str]:
    theirs, ours = (_bound_cell(each, name) for each in pair)
    return theirs, ours, ""


def _bound_cell(found: Mapping[str, float], name: str) -> str:
    if not found:
        return _NO_SHARE
    return _UNKNOWN if _is_unknown(found, name) else say.share(found.get(name, 0.0) / math.fsum(found.values()))
