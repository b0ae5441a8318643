"""Result of a comparison of training loops: figures as queries on its table, and as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Reference
from trimtab.core.serialization import read_json, to_json, write_whole
from trimtab.core.units import format_bytes, format_joules, format_seconds
from trimtab.experiments import result_table
from trimtab.experiments.change_effects import TOGETHER, ChangeEffect, effects_of
from trimtab.experiments.pages import Bar, figure, scaled_bars, template, thinned
from trimtab.experiments.result_table import (
    CONTROL,
    CPU_SECONDS,
    ENERGY,
    FLOPS,
    PEAK,
    PLANNED,
    SECONDS,
    TUNED,
    ResultTable,
)
from trimtab.experiments.time_to_target import QualityMetric, TargetSpeed, time_to_target
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain, mean_interval, resolution
from trimtab.plans.plan import Plan

EQUAL_LOSS = 0.5  # Percent of a loss, or points or percent of a metric; the paper's limit on quality (math: section 8).
SCHEMA = 1
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 40


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`, `race` or `ablate`. `print` shows it, `save` writes it as a page or as JSON.

    Args:
        title: name of the comparison.
        arms: names of the arms, the baseline first, without the control.
        steps: optimizer steps of the baseline per paired run.
        table: all measured values.
        plans: plan of an arm, by arm.
        reference: precision and clipping of the baseline.
        environment: machine and versions.
        failures: errors of arms that failed, by name.
        notes: caveats.
        metric: the evaluation for judging the training, with targets; or None.
        changes: names of the settings that differ from the loop, by arm with a plan.
        rivals: the arm for comparison with a plan, if not the baseline, by arm.
        precisions: compute precision of matrix products, by arm.
        terms: name of the counted terms, for example tokens.
        terms_per_sample: terms per sample.
        device: device with peaks, for utilisation.
        meter: the energy meter, or the reason for its absence.
        num_ranks: number of ranks per arm.
        task: name of the task or function.
        data: name, origin and hash of the data, if known.
        command: command line to reproduce the result, if known.
        created: time of the result, in UTC.
        kind: "comparison", "race" or "ablation".
    """

    title: str
    arms: tuple[str, ...]
    steps: int
    table: ResultTable
    plans: Mapping[str, Plan] = field(default_factory=dict)
    reference: Reference | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    metric: QualityMetric | None = None
    changes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rivals: Mapping[str, str] = field(default_factory=dict)
    precisions: Mapping[str, str] = field(default_factory=dict)
    terms: str = "samples"
    terms_per_sample: float = 1.0
    device: DeviceSpec | None = None
    meter: MeterFacts = NO_METER
    num_ranks: int = 1
    task: str = ""
    data: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    created: str = ""
    kind: str = "comparison"
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise FormatError("comparison.schema", got=repr(self.schema), expected=str(SCHEMA))

    @property
    def plan(self) -> Plan | None:
        """The plan of the planned arm; None for a race."""
        return self.plans.get(PLANNED)

    @property
    def num_pairs(self) -> int:
        """Number of paired runs."""
        return len(self.table.seeds_of(self.arms[0]))

    @property
    def control(self) -> Interval | None:
        """Speed of the baseline's second run relative to the first; its distance from 1 is the resolution."""
        return result_table.speed(self.table, CONTROL, self.arms[0])

    def speed(self, arm: str | None = None, against: str | None = None, *, metric: str = SECONDS) -> Interval | None:
        """Return the speed of an arm relative to another arm; None if it failed.

        Args:
            arm: by default the second arm.
            against: by default the baseline.
            metric: SECONDS, CPU_SECONDS or ENERGY (samples per joule).
        """
        return result_table.speed(self.table, arm or self.arms[1], against or self.arms[0], metric=metric)

    def energy(self, arm: str | None = None) -> Interval | None:
        """Return the energy per sample of an arm relative to the baseline; None if not measured."""
        found = self.speed(arm, metric=ENERGY)
        return None if found is None else found.inverse

    def memory(self, arm: str | None = None, against: str | None = None) -> float | None:
        """Return the peak memory of an arm (by default the second) relative to another; None if unknown."""
        return result_table.memory(self.table, arm or self.arms[1], against or self.arms[0])

    def effects(self) -> list[ChangeEffect]:
        """Return the effects of the changes of an ablation; empty for another comparison."""
        return list(effects_of(self.table, self.changes, self.failures)) if self.kind == "ablation" else []

    def terms_per_s(self, arm: str) -> list[float]:
        """Return the terms per second of an arm, by pair."""
        return [self.terms_per_sample / each for each in result_table.per_sample(self.table, arm) if each > 0]

    def utilisation(self, arm: str, *, of_model: bool = True) -> float | None:
        """Return the FLOP/s of an arm over the device's peak: MFU by the baseline's FLOP, or HFU by the arm's own."""
        flops = self.table.value(FLOPS, self.arms[0] if of_model else arm)
        seconds = result_table.per_sample(self.table, arm)
        precision = self.precisions.get(arm, "")
        if self.device is None or flops is None or not seconds or not precision:
            return None
        return self.device.utilisation(flops / statistics.median(seconds) / self.num_ranks, precision)

    def loss_difference(self, arm: str | None = None) -> Interval | None:
        """Return the difference of an arm's mean loss over the last third of training, in percent of the baseline's."""
        return result_table.loss_difference(self.table, arm or self.arms[1], self.arms[0])

    def metric_difference(self, arm: str | None = None) -> Interval | None:
        """Return the difference of the last evaluations after equal numbers of samples, positive is better.

        None without a metric, and for arms that were not evaluated after equal numbers of samples.
        """
        if self.metric is None:
            return None
        values = result_table.common_values(self.table, arm or self.arms[1], self.arms[0], self.metric.name)
        pairs = [self.metric.difference(ours, theirs) for ours, theirs in values]
        return mean_interval(pairs) if pairs and all(map(math.isfinite, pairs)) else None

    def planning_s(self, arm: str) -> float:
        """Return the seconds of planning and search that belong to an arm."""
        plan = self.plans.get(arm)
        return 0.0 if plan is None else plan.planning_s + plan.search_s

    def times_to_target(self, arm: str, against: str | None = None, *, charged: bool = True) -> list[TargetSpeed]:
        """Return the comparison of times to each target, easiest first.

        Args:
            charged: True to count planning as time of the arm.
        """
        found = []
        for target in self.metric.targets if self.metric is not None and arm not in self.failures else ():
            assert self.metric is not None
            charge = self.planning_s(arm) if charged else 0.0
            how = {"charged_s": charge, "control": self.control}
            speed = time_to_target(self.table, self.metric, target, arm, against or self.arms[0], **how)  # type: ignore[arg-type]
            found += [] if speed is None else [speed]
        return found

    def verdict(self, arm: str | None = None, against: str | None = None) -> str:
        """Return "gain", "harm", "no gain" or "no verdict" (fewer than five pairs, or a failed arm)."""
        return self.verdict_of(self.speed(arm, against), arm or self.arms[1])

    def verdict_of(self, found: Interval | None, arm: str) -> str:
        """Return the verdict on a speed of an arm, given the timing's resolution."""
        if arm in self.failures or found is None or found.n < MIN_PAIRS_FOR_VERDICT:
            return "no verdict"
        if is_gain(found, self.control):
            return "gain"
        harms = found.high < 1 and 1 - found.mean > resolution(self.control)
        return "harm" if harms else "no gain"

    def quality_verdict(self, arm: str | None = None) -> str:
        """Return "equal", "better", "worse" or "no verdict" for the difference of the last evaluations."""
        found = self.metric_difference(arm)
        if (arm or self.arms[1]) in self.failures or found is None or found.n < MIN_PAIRS_FOR_VERDICT:
            return "no verdict"
        if found.low >= -EQUAL_LOSS and found.high <= EQUAL_LOSS:
            return "equal"
        if found.low > 0 and found.mean > EQUAL_LOSS:
            return "better"
        return "worse" if found.high < 0 and found.mean < -EQUAL_LOSS else "no verdict"

    def is_below(self, limit: float) -> bool:
        """Return True if the estimated speed of a plan is below a limit, or if the plan failed; of any arm in a race.

        A plan for a recipe is judged against this recipe.
        """
        judged = [arm for arm in self.arms[1:] if arm in self.plans or not self.plans]
        speeds = [self.speed(arm, self.rivals.get(arm)) for arm in judged]
        failed = any(arm in self.failures for arm in judged)
        return failed or any(found is None or found.mean < limit for found in speeds)

    def __str__(self) -> str:
        return text_of(self)

    def _repr_html_(self) -> str:
        return html_of(self, is_page=False)

    def save(self, path: str | Path) -> Path:
        """Write the result: a page for the suffix .html, the whole table for .json.

        Raises:
            FormatError: another suffix.
        """
        path = Path(path)
        if path.suffix not in (".html", ".json"):
            raise FormatError(
                "path",
                got=path.name,
                expected="a name that ends in .html or .json",
                hint="A .json file can be read again with trimtab.Comparison.load.",
                code="result.suffix",
            )
        write_whole(path, html_of(self, is_page=True) if path.suffix == ".html" else to_json(self))
        return path

    @classmethod
    def load(cls, path: str | Path) -> Comparison:
        """Return a result from the JSON file that `save` wrote."""
        return read_json(cls, path)


