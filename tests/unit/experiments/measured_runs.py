"""Runs made by hand, with figures that are chosen: a comparison, a scaling table, an ablation, a record."""

from __future__ import annotations

import math
from dataclasses import replace

from trimtab.core.hardware import DeviceSpec
from trimtab.core.record import Evaluation, Header, RunRecord, StepRecord
from trimtab.core.step_phases import ArmPhases, RooflineBound, TimedGain, TimedRound
from trimtab.experiments.ablation.ablation_result import AblatedChange, Ablation, ChangeEffect
from trimtab.experiments.comparison.comparison_result import (
    Arm,
    ArmCurve,
    Comparison,
    Ratio,
    RatioRow,
    TargetRow,
    Verdict,
)
from trimtab.experiments.comparison.comparison_statistics import as_ratio
from trimtab.experiments.scaling import scaling_result as scaling
from trimtab.experiments.scaling.scaling_result import Scaling, ScalingJob, TimedArm, TimedBlocks
from trimtab.planner.statistics import ratio_interval
from trimtab.plans.plan import Plan

CPU = {"cpu": "Some CPU", "cpu_cores": "2", "os": "Linux", "torch": "2.13", "threads": "2", "sources": "abc"}
GPU = CPU | {"gpu": "NVIDIA H200"}
NOISE = (0.99, 1.0, 1.01, 0.995, 1.005, 1.0, 0.99, 1.01)
GAIN = Verdict("gain", "clear of one")


def around(mean: float, n: int = 5) -> Ratio:
    """Return a ratio of pairs that differ by a per cent or so."""
    pairs = [mean * noise for noise in NOISE[:n]]
    return as_ratio(ratio_interval(pairs), pairs)


def counted(mean: float) -> Ratio:
    return Ratio(mean, None, None, 1, (mean,), counted=True)


def arm(name: str, speed: float, n: int, plan_kind: str = "", learns: float = 1.0) -> Arm:
    """Return an arm whose accuracy rises by a tenth every 100 rows / `learns`, ten rows a second times `speed`."""
    points = tuple((100 * i, 10.0 * i / speed, min(0.95, 0.1 * i * learns)) for i in range(1, 11))
    return Arm(
        name,
        f"label of {name}",
        plan_kind,
        "",
        (1.0 / speed,) * n,
        (10.0 * speed,) * n,
        int(1e9 / speed),
        mfu=0.3 * speed,
        final_metric=(points[-1][2],) * n,
        final_samples=1000,
        curves=tuple(ArmCurve(seed, points) for seed in range(n)),
    )


def comparison(
    task: str = "cifar10_resnet50",
    environment: dict[str, str] | None = None,
    *,
    n: int = 5,
    paper: float = 1.1,
    plan: float = 2.0,
    target: float = 0.85,
) -> Comparison:
    """Return one in which the paper's recipe is `paper` times as fast as the reference, and the plan `plan` times."""
    arms = (arm("reference", 1.0, n), arm("paper", paper, n), arm("equivalent_plan", plan, n, "equivalent"))
    rows = [
        row
        for name, plan_kind, speed in (("paper", "", paper), ("equivalent_plan", "equivalent", plan))
        for row in (
            RatioRow("throughput", name, "reference", plan_kind, around(speed, n), GAIN),
            RatioRow("peak_memory", name, "reference", plan_kind, counted(1 / speed), GAIN),
        )
    ]
    quality = Ratio(0.1, 0.05, 0.15, n, (0.1,) * n)
    rows.append(
        RatioRow(
            "final_metric_difference",
            "equivalent_plan",
            "reference",
            "equivalent",
            quality,
            Verdict("no gain", "within"),
        )
    )
    reached = (n, n, n, 0)
    timed = [
        TargetRow(
            target,
            name,
            "reference",
            plan_kind,
            charged,
            around(speed, n),
            "",
            *reached,
            arm_s=(85.0 / speed,) * n,
            against_s=(85.0,) * n,
            verdict=GAIN,
        )
        for name, plan_kind, speed, charged in (
            ("paper", "", paper, False),
            ("equivalent_plan", "equivalent", plan, False),
            ("equivalent_plan", "equivalent", plan, True),
        )
    ]
    return Comparison(
        task=task,
        description="made by hand",
        headline=Verdict("gain", "A gain was measured."),
        metric="accuracy",
        higher_is_better=True,
        unit="share",
        terms="images",
        targets=(target,),
        num_pairs=n,
        arms=arms,
        ratios=tuple(rows),
        target_rows=tuple(timed),
        resolution=around(1.0, n),
        plans={},
        trials=(),
        planning_s=1.0,
        data_source={"name": "data", "origin": "here", "sha256": "ab" * 32},
        command="trimtab compare it",
        environment=GPU if environment is None else environment,
        created="2026-01-01T00:00:00Z",
    )


