"""Time and peak memory of activation checkpointing schedules: common schedules and optimal ones.

`python -m benchmarks.micro.frontier [--quick] [--json] [--models gpt_tied]` prints `frontier` rows: predicted and
measured seconds and peak of a step. `over_none` is the time relative to a step without recomputation, interleaved, with
its interval. `selective` keeps results of matrix products and attention in every block. `optimal` is the schedule of
least recomputation for a fraction of the peak without recomputation, also at the peaks of the other schedules. Freed
memory is kept by the allocator; otherwise smaller steps would gain from fewer page faults.

`--compiled` prints `torch_memory_budget` rows instead: the compiled model with an activation memory budget, a fraction
of the activations that the compiler would keep (not a bound on the peak); 1 is plain compilation. `gradient_error` is
the difference to the eager gradients with the same dropout masks, relative to their norm.

`--walk` prints `budget` rows instead: a profile is planned under 20 limits, from that peak down to the smallest
feasible limit, and each plan is executed.
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch._functorch.config
from torch import nn

import trimtab
from benchmarks import command
from benchmarks.micro.budget_sweep import run
from benchmarks.micro.prediction_models import KINDS, MORE_KINDS, Kind
from trimtab.core.block_costs import BlockChain
from trimtab.core.errors import InfeasibleError
from trimtab.core.recompute_schedule import KeptBlock, Schedule
from trimtab.losses import mean_of
from trimtab.measure.timing import time_settled
from trimtab.planner.plan_choice import choose
from trimtab.planner.recompute_cost import every_block, keep_all, predict, sqrt_segments
from trimtab.planner.recompute_solver import optimal
from trimtab.planner.statistics import ratio_interval
from trimtab.plans.profile import Candidate, Profile
from trimtab.profiling.block_profile import measure_recomputable
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.peak_memory import peak_bytes
from trimtab.techniques.activation_checkpointing import use_schedule
from trimtab.techniques.mixed_precision import autocast, retained_memory

MODELS = ("gpt_tied", "resnet50", "unet", "vit")
SHARES = (0.9, 0.8, 0.75, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25)
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
TURNS, QUICK_TURNS, LIMITS, WALK_STEPS = 15, 3, 20, 3
CPU = torch.device("cpu")
ALL_KINDS = KINDS | MORE_KINDS


@dataclass
class Loop:
    """Forward and backward of a model, for measurements."""

    model: nn.Module
    kind: Kind
    batch: Any
    precision: str
    called: nn.Module | None = None

    def step(self) -> None:
        """Run forward and backward."""
        self.model.zero_grad(set_to_none=True)
        with autocast(self.precision, CPU):
            result = self.kind.loss_fn(self.model if self.called is None else self.called, self.batch)
        mean_of(result).backward()

    def switch(self, called: nn.Module) -> Callable[[], None]:
        """Call another module instead of the model. Returns a function that undoes the change."""
        self.called = called

        def undo() -> None:
            self.called = None

        return undo

    def live(self) -> list[torch.Tensor]:
        """Return the tensors that exist before a step."""
        return [*self.model.parameters(), *self.model.buffers(), *self.batch]


def schedules_of(found: BlockChain) -> Iterator[tuple[str, float | None, Schedule]]:
    """Yield (name, requested fraction of the peak or None, schedule)."""
    number, chain = len(found.stages), found.stages
    plain = {"none": keep_all(number), "every_block": every_block(number)}
    plain["sqrt"] = sqrt_segments(number, [stage.is_linked for stage in chain[:-1]])
    if all(stage.part is not None for stage in chain[:-1]):
        plain["selective"] = (*(KeptBlock(index, in_part=True) for index in range(number - 1)), KeptBlock(number - 1))
    for name, schedule in plain.items():
        yield name, None, schedule
    whole = found.held_bytes + predict(chain, keep_all(number)).peak_bytes
    theirs = [(found.held_bytes + predict(chain, each).peak_bytes) / whole for each in plain.values()]
    seen = set()
    for share in sorted({*SHARES, *theirs}, reverse=True):  # also at the peaks of the common schedules
        schedule = optimal(chain, math.ceil(share * whole) - found.held_bytes)
        if schedule is not None and schedule not in seen:
            seen.add(schedule)
            yield "optimal", share, schedule


def rows_of(name: str, precision: str, turns: int) -> Iterator[dict[str, Any]]:
    """Yield a row per schedule of a model."""
    torch.manual_seed(0)
    kind = ALL_KINDS[name]
    loop = Loop(kind.make().train(), kind, kind.batch(kind.sizes[-1]), precision)
    subject = TrainingLoop(loop.model, torch.optim.SGD(loop.model.parameters(), lr=0.0), kind.loss_fn, loop.batch)
    measured = measure_recomputable(subject, Candidate(subject.rows, precision=precision))
    assert measured.whole is not None, measured.refusal
    found, blocks = measured.whole.at(subject.rows), measured.blocks
    none_s = None
    for schedule_name, share, schedule in schedules_of(found):
        row = {"metric": "frontier", "model": name, "precision": precision, "schedule": schedule_name, "share": share}
        row |= _measured(loop, functools.partial(use_schedule, loop.model, blocks, schedule), turns)
        expected = predict(found.stages, schedule)
        none_s = none_s or row["time_s"]
        row |= {"predicted_bytes": found.held_bytes + expected.peak_bytes}
        row |= {"predicted_over_none": 1 + expected.recompute_s / none_s, "runs": list(expected.runs)}
        print(_line(row), file=sys.stderr, flush=True)
        yield row


def compiled_rows(name: str, precision: str, turns: int) -> Iterator[dict[str, Any]]:
    """Yield a row per activation memory budget of the compiled model, relative to the eager model."""
    torch.manual_seed(0)
    kind = ALL_KINDS[name]
    loop = Loop(kind.make().train(), kind, kind.batch(kind.sizes[-1]), precision)
    for budget in BUDGETS:
        torch.compiler.reset()
        with torch._functorch.config.patch(activation_memory_budget=budget):
            compiled = torch.compile(loop.model, options={"fallback_random": True})  # same random numbers as eager
            undo = loop.switch(compiled)
            loop.step()  # compiles
            ours = _gradients(loop)
            undo()
            theirs = _gradients(loop)
            row = {"metric": "frontier", "model": name, "precision": precision, "schedule": "torch_memory_budget"}
            row |= {"gradient_error": float((ours - theirs).norm() / theirs.norm())}
            row |= {"share": budget, **_measured(loop, functools.partial(loop.switch, compiled), turns)}
        print(_line(row), file=sys.stderr, flush=True)
        yield row


def _gradients(loop: Loop) -> torch.Tensor:
    """Return the concatenated gradients of a step with fixed random numbers."""
    torch.manual_seed(1)
    loop.step()
    return torch.cat([p.grad.flatten() for p in loop.model.parameters() if p.grad is not None])


def _measured(loop: Loop, use: Callable[[], Callable[[], None]], turns: int) -> dict[str, Any]:
    """Return peak and seconds of a modified step, and its time relative to the unmodified step, interleaved.

    Args:
        loop: Step to measure.
        use: Modifies the step and returns a function that undoes the modification.
        turns: Number of rounds.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(turns + 1):
        for kept in (True, False) if turn % 2 else (False, True):
            undo = _nothing if kept else use()
            taken = time_settled(loop.step, CPU)
            undo()
            seconds[kept] += [taken] if turn else []
    over = ratio_interval([ours / theirs for ours, theirs in zip(seconds[False], seconds[True], strict=True)])
    undo = use()
    loop.model.zero_grad(set_to_none=True)
    peak = peak_bytes(loop.step, CPU, loop.live)
    undo()
    row = {"peak_bytes": peak, "time_s": sorted(seconds[False])[turns // 2]}
    return row | {"over_none": over.mean, "low": over.low, "high": over.high, "n": turns}


def _nothing() -> None:
    """Do nothing."""


def walk(name: str, precision: str, limits: int) -> Iterator[dict[str, Any]]:
    """Plan a profile under decreasing limits and yield a row per executed plan."""
    torch.manual_seed(0)
    kind = ALL_KINDS[name]
    model, batch = kind.make().train(), kind.batch(kind.sizes[-1])
    subject = TrainingLoop(model, torch.optim.AdamW(model.parameters(), lr=1e-4), kind.loss_fn, batch)
    reference = trimtab.Reference(precision=precision)
    profile = trimtab.profile(model, subject.optimizer, kind.loss_fn, batch, reference=reference, traces=True)
    whole, _ = run(subject, choose(profile, trimtab.Objective(), trimtab.Budget()), WALK_STEPS)
    least = _least_limit(profile, whole)
    for index in range(limits):
        limit = int(whole - (whole - least) * index / (limits - 1))
        row = {"metric": "budget", "model": name, "precision": precision, "budget_bytes": limit, "share": limit / whole}
        try:
            plan = choose(profile, trimtab.Objective(), trimtab.Budget(memory=limit))
        except InfeasibleError as error:
            row |= {"feasible": False, "hint": str(error.hint)}
        else:
            peak, seconds = run(subject, plan, WALK_STEPS)
            row |= {"feasible": True, "measured_bytes": peak, "is_met": peak <= limit}
            row |= {"measured_s": statistics.median(seconds)}
            row |= {"predicted_bytes": plan.predicted.peak_bytes, "predicted_s": plan.predicted.step_s}
            row |= {"changes": plan.changes_in_words or "nothing"}
        print(_walked(row), file=sys.stderr, flush=True)
        yield row


def _least_limit(profile: Profile, whole: int) -> int:
    """Return the smallest feasible limit in bytes, to a thousandth of `whole`."""
    refused, granted = 0, whole
    while granted - refused > whole // 1000:
        limit = (refused + granted) // 2
        try:
            choose(profile, trimtab.Objective(), trimtab.Budget(memory=limit))
        except InfeasibleError:
            refused = limit
        else:
            granted = limit
    return granted


def main() -> None:
    """Measure and print the frontier."""
    parser = command.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(ALL_KINDS), default=list(MODELS))
    parser.add_argument("--turns", type=int, default=TURNS, help="pairs of each schedule")
    parser.add_argument("--walk", action="store_true", help="plan under 20 limits, and run each plan")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    parser.add_argument("--compiled", action="store_true", help="torch's own way: compiled, under its memory budgets")
    options = parser.parse_args()
    turns = QUICK_TURNS if options.quick else options.turns
    names = options.models[:1] if options.quick else options.models
    if options.walk:
        limits = 4 if options.quick else LIMITS
        walked = [row for name in names for row in walk(name, options.precision, limits)]
        command.show("frontier_walk", walked, _walked, as_json=options.json)
        return
    let_go = retained_memory.hold()
    measure = compiled_rows if options.compiled else rows_of
    rows = [row for name in names for row in measure(name, options.precision, turns)]
    let_go()
    command.show("frontier_compiled" if options.compiled else "frontier", rows, _line, as_json=options.json)


def _walked(row: dict[str, Any]) -> str:
    limit = f"{row['model']:<9} {row['budget_bytes'] / 2**20:8.1f} MiB ({row['share']:.0%})"
    if not row["feasible"]:
        return f"{limit}  infeasible: {row['hint']}"
    took = f"{row['measured_bytes'] / 2**20:8.1f} MiB {'met' if row['is_met'] else 'BROKEN'}"
    return f"{limit}  {took}, {row['measured_s']:.3f} s (predicted {row['predicted_s']:.3f})  {row['changes']}"


def _line(row: dict[str, Any]) -> str:
    name = row["schedule"] + ("" if row["share"] is None else f" {row['share']:g}")
    memory = f"{row['peak_bytes'] / 2**20:8.1f} MiB"
    seconds = f"{row['over_none']:.3f} ({row['low']:.3f} to {row['high']:.3f}) of none's, {row['time_s']:.3f} s"
    where = f"{row['model']:<9} {row['precision']} {name:<13} {memory}  {seconds}"
    where += f"; gradients {row['gradient_error']:.1e} off" if "gradient_error" in row else ""
    if "predicted_bytes" not in row:
        return where
    told = f"{row['predicted_bytes'] / row['peak_bytes'] - 1:+.1%}, {row['predicted_over_none']:.3f}"
    return f"{where}; predicted {told}"


if __name__ == "__main__":
    main()
