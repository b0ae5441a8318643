"""One arm looked at on its own, apart from the races: peak memory of a step, seconds by phase, FLOP and terms."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.distributed.alone import ALONE, Together
from trimtab.distributed.dealing import rows_of_rank, shard
from trimtab.experiments.arm_facts import ArmFacts
from trimtab.measure.flops import count_flops
from trimtab.measure.memory import alive_between_steps, peak_bytes, storage_bytes
from trimtab.measure.sharded_norms import is_sharded, local
from trimtab.measure.timing import PhaseClock, time_call
from trimtab.recipes.loop import Loop, MakeLoop, autocast, move
from trimtab.tasks.task import LossFn, Task, TaskData

_PHASE_STEPS = 4


def measure_arm(
    make: MakeLoop,
    task: Task,
    data: TaskData,
    device: torch.device,
    together: Together = ALONE,
    *,
    peak_alone: bool = False,
) -> ArmFacts:
    """Return what a step of a fresh loop takes, once the optimizer's state exists, and what its loss counts.

    The forward pass is timed inside the loss function, the optimizer by its step hooks; what is left of a step is the
    backward pass and the loop itself. Several ranks measure in step: the peak is the largest of theirs, terms are of
    all of them, the rest is rank 0's.

    Args:
        peak_alone: what it holds at most is all that is asked for: neither phases nor FLOP, which take steps of their
            own.
    """
    rows = [rows_of_rank(task.batch_rows, rank, together.num_ranks) for rank in range(together.num_ranks)]
    shares = [each.stop - each.start for each in rows]
    watch = _Watch(task, device, shares[together.rank])
    torch.manual_seed(0)
    with together.entering():
        loop = make(watch.watched_task(), device)
    together.draw_apart(0)
    batches = watch.drawn(iter(shard(data.batches(0, task.batch_rows))))
    is_over = False
    try:
        for _ in range(2):
            loop.step(batches)
        peak = held_at_most(loop, batches, device, together.num_ranks)
        largest = None if peak is None else int(max(together.each(peak)))
        phases = {} if peak_alone else _phases(loop, batches, watch)
        terms = together.each(_terms_per_row(loop, batches, watch))
        flops = None if peak_alone else _flops_per_row(loop, batches, together)
        is_over = True
        found = ArmFacts(largest, phases, flops, loop.precision, terms_per_row=_mean(terms, shares))
        return together.made(ArmFacts, lambda: replace(found, terms_by_rank=tuple(terms) if len(terms) > 1 else ()))
    finally:
        if is_over or together.num_ranks == 1:
            loop.close()


def held_at_most(loop: Loop, batches: Iterator[Any], device: torch.device, num_ranks: int) -> int | None:
    """Return peak bytes of a step of this rank's, whose optimizer's state exists; None where its engine hides some.

    On CUDA the loop is the only one that holds anything.
    """
    loop.optimizer.zero_grad(set_to_none=True)  # alive before the count, gradients are not in it
    peak = peak_bytes(lambda: loop.step(batches), device, lambda: _live(loop))
    if num_ranks > 1 and device.type == "cpu" and not is_sharded(loop.model):
        # The buckets of gradients, which DDP holds all the time.
        peak += storage_bytes(p for p in loop.model.parameters() if p.requires_grad)
    return None if getattr(loop, "hides_memory", False) else peak


class _Watch:
    """What passes through a loop: seconds of its data and its forward passes, and what its loss counted."""

    def __init__(self, task: Task, device: torch.device, num_rows: int) -> None:
        self.task, self.device, self.clock = task, device, PhaseClock(device)
        self.num_rows = num_rows  # of a batch, on this rank
        self.num_batches = 0
        self.counts: list[Any] = []  # of each forward pass; None where the loss is a mean

    def watched_task(self) -> Task:
        """Return the task, every loss that a loop may train it by watched."""
        watched = {
            name: replace(recipe, loss_fn=self.around(recipe.loss_fn))
            for name, recipe in self.task.recipes.items()
            if recipe.loss_fn is not None
        }
        return replace(self.task, loss_fn=self.loss, **watched)

    def around(self, loss_fn: LossFn) -> LossFn:
        """Return a loss that is timed and counted."""

        def loss(model: torch.nn.Module, batch: Any) -> Any:
            with self.clock.phase("forward"):
                result = loss_fn(model, batch)
            self.counts.append(result[1] if isinstance(result, tuple) else None)
            return result

        return loss

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the task's loss."""
        return self.around(self.task.loss_fn)(model, batch)

    def drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches."""
        while True:
            with self.clock.phase("data"):
                batch = next(batches)
            self.num_batches += 1
            yield batch


def _terms_per_row(loop: Loop, batches: Iterator[Any], watch: _Watch) -> float:
    """Return what the loss counted in a row of all batches so far; the task's own figure where it is a mean."""
    if not watch.counts:  # a step of the user's own takes its loss itself: the declared one is asked apart
        watch.num_batches = 0
        for _ in range(_PHASE_STEPS):
            with autocast(loop.precision, watch.device):
                watch.loss(loop.model, move(next(batches), watch.device))
    if any(count is None for count in watch.counts):
        return float(watch.task.terms_per_row)
    return math.fsum(map(float, watch.counts)) / (watch.num_batches * watch.num_rows)


def _mean(terms: list[float], rows: list[int]) -> float:
    """Return the terms of a row over all ranks."""
    return terms[0] if len(terms) == 1 else math.fsum(map(operator.mul, terms, rows)) / sum(rows)


def _flops_per_row(loop: Loop, batches: Iterator[Any], together: Together) -> float | None:
    """Return FLOP of a step over its rows; None where the counter's dispatch mode is too much for the loop."""
    rows: list[int] = []
    # The loop ran without it: that is no failure of the arm.
    flops = together.attempt(lambda: count_flops(lambda: rows.append(loop.step(batches))))
    return None if flops is None else flops / rows[0]


def _phases(loop: Loop, batches: Iterator[Any], watch: _Watch) -> dict[str, float]:
    """Return seconds per batch of the task by phase, over a few steps."""
    clock, drawn = watch.clock, watch.num_batches
    step = contextlib.ExitStack()  # entered before the optimizer's step, closed after it
    before = loop.optimizer.register_step_pre_hook(lambda *args: step.enter_context(clock.phase("optimizer")))
    after = loop.optimizer.register_step_post_hook(lambda *args: step.close())
    clock.seconds.clear()
    total = time_call(lambda: loop.step(batches), watch.device, _PHASE_STEPS)
    before.remove()
    after.remove()
    per_step = (watch.num_batches - drawn) / _PHASE_STEPS  # P1 takes several a step
    phases = {name: seconds / _PHASE_STEPS for name, seconds in clock.seconds.items()}
    # A step of the user's own calls no loss function of ours: its forward pass is in what is left.
    rest = "backward and rest" if "forward" in phases else "forward, backward and rest"
    phases[rest] = max(0.0, total - sum(phases.values()))
    order = ("data", "forward", rest, "optimizer")
    return {name: phases[name] / per_step for name in order if name in phases}


def _live(loop: Loop) -> Iterator[Tensor]:
    """Yield what a loop holds between steps; of shards, this rank's."""
    yield from map(local, alive_between_steps(loop.model, loop.optimizer))
