"""Measurement of an arm outside the paired runs: peak memory, phases, FLOP and loss terms."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.distributed.coordinator import ALONE, Coordinator
from trimtab.distributed.sharded_loader import samples_of_rank, shard
from trimtab.experiments.baselines.loop import MakeLoop, SteppedLoop, autocast, move
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.paired_runs.instrumented_loop import InstrumentedLoop, by_phase
from trimtab.measure.flops import count_flops
from trimtab.measure.gradient_norms import is_sharded, local_shard
from trimtab.state.peak_memory import alive_between_steps, peak_bytes, storage_bytes
from trimtab.state.process_state import convolves_in_tf32
from trimtab.tasks.placement import prefetch
from trimtab.tasks.task import Task, TaskData

_PHASE_STEPS = 4


def measure_arm(
    make: MakeLoop,
    task: Task,
    data: TaskData,
    device: torch.device,
    together: Coordinator = ALONE,
    *,
    peak_alone: bool = False,
) -> ArmMetrics:
    """Return the measurements of a step of a fresh loop, after the optimizer state exists.

    Phases are timed (`measure.phases`) in separate steps. Several ranks measure in step: the peak is the largest over
    ranks, terms cover all ranks, all other figures are rank 0's.

    Args:
        make: builds the training loop.
        task: the task to train.
        data: data of the task.
        device: device of the loop.
        together: the ranks of the job.
        peak_alone: True to measure only peak memory, without the extra steps for phases and FLOP.
    """
    rows = [samples_of_rank(task.batch_size, rank, together.num_ranks) for rank in range(together.num_ranks)]
    shares = [each.stop - each.start for each in rows]
    watch = InstrumentedLoop(task, device, shares[together.rank], waits=together.num_ranks > 1)
    torch.manual_seed(0)
    with together.entering():
        loop = make(watch.watched_task(), device)
    together.draw_apart(0)
    batches = watch.drawn(prefetch(shard(data.batches(0, task.batch_size)), device))  # As in a paired run.
    is_over = False
    try:
        for _ in range(2):
            loop.step(batches)
        peak = held_at_most(loop, batches, device, together.num_ranks)
        largest = None if peak is None else int(max(together.each(peak)))
        phases = {} if peak_alone else _phases(loop, batches, watch)
        terms = together.each(_terms_per_sample(loop, batches, watch))
        flops = None if peak_alone else _flops_per_sample(loop, batches, together)
        is_over = True
        found = ArmMetrics(
            largest, phases, flops, loop.precision, terms_per_sample=_mean(terms, shares), peak=_peak(loop, device)
        )
        return together.made(ArmMetrics, lambda: replace(found, terms_by_rank=tuple(terms) if len(terms) > 1 else ()))
    finally:
        if is_over or together.num_ranks == 1:
            loop.close()


def _peak(loop: SteppedLoop, device: torch.device) -> str:
    """Return "tf32" for an fp32 loop with convolutions that torch computes in TF32, otherwise ""."""
    convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in loop.model.modules())
    in_tf32 = device.type == "cuda" and convolves and convolves_in_tf32()
    return "tf32" if loop.precision == "fp32" and in_tf32 else ""


def held_at_most(loop: SteppedLoop, batches: Iterator[Any], device: torch.device, num_ranks: int) -> int | None:
    """Return the peak bytes of a step on this rank, or None if the sharding backend hides some memory.

    The optimizer state must exist. On CUDA no other tensors may be alive.
    """
    loop.optimizer.zero_grad(set_to_none=True)  # Gradients alive before the count would be missing from it.
    peak = peak_bytes(lambda: loop.step(batches), device, lambda: _live(loop))
    if num_ranks > 1 and device.type == "cpu" and not is_sharded(loop.model):
        # DDP keeps its gradient buckets allocated between steps.
        peak += storage_bytes(p for p in loop.model.parameters() if p.requires_grad)
    return None if getattr(loop, "hides_memory", False) else peak


def _terms_per_sample(loop: SteppedLoop, batches: Iterator[Any], watch: InstrumentedLoop) -> float:
    """Return loss terms per sample over all batches so far, or the task's figure if the loss is a mean."""
    if not watch.counts:  # A custom step computes its own loss, so the declared loss is evaluated separately.
        watch.num_batches = 0
        for _ in range(_PHASE_STEPS):
            with autocast(loop.precision, watch.device):
                watch.loss(loop.model, move(next(batches), watch.device))
    if any(count is None for count in watch.counts):
        return float(watch.task.terms_per_sample)
    return math.fsum(map(float, watch.counts)) / (watch.num_batches * watch.num_samples)


def _mean(terms: list[float], rows: list[int]) -> float:
    """Return terms per sample over all ranks."""
    return terms[0] if len(terms) == 1 else math.fsum(map(operator.mul, terms, rows)) / sum(rows)


def _flops_per_sample(loop: SteppedLoop, batches: Iterator[Any], together: Coordinator) -> float | None:
    """Return FLOP per sample of a step, or None if the loop fails under the counter's dispatch mode."""
    rows: list[int] = []
    # The loop ran without the counter, so a failure under it is not a failure of the arm.
    flops = together.attempt(lambda: count_flops(lambda: rows.append(loop.step(batches))))
    return None if flops is None else flops / rows[0]


def _phases(loop: SteppedLoop, batches: Iterator[Any], watch: InstrumentedLoop) -> dict[str, float]:
    """Return seconds per batch of the task by phase, over a few steps."""
    drawn = watch.num_batches
    with watch.clock.on(loop.model, parts=False):
        for _ in range(_PHASE_STEPS):
            loop.step(batches)
    # The paper recipe (P1) takes several batches per step.
    phases = by_phase(watch.clock.seconds(), watch.num_batches - drawn)
    # A custom step does not call the wrapped loss function, so its forward and backward appear in the rest.
    hidden = {} if "forward" in phases else {"rest": "forward, backward and rest"}
    return {hidden.get(name, name): seconds for name, seconds in phases.items()}


def _live(loop: SteppedLoop) -> Iterator[Tensor]:
    """Yield the tensors a loop keeps alive between steps; for a sharded model, this rank's shards."""
    yield from map(local_shard, alive_between_steps(loop.model, loop.optimizer))
