"""What runs show, in one form whatever they are: findings, each of one run on one machine. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.core.phases import Gain
from trimtab.experiments.comparison.result import Ratio, Verdict, limit_in_words

# Of an environment: what makes a machine another one, and what a figure depends on beside it.
MACHINE = ("cpu", "cpu_cores", "gpu", "os")
VERSIONS = ("trimtab", "sources", "torch", "cuda", "numpy", "python", "threads")


@dataclass(frozen=True)
class Finding:
    """One measured figure of one run.

    Args:
        measure: time_to_target, peak_memory, throughput, final_metric, mfu, energy, do_no_harm, scaling_efficiency,
            component_throughput, component_memory, component_quality, component_time, gain_share.
        arm, against: of which loops; "" where there is no other, of a component "alone" or "in the plan".
        tier: "S", "F" or "".
        value, baseline: the figure itself of each, in its unit: seconds, bytes, terms per second.
        figure: what is judged: the ratio ours over theirs (below 1 is better for time and memory), a difference of the
            final metric (points or percent, positive is better), or a share; None: not known.
        said: what stands in place of it, where it is not known, or has to be known beside it.
        at_least, at_most: of a time of which no more is known, how many times as fast ours is; None where an arm
            failed, as such a bound would be held against a bar without a verdict of its run.
        failed: which arm failed in some race, and where; "" where none did.
        has_verdict: whether its run has one on it: enough pairs, a control, and nothing that failed.
        values: the figure itself of each pair, where there is one of each; infinite: never reached.
        reached: of a target, the pairs in which each of the two did. behind_at: a harder target that
            the other arm reached in more pairs, if any: no gain on this one speaks for the arm.
        target, charged: of a time, and whether planning is counted. ranks: of an efficiency. part: of a component, its
            choice; of a share, what it is of.
    """

    measure: str
    arm: str
    against: str = ""
    tier: str = ""
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

    @property
    def is_bounded(self) -> bool:
        """Whether a bound is what is known of it."""
        return self.at_least is not None or self.at_most is not None

    @property
    def told(self) -> str:
        """What is said, as a person reads it: of a bound also that it is of speeds, which amid changes is not seen."""
        return bound_in_words(self.at_least, self.at_most) or self.said


def bound_in_words(at_least: float | None, at_most: float | None) -> str:
    """Return a bound on how many times as fast something is as a person reads it; "" where there is none."""
    said = limit_in_words(at_least, at_most)
    return f"{said} the speed" if said else ""


@dataclass(frozen=True)
class Run:
    """What one folder or file holds.

    Args:
        name: as it was given. kind: comparison, scaling, record and the like. labels: arm -> what a person reads.
        precisions: arm -> what it computed in, where that is known.
        data_sha256: of what it was trained on, "" where that is not recorded. higher_is_better: of its metric.
        trained: what its reference was trained on and came to, in words; "" where that is not known.
        planned: how much longer a run its plan was made for than what was raced, in words; "" where that is the same.
        meter: what counted its joules, or why nothing did, in words; "" where joules are not asked of its kind.
        known: what was found of its races after they were run, which no figure holds.
        gain: laps of its reference and its plan of tier S under a clock; None: they were not clocked.
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
    gain: Gain | None = None
    precisions: Mapping[str, str] = field(default_factory=dict)

    @property
    def machine(self) -> tuple[tuple[str, str], ...]:
        """What tells its machine from another; empty where that was not recorded."""
        return tuple((key, self.environment[key]) for key in MACHINE if key in self.environment)

    @property
    def versions(self) -> tuple[tuple[str, str], ...]:
        """What else its figures depend on."""
        return tuple((key, self.environment[key]) for key in VERSIONS if key in self.environment)

    @property
    def has_gpu(self) -> bool:
        """Whether its figures are of a GPU: where there is one, loops run on it."""
        return "gpu" in self.environment

    def has_gpu_of(self, model: str) -> bool:
        """Whether its figures are of a GPU of a model; one of another that goes by a longer name, as a Ti, is not."""
        return self.environment.get("gpu", "").endswith(model)
