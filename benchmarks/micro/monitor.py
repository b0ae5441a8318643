"""Overhead of the gradient noise monitor: steps of a run with and without the monitor, interleaved.

`python -m benchmarks.micro.monitor [--quick] [--json] [--tasks NAME ...]` prints `monitor_overhead_ratio` rows: seconds
with the monitor relative to seconds without (1.005 is half a percent), and the fraction by the monitor's own clock.

A single run executes both kinds of steps, because two runs differ by more than the overhead in memory placement: for
steps without the monitor, the controller is exchanged for that of a fixed batch size. At k = 1 a few windows are split
in two, which is part of the overhead. The first windows, in which the monitor may take more, are not compared:
`price_of_the_first` is their overhead by the monitor's clock, `price_of_a_run` that of 2,000 windows including them.

`--mechanisms` compares methods to compute each micro-batch's norm, in every window: hooks that keep references, with
norms of a chunk at a time (used by trimtab); a norm in each parameter's hook; norms of partial sums (no hooks, not
exact); a copy of each gradient (without norms); and nothing, as control.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.adaptive_batch.noise_probes import OverheadBudget
from trimtab.losses import mean_of
from trimtab.measure.gradient_norms import GradientNorms, squared_norm
from trimtab.measure.timing import synchronize
from trimtab.planner.statistics import Interval, ratio_interval, resolution
from trimtab.plans.plan import Plan
from trimtab.tasks.task import Task

# (task, micro-batches per step, pairs, pairs with --quick)
CASES = (("digits_resnet", 4, 2000, 90), ("source_gpt", 4, 450, 12), ("source_gpt", 1, 150, 12))
# At the size of the paper, for a GPU, with bf16 autocast. Only run if named.
PAPER_SIZE = (("wikitext2_gpt2", 4, 200, 4),)
RUN = 2_000
BEGUN, QUICK_BEGUN = 200, 20  # first windows of a run, in which the overhead budget is larger
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Step = Callable[[Any], None]


def steps_of(task: Task, k: int) -> tuple[Step, Step, OverheadBudget]:
    """Return a step with the monitor (including decisions on k), a step without, and the overhead account."""
    torch.manual_seed(0)
    model = task.make_model().to(DEVICE).train()
    rule = trimtab.BatchRule("norm_test", k=k, k_max=2 * k, theta=1e6, learning_rate="none")  # never raises k
    precision = "bf16" if task.name in {name for name, *_ in PAPER_SIZE} else "fp32"
    plan = Plan.fixed(task.batch_size, micro_batch=task.batch_size // k, batch_rule=rule, precision=precision)
    run = trimtab.start(model, task.make_optimizer(model), plan)
    watching, hooks = run._control, run._hooks
    assert watching is not None
    without = copy.copy(hooks)
    without.remove(watching)

    def step(batch: Any, *, is_watched: bool) -> None:
        run._control, run._hooks = (watching, hooks) if is_watched else (None, without)
        run.train_step(run.window(batch), task.loss_fn)

    watched, plain = functools.partial(step, is_watched=True), functools.partial(step, is_watched=False)
    return watched, plain, watching._account


def alternate(task: Task, arms: list[Step], pairs: int, skip: int) -> list[list[float]]:
    """Return the seconds per step of each arm, interleaved in rounds of random order."""
    batches: Iterator[Any] = task.load_data().batches(0, task.batch_size)
    draw, order = random.Random(0), list(range(len(arms)))
    seconds: list[list[float]] = [[] for _ in arms]
    for index in range(pairs + skip):
        batch = next(batches)
        draw.shuffle(order)
        for arm in order:
            synchronize(DEVICE)
            start = time.perf_counter()
            arms[arm](batch)
            synchronize(DEVICE)
            if index >= skip:
                seconds[arm].append(time.perf_counter() - start)
    return seconds


def ratio(ours: list[float], theirs: list[float]) -> Interval:
    """Return the ratio ours / theirs, paired by round."""
    return ratio_interval([a / b for a, b in zip(ours, theirs, strict=True)])


def monitor_row(name: str, k: int, pairs: int, begun: int) -> dict[str, Any]:
    """Return the row of a task. The first `begun` windows, with a larger overhead budget, are not compared."""
    task = load_task(name)
    watched, plain, account = steps_of(task, k)
    for batch in itertools.islice(task.load_data().batches(1, task.batch_size), begun):
        watched(batch)
    early_share = account.share if begun else 0.0
    theirs, ours, control = alternate(task, [plain, watched, plain], pairs, skip=10)
    found, same = ratio(ours, theirs), ratio(control, theirs)
    return {
        "metric": "monitor_overhead_ratio",
        "task": name,
        "estimator": "exact",
        "num_micro_batches": k,
        "mean": found.mean,
        "low": found.low,
        "high": found.high,
        "n": found.n,
        "resolution": resolution(same),
        "control_half_width": same.half_width,
        "price_of_a_window": account.price,
        "measured_every": account.every,
        "price_on_average": account.price / account.every,
        "price_of_a_run": (begun * early_share + (RUN - begun) * account.price / account.every) / RUN,
        "first_windows": begun,
        "price_of_the_first": early_share,
    }


# Methods to compute norms.


class ByHand:
    """Hand-written step that computes each micro-batch's squared norm by one of several methods, on the same model."""

    def __init__(self, task: Task, k: int) -> None:
        torch.manual_seed(0)
        self._task, self._k = task, k
        self._model = task.make_model().to(DEVICE).train()
        self._optimizer = task.make_optimizer(self._model)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self._norms = GradientNorms(self._parameters)
        self._found: list[torch.Tensor] = []

    def step(self, mechanism: str, batch: Any) -> None:
        """Take a step with a method. Hooks are removed at the end of the window."""
        self._optimizer.zero_grad(set_to_none=True)
        self._found.clear()
        hooks = []
        if mechanism == "chunks of references":
            self._norms.on()
        elif mechanism == "norm in each hook":
            hooks = [p.register_hook(lambda g: self._found.append(g.norm().square())) for p in self._parameters]
        columns = [column.to(DEVICE).chunk(self._k) for column in batch]
        for micro in zip(*columns, strict=True):
            result = self._task.loss_fn(self._model, micro)
            loss = mean_of(result)
            (loss / self._k).backward()
            self._look(mechanism)
        self._norms.off()
        for hook in hooks:
            hook.remove()
        self._optimizer.step()

    def _look(self, mechanism: str) -> None:
        if mechanism == "chunks of references":
            self._found.append(self._norms.take())
        elif mechanism == "norms of the sum":
            self._found.append(squared_norm([p.grad for p in self._parameters if p.grad is not None]))
        elif mechanism == "copies alone":
            self._found.append(torch.cat([p.grad.flatten() for p in self._parameters if p.grad is not None]))


