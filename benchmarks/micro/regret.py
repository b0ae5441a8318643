"""Regret of adaptive accumulation: time to a loss relative to the best fixed k, which is unknown in advance.

`python -m benchmarks.micro.regret [--quick] [--json] [--tasks source_gpt_small] [--seeds 10] [--jobs 2]` trains each
case from several seeds to a validation loss, with fixed k = 1, 2, 4, 8, 16 micro-batches per window and rank, and with
the policies. `regret_ratio` rows contain the time relative to the best fixed k, by medians over seeds and paired by
seed, for several losses and their mean. Arms train in parallel with a thread each, because only the overhead of
measuring noise is timed.

- Time: samples to the loss, converted with a table of `t_micro` and `t_fixed` for all arms, plus the measured overhead.
  The table is measured first: in a single process ("local"), and on two gloo ranks with reductions delayed by a sleep
  ("slow"), with a thread per rank.
- Two ranks are simulated by a process with twice the micro-batches, which has the same gradients (but updates batch
  statistics twice). The controller reads the times of the table instead of its own, once it has enough measurements.
- Learning rate: follows the batch size by the optimizer's rule in every arm, starting from the best at k = 1
  (`--sweep` shows others), with a warm-up if the case has one.
- "again" repeats the best fixed arm from other seeds, as a control. The best of several arms is also lucky, so
  `over_again` is relative to this repetition.
- Policies other than goodput, and fixed k more than 10% behind after five seeds, get no more seeds. Arms are compared
  on common seeds.
- `--keep FOLDER` resumes an interrupted run of the same sources.
"""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.micro.regret_cases import CASES, Case, Course, kept, train, train_fixed
from benchmarks.micro.regret_times import local_times, rank_times
from trimtab.adaptive_batch.step_time_model import StepTimes
from trimtab.planner.statistics import ratio_interval

FIXED = (1, 2, 4, 8, 16)
POLICIES = ("goodput", "paper")
COMPARED = "goodput"
RANKS = {"local": 1, "slow": 2}
LATENCY = 3.0  # of a slow reduction, in micro-batch times of one process
SEEDS, QUICK_SEEDS, OTHER_SEEDS = 10, 1, 5
FAR_BEHIND = 1.1
FIRST_SEED = 300  # earlier seeds were used to develop the policies and their constants

Targets = tuple[float, ...]
Arrivals = list[tuple[float, float]]  # (samples, seconds) per seed; infinite if the loss was not reached


def rule_of(policy: str, case: Case, ranks: int) -> trimtab.BatchRule:
    """Return the rule of a policy, in micro-batches of all ranks.

    The target of "paper" is a quarter of the initial variance of a micro-batch's gradient, so that it starts with k = 4
    as in the paper's recipe.
    """
    if policy == "paper":
        rule = trimtab.BatchRule("fixed", k=4, learning_rate="none", min_windows=10**6)
        noise = train(case, FIRST_SEED, rule, most=80 * case.rows).noise
        assert noise is not None
        target = noise.trace / case.rows / 4 / ranks  # its k is per rank
        allowed = 4 * ranks, 8 * ranks
        return trimtab.BatchRule(
            "paper", k=4 * ranks, k_max=16 * ranks, sigma2_target=target, allowed=allowed, learning_rate="linear"
        )
    return trimtab.BatchRule(policy, k=ranks, k_max=16 * ranks)


