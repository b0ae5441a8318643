"""What following the noise costs against the best fixed k, which nobody knows beforehand.

`python benchmarks/regret.py [--quick] [--json] [--tasks digits_resnet] [--seeds 5]` trains each case from several seeds
with k = 1, 2, 4, 8, 16 micro-batches a window and rank, and with the policies, to a held-out loss, and prints
`regret_ratio` rows: time to it over that of the best fixed k, by medians over seeds and paired by seed.

Time is samples to the loss, as trained, by one table of `t_micro` and `t_fixed` for all arms, measured first: in one
process ("local"), and over two gloo ranks of one thread whose reductions a sleep makes slow ("slow"). Two ranks are
trained as one process of twice the micro-batches, which is the same maths, and the control is told the table's times in
place of its own, so that a busy machine changes no decision. The learning rate follows the batch by the optimizer's
rule in every arm, from the one that is best at k = 1 (`--sweep` shows what others give).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from regret_cases import CASES, Case, Course, local_times, rank_times, train

import trimtab
from trimtab.decide.accumulation import Times
from trimtab.decide.statistics import ratio_interval
from trimtab.measure.machine import environment

FIXED = (1, 2, 4, 8, 16)
POLICIES = ("goodput", "norm_test", "paper")
RANKS = {"local": 1, "slow": 2}
LATENCY = 3.0  # of a slow reduction, in micro-batches of one process
SEEDS, QUICK_SEEDS = 5, 1

Arrivals = list[tuple[float, float]]  # (samples, seconds) of each seed; infinite where the loss was not reached


def rule_of(policy: str, case: Case, ranks: int) -> trimtab.BatchRule:
    """Return a policy's rule in micro-batches of all ranks.

    The paper's target is a quarter of the variance of a micro-batch's gradient at the start, which makes it begin at
    the four that its recipe has.
    """
    if policy == "paper":
        rule = trimtab.BatchRule("fixed", k=4, learning_rate="none", min_windows=10**6)
        noise = train(case, 0, rule, most_samples=48 * case.rows).noise
        assert noise is not None
        target = noise.trace / case.rows / 4 / ranks  # its k is of one rank
        allowed = 4 * ranks, 8 * ranks
        return trimtab.BatchRule("paper", k=4 * ranks, k_max=16 * ranks, sigma2_target=target, allowed=allowed)
    return trimtab.BatchRule(policy, k=ranks, k_max=16 * ranks)


class Trained:
    """Courses that were trained: one of fixed k is the same whatever the ranks that share its micro-batches."""

    def __init__(self, case: Case, seeds: int) -> None:
        self._case, self._seeds = case, seeds
        self._fixed: dict[int, list[Course]] = {}

    def fixed(self, total: int) -> list[Course]:
        """Return a course a seed of so many micro-batches a window, on all ranks."""
        if total not in self._fixed:
            rule = trimtab.BatchRule("fixed", k=total, k_max=total, min_windows=10**6)
            self._fixed[total] = [train(self._case, seed, rule) for seed in range(self._seeds)]
        return self._fixed[total]

    def policy(self, name: str, ranks: int, times: Times) -> list[Course]:
        """Return a course a seed by a policy."""
        rule = rule_of(name, self._case, ranks)
        return [train(self._case, seed, rule, ranks, times) for seed in range(self._seeds)]


def case_rows(case: Case, seeds: int, latency: float) -> Iterator[dict[str, Any]]:
    """Train every arm, and yield its row on every link."""
    local = local_times(case)
    tables = {"local": local, "slow": rank_times(case, latency * local.micro_s)}
    trained = Trained(case, seeds)
    for link, ranks in RANKS.items():
        times = tables[link]
        courses = {f"k={k}": trained.fixed(k * ranks) for k in FIXED}
        courses |= {policy: trained.policy(policy, ranks, times) for policy in POLICIES}
        arms = {name: [each.arrival(case.target, times, ranks) for each in found] for name, found in courses.items()}
        medians = {name: statistics.median(seconds for _, seconds in found) for name, found in arms.items()}
        for name, found in arms.items():
            print(f"{case.name} {link} {name}: {[f'{seconds:.3g}' for _, seconds in found]} s", file=sys.stderr)
        best = min((f"k={k}" for k in FIXED), key=lambda name: medians[name])
        for name, found in arms.items():
            mean_k = statistics.fmean(course.mean_k for course in courses[name]) / ranks
            yield _row(case, link, name, found, arms[best]) | {
                "best_k": int(best.removeprefix("k=")),
                "mean_k": mean_k,
                "median_s": _finite(medians[name]),
                "regret": _finite(medians[name] / medians[best] - 1),
                "ranks": ranks,
                "micro_s": times.micro_s,
                "fixed_s": times.fixed_s,
            }


def _row(case: Case, link: str, name: str, arm: Arrivals, best: Arrivals) -> dict[str, Any]:
    both = [(ours, theirs) for (_, ours), (_, theirs) in zip(arm, best, strict=True) if math.isfinite(ours + theirs)]
    row: dict[str, Any] = {"metric": "regret_ratio", "task": case.name, "link": link, "policy": name}
    row |= {"target": case.target, "n": len(both), "seeds": len(arm)}
    if len(both) > 1:
        found = ratio_interval([ours / theirs for ours, theirs in both])
        row |= {"mean": found.mean, "low": found.low, "high": found.high}
    return row | {"median_samples": _finite(statistics.median(samples for samples, _ in arm))}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sweep_rows(case: Case) -> Iterator[dict[str, Any]]:
    """Train at k = 1 with other learning rates than the case's."""
    rule = trimtab.BatchRule("fixed", k=1, k_max=1, min_windows=10**6)
    for factor, seed in itertools.product((0.25, 0.5, 1.0, 2.0, 4.0), range(3)):
        course = train(case, seed, rule, rate=factor * case.rate)
        samples = _finite(course.arrival(case.target, Times(1.0, 0.0), 1)[0])
        yield {"metric": "samples_to_target", "task": case.name, "rate": factor * case.rate, "seed": seed, "n": 1} | {
            "samples": samples
        }


