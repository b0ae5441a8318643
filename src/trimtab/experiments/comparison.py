"""Result of a comparison of training loops: figures as queries on its table, as a screen of text, and as a page."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from trimtab.core.choice import Effect
from trimtab.core.energy_reading import NO_METER, MeterFacts, Provenance
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Reference
from trimtab.core.serialization import read_json, to_json, write_whole
from trimtab.core.units import format_bytes, format_joules, format_seconds
from trimtab.experiments import result_table
from trimtab.experiments.change_effects import ALONE, IN_PLAN, TOGETHER, ChangeEffect, effects_of
from trimtab.experiments.pages import Figure, figure, template, thinned
from trimtab.experiments.plan_changes import loop_values
from trimtab.experiments.result_table import (
    BASELINE,
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
from trimtab.experiments.time_to_target import EQUAL_LOSS, QualityMetric, TargetSpeed, time_to_target
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain, mean_interval, resolution
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS

_NAMES = {
    BASELINE: "your loop",
    CONTROL: "your loop again",
    PLANNED: "trimtab's plan",
    TUNED: "tuned plan",
    "strict": "fp32 without TF32",
    "strong": "hand-tuned recipe",
    "muon": "recipe with Muon",
    "plan for strong": "plan for the recipe",
}
_BARS = "▁▂▃▄▅▆▇█"
_POINTS = 40
_WIDTH, _LINES = 80, 25
_LEAST_MEMORY = 0.01  # Relative differences of peak memory below this are not reported.
SCHEMA = 1


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
        return screen_of(self)

    def details(self) -> str:
        """Return all figures as text, with the quality of the training and the conditions of the measurement."""
        return details_of(self)

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


def name_of(found: Comparison, arm: str) -> str:
    """Return the name of an arm for readers."""
    return arm if found.kind == "race" else _NAMES.get(arm, arm)


# The screen: what a reader needs first.


def screen_of(found: Comparison, width: int = _WIDTH, report: str = "") -> str:
    """Return the headline, figures, loss curves, changes and caveats in at most 25 lines.

    Races and ablations have one more line per arm.

    Args:
        width: columns of the terminal.
        report: path of the report, printed last.
    """
    blocks = [_wrapped(headline_of(found), width, first="")]
    blocks.append(_effects(found) if found.kind == "ablation" else _aligned(_table(found, width), width))
    blocks.append(_sparklines(found, width))
    if found.kind != "ablation":
        blocks += [_changes(found, arm, width) for arm in (PLANNED, TUNED)]
    lines = [line for block in blocks if block for line in (*block, "")]
    most = _LINES + (0 if found.kind == "comparison" else len(found.arms)) - bool(report)
    caveats = [_wrapped(each, width) for each in caveats_of(found)]
    if len(lines) + sum(map(len, caveats)) > most:
        lines = lines[: most - 1]
        room = most - 1 - len(lines)
        kept = [each for index, each in enumerate(caveats) if sum(map(len, caveats[: index + 1])) <= room]
        caveats = [*kept, ["More: --verbose, or the report."]]
    lines += [line for each in caveats for line in each]
    return "\n".join([*lines, f"report: {report}" if report else ""]).rstrip()


def headline_of(found: Comparison) -> str:
    """Return the verdict, speed and memory of the plan against the user's loop, and the effect on the numerics."""
    arm = TUNED if TUNED in found.arms and found.metric is not None and found.metric.targets else found.arms[1]
    name, base = name_of(found, arm), name_of(found, found.arms[0])
    if arm in found.failures:
        return f"{name} failed: {found.failures[arm]}"
    known = [each for each in found.times_to_target(arm) if each.speed is not None or each.bound[0] in "<>"]
    if arm == TUNED and known and found.metric is not None:
        target = known[-1]
        speed = target.bound if target.speed is None else speed_in_words(target.speed)
        return (
            f"{target.verdict}: {name} reaches {found.metric.name} {target.target:g} at {speed} the speed of {base}, "
            f"planning included. {numerics_of(found, arm)}"
        )
    if arm in found.plans and not found.changes.get(arm, found.plans[arm].changes):
        again = found.speed(arm)
        measured = "" if again is None else f" The same loop, measured again: {speed_in_words(again)}."
        return f"{found.verdict(arm)}: {name} changes nothing in {base}.{measured}"
    measured = found.speed(arm)
    text = "speed unknown" if measured is None else f"{speed_in_words(measured)} the speed of {base}"
    if measured is not None and found.control is not None and measured.low > 1 and found.verdict(arm) == "no gain":
        text += ", within the difference of two runs of your loop"
    memory = found.memory(arm)
    if memory is not None and abs(1 - memory) >= _LEAST_MEMORY:
        text += f", {abs(1 - memory):.0%} {'less' if memory < 1 else 'more'} peak memory"
    return f"{found.verdict(arm)}: {name} has {text}. {numerics_of(found, arm)}".rstrip()