def text_of(found: Comparison) -> str:
    """Return the result as text: a headline, a line per arm, losses, the resolution of the timing, notes."""
    lines = [headline_of(found), ""]
    table = table_of(found)
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    lines.append("")
    for arm in found.arms[:2]:
        if curve := result_table.loss_curve(found.table, arm, 0):
            lines.append(f"loss  {sparkline([loss for _, loss in curve])}  {arm}")
    return "\n".join([*lines, *remarks_of(found)])


def headline_of(found: Comparison) -> str:
    """Return the result in a sentence."""
    arm = TUNED if TUNED in found.arms and found.metric is not None and found.metric.targets else found.arms[1]
    if arm in found.failures:
        return f"{arm} failed: {found.failures[arm]}"
    plan = found.plans.get(arm)
    words = "" if plan is None else plan.values_in_words(found.changes.get(arm, plan.changes))
    changes = "" if plan is None else f" ({words})" if words else ", which changes nothing,"
    known = [each for each in found.times_to_target(arm) if each.speed is not None or each.bound[0] in "<>"]
    if arm == TUNED and known and found.metric is not None:
        target = known[-1]
        said = target.bound if target.speed is None else speed_in_words(target.speed)
        return (
            f"{target.verdict}: {arm}{changes} reaches {found.metric.name} {target.target:g} at {said} the speed of "
            + (f"{found.arms[0]}, planning included")
        )
    speed, memory = found.speed(arm), found.memory(arm)
    parts = [] if speed is None else [f"{speed_in_words(speed)} the speed of {found.arms[0]}"]
    if memory is not None and abs(1 - memory) >= 0.01:
        parts.append(f"{abs(1 - memory):.0%} {'less' if memory < 1 else 'more'} memory")
    return f"{found.verdict(arm)}: {arm}{changes} has " + ", ".join(parts)


