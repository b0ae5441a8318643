"""Findings of where a gain comes from: of laps under a clock, and of the thirds of races."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trimtab.core.errors import FormatError
from trimtab.core.phases import Gain
from trimtab.decide.attribution import MEMORY as MEMORY_BOUND
from trimtab.decide.attribution import shares
from trimtab.experiments.comparison.result import ThirdRow, Verdict
from trimtab.experiments.comparison.stats import as_ratio
from trimtab.experiments.evaluation.result import Finding, Run
from trimtab.experiments.phase_page import PhasePage

REFERENCE = "reference"
_UNPROVED = "laps of one process: no races show that the plan gains"
_PARTS = {MEMORY_BOUND: "memory"}  # as the paper's claims name it


def gain_findings(gain: Gain | None, thirds: Sequence[ThirdRow], *, is_proved: bool) -> Iterator[Finding]:
    """Yield shares of what a step saves by phase and bound, where it was clocked, and of a run by third.

    Args:
        is_proved: whether races have shown that the plan gains. Laps are of one seed and of arms that are built once,
            and have no control: alone they allow no verdict.
    """
    if gain is not None:
        yield from _shares(gain, is_proved)
    for row in thirds:
        if row.against == REFERENCE and row.saved is not None:
            yield Finding("gain_share", row.arm, REFERENCE, row.tier, figure=row.saved, part=row.third)


def _shares(gain: Gain, is_proved: bool) -> Iterator[Finding]:
    said = "; ".join(filter(None, (gain.on_ranks, "" if is_proved else _UNPROVED)))
    for each in shares(gain):
        figure = as_ratio(each.share, each.each)
        part = _PARTS.get(each.of, each.of)
        how = {"said": said, "part": part, "has_verdict": is_proved}
        yield Finding("gain_share", "plan_S", REFERENCE, "S", figure=figure, **how)


def of_phases(name: str, found: PhasePage) -> Run:
    """Return what laps under a clock show.

    Raises:
        FormatError: they are of several plans, or none; or of steps that took no time.
    """
    if len(found.gains) != 1:
        given, way_out = f"{len(found.gains)} of them", "trimtab phases ONE --out FILE"
        raise FormatError("gains", given=given, expected="one plan's", way_out=way_out)
    (gain,) = found.gains
    laps = (*gain.reference.laps, *gain.plan.laps)
    if not all(0 < seconds < math.inf for lap in laps for seconds in (lap.plain_s, lap.clocked_s)):
        raise FormatError("gains: laps", given="a step that took no time, or for ever", expected="seconds above 0")
    clocked = " ".join(filter(None, (f"A step of {gain.task}", gain.on_ranks, "under a clock of its phases")))
    said = f"{clocked}: {gain.changes or 'the plan changes nothing'}."
    return Run(
        name,
        "phases",
        gain.task,
        gain.environment,
        Verdict("no verdict", said),
        tuple(gain_findings(gain, found.thirds[0] if found.thirds else (), is_proved=False)),
        labels={"plan_S": gain.changes or "the plan"},
        gain=gain,
    )
