"""Effects of changes, computed from the records of an ablation (math: section 8)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trimtab.core.record import RunRecord
from trimtab.experiments.ablation.ablation_design import (
    PLAN,
    PLAN_AGAIN,
    REFERENCE,
    UNCHANGED,
    UNCHANGED_AGAIN,
    AblationDesign,
    power_of_all,
)
from trimtab.experiments.ablation.ablation_result import (
    ALONE,
    INTERACTION,
    MEMORY,
    QUALITY,
    THROUGHPUT,
    WITHIN,
    AblatedChange,
    ChangeEffect,
)
from trimtab.experiments.comparison.comparison_result import Ratio, RatioRow, Verdict
from trimtab.experiments.comparison.comparison_statistics import (
    Races,
    as_ratio,
    error_of_run,
    failures,
    is_brief,
    throughput_ratios,
)
from trimtab.experiments.comparison.ratio_rows import (
    SAME_PEAK,
    by_rows,
    difference,
    memory_verdict,
    quality_row,
    ratio_of_counts,
    unless_failed,
)
from trimtab.experiments.comparison.verdicts import (
    control_verdict,
    interaction_verdict,
    quality_interaction,
    speed_verdict,
)
from trimtab.planner.statistics import Interval, mean_interval, ratio_interval

# An arm, another arm, and the exponent of their ratio.
Term = tuple[str, str, int]


@dataclass(frozen=True)
class AblationMeasurements:
    """Measurements of an ablation: paired runs, peak memory by arm, and the held-out metric.

    Args:
        design: arms and changes of the ablation.
        races: records by seed and arm.
        peaks: peak bytes by arm.
        labels: label by arm.
        metric, higher_is_better, unit: of the task's held-out metric.
    """

    design: AblationDesign
    races: Races
    peaks: Mapping[str, int]
    labels: Mapping[str, str]
    metric: str
    higher_is_better: bool
    unit: str

    @property
    def has_interactions(self) -> bool:
        """True if there are several changes."""
        return len(self.design.changes) > 1

    def control(self, again: str) -> Interval | None:
        """Return the A/A interval of a loop, or None if the second run is missing or failed."""
        found = self.design.controls
        return None if again not in found else self._control([(again, found[again], 1)])

    @property
    def interaction_terms(self) -> list[Term]:
        """Terms of the A/A interaction, in which all loops are repeats."""
        return [(PLAN_AGAIN, PLAN, 1), (UNCHANGED_AGAIN, UNCHANGED, -1)]

    @property
    def interaction_control(self) -> Interval | None:
        """Apparent interaction between two runs of the same loops, as an interval."""
        return self._control(self.interaction_terms) if self.has_interactions else None

    @property
    def interaction_ratio(self) -> Ratio | None:
        """Apparent interaction between two runs of the same loops, with the ratio of each pair; None if unknown."""
        return self._product(self.interaction_terms) if self.has_interactions else None

    def _control(self, terms: Sequence[Term]) -> Interval | None:
        ratios = products(self.races, terms)
        return ratio_interval(ratios) if len(ratios) > 1 and not failures(self.races, *_arms(terms)) else None

    def ratio(self, arm: str, against: str, plan_kind: str, control: Interval | None) -> Iterator[RatioRow]:
        """Yield the throughput, memory and quality ratios of two arms, as far as measured."""
        names = self.labels.get(arm, arm), self.labels.get(against, against)
        if ratios := throughput_ratios(self.races, arm, against):
            ratio = as_ratio(ratio_interval(ratios), ratios)
            verdict = unless_failed(speed_verdict(ratio, control, *names), self.races, arm, against)
            yield RatioRow(THROUGHPUT, arm, against, plan_kind, ratio, verdict)
        if arm in self.peaks and against in self.peaks:
            peaks = ratio_of_counts(self.peaks[arm] / self.peaks[against])
            verdict = unless_failed(memory_verdict(peaks, names[1]), self.races, arm, against)
            yield RatioRow(MEMORY, arm, against, plan_kind, peaks, verdict)
        how = (self.metric, self.higher_is_better, self.unit)
        if (quality := quality_row(self.races, arm, against, plan_kind, *how, at_equal_samples=True)) is not None:
            yield quality

    def effects(self, change: AblatedChange) -> Iterator[ChangeEffect]:
        """Yield the effects of a change alone and in the plan, and their interaction."""
        design, settings = self.design, {ALONE: UNCHANGED_AGAIN, WITHIN: PLAN_AGAIN}
        both = {ALONE: design.alone(change.name), WITHIN: design.within(change.name)}
        for setting, (arm, against) in both.items():
            if setting in change.refusals or (setting == WITHIN and not self.has_interactions):
                continue
            for row in self.ratio(arm, against, change.plan_kind, self.control(settings[setting])):
                yield ChangeEffect(
                    change.name, setting, row.metric, change.plan_kind, row.ratio, row.verdict, arm, against
                )
        if self.has_interactions and not change.refusals:
            yield from self._interactions(change, both[WITHIN], both[ALONE])

    def pair_effects(self, change: AblatedChange, other: AblatedChange) -> Iterator[ChangeEffect]:
        """Yield the interaction of a change with another change."""
        plan_kind = "tuned" if "tuned" in (change.plan_kind, other.plan_kind) else "equivalent"
        beside, alone = self.design.beside(change.name, other.name), self.design.alone(change.name)
        if ALONE not in {**change.refusals, **other.refusals}:
            yield from self._interactions(change, beside, alone, other, plan_kind)

    def _interactions(
        self,
        change: AblatedChange,
        beside: tuple[str, str],
        alone: tuple[str, str],
        other: AblatedChange | None = None,
        plan_kind: str = "",
    ) -> Iterator[ChangeEffect]:
        """Yield the effect next to other changes over the effect alone."""
        terms: list[Term] = [(*beside, 1), (*alone, -1)]
        what = change.says if other is None else f"{change.says} with {other.says}"
        rest = {"arm": beside[0], "against": beside[1], "other": "" if other is None else other.name}
        plan_kind = plan_kind or change.plan_kind
        if (ratio := self._product(terms)) is not None:
            verdict = interaction_verdict(ratio, self.interaction_control, what)
            verdict = unless_failed(verdict, self.races, *_arms(terms))
            yield ChangeEffect(change.name, INTERACTION, THROUGHPUT, plan_kind, ratio, verdict, **rest)
        if all(arm in self.peaks for arm in (*beside, *alone)):
            value = math.prod((self.peaks[arm] / self.peaks[against]) ** power for arm, against, power in terms)
            verdict = unless_failed(_memory_interaction(value, what), self.races, *_arms(terms))
            yield ChangeEffect(change.name, INTERACTION, MEMORY, plan_kind, ratio_of_counts(value), verdict, **rest)
        if (found := self._further(beside, alone)) is not None:
            verdict = unless_failed(quality_interaction(found, what), self.races, *_arms(terms))
            yield ChangeEffect(change.name, INTERACTION, QUALITY, plan_kind, found, verdict, **rest)

    def _further(self, beside: tuple[str, str], alone: tuple[str, str]) -> Ratio | None:
        """Return the interaction in the held-out metric, paired by seed.

        The four arms are compared at their last common evaluation: a difference of differences in points, or for a
        relative
        metric a ratio of ratios in percent.
        """
        found = []
        for _, race in sorted(self.races.items()):
            ends = self._ends([race[arm] for arm in (*beside, *alone) if arm in race])
            found += [] if len(ends) < 4 else [self._apart(*ends)]
        if not found:
            return None
        interval = mean_interval(found)
        low, mean, high, *pairs = map(self._in_percent, (interval.low, interval.mean, interval.high, *found))
        return as_ratio(Interval(mean, low, high, interval.n), pairs)

    def _ends(self, records: Sequence[RunRecord]) -> list[float]:
        """Return the metric of all arms at the last common evaluation; [] if an arm was only timed or failed."""
        if any(is_brief(record) or error_of_run(record) for record in records):
            return []
        values = [by_rows(record, self.metric) for record in records]
        common = set[int].intersection(*map(set, values)) if values else set()
        return [each[max(common)] for each in values] if common else []

    def _apart(self, beside: float, without: float, alone: float, loop: float) -> float:
        """Return the interaction for a seed (above 0 is better).

        In points, or 100 times a logarithm for a relative metric.
        """
        if self.unit != "relative":
            points = difference(beside, without, self.higher_is_better, self.unit)
            return points - difference(alone, loop, self.higher_is_better, self.unit)
        if min(beside, without, alone, loop) <= 0:
            return math.nan
        return 100 * self._sign * (math.log(beside / without) - math.log(alone / loop))

    def _in_percent(self, value: float) -> float:
        if self.unit != "relative" or not math.isfinite(value):
            return value
        return 100 * self._sign * math.expm1(self._sign * value / 100)

    @property
    def _sign(self) -> int:
        return 1 if self.higher_is_better else -1

    def all_together(self, changes: Sequence[AblatedChange]) -> Iterator[ChangeEffect]:
        """Yield the effect of all changes over the product of the separate effects.

        Nothing for fewer than three changes: for two, the product is their interaction.
        """
        if len(changes) < 3 or any(ALONE in change.refusals for change in changes):
            return
        terms: list[Term] = [(PLAN, UNCHANGED, 1), *((*self.design.alone(each.name), -1) for each in changes)]
        if (ratio := self._product(terms)) is None:
            return
        control, power = self.interaction_control, power_of_all(len(changes))
        if control is not None:
            control = Interval(control.mean**power, control.low**power, control.high**power, control.n)
        plan_kind = "tuned" if any(each.plan_kind == "tuned" for each in changes) else "equivalent"
        verdict = interaction_verdict(ratio, control, "the plan as a whole")
        yield ChangeEffect(
            "", INTERACTION, THROUGHPUT, plan_kind, ratio, unless_failed(verdict, self.races, *_arms(terms))
        )

    def _product(self, terms: Sequence[Term]) -> Ratio | None:
        ratios = products(self.races, terms)
        return as_ratio(ratio_interval(ratios), ratios) if ratios else None

    def control_rows(self) -> Iterator[RatioRow]:
        """Yield the A/A ratio of every repeated loop."""
        for again, base in self.design.controls.items():
            if ratios := throughput_ratios(self.races, again, base):
                ratio = as_ratio(ratio_interval(ratios), ratios)
                verdict = unless_failed(control_verdict(ratio, self.labels[base]), self.races, again, base)
                yield RatioRow(THROUGHPUT, again, base, "", ratio, verdict)

    def whole(self, plan_kind: str) -> Iterator[RatioRow]:
        """Yield the plan, and the unchanged run, against the user's loop."""
        for arm, of in ((PLAN, plan_kind), (UNCHANGED, "equivalent")):
            yield from self.ratio(arm, REFERENCE, of, self.control(UNCHANGED_AGAIN))


def products(races: Races, terms: Sequence[Term]) -> list[float]:
    """Return, by seed, the product of throughput ratios with exponents, for seeds with all ratios."""
    found = []
    for seed in sorted(races):
        one = {seed: races[seed]}
        ratios = [(throughput_ratios(one, arm, against), power) for arm, against, power in terms]
        if all(each for each, _ in ratios):
            found.append(math.prod(each[0] ** power for each, power in ratios))
    return found


def _arms(terms: Sequence[Term]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for arm, against, _ in terms for name in (arm, against)))


def _memory_interaction(value: float, what: str) -> Verdict:
    """Return the verdict on whether peak ratios multiply; each of the four counts repeats to within 1%."""
    if abs(math.log(value)) <= 2 * math.log1p(SAME_PEAK):
        return Verdict(
            "none found", f"{what}: {value:.3f}x the product of the separate effects on the peak", "interaction.equal"
        )
    more = "more" if value < 1 else "less"
    sentence = f"{what}: {more} memory saved together than separately, {value:.3f}x the product of the separate effects"
    return Verdict(f"{more} together", sentence, f"interaction.{more}")
