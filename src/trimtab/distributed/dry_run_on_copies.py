"""Dry run of a plan on copies of a model and its optimizer: step time and peak memory on all ranks."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from trimtab.core.plan import KEEP_BATCH, KEEP_LEARNING_RATE, KEEP_SCHEDULE, KEEP_WARMUP, Plan
from trimtab.distributed.backend_selection import backend_of
from trimtab.distributed.process_group import max_over_ranks, total
from trimtab.distributed.zero_stage_inputs import RankLoop
from trimtab.measure.peak_memory import alive_between_steps, peak_bytes
from trimtab.measure.sharded_norms import local_shard
from trimtab.measure.timing import time_call
from trimtab.runtime.backend import Backend
from trimtab.runtime.batch import tensors_in
from trimtab.runtime.batch_splitting import BY_CONTAINERS, BatchSplitting
from trimtab.runtime.oom_retry import recovers_from
from trimtab.runtime.optimizers import drop_gradients
from trimtab.runtime.run import Run
from trimtab.runtime.window_snapshot import bytes_to_begin_anew

_WARM_WINDOWS = 2  # DDP rebuilds its buckets in the second step
_MOST_WARM = 20  # fp16 adjusts its loss scale
_BLOCK_S, _MOST_WINDOWS = 0.25, 50


class DryRunOutOfMemory(Exception):
    """A rank ran out of memory and had to split its micro-batches; known on every rank."""


@contextlib.contextmanager
def dry_run_of(
    plan: Plan, copied: Callable[[], RankLoop], clip_norm: float | None, batching: BatchSplitting = BY_CONTAINERS
) -> Iterator[DryRun]:
    """Run a plan on copies inside the block, as `trimtab.start` would; a collective.

    Args:
        plan: plan to run.
        copied: returns copies of model and optimizer, the loss function and the batch.
        clip_norm: clipping limit of the loop, if the plan has none.
        batching: counts and splits the batch.
    """
    gc.collect()  # An error of an earlier run holds its frames, and the frames hold the run's tensors.
    model, optimizer, loss_fn, batch = copied()
    plan = replace(
        plan,
        batch_rule=None,
        warmup_fraction=KEEP_WARMUP,
        schedule=KEEP_SCHEDULE,
        learning_rate_scale=KEEP_LEARNING_RATE,
        batch_policy=KEEP_BATCH,
    )
    clip = None if plan.clip_norm.value is not None else clip_norm
    backend: Backend | None = backend_of(model, plan, {"clip_norm": clip})
    ours: DryRun | None = None
    try:
        with Run(model, optimizer, plan, clip_norm=clip, backend=backend, batching=batching, on_trial=True) as run:
            ours = DryRun(run, (model, optimizer, loss_fn, batch))
            del run
            ours.warm_up()
            yield ours
    finally:
        if ours is not None:
            ours.let_go()  # The caller may still hold the object.
        del model, optimizer, backend, ours
        gc.collect()  # DDP's reducer and its model refer to each other


class DryRun:
    """A started run with its loop; `is_accelerated`: the model is on an accelerator."""

    def __init__(self, run: Run, loop: RankLoop) -> None:
        self._run, self._loop = run, loop
        self._device = next(run.model.parameters()).device
        self.is_accelerated, self._windows = self._device.type == "cuda", 1

    def let_go(self) -> None:
        """Drop all references to the finished run."""
        del self._run, self._loop

    def warm_up(self) -> None:
        """Run untimed steps until the optimizer has stepped and all one-time initialisation is done."""
        windows = 0
        while windows < _WARM_WINDOWS or (self._run.applied_steps == 0 and windows < _MOST_WARM):
            self._window()
            windows += 1
        once_s = max_over_ranks(time_call(self._window, self._device))
        self._windows = max(1, min(_MOST_WINDOWS, math.ceil(_BLOCK_S / once_s)))

    def block_s(self) -> float:
        """Return the seconds per step over a block of steps; maximum over ranks. Ranks begin together."""
        total(0.0)
        return max_over_ranks(time_call(self._window, self._device, self._windows))

    def peak_bytes(self, beside_bytes: int) -> int:
        """Return the peak memory of a step, maximum over ranks.

        Args:
            beside_bytes: bytes of foreign tensors on a CUDA device.
        """
        drop_gradients(self._loop[1])  # The count must include memory that is freed during the step.
        counted = peak_bytes(self._window, self._device, self._alive)
        own = counted - beside_bytes if self.is_accelerated else counted + self._kept_bytes()
        return int(max_over_ranks(float(own)))

    def _window(self) -> None:
        _, _, loss_fn, batch = self._loop
        self._run.train_step(self._run.window(batch), loss_fn)
        if self._run.micro_batch_limit is not None:
            limit = self._run.micro_batch_limit
            raise DryRunOutOfMemory(f"a rank ran out of memory with micro-batches of more than {limit} samples")

    def _alive(self) -> Iterator[Tensor]:
        model, optimizer, _, batch = self._loop
        yield from map(local_shard, alive_between_steps(model, optimizer))
        yield from tensors_in(batch)

    def _kept_bytes(self) -> int:
        """Return a replica's additional memory: DDP's buckets, and the snapshot for repeating a step."""
        model, plan = self._loop[0], self._run.plan
        if int(plan.zero_stage.value or 0) >= 2:
            return 0
        buckets = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
        return buckets + (bytes_to_begin_anew(model) if recovers_from(None, plan, model, may_retry=True) else 0)