def speed_in_words(speed: Interval) -> str:
    """Return a speed with interval; below five pairs with the number of pairs only."""
    if speed.n < MIN_PAIRS_FOR_VERDICT:
        return f"{speed.mean:.2f}x (n={speed.n})"
    return f"{speed.mean:.2f}x (95% {speed.low:.2f} to {speed.high:.2f}, n={speed.n})"


def loss_in_words(found: Comparison, arm: str) -> str:
    """Return a sentence on the equality of losses, or "" without losses."""
    difference = found.loss_difference(arm)
    if difference is None:
        return ""
    what = f"loss of {arm}, last third: {difference.mean:+.2g}% of the baseline's"
    if difference.n < MIN_PAIRS_FOR_VERDICT:
        return f"{what} (n={difference.n})"
    is_equal = max(abs(difference.low), abs(difference.high)) <= EQUAL_LOSS
    interval = f"95% {difference.low:+.2g} to {difference.high:+.2g}"
    return f"{what} ({interval}): {'equal' if is_equal else 'not shown to be equal'} within {EQUAL_LOSS}%"


def quality_in_words(found: Comparison, arm: str) -> str:
    """Return a sentence on the difference of the last evaluations, or "" without a metric."""
    difference = found.metric_difference(arm)
    if difference is None or found.metric is None:
        return ""
    interval = f", 95% {difference.low:+.2f} to {difference.high:+.2f}" if difference.n > 1 else ""
    said = f"{found.metric.name} of {arm}: {difference.mean:+.2f}{found.metric.unit_in_words} (n={difference.n}"
    return f"{said}{interval}): {found.quality_verdict(arm)}"


