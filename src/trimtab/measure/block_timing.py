"""Forward time of each block inside a training step, from CUDA events or the host clock."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from trimtab.measure.overhead_timer import stamp
from trimtab.measure.step_timer import seconds_between
from trimtab.measure.timing import synchronize


def forward_seconds(
    step: Callable[[], object], model: nn.Module, blocks: Sequence[str], device: torch.device, *, steps: int = 5
) -> tuple[float, ...]:
    """Return the median forward time of each block in seconds, after a warm-up step.

    Blocks are timed inside a step, because alone they would find other cache contents. The device is not synchronized
    between blocks.

    Args:
        step: Runs each block's forward once.
        model: Model with the blocks.
        blocks: Names of the blocks.
        device: Device of the model.
        steps: Number of timed steps.
    """
    seconds: list[list[float]] = [[] for _ in blocks]
    for index in range(steps + 1):
        with _stamped(model, blocks, device) as stamps:
            step()
        synchronize(device)
        if index:
            for each, pair in zip(seconds, stamps, strict=True):
                each.append(seconds_between(*pair))
    return tuple(map(statistics.median, seconds))


@contextlib.contextmanager
def _stamped(model: nn.Module, blocks: Sequence[str], device: torch.device) -> Iterator[list[list[Any]]]:
    stamps: list[list[Any]] = [[] for _ in blocks]

    def note(index: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if len(stamps[index]) == 2:  # recomputed in the backward by the model's own activation checkpointing
                return
            event = stamp(device)
            stamps[index].append(time.perf_counter() if event is None else event)

        return hook

    handles = []
    for index, name in enumerate(blocks):
        block = model.get_submodule(name)
        handles += [block.register_forward_pre_hook(note(index)), block.register_forward_hook(note(index))]
    try:
        yield stamps
    finally:
        for handle in handles:
            handle.remove()