def numerics_of(found: Comparison, arm: str) -> str:
    """Return a sentence on the numerics of an arm with a plan: proved equal, not proved, or changed; "" without one."""
    plan = found.plans.get(arm)
    if plan is None:
        return ""
    names = found.changes.get(arm, plan.changes)
    if training := [name for name in names if getattr(plan, name).effect is Effect.TRAINING]:
        return f"Changes the training: {plan.values_in_words(training)}."
    if plan.proof is None:
        return "Equal numerics were not proved."
    if not plan.proof.holds:
        return f"The numerics differ: {plan.proof.reason.rstrip('.')}."
    return "Same numerics: two optimizer steps agree to rounding."


def _table(found: Comparison, width: int) -> list[list[str]]:
    """Return a row per figure for up to three arms, else a row per arm."""
    rows = table_of(found)
    across = [list(column) for column in zip(*rows, strict=True)]
    return rows if len(rows) > 4 or _width_of(across) > width else across


def _width_of(table: Sequence[Sequence[str]]) -> int:
    return sum(max(map(len, column)) for column in zip(*table, strict=True)) + 2 * (len(table[0]) - 1)


def _aligned(table: list[list[str]], width: int = 10**9) -> list[str]:
    """Return the lines of a table, without the last columns that exceed the width."""
    while len(table[0]) > 2 and _width_of(table) > width:
        table = [row[:-1] for row in table]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in table
    ]


def _effects(found: Comparison) -> list[str]:
    """Return a line per change of an ablation: speed alone and in the plan, and peak memory alone."""
    rows: dict[str, list[str]] = {}
    for effect in found.effects():
        if effect.setting != TOGETHER and effect.speed is not None:
            row = rows.setdefault(effect.change, [_title_of(effect.change), "", "", ""])
            words = f"{effect.speed.mean:.2f}x {found.verdict_of(effect.speed, effect.arm)}"
            row[1 if effect.setting == ALONE else 2] = words
            if effect.setting == ALONE and effect.memory is not None:
                row[3] = f"{effect.memory:.2f}x"
    return _aligned([["change", ALONE, IN_PLAN, "memory"], *rows.values()]) if rows else []


def _sparklines(found: Comparison, width: int) -> list[str]:
    """Return the loss curves of the first pair of the first two arms, on one scale."""
    curves = {arm: [loss for _, loss in result_table.loss_curve(found.table, arm, 0)] for arm in found.arms[:2]}
    shown = {arm: thinned(curve, min(_POINTS, width - 24)) for arm, curve in curves.items() if curve}
    values = [value for curve in shown.values() for value in curve]
    if len(values) <= len(shown):  # A single point is no curve.
        return []
    return [
        f"loss  {sparkline(curve, len(curve), (min(values), max(values)))}  {name_of(found, arm)}"
        for arm, curve in shown.items()
    ]


def _changes(found: Comparison, arm: str, width: int) -> list[str]:
    """Return a line per change of a plan, with the value in the user's loop and in the plan."""
    changes = changes_of_arm(found, arm)
    also = arm == TUNED and set(changes_of_arm(found, PLANNED)) & set(changes)
    changes = [each for each in changes if not also or each not in also]
    if not changes:
        return []
    size = max(len(name) for name, _, _ in changes)
    lines = [f"{'further ' if also else ''}changes of {name_of(found, arm)}:"]
    for name, before, after in changes:
        lines += _wrapped(f"  {name:<{size}}  {before} -> {after}", width, first="")
    return lines