def scaled(
    efficiency: float = 0.97, *, ranks: int = 2, crowded: str = "", environment: dict[str, str] = GPU
) -> Scaling:
    """Return a table of the plain loop and the plan, whose efficiency it is."""

    def timed(rate: float) -> TimedBlocks:
        return TimedBlocks((100,), (100 / rate,))

    def job(number: int, count: int) -> ScalingJob:
        noise = NOISE[number] if count > 1 else 1.0
        rates = {"baseline": 100.0 * count * 0.9 * noise, "plan": 100.0 * count * efficiency * noise}
        arms = (TimedArm(name, "weak", timed(rate if count > 1 else 100.0), None, 32.0) for name, rate in rates.items())
        return ScalingJob(count, number, tuple(arms), crowded if count > 1 else "")

    jobs = [job(number, count) for number in range(5) for count in (1, ranks)]
    return scaling.summarise("cifar10_resnet50", jobs, dict(environment))


def ablation(precision: float = 1.3, *, setting: str = "alone", verdict: Verdict = GAIN) -> Ablation:
    """Return one of a plan that changes the precision alone."""
    effect = ChangeEffect("precision", setting, "throughput", "equivalent", around(precision), verdict)
    memory = ChangeEffect("precision", setting, "peak_memory", "equivalent", counted(0.7), GAIN)
    of = comparison()
    return Ablation(
        task=of.task,
        description="",
        headline=of.headline,
        metric=of.metric,
        higher_is_better=True,
        unit=of.unit,
        num_seeds=5,
        plan=Plan.fixed(8, precision="bf16"),
        data_source=of.data_source,
        command="trimtab ablate it",
        environment=of.environment,
        created=of.created,
        changes=(AblatedChange("precision", "precision bf16", "equivalent"),),
        effects=(effect, memory),
    )


def recorded(environment: dict[str, str] = CPU) -> RunRecord:
    """Return the record of a run of two steps."""
    steps = tuple(StepRecord(i, 10, 10.0, 1.0, 0.1, 0.5) for i in range(2))
    return RunRecord(Header("tiny", 3, None, environment), steps, (Evaluation(20, 1.0, {"accuracy": 0.5}),), (), None)


def on(found: Comparison, **changes: str) -> Comparison:
    """Return a comparison with another environment."""
    return replace(found, environment=dict(found.environment) | changes)


def gain(task: str = "source_gpt", laps: int = 6) -> TimedGain:
    """Return a gain of 1.5x that comes from forward and backward, some of which is computed again."""
    theirs = {"data": 0.02, "forward": 0.4, "backward": 0.8, "optimizer": 0.16, "rest": 0.02}
    ours = {"data": 0.02, "forward": 0.2, "recompute": 0.1, "backward": 0.5, "optimizer": 0.08, "rest": 0.02}
    roofs = {"forward": RooflineBound(0.1, 0.05, 1e9, 1e8), "backward": RooflineBound(0.2, 0.1, 2e9, 2e8)}

    def arm_of(seconds: dict[str, float], wobble: float) -> ArmPhases:
        found = []
        for index in range(laps):
            lap = {name: each * (1 + wobble * (index % 3 - 1)) for name, each in seconds.items()}
            parts = {"forward Linear": 0.9 * lap["forward"], "forward": 0.1 * lap["forward"]}
            found.append(TimedRound(lap, parts, math.fsum(lap.values()) / 1.02))
        return ArmPhases(tuple(found), roofs, ("one process: nothing is communicated",))

    device = DeviceSpec("a processor", "cpu", None, {"fp32": 1e11}, 1e10, "timed here", 1)
    return TimedGain(task, arm_of(theirs, 0.01), arm_of(ours, 0.02), "precision bf16, recompute (0) 1", device)