def changes_in_words(found: Comparison) -> list[str]:
    """Return a sentence for every change of an ablation: speed and verdict, alone and in the plan."""
    said = dict[str, list[str]]()
    for effect in found.effects():
        if effect.speed is not None:
            words = f"{speed_in_words(effect.speed)} {effect.setting}"
            if effect.setting != TOGETHER:
                words += f", {found.verdict_of(effect.speed, effect.arm)}"
            said.setdefault(effect.change.replace("_", " "), []).append(words)
    return [f"{change}: {'; '.join(words)}" for change, words in said.items()]


def targets_in_words(found: Comparison, arm: str) -> Iterator[str]:
    """Yield a sentence for every target of an arm: seconds with planning, against the baseline."""
    for speed in found.times_to_target(arm):
        assert found.metric is not None
        ours, theirs = (
            format_seconds(statistics.median(each)) if math.isfinite(statistics.median(each)) else "not reached"
            for each in (speed.arm_s, speed.against_s)
        )
        known = speed.bound if speed.speed is None else speed_in_words(speed.speed)
        planning = " with planning" if speed.charged_s else ""
        yield (
            f"{found.metric.name} {speed.target:g}: {arm} in {ours}{planning}, {speed.against} in {theirs}; "
            f"{known}: {speed.verdict}"
        )


def remarks_of(found: Comparison) -> list[str]:
    """Return the sentences below the table: quality, targets, timing, baseline, failures and caveats."""
    compared = [arm for arm in found.arms[1:] if arm in found.plans] if found.kind != "ablation" else [found.arms[1]]
    compared = compared or list(found.arms[1:2])
    lines = [loss_in_words(found, arm) for arm in compared if arm != TUNED and arm not in found.rivals]
    lines += [quality_in_words(found, arm) for arm in compared if arm not in found.rivals]
    lines += [line for arm in compared if arm not in found.rivals for line in targets_in_words(found, arm)]
    if found.kind == "ablation":
        lines += changes_in_words(found)
    for arm, rival in found.rivals.items():
        if (speed := found.speed(arm, rival)) is not None:
            lines.append(f"{arm}: {speed_in_words(speed)} the speed of {rival}")
    if (control := found.control) is not None and control.n >= 2:
        lines.append(f"timing: two runs of the baseline differ by up to {100 * resolution(control):.2g}%")
    cpu, wall = found.speed(metric=CPU_SECONDS), found.speed()
    if cpu is not None and wall is not None and abs(cpu.mean / wall.mean - 1) > 0.1:
        lines.append(f"by processor time: {speed_in_words(cpu)}")
    if found.reference is not None:
        lines.append(f"baseline: {found.reference.describe()}; {found.steps} steps in each of {found.num_pairs} pairs")
    if found.plan is not None and found.plan.changes:
        proved = found.plan.proof is not None and found.plan.proof.holds
        same = "proved to differ from loss_fn's own by rounding only" if proved else "not proved"
        lines.append(f"training of the plan: {same}; {planning_in_words(found.plan)}".rstrip("; "))
    if not found.meter.is_absent:
        lines.append(f"energy: {found.meter.describe()}")
    lines += [f"{name} failed: {reason}" for name, reason in found.failures.items() if name != found.arms[1]]
    return [line for line in (*lines, *found.notes) if line]


