"""Instrumented losses and batches of a loop: seconds by phase and counts of loss terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from trimtab.core.step_phases import PHASES
from trimtab.losses import parts_of
from trimtab.measure.phase_timer import Label, StepClock
from trimtab.tasks.task import LossFn, Task


class InstrumentedLoop:
    """A task's losses and batches with timing and counting.

    Args:
        task: the task.
        device: device of the loop.
        num_samples: samples per batch on this rank.
        waits: True if ranks wait for each other after a backward.

    Attributes:
        num_batches: number of batches drawn so far.
        counts: loss terms of every forward pass; None if the loss is a mean.
    """

    def __init__(self, task: Task, device: torch.device, num_samples: int, *, waits: bool = False) -> None:
        self.task, self.device, self.num_samples = task, device, num_samples
        self.clock = StepClock(device, waits=waits)
        self.num_batches = 0
        self.counts: list[Any] = []

    def watched_task(self) -> Task:
        """Return the task with all its losses instrumented."""
        watched = {
            name: replace(recipe, loss_fn=self.around(recipe.loss_fn))
            for name, recipe in self.task.recipes.items()
            if recipe.loss_fn is not None
        }
        return replace(self.task, loss_fn=self.loss, **watched)

    def around(self, loss_fn: LossFn) -> LossFn:
        """Return the loss function with timing and counting."""

        def loss(model: torch.nn.Module, batch: Any) -> Any:
            result = self.clock.forward(loss_fn, model, batch)
            self.counts.append(parts_of(result).count)
            return result

        return loss

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the task's loss, with timing and counting."""
        return self.around(self.task.loss_fn)(model, batch)

    def drawn(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, with timing and counting."""
        while True:
            with self.clock.phase("data"):
                batch = next(batches)
            self.num_batches += 1
            yield batch


def by_phase(seconds: Mapping[Label, float], num_batches: int) -> dict[str, float]:
    """Return seconds per batch of every phase present, in order."""
    found = {phase: sum(s for (name, _), s in seconds.items() if name == phase) for phase in PHASES}
    present = {phase for phase, _ in seconds}
    return {phase: found[phase] / num_batches for phase in PHASES if phase in present}


def by_part(seconds: Mapping[Label, float], num_batches: int) -> dict[str, float]:
    """Return seconds per batch of forward and backward by module class, as "forward Linear"."""
    found = {label: s for label, s in seconds.items() if label[0] in ("forward", "backward")}
    return {" ".join(label).strip(): s / num_batches for label, s in sorted(found.items())}