def _rate(value: float) -> str:
    """Return a rate with four digits, and without an exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _title_of(change: str) -> str:
    """Return the name of a setting, or of several settings together, for readers."""
    return SETTINGS[change].title if change in SETTINGS else change.replace("_", " ")


def changes_of_arm(found: Comparison, arm: str) -> list[tuple[str, str, str]]:
    """Return the name, the loop's value and the plan's value of every change of an arm."""
    plan = found.plans.get(arm)
    if plan is None or found.reference is None:
        return []
    before = loop_values(plan, found.reference)
    return [
        (each.title, each.value_text(before[each.name]), each.value_text(getattr(plan, each.name).value))
        for each in map(SETTINGS.__getitem__, found.changes.get(arm, ()))
    ]


def _wrapped(text: str, width: int, first: str = "- ") -> list[str]:
    """Return at most three lines of a text."""
    indent = " " * len(first)
    return textwrap.wrap(
        first + " ".join(text.split()) if first else text,
        width,
        subsequent_indent=indent,
        max_lines=3,
        placeholder=" ...",
        break_on_hyphens=False,
    )


def caveats_of(found: Comparison) -> list[str]:
    """Return what limits the result: failed arms, quality, targets, timing noise, a busy machine, and notes."""
    plans = [arm for arm in (PLANNED, TUNED) if arm in found.plans]
    lines = [f"{name_of(found, arm)} failed: {why}" for arm, why in found.failures.items() if arm != found.arms[1]]
    lines += [line for arm in plans[::-1] for line in targets_in_words(found, arm)]
    lines += _rivals_in_words(found)
    unequal = (loss_in_words(found, arm) for arm in plans[:1] if arm != TUNED)
    lines += [line for line in unequal if "not shown" in line]
    lines += [quality_in_words(found, arm) for arm in plans]
    lines += _timing_in_words(found)
    return [line for line in (*lines, *found.notes) if line]


# All figures.


def details_of(found: Comparison) -> str:
    """Return all figures as text: the table of arms, losses, quality, targets, timing and notes."""
    blocks = [[headline_of(found)], _aligned(table_of(found)), _sparklines(found, _WIDTH)]
    blocks += [_changes(found, arm, _WIDTH) for arm in (PLANNED, TUNED)]
    lines = [line for block in blocks if block for line in (*block, "")]
    return "\n".join([*lines, *remarks_of(found)])


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
        rows.append([name_of(found, arm), shown, *(summary.get(name, "") for name in columns)])
    return rows


def summary_of(found: Comparison, arm: str) -> dict[str, str]:
    """Return the figures of an arm in words, by name."""
    rates, peak = found.terms_per_s(found.arms[0]), found.table.value(PEAK, arm)
    speed = None if arm == found.arms[0] else found.speed(arm)  # Times the baseline's rate: a single estimate of speed.
    factor = 1.0 if speed is None else speed.mean
    joules = result_table.per_sample(found.table, arm, ENERGY)
    losses = [result_table.loss_curve(found.table, arm, seed) for seed in found.table.seeds_of(arm)]
    last = [curve[-1][1] for curve in losses if curve]
    energy = "energy/sample" if found.meter.provenance is Provenance.MEASURED else "energy/sample (estimated)"
    words = {
        f"{found.terms}/s": _rate(factor * statistics.median(rates)) if rates else "",
        "peak memory": "" if peak is None else format_bytes(int(peak)),
        "final loss": f"{statistics.fmean(last):.4g}" if last else "",
    }
    for name, values in result_table.final_values(found.table, arm).items():
        words[name] = f"{statistics.fmean(values.values()):.4g}"
    return words | {energy: format_joules(statistics.median(joules)) if joules else ""}


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
    what = f"loss of {name_of(found, arm)}, last third: {difference.mean:+.2g}% of {name_of(found, found.arms[0])}'s"
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
    words = f"{difference.mean:+.2f}{found.metric.unit_in_words} (n={difference.n}{interval})"
    return f"{found.metric.name} of {name_of(found, arm)}: {words}: {found.quality_verdict(arm)}"


def changes_in_words(found: Comparison) -> list[str]:
    """Return a sentence for every change of an ablation: speed and verdict, alone and in the plan."""
    words = dict[str, list[str]]()
    for effect in found.effects():
        if effect.speed is not None:
            text = f"{speed_in_words(effect.speed)} {effect.setting}"
            text += "" if effect.setting == TOGETHER else f", {found.verdict_of(effect.speed, effect.arm)}"
            words.setdefault(_title_of(effect.change), []).append(text)
    return [f"{change}: {'; '.join(each)}" for change, each in words.items()]


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
            f"{found.metric.name} {speed.target:g}: {name_of(found, arm)} in {ours}{planning}, "
            f"{name_of(found, speed.against)} in {theirs}; {known}: {speed.verdict}"
        )


def remarks_of(found: Comparison) -> list[str]:
    """Return the sentences below the table: losses, effects of changes, conditions of the measurement, and caveats."""
    compared = [arm for arm in (PLANNED, TUNED) if arm in found.plans] or found.arms[1:2]
    lines = [loss_in_words(found, arm) for arm in compared if arm != TUNED]
    lines += [*changes_in_words(found), *(line for line in caveats_of(found) if line not in lines)]
    if found.reference is not None:
        loop = f"your loop: {found.reference.describe()}"
        lines.append(f"{loop}; {found.steps} steps in each of {found.num_pairs} pairs")
    if found.plan is not None and found.plan.changes:
        proved = found.plan.proof is not None and found.plan.proof.holds
        same = "proved to differ from loss_fn's own by rounding only" if proved else "not proved"
        planning = f"; planning took {format_seconds(found.plan.planning_s)}" if found.plan.planning_s else ""
        lines.append(f"training of the plan: {same}{planning}")
    if not found.meter.is_absent:
        lines.append(f"energy: {found.meter.describe()}")
    return [line for line in lines if line]


def _rivals_in_words(found: Comparison) -> list[str]:
    pairs = ((arm, rival, found.speed(arm, rival)) for arm, rival in found.rivals.items())
    return [
        f"{name_of(found, arm)}: {speed_in_words(speed)} the speed of {name_of(found, rival)}"
        for arm, rival, speed in pairs
        if speed is not None
    ]


def _timing_in_words(found: Comparison) -> Iterator[str]:
    if (control := found.control) is not None and control.n >= 2:
        differ = 100 * resolution(control)
        percent = f"{differ:.0f}" if differ >= 10 else f"{differ:.2g}"
        yield f"timing: two runs of {name_of(found, found.arms[0])} differ by up to {percent}%"
    cpu, wall = found.speed(metric=CPU_SECONDS), found.speed()
    if cpu is not None and wall is not None and abs(cpu.mean / wall.mean - 1) > 0.1:
        yield f"by processor time: {speed_in_words(cpu)}; other processes may have been running"


def sparkline(values: Sequence[float], width: int = _POINTS, limits: tuple[float, float] | None = None) -> str:
    """Return a line of block characters, each the mean of an equal part of the values.

    Args:
        limits: values of the lowest and highest character; by default of the line's own.
    """
    parts = thinned(values, width)
    low, high = limits or (min(parts), max(parts))
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in parts)


# The page.


class Bar(NamedTuple):
    """A bar: index of the arm's colour, name of the arm, value in words, and length from 0 to 1."""

    color: int
    label: str
    value: str
    length: float


