"""What following the noise costs against the best fixed k, which nobody knows beforehand.

`python benchmarks/regret.py [--quick] [--json] [--tasks digits_resnet] [--seeds 5]` trains each task from several seeds
with k = 1, 2, 4, 8, 16 loader batches a window and with the policies, to the task's target, and prints `regret_ratio`
rows: a policy's time to it over that of the best fixed k (median over seeds), paired by seed.

Time is samples to the target, as trained, by one table of seconds for all arms, measured first: `t_micro` and `t_fixed`
of this machine ("local"), and the same with the latency of a slow reduction added to each window, over two ranks
("slow"). Two ranks are trained as one process of twice the micro-batches, which is the same maths; the control is told
the table's times instead of its own, so that a busy machine changes no decision. The learning rate follows the batch by
the optimizer's rule in every arm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import trimtab
from trimtab.core.plan import Plan
from trimtab.decide.accumulation import Times
from trimtab.decide.statistics import ratio_interval
from trimtab.measure.machine import environment
from trimtab.tasks import load_task
from trimtab.tasks.task import Task

FIXED = (1, 2, 4, 8, 16)
POLICIES = ("goodput", "norm_test", "paper")
RANKS = {"local": 1, "slow": 2}
LATENCY_S = 3.0  # of a slow reduction, in micro-batches: what a gradient of this size takes over a slow network
SEEDS, QUICK_SEEDS = 5, 1


@dataclass(frozen=True)
class Case:
    """A task as it is trained here: rows of a loader batch (one micro-batch), target, samples between evaluations."""

    task: str
    rows: int
    target: float
    eval_every: int
    most_samples: int


CASES = (
    Case("digits_resnet", 16, 0.95, 512, 60_000),
    Case("source_gpt", 4, 3.6, 128, 12_000),
)


@dataclass(frozen=True)
class Arrival:
    """Samples and seconds by the table when a target was met; infinite where it never was."""

    samples: float
    seconds: float
    mean_k: float


def measured_times(task: Task, rows: int, windows: int = 40) -> Times:
    """Return this machine's times of a micro-batch and of the rest of a window, as a run measures them."""
    torch.manual_seed(0)
    model = task.make_model().train()
    rule = trimtab.BatchRule("fixed", k=4, learning_rate="none", min_windows=10**6)
    batches = task.load_data().batches(0, rows)
    with trimtab.start(model, task.make_optimizer(model), Plan.fixed(rows, batch_rule=rule)) as run:
        for _ in range(windows):
            run.train_step(run.window(*itertools.islice(batches, run.num_batches)), task.loss_fn)
        state = run.state_dict()["batch"]["times"]
    return Times(statistics.median(state["row_s"]) * rows, statistics.median(state["fixed_s"]))


class Told:
    """Times that are known beforehand, in place of those a run measures."""

    def __init__(self, times: Times) -> None:
        self._times = times

    def add(self, row_s: float, fixed_s: float) -> None:
        """Take nothing in."""

    def times(self, micro_rows: float) -> Times:
        """Return them."""
        return self._times


def train(case: Case, seed: int, rule: trimtab.BatchRule, ranks: int, times: Times) -> Arrival:
    """Train to the target by a rule, whose k counts the micro-batches of all ranks."""
    task = load_task(case.task)
    data = task.load_data()
    torch.manual_seed(seed)
    model = task.make_model().train()
    optimizer = task.make_optimizer(model)
    rows = case.rows * ranks
    plan = Plan.fixed(rows, micro_batch=case.rows, batch_rule=rule)
    batches = data.batches(seed, rows)
    points: list[tuple[float, float, float]] = []
    ks, seconds = [], 0.0
    with trimtab.start(model, optimizer, plan) as run:
        told = Told(Times(times.micro_s / ranks, times.fixed_s))  # its k counts those of all ranks
        run._control._times = told  # type: ignore[union-attr, assignment]
        due = case.eval_every
        while run.consumed_rows < case.most_samples:
            window = run.window(*itertools.islice(batches, run.num_batches))
            run.train_step(window, task.loss_fn)
            ks.append(window.num_batches)
            seconds += window.num_batches * times.micro_s + times.fixed_s
            if run.consumed_rows >= due:
                due = run.consumed_rows + case.eval_every
                value = task.metric.evaluate(model, data.held_out)
                model.train()
                points.append((run.consumed_rows, seconds, value))
                found = crossing(points, case.target, task.metric.higher_is_better)
                if found is not None:
                    return Arrival(*found, statistics.fmean(ks))
    return Arrival(math.inf, math.inf, statistics.fmean(ks))


