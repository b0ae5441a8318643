"""Plans under decreasing memory budgets, executed on fresh models to test that the budgets are met.

`python -m benchmarks.micro.budget_sweep [--quick] [--json] [--tasks NAME ...]` prints `budget` rows for budgets from
100% to 30% of the peak of the unlimited plan:

- prediction and measurement of each plan; `time_error` is the relative error of the predicted seconds;
- `recorded_s`: seconds predicted by the profile of the unlimited plan for its plan under this budget;
- `is_monotone`: True if `recorded_s` is at least that of the looser budget, up to the 1% that a plan may trade for less
  memory; None if there is no plan;
- `plans_monotone`: the same for the executed plans, which have separate profiles;
- `is_between`: True if the median measured time lies within the predicted interval.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.core.errors import InfeasibleError
from trimtab.measure.timing import time_call
from trimtab.planner.plan_choice import choose
from trimtab.planner.statistics import mean_interval
from trimtab.planner.trial_statistics import FREE_SPEED
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.peak_memory import peak_bytes
from trimtab.tasks.task import Batch, Task

TASKS = ("digits_resnet", "source_gpt", "wikitext2_gpt")
SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)
STEPS = 10
DEVICE = torch.device("cpu")


def made(task: Task) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a new model and optimizer."""
    torch.manual_seed(0)
    model = task.make_model().train()
    return model, task.make_optimizer(model)


def planned(task: Task, batch: Batch, limit: int | None) -> Plan:
    """Return the plan under a budget in bytes; None for no budget."""
    model, optimizer = made(task)
    budget = trimtab.Budget(memory=limit)
    return trimtab.plan(model, optimizer, task.loss_fn, batch, budget=budget, reference=task.reference)


def predicted_s(profile: Profile, limit: int) -> float | None:
    """Return the predicted seconds of the plan that a profile yields under a budget; None without a feasible plan."""
    try:
        plan = choose(profile, trimtab.Objective(), trimtab.Budget(memory=limit))
    except InfeasibleError:
        return None
    return plan.predicted and plan.predicted.step_s


def run(subject: TrainingLoop, plan: Plan, steps: int = STEPS) -> tuple[int, list[float]]:
    """Return the peak of a step in bytes and the seconds of several steps."""
    with trimtab.start(subject.model, subject.optimizer, plan) as started:

        def step() -> None:
            started.train_step(started.window(subject.batch), subject.loss_fn)

        for _ in range(2):
            step()
        subject.optimizer.zero_grad(set_to_none=True)
        peak = peak_bytes(step, DEVICE, subject.live_tensors)
        return peak, [time_call(step, DEVICE) for _ in range(steps)]


def sweep(name: str, shares: tuple[float, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row per budget."""
    task = load_task(name)
    batch = next(task.load_data().batches(0, task.batch_size))
    model, optimizer = made(task)
    recorded = trimtab.profile(model, optimizer, task.loss_fn, batch, reference=task.reference, traces=True)
    peak, _ = run(
        TrainingLoop(*made(task), task.loss_fn, batch), choose(recorded, trimtab.Objective(), trimtab.Budget())
    )
    longest, longest_plan = 0.0, 0.0
    for share in shares:
        row = {"metric": "budget", "model": name, "share": share, "budget_bytes": int(share * peak)}
        recorded_s = predicted_s(recorded, row["budget_bytes"])
        row |= {"recorded_s": recorded_s, "is_monotone": recorded_s and recorded_s >= FREE_SPEED * longest}
        longest = max(longest, recorded_s or 0.0)
        print(f"{name}: {100 * share:.0f}% of {peak / 2**20:.0f} MiB", file=sys.stderr, flush=True)
        try:
            plan = planned(task, batch, int(share * peak))
        except InfeasibleError as error:
            yield row | {"feasible": False, "measured_bytes": None, "measured_s": None, "hint": str(error.hint)}
            continue
        found, seconds = run(TrainingLoop(*made(task), task.loss_fn, batch), plan)
        interval, predicted = mean_interval(seconds), plan.predicted
        row |= {"feasible": True, "measured_bytes": found, "is_met": found <= row["budget_bytes"]}
        row |= {"measured_s": statistics.median(seconds), "low": interval.low, "high": interval.high, "n": interval.n}
        if predicted is not None:
            row |= {"predicted_s": predicted.step_s, "predicted_bytes": predicted.peak_bytes}
            row |= {"time_error": predicted.step_s / row["measured_s"] - 1}
            if predicted.between_s is not None:
                low_s, high_s = predicted.between_s
                row |= {"predicted_low": low_s, "predicted_high": high_s}
                row |= {"is_between": low_s <= row["measured_s"] <= high_s}
            row |= {"plans_monotone": predicted.step_s >= FREE_SPEED * longest_plan}
            longest_plan = max(longest_plan, predicted.step_s)
        yield row | {"changes": plan.changes_in_words or "nothing", "planning_s": plan.planning_s}


def main() -> None:
    """Plan and run under every budget and print the rows."""
    parser = command.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    options = parser.parse_args()
    tasks = options.tasks[:1] if options.quick else options.tasks
    rows = [row for name in tasks for row in sweep(name, SHARES[::3] if options.quick else SHARES)]
    command.show("budget_sweep", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    limit = f"{row['model']:<16} {row['budget_bytes'] / 2**20:8.1f} MiB"
    if not row["feasible"]:
        return f"{limit}  infeasible: {row['hint']}"
    met = "met" if row["is_met"] else "BROKEN"
    took = f"{row['measured_bytes'] / 2**20:8.1f} MiB {met}, {row['measured_s']:.3f} s"
    recorded = "" if row["is_monotone"] is not False else "; LESS than under a looser limit, by one profile"
    return f"{limit}  {took} (predicted {row.get('time_error', math.nan):+.1%}{recorded})  {row['changes']}"


if __name__ == "__main__":
    main()
