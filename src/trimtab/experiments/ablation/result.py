"""What each change of a plan is worth, alone and in the plan, and how the two differ (paper, table III). Values only.

    alone       = (loop with the change) / (loop)
    in the plan = (plan) / (plan without the change)
    interaction = in the plan / alone, on log ratios: a difference, paired by seed; of quality in the plan - alone, in
                  points; of a metric that is relative in the plan / alone, in percent

The loop is the one that the plan's own engine runs with nothing changed, so that what the engine itself takes is in no
change. Changes that act apart have an interaction of 1, of quality 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.plan import Plan
from trimtab.experiments.comparison.result import Ratio, RatioRow, TargetRow, Verdict

ABLATION_SCHEMA = 1
ALONE, WITHIN, INTERACTION = "alone", "in the plan", "interaction"
WHOLE = "whole"  # the plan against the reference
THROUGHPUT, MEMORY, QUALITY = "throughput", "peak_memory", "final_metric_difference"


@dataclass(frozen=True)
class Change:
    """One change of a plan.

    Args:
        name: of the choice. says: with its value, for a person. tier: "S" keeps the maths, "F" changes the dynamics.
        refusals: setting -> why it could not be tried in it: what it depends on, or what it raised.
    """

    name: str
    says: str
    tier: str
    refusals: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class AblatedArm:
    """The loop with some changes, as it ran.

    Args:
        label: what a person reads. changes: their names. row_s: median seconds per row, one per seed. peak_bytes: of a
            step, counted apart; None: not counted. final_metric: one per seed that ran to its end, after `final_rows`.
    """

    name: str
    label: str
    changes: tuple[str, ...]
    row_s: tuple[float, ...] = ()
    peak_bytes: int | None = None
    final_metric: tuple[float, ...] = ()
    final_rows: int = 0
    error: str = ""


@dataclass(frozen=True)
class Effect:
    """What a change is worth in one setting: the loop with it over the loop without.

    Args:
        change: its name; "" for all of them against the product of each alone. setting: alone, in the plan, or
            interaction. metric: throughput, peak_memory or final_metric_difference, as of `RatioRow`.
        arm, against: with and without it; of an interaction, the plan's. other: of an interaction with one other change
            alone, its name.
    """

    change: str
    setting: str
    metric: str
    tier: str
    ratio: Ratio
    verdict: Verdict
    arm: str = ""
    against: str = ""
    other: str = ""


@dataclass(frozen=True)
class ChangeTime:
    """Seconds to one rung of the ladder with a change and without: the column of table III.

    Args:
        change: its name; "" for all of them, against the reference. setting: alone, in the plan, or whole.
        row: of the two arms; charged with planning and search (whole), or with the search that found the change.
    """

    change: str
    setting: str
    row: TargetRow


@dataclass(frozen=True)
class Ablation:
    """Everything a report shows.

    Args:
        headline: the verdict, first thing read. unit: of the metric, as `Comparison` has it. whole: throughput, memory
            and quality of the plan against the reference, and of the engine that changes nothing.
        controls: loops against themselves: what can be told from nothing.
        interaction_control: worth together over worth apart of two runs of the same loops, whose truth is 1.
        times: seconds to targets; (): no arm ran whole.
        notes: anything a reader must know.
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
    changes: tuple[Change, ...] = ()
    arms: tuple[AblatedArm, ...] = ()
    effects: tuple[Effect, ...] = ()
    whole: tuple[RatioRow, ...] = ()
    controls: tuple[RatioRow, ...] = ()
    interaction_control: Ratio | None = None
    times: tuple[ChangeTime, ...] = ()
    notes: tuple[str, ...] = ()
    kind: str = "ablation"
    schema: int = ABLATION_SCHEMA

    def change(self, name: str) -> Change | None:
        """Return a change by name, or None."""
        return next((change for change in self.changes if change.name == name), None)

    def effect(self, change: str, setting: str, metric: str = THROUGHPUT, other: str = "") -> Effect | None:
        """Return what a change is worth, or None where that was not measured."""
        key = (change, setting, metric, other)
        return next((e for e in self.effects if (e.change, e.setting, e.metric, e.other) == key), None)
