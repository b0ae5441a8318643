"""Results of runs in a uniform form: findings, each from a single run on a single machine. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.step_phases import TimedGain
from trimtab.experiments.comparison.comparison_result import Ratio, Verdict, limit_in_words

# Keys of an environment: those that identify a machine, and further keys that affect figures.
MACHINE = ("cpu", "cpu_cores", "gpu", "os")
VERSIONS = ("trimtab", "sources", "torch", "cuda", "numpy", "python", "threads")


@dataclass(frozen=True)
class Finding:
    """A measured figure of a run.

    Args:
        measure: time_to_target, peak_memory, throughput, final_metric, mfu, energy, do_no_harm, scaling_efficiency,
            component_throughput, component_memory, component_quality, component_time, gain_share.
        arm, against: the two loops; `against` is "" without a second loop, and "alone" or "in the plan" for a
            component.
        plan_kind: "equivalent", "tuned" or "".
        value, baseline: absolute figures of both loops: seconds, bytes or terms per second.
        figure: the judged figure: ratio arm over other arm (below 1 is better for time and memory), difference of the
            final metric (points or percent, positive is better), or fraction; None if unknown.
        said: text shown instead of an unknown figure, or next to a figure.
        has_verdict: True if the run has a verdict on the figure: enough pairs, a control, and no failure.
        values: absolute figure of every pair; infinite for a target not reached.
        reached: pairs in which each of the two arms reached the target.
        behind_at: a harder target that the other arm reached in more pairs, or None.
        target: held-out metric of a time to target.
        charged: True if a time includes planning.
        ranks: number of ranks of an efficiency.
        part: setting of a component, or the subject of a fraction.
        at_least, at_most: bounds of the speed-up of a censored time; None after a failure, because a bound would be
            compared with claims without a verdict of the run.
        failed: failed arms with the number of failed runs, or "".
        resolution: half-width of the interval of the A/A control, by which a goal's limit is relaxed.
    """

    measure: str
    arm: str
    against: str = ""
    plan_kind: str = ""
    value: float | None = None
    baseline: float | None = None
    figure: Ratio | None = None
    said: str = ""
    has_verdict: bool = True
    values: tuple[float, ...] = ()
    reached: tuple[int, int] = (0, 0)
    behind_at: float | None = None
    target: float | None = None
    charged: bool = False
    ranks: int | None = None
    part: str = ""
    at_least: float | None = None
    at_most: float | None = None
    failed: str = ""
    resolution: float = 0.0

    @property
    def is_bounded(self) -> bool:
        """True if only a bound is known."""
        return self.at_least is not None or self.at_most is not None

    @property
    def told(self) -> str:
        """The text for a reader; a bound is given as a speed-up, to distinguish it from relative changes."""
        return bound_in_words(self.at_least, self.at_most) or self.said


def bound_in_words(at_least: float | None, at_most: float | None) -> str:
    """Return a bound on a speed-up as text, or "" without a bound."""
    said = limit_in_words(at_least, at_most)
    return f"{said} the speed" if said else ""


@dataclass(frozen=True)
class Run:
    """Content of a result folder or file.

    Args:
        name: name as given by the user.
        kind: comparison, scaling, record, ...
        task: name of the task.
        environment: machine and versions.
        headline: the headline verdict.
        findings: measured figures.
        metric, unit, terms: held-out metric, its unit, and the loss terms counted.
        labels: label by arm.
        command: command line to reproduce the run.
        data_sha256: hash of the training data, or "" if not recorded.
        higher_is_better: direction of the metric.
        trained: samples trained on by the reference and its result, as text; "" if unknown.
        planned: length of the run assumed in planning relative to the paired runs, as text; "" if equal.
        meter: description of the energy meter or the reason for its absence; "" for kinds without energy.
        known: defects of the paired runs found after recording.
        unfounded: measures that are invalid because of these defects.
        gain: timed phases of the reference and the equivalent plan, or None.
        precisions: compute precision by arm, if known.
    """

    name: str
    kind: str
    task: str
    environment: Mapping[str, str]
    headline: Verdict
    findings: tuple[Finding, ...]
    metric: str = ""
    unit: str = ""
    terms: str = "rows"
    labels: Mapping[str, str] = field(default_factory=dict)
    command: str = ""
    data_sha256: str = ""
    higher_is_better: bool = True
    trained: str = ""
    planned: str = ""
    meter: str = ""
    known: tuple[str, ...] = ()
    unfounded: frozenset[str] = frozenset()
    gain: TimedGain | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> tuple[tuple[str, str], ...]:
        """Keys that identify the machine; empty if not recorded."""
        return tuple((key, self.environment[key]) for key in MACHINE if key in self.environment)

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """Further environment values that affect figures."""
        return tuple((key, self.environment[key]) for key in VERSIONS if key in self.environment)

    @property
    def has_gpu(self) -> bool:
        """True if the figures come from a GPU: loops use a GPU if present."""
        return "gpu" in self.environment

    def has_gpu_of(self, model: str) -> bool:
        """Return True for a GPU of exactly this model; a longer name such as "Ti" is a different model."""
        return self.environment.get("gpu", "").endswith(model)