def table_of(found: Comparison) -> list[list[str]]:
    """Return the main table as cells: a row of headings, and a row per arm that did not fail."""
    summaries = {arm: summary_of(found, arm) for arm in found.arms if arm not in found.failures}
    columns = [
        name for name in next(iter(summaries.values()), {}) if any(each.get(name) for each in summaries.values())
    ]
    rows = [["", "speed", *columns]]
    for arm, summary in summaries.items():
        speed = None if arm == found.arms[0] else found.speed(arm)
        shown = "1" if arm == found.arms[0] else "" if speed is None else f"{speed.mean:.2f}x"
        rows.append([arm, shown, *(summary.get(name, "") for name in columns)])
    return rows


def summary_of(found: Comparison, arm: str) -> dict[str, str]:
    """Return the figures of an arm in words, by name."""
    rates, peak = found.terms_per_s(found.arms[0]), found.table.value(PEAK, arm)
    speed = None if arm == found.arms[0] else found.speed(arm)  # Times the baseline's rate: a single estimate of speed.
    factor = 1.0 if speed is None else speed.mean
    joules = result_table.per_sample(found.table, arm, ENERGY)
    words = {
        f"{found.terms}/s": f"{factor * statistics.median(rates):,.4g}" if rates else "",
        "peak memory": "" if peak is None else format_bytes(int(peak)),
        "energy/sample": format_joules(statistics.median(joules)) if joules else "",
    }
    losses = [result_table.loss_curve(found.table, arm, seed) for seed in found.table.seeds_of(arm)]
    last = [curve[-1][1] for curve in losses if curve]
    words["last loss"] = f"{statistics.fmean(last):.4g}" if last else ""
    for name, values in result_table.final_values(found.table, arm).items():
        words[name] = f"{statistics.fmean(values.values()):.4g}"
    return words


def planning_in_words(plan: Plan | None) -> str:
    """Return the time of planning in words, or ""."""
    return "" if plan is None or not plan.planning_s else f"planning took {format_seconds(plan.planning_s)}"


def sparkline(values: Sequence[float], width: int = _POINTS) -> str:
    """Return a line of block characters, each the mean of an equal part of the values."""
    parts = thinned(values, width)
    low, high = min(parts), max(parts)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in parts)


def html_of(found: Comparison, *, is_page: bool) -> str:
    """Return the result as HTML, a whole page or a fragment.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    curves: dict[str, Sequence[tuple[float, float]]] = {
        arm: result_table.loss_curve(found.table, arm, 0) for arm in found.arms
    }
    figures = [figure(curves, "Mean loss of the first pair, by samples trained on", "samples")]
    if found.metric is not None:
        evaluated = {arm: result_table.evaluations(found.table, arm, found.metric.name, 0) for arm in found.arms}
        points = {arm: [(each.seconds, each.value) for each in one] for arm, one in evaluated.items()}
        figures.append(figure(points, f"{found.metric.name} of the first pair, by seconds of training", "s"))
    values = {
        "is_page": is_page,
        "found": found,
        "headline": headline_of(found),
        "table": table_of(found),
        "bars": _bars(found),
        "remarks": remarks_of(found),
        "figures": [each for each in figures if each is not None],
        "details": {arm: plan.explain() for arm, plan in found.plans.items()},
        "machine": ", ".join(f"{name} {value}" for name, value in found.environment.items() if name != "sources"),
    }
    return str(template("comparison.html.jinja").render(values))


def _bars(found: Comparison) -> dict[str, list[Bar]]:
    """Return the bars of speed and of peak memory of the arms that did not fail."""
    arms = [arm for arm in found.arms if arm not in found.failures]
    speeds = dict.fromkeys(arms[:1], 1.0)
    speeds |= {arm: speed.mean for arm in arms[1:] if (speed := found.speed(arm)) is not None}
    peaks = {arm: peak for arm in arms if (peak := found.table.value(PEAK, arm)) is not None}
    return {
        "speed": scaled_bars(speeds, {arm: f"{value:.2f}x" for arm, value in speeds.items()}),
        "peak memory": scaled_bars(peaks, {arm: summary_of(found, arm)["peak memory"] for arm in peaks}),
    }
