"""Planner's choice compared with an exhaustive search over the candidates.

`python -m benchmarks.micro.exhaustive [--quick] [--json] [--tasks NAME ...]` runs all candidates of a task, then runs
the five best again and prints a `pick` row for each: seconds of the planner's choice relative to the candidate, paired
by block (1.03: the choice is 3% slower). There is no memory limit. The space excludes recomputation and compilation.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch

import trimtab
from benchmarks import command
from benchmarks.paper.tasks import load_task
from trimtab.planner.cost_model import sizes_to_consider
from trimtab.planner.plan_choice import choose
from trimtab.planner.search import SearchPhase, mode_candidates
from trimtab.planner.trial_statistics import speed_ratio
from trimtab.plans.profile import Candidate, Profile, Trial
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.trials import run_stage
from trimtab.settings import SEARCHED

TASKS = ("digits_resnet", "source_gpt")
BEST, BLOCKS = 5, 16


def space(profile: Profile) -> list[Candidate]:
    """Return all candidates: precision, memory format, allocator, fused optimizer, head chunks, micro-batch size."""
    fused = (False, True) if profile.loop.supports_fused else (profile.loop.is_fused,)
    allocators = ("keep", "retain") if profile.loop.can_retain else ("keep",)
    chunks = {None, *(trial.candidate.loss_chunk for trial in profile.stage("head"))}
    modes = {(each.precision, each.memory_layout) for each in mode_candidates(profile)}
    sizes = sizes_to_consider(profile)
    grid = itertools.product(sorted(modes), fused, sizes, allocators, sorted(chunks, key=lambda c: c or 0))
    return [
        Candidate(
            rows,
            precision=precision,
            memory_layout=layout,
            fused_optimizer=is_fused,
            allocator=allocator,
            loss_chunk=chunk,
        )
        for (precision, layout), is_fused, rows, allocator, chunk in grid
    ]


def rows_of(name: str, *, quick: bool) -> Iterator[dict[str, Any]]:
    """Plan a task, run all candidates, and yield a row for each of the best, run again with the planner's choice."""
    task = load_task(name)
    batch = next(task.load_data().batches(0, task.batch_size))
    torch.manual_seed(0)
    model = task.make_model().train()
    subject = TrainingLoop(model, task.make_optimizer(model), task.loss_fn, batch, task.reference.clip_norm)
    loop = (model, subject.optimizer, task.loss_fn, batch)
    profile = trimtab.profile(*loop, reference=task.reference)
    plan = choose(profile, trimtab.Objective(), trimtab.Budget())
    pick = Candidate(**{field: getattr(plan, field).value for field in SEARCHED})
    everything = space(profile)
    print(f"{name}: {len(everything)} settings, picked {pick.describe()}", file=sys.stderr, flush=True)
    found = run_stage(subject, SearchPhase("everything", tuple(everything)), 3, _tell)
    ran = sorted((trial for trial in found if trial.step_s), key=lambda trial: trial.step_s or 0.0)
    best = [trial.candidate for trial in ran if trial.candidate != pick][:BEST]
    again = SearchPhase("again", (pick, *best), control=True, accepts=True, drops=False)
    ours, *others = run_stage(subject, again, 5 if quick else BLOCKS, _tell)
    control = speed_ratio(next(trial for trial in others if trial.control), ours)
    for trial in others:
        if not trial.control:
            resolved = {"control_low": control.low, "control_high": control.high}
            yield _row(name, pick, ours, trial, len(everything)) | resolved


def _row(name: str, pick: Candidate, ours: Trial, trial: Trial, size: int) -> dict[str, Any]:
    ratio = speed_ratio(trial, ours)
    row = {"metric": "pick", "task": name, "pick": pick.describe(), "other": trial.candidate.describe(), "space": size}
    return row | {"mean": ratio.mean, "low": ratio.low, "high": ratio.high, "n": ratio.n}


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run the search and print the comparison."""
    parser = command.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    options = parser.parse_args()
    tasks = options.tasks[:1] if options.quick else options.tasks
    rows = [row for name in tasks for row in rows_of(name, quick=options.quick)]
    command.show("exhaustive", rows, _line, as_json=options.json)


def _line(row: dict[str, Any]) -> str:
    ratio = f"{row['mean']:.3f} (95% {row['low']:.3f} to {row['high']:.3f}, n={row['n']})"
    return f"{row['task']:<16} pick ({row['pick']}) takes {ratio} of {row['other']}"


if __name__ == "__main__":
    main()