def main() -> None:
    """Train, and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tasks", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--latency", type=float, default=LATENCY, help="of a slow reduction, in micro-batches")
    parser.add_argument("--sweep", action="store_true", help="learning rates at k = 1")
    options = parser.parse_args()
    cases = [case for case in CASES if case.name in (options.tasks or [each.name for each in CASES])]
    seeds = QUICK_SEEDS if options.quick else options.seeds
    rows: list[dict[str, Any]] = []
    for case in cases[:1] if options.quick else cases:
        rows += sweep_rows(case) if options.sweep else case_rows(case, seeds, options.latency)
    if options.json:
        print(json.dumps({"schema": 1, "name": "regret", "environment": environment(), "rows": rows}, allow_nan=False))
        return
    for row in rows:
        print(_sweep_line(row) if options.sweep else _line(row))


def _sweep_line(row: dict[str, Any]) -> str:
    samples = "not reached" if row["samples"] is None else f"{row['samples']:.0f} samples"
    return f"{row['task']:<14} rate {row['rate']:<8.3g} seed {row['seed']}  {samples}"


def _line(row: dict[str, Any]) -> str:
    where = f"{row['task']:<14} {row['link']:<6} {row['policy']:<10} mean k {row['mean_k']:5.1f}"
    if row["median_s"] is None:
        return f"{where}  not reached"
    ratio = f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if "mean" in row else "not measured"
    return (
        f"{where}  {row['median_samples']:8.0f} samples {row['median_s']:8.1f} s  "
        f"regret {100 * row['regret']:6.1f}% against k={row['best_k']}: {ratio}"
    )


if __name__ == "__main__":
    main()
