"""Result of a comparison of training loops: figures as queries on its table."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trimtab.core.energy_reading import NO_METER, MeterFacts
from trimtab.core.errors import FormatError
from trimtab.core.hardware import DeviceSpec
from trimtab.core.objective import Reference
from trimtab.core.serialization import read_json, to_json, write_whole
from trimtab.experiments import result_table
from trimtab.experiments.change_effects import ChangeEffect, effects_of
from trimtab.experiments.comparison_page import html_of
from trimtab.experiments.comparison_text import details_of, screen_of
from trimtab.experiments.result_table import CONTROL, ENERGY, FLOPS, PLANNED, SECONDS, ResultTable
from trimtab.experiments.time_to_target import EQUAL_LOSS, QualityMetric, TargetSpeed, time_to_target
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, Interval, is_gain, mean_interval, resolution
from trimtab.plans.plan import Plan

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
