"""One arm looked at on its own, apart from the races: peak memory of a step, seconds by phase, counted FLOP."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.experiments.arm_facts import ArmFacts
from trimtab.measure.flops import count_flops
from trimtab.measure.memory import peak_bytes
from trimtab.measure.timing import PhaseClock, time_call
from trimtab.recipes.loop import Loop, MakeLoop
from trimtab.tasks.task import Task, TaskData

_PHASE_STEPS = 4


def measure_arm(make: MakeLoop, task: Task, data: TaskData, device: torch.device) -> ArmFacts:
    """Return what a step of a fresh loop takes, once the optimizer's state exists.

    The forward pass is timed inside the loss function, the optimizer by its step hooks; what is left of a step is the
    backward pass and the loop itself.
    """
    clock = PhaseClock(device)
    torch.manual_seed(0)
    loop = make(replace(task, loss_fn=_timed(task.loss_fn, clock)), device)
    try:
        batches = data.batches(0, task.batch_rows)
        for _ in range(2):
            loop.step(batches)
        peak = peak_bytes(lambda: loop.step(batches), device, lambda: _live(loop))
        return ArmFacts(peak, _phases(loop, batches, clock, device), _flops_per_row(loop, batches), loop.precision)
    finally:
        loop.close()


def _flops_per_row(loop: Loop, batches: Iterator[Any]) -> float | None:
    """Return FLOP of a step over its rows; None where the counter's dispatch mode is too much for the loop."""
    rows: list[int] = []
    try:
        flops = count_flops(lambda: rows.append(loop.step(batches)))
    except Exception:  # the loop ran without it: that is no failure of the arm
        return None
    return None if flops is None else flops / rows[0]


def _phases(loop: Loop, batches: Iterator[Any], clock: PhaseClock, device: torch.device) -> dict[str, float]:
    step = contextlib.ExitStack()  # entered before the optimizer's step, closed after it
    before = loop.optimizer.register_step_pre_hook(lambda *args: step.enter_context(clock.phase("optimizer")))
    after = loop.optimizer.register_step_post_hook(lambda *args: step.close())
    clock.seconds.clear()
    total = time_call(lambda: loop.step(_timed_data(batches, clock)), device, _PHASE_STEPS)
    before.remove()
    after.remove()
    phases = {name: seconds / _PHASE_STEPS for name, seconds in clock.seconds.items()}
    phases["backward and rest"] = max(0.0, total - sum(phases.values()))
    order = ("data", "forward", "backward and rest", "optimizer")
    return {name: phases[name] for name in order if name in phases}


def _timed(function: Callable[..., Any], clock: PhaseClock) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        with clock.phase("forward"):
            return function(*args)

    return call


def _timed_data(batches: Iterator[Any], clock: PhaseClock) -> Iterator[Any]:
    while True:
        with clock.phase("data"):
            batch = next(batches)
        yield batch


def _live(loop: Loop) -> Iterator[Tensor]:
    yield from loop.model.parameters()
    yield from loop.model.buffers()
    for state in loop.optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, Tensor))
