"""Seconds of the phases of a step, without and with a plan: savings, shares of the gain, and bounds.

Means of paired rounds are compared, because means are additive: the savings of the phases and the unattributed rest sum
to the saving of the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.units import format_seconds
from trimtab.experiments.result_table import BASELINE, PLANNED, SAMPLES, SECONDS, ResultTable
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, mean_interval, ratio_interval, share_interval

# Explanation of each phase, in the order of a step. Recomputation is not part of the backward.
PHASE_MEANINGS = {
    "data": "waiting for the next batch",
    "forward": "model and loss",
    "recompute": "recomputation in the backward pass",
    "backward": "gradients",
    "communication": "waiting for other ranks after backward",
    "optimizer": "optimizer step",
    "rest": "the rest of the loop: copying and slicing batches, zeroing and clipping gradients, counting",
}
PHASES = tuple(PHASE_MEANINGS)
WHOLE, UNATTRIBUTED, FILE = "step", "unattributed", "phases.json"
SCHEMA = 3
# The clock may lengthen a step by this factor at most, or the phases do not represent a plain step: a step that waits
# for its host also waits for the clock.
_DISTORTED = 1.25
PHASE, PART, ROOF = "phase:", "part:", "roof:"  # Prefixes of metrics, in seconds per sample.
_HIDDEN = ("forward", "recompute", "backward")  # Phases that a user's own step hides in the rest.
# Phases that have a roofline, and the phases whose seconds it covers.
_UNDER = {"forward": ("forward",), "backward": ("backward", "recompute"), "optimizer": ("optimizer",)}
COMPUTE, MEMORY, UNBOUND = "compute-bound", "memory-bound", "not known"
_OTHERS = {"communication": "communication-bound", "data": "waiting for data", "rest": "the loop itself"}
BOUNDS = (COMPUTE, MEMORY, *_OTHERS.values(), UNBOUND)


@dataclass(frozen=True)
class PhaseResult:
    """Seconds of the phases of a step, without and with a plan. `print` shows where the plan saves time.

    Args:
        task: name of the loop.
        table: measured values; phases, module classes and rooflines in seconds per sample.
        step_samples: samples of a step of the baseline.
        changes: the plan in words.
        device: device whose peaks give the lower bounds.
        num_ranks: ranks that trained together; seconds are of rank 0.
        environment: machine and versions.
        notes: what is unknown, by arm.
    """

    task: str
    table: ResultTable
    step_samples: float
    changes: str
    device: DeviceSpec
    num_ranks: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise FormatError("phases.schema", got=repr(self.schema), expected=str(SCHEMA))

    def seconds(self, arm: str, metric: str) -> list[float]:
        """Return the seconds per step of a phase, part or roofline of an arm, by round; 0 in rounds without it."""
        found = {row.round: row.value * self.step_samples for row in self.table.select(metric, arm)}
        return [found.get(number, 0.0) for number in sorted(self._plain(arm))]

    def _plain(self, arm: str) -> dict[int, float]:
        samples = {row.round: row.value for row in self.table.select(SAMPLES, arm)}
        seconds = self.table.select(SECONDS, arm)
        return {row.round: row.value / samples[row.round] * self.step_samples for row in seconds}

    def plain(self, arm: str) -> list[float]:
        """Return the seconds per step without the clock, by round."""
        return list(self._plain(arm).values())

    def clocked(self, arm: str) -> list[float]:
        """Return the seconds per step with the clock, by round."""
        found = [self.seconds(arm, f"{PHASE}{phase}") for phase in PHASES]
        return [math.fsum(values) for values in zip(*found, strict=True)]

    def phases_of(self, arm: str) -> tuple[str, ...]:
        """Return the phases that occurred in an arm, in order."""
        return tuple(phase for phase in PHASES if self.table.select(f"{PHASE}{phase}", arm))

    @property
    def speed(self) -> Interval:
        """Speed of the plan without the clock, paired by round."""
        return ratio_interval([a / b for a, b in zip(self.plain(BASELINE), self.plain(PLANNED), strict=True)])

    def clock_cost(self, arm: str) -> Interval:
        """Return the length of a step with the clock relative to a step without."""
        return ratio_interval([a / b for a, b in zip(self.clocked(arm), self.plain(arm), strict=True)])

    @property
    def is_distorted(self) -> bool:
        """True if the clock lengthens a step so much that its phases do not represent a plain step."""
        return any(self.clock_cost(arm).mean > _DISTORTED for arm in (BASELINE, PLANNED))

    def __str__(self) -> str:
        return text_of(self)


@dataclass(frozen=True)
class SavedTime:
    """Time saved in a phase.

    Args:
        phase: name of the phase.
        baseline_s, plan_s: mean seconds per step.
        saved: baseline minus plan in seconds, paired by round, with a 95% t interval.
        share: fraction of the saving of the whole step; None if the saving is not significant, or distorted.
        each: the saving of every round relative to the mean saving of a step; their mean is the share.
    """

    phase: str
    baseline_s: float
    plan_s: float
    saved: Interval
    share: Interval | None
    each: tuple[float, ...] = ()


def saved_times(found: PhaseResult) -> list[SavedTime]:
    """Return the saving of each phase, the unattributed rest and the whole step; the others sum to the whole.

    A forward and backward that are hidden in the rest of one arm are merged into the rest of both.
    """
    hidden = _HIDDEN if any("forward" not in found.phases_of(arm) for arm in (BASELINE, PLANNED)) else ()
    groups: dict[str, tuple[str, ...]] = {}
    for phase in PHASES:
        if phase in hidden or not any(phase in found.phases_of(arm) for arm in (BASELINE, PLANNED)):
            continue
        groups[phase] = (*hidden, phase) if phase == "rest" else (phase,)
    rows = {
        phase: tuple(_summed(found, arm, [f"{PHASE}{each}" for each in within]) for arm in (BASELINE, PLANNED))
        for phase, within in groups.items()
    }
    plain = tuple(found.plain(arm) for arm in (BASELINE, PLANNED))
    rows[UNATTRIBUTED] = tuple(
        [p - c for p, c in zip(found.plain(arm), found.clocked(arm), strict=True)] for arm in (BASELINE, PLANNED)
    )
    rows[WHOLE] = plain
    return [_saved(found, name, *pair) for name, pair in rows.items()]


def saved_by_part(found: PhaseResult) -> list[SavedTime]:
    """Return the saving by module class in forward and backward; [] unless both arms distinguish classes."""
    names = [
        {row.metric for row in found.table if row.arm == arm and row.metric.startswith(PART)}
        for arm in (BASELINE, PLANNED)
    ]
    if not all(any(" " in name for name in each) for each in names):
        return []
    every = sorted(names[0] | names[1])
    return [
        _saved(found, name.removeprefix(PART), *(found.seconds(arm, name) for arm in (BASELINE, PLANNED)))
        for name in every
    ]


def saved_by_bound(found: PhaseResult) -> list[SavedTime]:
    """Return the saving by bound; [] if some phase has an unknown bound."""
    bounds = [_bounds_by_round(found, arm) for arm in (BASELINE, PLANNED)]
    if any(any(each[UNBOUND]) for each in bounds):
        return []
    names = [name for name in BOUNDS if any(any(each[name]) for each in bounds)]
    return [_saved(found, name, bounds[0][name], bounds[1][name]) for name in names]


def bound_seconds(found: PhaseResult, arm: str) -> dict[str, float]:
    """Return the mean seconds of a clocked step by bound (`BOUNDS`); the values sum to the step.

    A phase's seconds are split in proportion to the compute and memory seconds of its roofline. Phases without a
    roofline are unknown, as is a rest that contains the forward.
    """
    means = {name: math.fsum(values) / len(values) for name, values in _bounds_by_round(found, arm).items()}
    return {name: seconds for name, seconds in means.items() if seconds > 0}


def _bounds_by_round(found: PhaseResult, arm: str) -> dict[str, list[float]]:
    rounds = len(found.plain(arm))
    result = {name: [0.0] * rounds for name in BOUNDS}
    has_forward = "forward" in found.phases_of(arm)

    def add(name: str, values: Sequence[float], share: float = 1.0) -> None:
        result[name] = [before + share * value for before, value in zip(result[name], values, strict=True)]

    for phase in found.phases_of(arm):
        values = found.seconds(arm, f"{PHASE}{phase}")
        key = next((key for key, within in _UNDER.items() if phase in within), "")
        roof = [found.table.value(f"{ROOF}{kind}:{key}", arm) or 0.0 for kind in ("compute", "memory")]
        if phase in _OTHERS and (phase != "rest" or has_forward):
            add(_OTHERS[phase], values)
        elif sum(roof) > 0:
            add(COMPUTE, values, roof[0] / sum(roof))
            add(MEMORY, values, roof[1] / sum(roof))
        else:
            add(UNBOUND, values)
    return result


def _summed(found: PhaseResult, arm: str, metrics: Sequence[str]) -> list[float]:
    return [math.fsum(values) for values in zip(*(found.seconds(arm, metric) for metric in metrics), strict=True)]


def _saved(found: PhaseResult, name: str, baseline: Sequence[float], plan: Sequence[float]) -> SavedTime:
    parts = [a - b for a, b in zip(baseline, plan, strict=True)]
    wholes = [a - b for a, b in zip(found.plain(BASELINE), found.plain(PLANNED), strict=True)]
    whole = mean_interval(wholes)
    # A slowdown has no shares: shares are fractions of a gain.
    is_gain = whole.n >= MIN_PAIRS_FOR_VERDICT and whole.low > 0 and not found.is_distorted
    share = share_interval(parts, wholes) if is_gain else None
    each = tuple(part / whole.mean for part in parts) if is_gain else ()
    means = (math.fsum(values) / len(values) for values in (baseline, plan))
    return SavedTime(name, *means, mean_interval(parts), share, each)


def rows_of(found: PhaseResult) -> Iterator[dict[str, Any]]:
    """Yield flat benchmark rows: saving by phase, module class and bound, bounds, cost of the clock, and speed."""
    head = {"task": found.task, "ranks": found.num_ranks, "device": found.device.name, "changes": found.changes}
    parts = {"phase_saved_s": saved_times(found), "part_saved_s": saved_by_part(found)}
    parts["bound_saved_s"] = saved_by_bound(found)
    for metric, saved in parts.items():
        for row in saved:
            share = {} if row.share is None else {"share": row.share.mean, "share_low": row.share.low,
                                                  "share_high": row.share.high}  # fmt: skip
            seconds = {"phase": row.phase, "reference_s": row.baseline_s, "plan_s": row.plan_s}
            yield {"metric": metric} | head | seconds | _interval(row.saved) | share
    for arm in (BASELINE, PLANNED):
        bounds = {} if found.is_distorted else bound_seconds(found, arm)
        for bound, seconds_s in bounds.items():
            share_of_step = seconds_s / math.fsum(bounds.values())
            yield {"metric": "bound_share", **head, "arm": arm, "bound": bound, "seconds_s": seconds_s,
                   "share": share_of_step}  # fmt: skip
        yield {"metric": "clock_ratio", **head, "arm": arm} | _interval(found.clock_cost(arm))
    yield {"metric": "step_speedup", **head} | _interval(found.speed)


def _interval(found: Interval) -> dict[str, Any]:
    ends = {"mean": found.mean, "low": found.low, "high": found.high}
    return {name: value if math.isfinite(value) else None for name, value in ends.items()} | {"n": found.n}


def text_of(found: PhaseResult) -> str:
    """Return the table of phases, the bounds of the remaining time, and notes."""
    ranks = f" on {found.num_ranks} ranks" if found.num_ranks > 1 else ""
    speed = found.speed
    lines = [
        f"{found.task}{ranks}, plan ({found.changes}): {speed.mean:.2f}x "
        f"(95% {speed.low:.2f} to {speed.high:.2f}, n={speed.n} rounds)",
        "",
        f"{'phase':<16}{'baseline':>11}{'plan':>11}{'saved':>11}  share of the gain",
    ]
    for row in saved_times(found):
        share = "" if row.share is None else f"{row.share.mean:.0%} ({row.share.low:.0%} to {row.share.high:.0%})"
        seconds = "".join(f"{_signed(value):>11}" for value in (row.baseline_s, row.plan_s, row.saved.mean))
        lines.append(f"{row.phase:<16}{seconds}  {share}".rstrip())
    parts = sorted(saved_by_part(found), key=lambda row: -abs(row.saved.mean))[:6]
    if parts:
        lines += ["", "by module class, largest first:"]
        lines += [f"  {row.phase:<32}{_signed(row.saved.mean):>11}" for row in parts]
    if found.is_distorted:
        lines += ["", "The clock lengthens a step so much that its phases do not represent a plain step."]
    else:
        for arm in (BASELINE, PLANNED):
            bounds = bound_seconds(found, arm)
            whole = math.fsum(bounds.values())
            said = ", ".join(f"{name} {seconds / whole:.0%}" for name, seconds in bounds.items())
            lines += ["", f"time of {arm}: {said}"] if arm == BASELINE else [f"time of {arm}: {said}"]
    lines += [f"{arm}: {note}" for arm, notes in found.notes.items() for note in notes]
    return "\n".join(lines)


def _signed(seconds: float) -> str:
    return f"-{format_seconds(-seconds)}" if seconds < 0 else format_seconds(seconds)