def crossing(points: list[tuple[float, float, float]], target: float, higher: bool) -> tuple[float, float] | None:
    """Return (samples, seconds) at the first of two evaluations in a row beyond the target, interpolated; else None."""
    beyond = [(value >= target) if higher else (value <= target) for _, _, value in points]
    if len(points) < 2 or not (beyond[-1] and beyond[-2]):
        return None
    if len(points) == 2 or points[-2][2] == points[-3][2]:
        return points[-2][:2]
    (s0, t0, v0), (s1, t1, v1) = points[-3:-1]
    share = min(1.0, max(0.0, (target - v0) / (v1 - v0)))
    return s0 + share * (s1 - s0), t0 + share * (t1 - t0)


def first_variance(case: Case, ranks: int) -> float:
    """Return the variance of a micro-batch's gradient over the first windows, for the paper's target."""
    task = load_task(case.task)
    torch.manual_seed(0)
    model = task.make_model().train()
    rule = trimtab.BatchRule("fixed", k=4, learning_rate="none", min_windows=10**6)
    batches = task.load_data().batches(0, case.rows)
    with trimtab.start(model, task.make_optimizer(model), Plan.fixed(case.rows, batch_rule=rule)) as run:
        for _ in range(12):
            run.train_step(run.window(*itertools.islice(batches, run.num_batches)), task.loss_fn)
        assert run.noise is not None
        return run.noise.trace / case.rows


def rule_of(policy: str, case: Case, ranks: int) -> trimtab.BatchRule:
    """Return a policy's rule; the paper's target is its first variance over four, as its recipe here has it."""
    if policy == "paper":
        target = first_variance(case, ranks) / 4
        return trimtab.BatchRule("paper", k=4 * ranks, k_max=16 * ranks, sigma2_target=target, allowed=(4, 8))
    return trimtab.BatchRule(policy, k=ranks, k_max=16 * ranks)


def case_rows(case: Case, seeds: int, latency: float) -> Iterator[dict[str, Any]]:
    """Train every arm on every link, and yield its rows."""
    local = measured_times(load_task(case.task), case.rows)
    for link, ranks in RANKS.items():
        fixed_s = local.fixed_s + (latency * local.micro_s if link == "slow" else 0.0)
        times = Times(local.micro_s, fixed_s)
        rules = {f"k={k}": trimtab.BatchRule("fixed", k=k * ranks, k_max=16 * ranks) for k in FIXED}
        rules |= {policy: rule_of(policy, case, ranks) for policy in POLICIES}
        found: dict[str, list[Arrival]] = {}
        for name, rule in rules.items():
            found[name] = [train(case, seed, rule, ranks, times) for seed in range(seeds)]
            print(f"{case.task} {link} {name}: {[round(each.seconds, 1) for each in found[name]]}", file=sys.stderr)
        medians = {name: statistics.median(each.seconds for each in arms) for name, arms in found.items()}
        best = min((f"k={k}" for k in FIXED), key=lambda name: medians[name])
        for name, arms in found.items():
            yield _row(case, link, name, arms, found[best]) | {
                "best_k": int(best.removeprefix("k=")),
                "median_s": medians[name],
                "regret": medians[name] / medians[best] - 1,
                "micro_s": times.micro_s,
                "fixed_s": times.fixed_s,
            }


def _row(case: Case, link: str, name: str, arms: list[Arrival], best: list[Arrival]) -> dict[str, Any]:
    reached = [(a.seconds, b.seconds) for a, b in zip(arms, best, strict=True) if math.isfinite(a.seconds + b.seconds)]
    row: dict[str, Any] = {"metric": "regret_ratio", "task": case.task, "link": link, "policy": name}
    row |= {"target": case.target, "n": len(reached), "mean_k": statistics.fmean(each.mean_k for each in arms)}
    if len(reached) > 1:
        found = ratio_interval([ours / theirs for ours, theirs in reached])
        row |= {"mean": found.mean, "low": found.low, "high": found.high}
    return row | {"median_samples": statistics.median(each.samples for each in arms)}


def main() -> None:
    """Train, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tasks", nargs="+", choices=[case.task for case in CASES])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--latency", type=float, default=LATENCY_S, help="of a slow reduction, in micro-batches")
    options = parser.parse_args()
    cases = [case for case in CASES if case.task in (options.tasks or [each.task for each in CASES])]
    seeds = QUICK_SEEDS if options.quick else options.seeds
    rows = [row for case in (cases[:1] if options.quick else cases) for row in case_rows(case, seeds, options.latency)]
    if options.json:
        print(json.dumps({"schema": 1, "name": "regret", "environment": environment(), "rows": rows}))
        return
    for row in rows:
        ratio = f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if "mean" in row else "not measured"
        print(
            f"{row['task']:<14} {row['link']:<6} {row['policy']:<10} mean k {row['mean_k']:5.1f}"
            f"  median {row['median_s']:8.1f} s  regret {100 * row['regret']:6.1f}%  against k={row['best_k']}: {ratio}"
        )


if __name__ == "__main__":
    main()
