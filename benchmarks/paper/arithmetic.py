"""Arithmetic checks of the paper's own figures, independent of any machine (math: section 8)."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.paper.claims import BATCH_IMAGES, MAIN_TABLES, RANKS
from benchmarks.paper.projection import doubling_months, net_speedup, speedup_of_time_saved
from trimtab.core.hardware import absent_device

GPU = "RTX 3090"
# FLOP per image of ResNet-50, forward and backward, by stem (math: section 9).
FLOP_PER_IMAGE = {"3x3": 7.78e9, "7x7": 0.50e9}


@dataclass(frozen=True)
class Check:
    """A statement of the paper next to the result computed from its own figures.

    Args:
        says: the statement.
        source: section, table or equation.
        gives: the computed figures.
        holds: True if both agree to the printed digits.
    """

    says: str
    source: str
    gives: str
    holds: bool


def checks() -> tuple[Check, ...]:
    """Return all checks in the order of the paper."""
    return (_times(), _perplexity(), *_efficiencies(), _utilisation(), _net(), *_doublings(), _overhead())


def _line(table: int, measure: str) -> tuple[float, float]:
    line = next(line for line in MAIN_TABLES[table].lines if line.measure == measure)
    return line.baseline, line.optimised


def _change(table: int, measure: str) -> float:
    before, after = _line(table, measure)
    return 100 * (after / before - 1)


def _times() -> Check:
    found = sorted(-_change(table, "time_to_target") for table in (0, 1))
    gives = f"tables I and II: {found[0]:.1f} and {found[1]:.1f}% less"
    return Check("26-28% less time to convergence", "section V.A", gives, round(found[0]) >= 26 and found[1] <= 28)


def _perplexity() -> Check:
    change = _change(1, "final_metric")
    return Check("perplexity within 0.5%", "section V.A", f"table II: {change:+.2f}%", abs(change) <= 0.5)


def _efficiencies() -> tuple[Check, ...]:
    alone = RANKS[0]
    found = []
    for row in RANKS[1:]:
        each = (row.baseline_per_s / alone.baseline_per_s, row.optimised_per_s / alone.optimised_per_s)
        shares = [100 * ratio / row.num for ratio in each]
        printed = (100 * row.baseline_efficiency, 100 * row.optimised_efficiency)
        holds = all(abs(a - b) < 0.06 for a, b in zip(shares, printed, strict=True))
        says = f"efficiency on {row.num} GPUs: {printed[0]:.1f} and {printed[1]:.1f}%"
        found.append(Check(says, "table IV", f"its throughputs: {shares[0]:.1f} and {shares[1]:.1f}%", holds))
    return tuple(found)


def _utilisation() -> Check:
    peaks, rates, printed = absent_device(GPU), _line(0, "throughput"), _line(0, "mfu")
    stems, holds = [], False
    for stem, flop in FLOP_PER_IMAGE.items():
        each = [100 * rate * flop / peaks.peak_flops[kind] for rate, kind in zip(rates, ("fp32", "fp16"), strict=True)]
        stems.append(f"{each[0]:.1f} and {each[1]:.1f}% with the {stem} stem")
        holds |= all(abs(a - b) < 0.5 for a, b in zip(each, printed, strict=True))
    gives = f"table I's throughputs, by one {GPU}'s peaks: {', '.join(stems)}"
    return Check(f"FLOPs utilization {printed[0]} and {printed[1]}%", "table I", gives, holds)


def _net() -> Check:
    net = net_speedup(1.42, 0.12)
    return Check("1.42 / (1 + 0.12) is about 1.27", "eq. 21", f"{net:.3f}", abs(net - 1.27) < 0.005)


def _doublings() -> tuple[Check, Check]:
    fast, slow = doubling_months(1.26), doubling_months(1.20)
    speed = speedup_of_time_saved(-_change(0, "time_to_target") / 100)
    gives = f"{fast:.1f}; and 26.2% less time is {speed:.3f}x the speed: {doubling_months(speed):.1f} months"
    return (
        Check("26% a cycle doubles in 14.8 months", "eq. 23", gives, abs(fast - 14.8) < 0.05),
        Check("20% a cycle doubles in about 19 months", "section VI.B", f"{slow:.1f}", abs(slow - 19) < 0.5),
    )


def _overhead() -> Check:
    step_ms = 1000 * BATCH_IMAGES / _line(0, "throughput")[1]
    shares = [100 * ms / step_ms for ms in (8, 12)]
    gives = f"of table I's step of {step_ms:.0f} ms: {shares[0]:.0f} to {shares[1]:.0f}%"
    holds = abs(shares[0] - 18) < 1 and abs(shares[1] - 27) < 1
    return Check("8 to 12 ms a step are 18 to 27% overhead", "section VII", gives, holds)