def html_of(found: Comparison, *, is_page: bool) -> str:
    """Return the result as HTML, a whole page or a fragment.

    Raises:
        DependencyError: jinja2 is not installed.
    """
    drawn = found.arms if found.kind != "ablation" else found.arms[:2]
    curves = {arm: result_table.loss_curve(found.table, arm, 0) for arm in drawn}
    figures = [_curves(found, curves, "Loss of the first pair, by samples trained on", "samples")]
    if found.metric is not None:
        evaluated = {arm: result_table.evaluations(found.table, arm, found.metric.name, 0) for arm in drawn}
        points = {arm: [(each.seconds, each.value) for each in one] for arm, one in evaluated.items()}
        figures.append(_curves(found, points, f"{found.metric.name} of the first pair, by seconds of training", "s"))
    plans = {arm: plan for arm, plan in found.plans.items() if found.kind != "ablation" or arm == PLANNED}
    values = {
        "is_page": is_page,
        "found": found,
        "headline": headline_of(found),
        "caveats": caveats_of(found),
        "base": name_of(found, found.arms[0]),
        "bars": _bars(found),
        "figures": [each for each in figures if each is not None],
        "changes": {name_of(found, arm): _reasons(found, arm) for arm in (PLANNED, TUNED) if arm in plans},
        "effects": changes_in_words(found),
        "table": table_of(found),
        "remarks": remarks_of(found),
        "explained": {name_of(found, arm): plan.explain() for arm, plan in plans.items()},
        "machine": {name: value for name, value in found.environment.items() if name != "sources"},
    }
    return str(template("comparison.html.jinja").render(values))


def _curves(
    found: Comparison, curves: Mapping[str, Sequence[tuple[float, float]]], caption: str, unit: str
) -> Figure | None:
    return figure({name_of(found, arm): curve for arm, curve in curves.items()}, caption, unit)


def _bars(found: Comparison) -> dict[str, list[Bar]]:
    """Return the bars of speed and of peak memory of the arms that did not fail, by caption."""
    colors = {arm: index for index, arm in enumerate(found.arms) if arm not in found.failures}
    speeds, words = dict[str, float](), dict[str, str]()
    for arm in colors:
        speed = None if arm == found.arms[0] else found.speed(arm)
        if speed is not None or arm == found.arms[0]:
            speeds[arm] = 1.0 if speed is None else speed.mean
            words[arm] = "1" if speed is None else f"{speed.mean:.2f}x"
    peaks = {arm: peak for arm in colors if (peak := found.table.value(PEAK, arm)) is not None}
    groups = {
        "Speed (longer is faster)": (speeds, words),
        "Peak memory (shorter is smaller)": (peaks, {arm: format_bytes(int(peak)) for arm, peak in peaks.items()}),
    }
    return {
        caption: [
            Bar(colors[arm], name_of(found, arm), text[arm], value / max(values.values()))
            for arm, value in values.items()
        ]
        for caption, (values, text) in groups.items()
        if len(values) > 1
    }


def _reasons(found: Comparison, arm: str) -> list[tuple[str, ...]]:
    """Return the name, both values, numerical effect and reason of every change of an arm."""
    plan = found.plans[arm]
    choices = [getattr(plan, name) for name in found.changes.get(arm, ())]
    return [
        (*change, choice.effect.value, choice.reason)
        for change, choice in zip(changes_of_arm(found, arm), choices, strict=False)
    ]