class Trained:
    """Training runs of a case. Runs of fixed k are shared between numbers of ranks.

    Args:
        case: Case to train.
        seeds: Number of seeds.
        pool: Executor of the runs.
        keep: Folder with cached runs.
    """

    def __init__(self, case: Case, seeds: int, pool: Executor, keep: Path) -> None:
        self._case, self._seeds, self._pool, self._keep = case, seeds, pool, keep
        self._fixed: dict[tuple[int, int], Future[Course]] = {}

    def fixed(self, total: int, *, first: int = FIRST_SEED, most: int = OTHER_SEEDS) -> list[Future[Course]]:
        """Submit runs with a fixed number of micro-batches per window.

        Args:
            total: Micro-batches of all ranks.
            first: First seed.
            most: Maximum number of seeds.
        """
        seeds = range(first, first + min(most, self._seeds))
        for seed in seeds:
            if (total, seed) not in self._fixed:
                self._fixed[total, seed] = self._submit(f"fixed {total}", train_fixed, seed, total)
        return [self._fixed[total, seed] for seed in seeds]

    def again(self, total: int) -> list[Future[Course]]:
        """Submit the same runs from other seeds."""
        return self.fixed(total, first=FIRST_SEED + self._seeds, most=self._seeds)

    def policy(self, name: str, ranks: int, times: StepTimes) -> list[Future[Course]]:
        """Submit a run per seed with a policy."""
        rule = rule_of(name, self._case, ranks)
        seeds = self._seeds if name == COMPARED else min(self._seeds, OTHER_SEEDS)
        each = range(FIRST_SEED, FIRST_SEED + seeds)
        return [self._submit(f"{name} on {ranks}", train, seed, rule, ranks, times) for seed in each]

    def _submit(self, name: str, run: Callable[..., Course], seed: int, *arguments: Any) -> Future[Course]:
        path = self._keep / f"{self._case.name}, {name}, seed {seed}.json"
        return self._pool.submit(kept, path, run, self._case, seed, *arguments)


def tables_of(case: Case, latency: float, keep: Path) -> dict[str, StepTimes]:
    """Return the step times per link, measured on the first call and cached."""
    keep.mkdir(parents=True, exist_ok=True)
    settings, path = keep / f"{case.name}, settings.txt", keep / f"{case.name}, times.json"
    said = f"{case.rows} rows, rate {case.rate:g}, losses {case.targets}, latency {latency:g}"
    said += f", {case.warmup} samples of warm-up" if case.warmup else ""
    if settings.is_file() and settings.read_text() != said:
        raise SystemExit(f"{keep} keeps what was trained with {settings.read_text()}; now it is {said}")
    settings.write_text(said)
    if not path.is_file():
        local = local_times(case)
        tables = {"local": local, "slow": rank_times(case, latency * local.micro_s)}
        path.write_text(json.dumps({link: [times.micro_s, times.fixed_s] for link, times in tables.items()}))
    return {link: StepTimes(*times) for link, times in json.loads(path.read_text()).items()}


def case_rows(case: Case, seeds: int, latency: float, jobs: int, keep: Path) -> Iterator[dict[str, Any]]:
    """Train every arm and yield its rows for every link."""
    tables = tables_of(case, latency, keep)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        trained, begun = Trained(case, seeds, pool, keep), {}
        for link, ranks in RANKS.items():
            begun[link] = {f"k={k}": trained.fixed(k * ranks) for k in FIXED}
            begun[link] |= {policy: trained.policy(policy, ranks, tables[link]) for policy in POLICIES}
        for link, ranks in RANKS.items():
            begun[link] |= _near(case, trained, tables[link], ranks, seeds)
        for link, arms in begun.items():
            courses = {name: _results(f"{case.name} {link} {name}", found) for name, found in arms.items()}
            yield from _link_rows(case, link, courses, tables[link], trained)


def _near(case: Case, trained: Trained, times: StepTimes, ranks: int, seeds: int) -> dict[str, list[Future[Course]]]:
    """Submit the remaining seeds of each fixed k that is not far behind after the first seeds."""

    def median_s(k: int) -> float:
        few = [each.result() for each in trained.fixed(k * ranks)]
        return statistics.median(each.arrival(case.targets, times, ranks)[1] for each in few)

    medians = {k: median_s(k) for k in FIXED}
    near = [k for k, seconds in medians.items() if seconds <= FAR_BEHIND * min(medians.values())]
    return {f"k={k}": trained.fixed(k * ranks, most=seeds) for k in near}


def _results(name: str, begun: list[Future[Course]]) -> list[Course]:
    found = [each.result() for each in begun]
    print(name, [f"{course.points[-1][0]:.0f}" for course in found], "samples", file=sys.stderr, flush=True)
    return found