NOTHING = "nothing"
MECHANISMS = ("chunks of references", "norm in each hook", "norms of the sum", "copies alone", NOTHING)


def mechanism_rows(name: str, k: int, pairs: int) -> list[dict[str, Any]]:
    """Return a row per method, relative to no measurement, and the row of the control."""
    task = load_task(name)
    by_hand = ByHand(task, k)
    arms = [functools.partial(by_hand.step, mechanism) for mechanism in (NOTHING, *MECHANISMS)]
    theirs, *seconds = alternate(task, arms, pairs, skip=5)
    rows = []
    for mechanism, ours in zip(MECHANISMS, seconds, strict=True):
        found = ratio(ours, theirs)
        row = {"metric": "monitor_overhead_ratio", "task": name, "estimator": mechanism, "num_micro_batches": k}
        rows.append(row | {"mean": found.mean, "low": found.low, "high": found.high, "n": found.n})
    return rows


def main() -> None:
    """Measure and print the overhead."""
    parser = command.parser(__doc__)
    parser.add_argument("--mechanisms", action="store_true", help="ways to see the norms, in every window")
    parser.add_argument("--tasks", nargs="+", default=sorted({name for name, *_ in CASES}))
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, k, full, quick in [case for case in (*CASES, *PAPER_SIZE) if case[0] in options.tasks]:
        pairs, begun = (quick, QUICK_BEGUN) if options.quick else (full, BEGUN)
        print(f"{name}, {k} micro-batches, {pairs} rounds", file=sys.stderr)
        if options.mechanisms:
            rows += mechanism_rows(name, k, max(10, pairs // 3))
        else:
            rows.append(monitor_row(name, k, pairs, begun))
    command.show("monitor", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    bar = f"  bar {1.005 + row['control_half_width']:.4f}" if "control_half_width" in row else ""
    line = f"{row['task']}  {row['estimator']}: {row['mean']:.4f} ({row['low']:.4f} to {row['high']:.4f}){bar}"
    if "price_of_a_window" not in row:
        return line
    return (
        f"{line}\n  its own clock: {100 * row['price_of_a_window']:.2f}% of a measured window, one in "
        f"{row['measured_every']}: {100 * row['price_on_average']:.2f}% on average"
    )


if __name__ == "__main__":
    main()
