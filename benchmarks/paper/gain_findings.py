"""Findings on the source of a gain: from interleaved timed steps, and from thirds of training."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from benchmarks.paper.finding import Finding, Run
from trimtab.core.errors import FormatError
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, ThirdRow, Verdict
from trimtab.experiments.comparison.comparison_statistics import as_ratio
from trimtab.experiments.phase_attribution import MEMORY as MEMORY_BOUND
from trimtab.experiments.phase_attribution import shares
from trimtab.experiments.phase_result import PhaseResult

REFERENCE = "reference"
_UNPROVED = "laps of one process: no races show that the plan gains"
_NOT_FASTER = "its races do not show that it is faster"
_LAPPED = "equivalent_plan"  # The arm with phase timing.
_PARTS = {MEMORY_BOUND: "memory"}  # The name used in the paper's claims.


def gain_findings(gain: TimedGain | None, thirds: Sequence[ThirdRow], faster: Collection[str]) -> Iterator[Finding]:
    """Yield fractions of the saved time by phase, bound and third of training.

    Args:
        gain: the gain by phase, or None.
        thirds: comparison by thirds of training.
        faster: arms with a significant gain in paired runs and no failure. Phase timing covers a single seed with arms
            built once, and thirds cover only successful runs, so neither allows a verdict alone.
    """
    if gain is not None:
        yield from _shares(gain, _LAPPED in faster)
    for row in thirds:
        if row.against == REFERENCE and row.saved is not None:
            is_proved = row.arm in faster
            how = {"said": "" if is_proved else _NOT_FASTER, "part": row.third, "has_verdict": is_proved}
            yield Finding("gain_share", row.arm, REFERENCE, row.plan_kind, figure=row.saved, **how)


def _shares(gain: TimedGain, is_proved: bool) -> Iterator[Finding]:
    said = "; ".join(filter(None, (gain.on_ranks, "" if is_proved else _UNPROVED)))
    for each in shares(gain):
        figure = as_ratio(each.share, each.each)
        part = _PARTS.get(each.of, each.of)
        how = {"said": said, "part": part, "has_verdict": is_proved}
        yield Finding("gain_share", _LAPPED, REFERENCE, "equivalent", figure=figure, **how)


def of_phases(name: str, found: PhaseResult) -> Run:
    """Return the run of a phase table.

    Raises:
        FormatError: the table has no plan or several plans, or steps with zero or infinite time.
    """
    if len(found.gains) != 1:
        given, hint = f"{len(found.gains)} of them", "trimtab phases ONE --out FILE"
        raise FormatError("gains", got=given, expected="one plan's", hint=hint)
    (gain,) = found.gains
    laps = (*gain.reference.laps, *gain.plan.laps)
    if not all(0 < seconds < math.inf for lap in laps for seconds in (lap.plain_s, lap.clocked_s)):
        raise FormatError("gains: laps", got="a step that took no time, or for ever", expected="seconds above 0")
    clocked = " ".join(filter(None, (f"A step of {gain.task}", gain.on_ranks, "under a clock of its phases")))
    said = f"{clocked}: {gain.changes or 'the plan changes nothing'}."
    return Run(
        name,
        "phases",
        gain.task,
        gain.environment,
        Verdict(NO_VERDICT, said),
        tuple(gain_findings(gain, found.thirds[0] if found.thirds else (), faster=())),
        labels={"equivalent_plan": gain.changes or "the plan"},
        gain=gain,
    )