def _link_rows(
    case: Case, link: str, courses: dict[str, list[Course]], times: StepTimes, trained: Trained
) -> Iterator[dict[str, Any]]:
    ranks = RANKS[link]
    of_link = {"task": case.name, "link": link, "ranks": ranks, "micro_s": times.micro_s, "fixed_s": times.fixed_s}

    def arrivals(name: str, targets: Targets) -> Arrivals:
        return [each.arrival(targets, times, ranks) for each in courses[name]]

    def best_for(targets: Targets) -> int:
        return min(FIXED, key=lambda k: _median_s(arrivals(f"k={k}", targets)))

    courses = courses | {"again": [each.result() for each in trained.again(best_for(case.targets) * ranks)]}
    for targets in (case.targets, *((each,) for each in case.targets)):
        best = best_for(targets)
        for name, found in courses.items():
            mean_k = statistics.fmean(course.mean_k for course in found) / ranks
            row = _row(arrivals(name, targets), arrivals(f"k={best}", targets))
            row |= {"policy": name, "best": f"k={best}", "best_k": best, "mean_k": mean_k}
            row["over_again"] = _over(arrivals(name, targets), arrivals("again", targets))
            yield {"metric": "regret_ratio"} | of_link | {"easiest": targets[0], "target": targets[-1]} | row


def _median_s(arm: Arrivals) -> float:
    return statistics.median(seconds for _, seconds in arm)


def _row(arm: Arrivals, best: Arrivals) -> dict[str, Any]:
    seeds = min(len(arm), len(best))
    arm, best = arm[:seeds], best[:seeds]
    both = [(ours, theirs) for (_, ours), (_, theirs) in zip(arm, best, strict=True) if math.isfinite(ours + theirs)]
    row: dict[str, Any] = {"n": len(both), "seeds": len(arm)}
    if len(both) > 1:
        found = ratio_interval([ours / theirs for ours, theirs in both])
        row |= {"mean": found.mean, "low": found.low, "high": found.high}
    return row | {
        "median_samples": _finite(statistics.median(samples for samples, _ in arm)),
        "median_s": _finite(_median_s(arm)),
        "regret": _over(arm, best),
    }


def _over(arm: Arrivals, other: Arrivals) -> float | None:
    return _finite(_median_s(arm) / _median_s(other) - 1)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def sweep_rows(case: Case) -> Iterator[dict[str, Any]]:
    """Yield samples to the loss at k = 1 for several learning rates."""
    for factor, seed in itertools.product((0.25, 0.5, 1.0, 2.0, 4.0), range(3)):
        course = train_fixed(case, seed, 1, factor * case.rate)
        samples = _finite(course.arrival(case.targets, StepTimes(1.0, 0.0), 1)[0])
        yield {"metric": "samples_to_target", "task": case.name, "rate": factor * case.rate, "seed": seed, "n": 1} | {
            "samples": samples
        }


def main() -> None:
    """Train all arms and print the regret of each policy."""
    parser = command.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=[case.name for case in CASES])
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="arms side by side")
    parser.add_argument("--latency", type=float, default=LATENCY, help="of a slow reduction, in micro-batches")
    parser.add_argument("--keep", type=Path, help="folder in which what is trained is kept, to go on another time")
    parser.add_argument("--sweep", action="store_true", help="learning rates at k = 1")
    options = parser.parse_args()
    cases = [case for case in CASES if case.name in (options.tasks or [each.name for each in CASES])]
    seeds = QUICK_SEEDS if options.quick else options.seeds
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        keep = options.keep or Path(folder)
        for case in cases[:1] if options.quick else cases:
            rows += sweep_rows(case) if options.sweep else case_rows(case, seeds, options.latency, options.jobs, keep)
    command.show("regret", rows, _sweep_line if options.sweep else _line, as_json=options.json)


def _sweep_line(row: dict[str, Any]) -> str:
    samples = "not reached" if row["samples"] is None else f"{row['samples']:.0f} samples"
    return f"{row['task']:<14} rate {row['rate']:<8.3g} seed {row['seed']}  {samples}"


def _line(row: dict[str, Any]) -> str:
    losses = f"{row['easiest']:g}" + (f" to {row['target']:g}" if row["easiest"] != row["target"] else "")
    where = f"{row['task']:<14} {losses:<12} {row['link']:<6} {row['policy']:<13} mean k {row['mean_k']:5.1f}"
    if row["median_s"] is None:
        return f"{where}  not reached"
    ratio = f"{row['mean']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if "mean" in row else "not measured"
    return (
        f"{where}  {row['median_samples']:8.0f} samples {row['median_s']:8.1f} s  "
        f"regret {100 * row['regret']:6.1f}% against {row['best']}: {ratio}, n={row['n']}"
    )


if __name__ == "__main__":
    main()
