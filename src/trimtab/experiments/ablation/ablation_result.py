"""Effects of a plan's changes, alone and in the plan, with interactions (paper, table III). Values only.

    alone       = (loop with the change) / (loop)
    in the plan = (plan) / (plan without the change)
    interaction = in the plan / alone, on log ratios: a difference, paired by seed; for quality: in the plan - alone,
    in
                  points; for a relative metric: in the plan / alone, in percent

The loop is trimtab's run with nothing changed, so that the overhead of the run itself is in no change. Independent
changes have an interaction of 1, in quality 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.experiments.comparison.comparison_result import Ratio, RatioRow, TargetRow, Verdict
from trimtab.plans.plan import Plan

ABLATION_SCHEMA = 2
ALONE, WITHIN, INTERACTION = "alone", "in the plan", "interaction"
WHOLE = "whole"  # the plan against the reference
THROUGHPUT, MEMORY, QUALITY = "throughput", "peak_memory", "final_metric_difference"


@dataclass(frozen=True)
class AblatedChange:
    """A change of a plan.

    Args:
        name: name of the setting.
        says: setting with its value, for reports.
        plan_kind: "equivalent" keeps the numerics (up to rounding), "tuned" changes training.
        refusals: reason for an impossible arm (a dependency or an error), by setting "alone" or "in the plan".
    """

    name: str
    says: str
    plan_kind: str
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AblatedArm:
    """Results of the loop with some changes.

    Args:
        name: name of the arm.
        label: label in reports.
        changes: names of the changes.
        sample_s: median seconds per sample, by seed.
        peak_bytes: peak memory of a step, measured separately; None if not counted.
        final_metric: metric after `final_samples` samples, by seed with a full run.
        final_samples: samples at the end of full runs.
        error: error of a failed arm, or "".
    """

    name: str
    label: str
    changes: tuple[str, ...]
    sample_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    final_metric: tuple[float, ...] = ()
    final_samples: int = 0
    error: str = ""


@dataclass(frozen=True)
class ChangeEffect:
    """Effect of a change in a setting: the loop with the change over the loop without.

    Args:
        change: name of the change; "" for all changes over the product of the separate effects.
        setting: alone, in the plan, or interaction.
        metric: throughput, peak_memory or final_metric_difference, as in `RatioRow`.
        plan_kind: "equivalent" or "tuned".
        ratio: the effect.
        verdict: verdict on the effect.
        arm, against: arms with and without the change; for an interaction, those of the plan.
        other: name of the other change in a pairwise interaction, or "".
    """

    change: str
    setting: str
    metric: str
    plan_kind: str
    ratio: Ratio
    verdict: Verdict
    arm: str = ""
    against: str = ""
    other: str = ""


@dataclass(frozen=True)
class ChangeTime:
    """Time to a target with and without a change, as in table III.

    Args:
        change: name of the change; "" for all changes against the reference.
        setting: alone, in the plan, or whole.
        row: time to target of both arms, charged with planning and search (whole) or with the search for the change.
    """

    change: str
    setting: str
    row: TargetRow


@dataclass(frozen=True)
class Ablation:
    """Complete result of an ablation, as shown in a report.

    Args:
        headline: the headline verdict.
        unit: unit of the metric, as in `Comparison`.
        num_seeds: number of paired runs.
        plan: the ablated plan.
        whole: throughput, memory and quality against the reference, for the plan and for the unchanged run.
        controls: A/A ratios of repeated loops.
        interaction_control: interaction between two runs of the same loops, with a true value of 1.
        times: times to targets; () without full runs.
        notes: caveats.
    """

    task: str
    description: str
    headline: Verdict
    metric: str
    higher_is_better: bool
    unit: str
    num_seeds: int
    plan: Plan
    data_source: Mapping[str, str]
    command: str
    environment: Mapping[str, str]
    created: str
    changes: tuple[AblatedChange, ...] = ()
    arms: tuple[AblatedArm, ...] = ()
    effects: tuple[ChangeEffect, ...] = ()
    whole: tuple[RatioRow, ...] = ()
    controls: tuple[RatioRow, ...] = ()
    interaction_control: Ratio | None = None
    times: tuple[ChangeTime, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = "ablation"
    schema: int = ABLATION_SCHEMA

    def change(self, name: str) -> AblatedChange | None:
        """Return a change by name, or None."""
        return next((change for change in self.changes if change.name == name), None)

    def effect(self, change: str, setting: str, metric: str = THROUGHPUT, other: str = "") -> ChangeEffect | None:
        """Return an effect, or None if not measured."""
        key = (change, setting, metric, other)
        return next((e for e in self.effects if (e.change, e.setting, e.metric, e.other) == key), None)
