"""A plan on copies of a model and its optimizer, on all ranks: what its windows take, and what a rank holds in them."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from torch import Tensor

from trimtab.core.plan import KEEP_BATCH, KEEP_LEARNING_RATE, KEEP_SCHEDULE, KEEP_WARMUP, Plan
from trimtab.distributed.backends import backend_of
from trimtab.distributed.process_group import slowest, total
from trimtab.distributed.stage_choice import RankLoop
from trimtab.measure.memory import alive_between_steps, peak_bytes
from trimtab.measure.sharded_norms import local
from trimtab.measure.timing import time_call
from trimtab.runtime.backend import Backend
from trimtab.runtime.batches import tensors_in
from trimtab.runtime.batching import BY_CONTAINERS, Batching
from trimtab.runtime.engine import Run
from trimtab.runtime.optimizers import drop_gradients
from trimtab.runtime.recovery import recovers_from
from trimtab.runtime.window_start import bytes_to_begin_anew

_WARM_WINDOWS = 2  # DDP lays its buckets out anew in the second
_MOST_WARM = 20  # fp16 finds its loss scale
_BLOCK_S, _MOST_WINDOWS = 0.25, 50


class DidNotFit(Exception):
    """Memory ran out on a rank, which cut its window smaller; every rank knows."""


@contextlib.contextmanager
def rehearsing(
    plan: Plan, copied: Callable[[], RankLoop], clip_norm: float | None, batching: Batching = BY_CONTAINERS
) -> Iterator[RehearsedRun]:
    """Run a plan inside the block as `trimtab.start` would, on copies; every rank enters, and leaves, with the others.

    Args:
        copied: returns a model and optimizer of the run's own. clip_norm: as the loop clips, where the plan does not.
        batching: counts and splits the batch.
    """
    gc.collect()  # an error of the run before holds its frames, and they what they ran
    model, optimizer, loss_fn, batch = copied()
    kept = {"schedule": KEEP_SCHEDULE, "learning_rate_scale": KEEP_LEARNING_RATE, "batch_policy": KEEP_BATCH}
    plan = replace(plan, batch_rule=None, warmup_fraction=KEEP_WARMUP, **kept)
    clip = None if plan.clip_norm.value is not None else clip_norm
    backend: Backend | None = backend_of(model, plan, {"clip_norm": clip})
    ours: RehearsedRun | None = None
    try:
        with Run(model, optimizer, plan, clip_norm=clip, backend=backend, batching=batching, on_trial=True) as run:
            ours = RehearsedRun(run, (model, optimizer, loss_fn, batch))
            del run
            ours.warm_up()
            yield ours
    finally:
        if ours is not None:
            ours.let_go()  # whoever was given it may still hold it
        del model, optimizer, backend, ours
        gc.collect()  # a reducer and its model hold each other


class RehearsedRun:
    """A started run, and the loop that it is of. `is_accelerated`: its memory is an accelerator's."""

    def __init__(self, run: Run, loop: RankLoop) -> None:
        self._run, self._loop = run, loop
        self._device = next(run.model.parameters()).device
        self.is_accelerated, self._windows = self._device.type == "cuda", 1

    def let_go(self) -> None:
        """Hold nothing of the run any more, which is over."""
        del self._run, self._loop

    def warm_up(self) -> None:
        """Run what is not timed: until the optimizer has stepped, and no engine makes anything for the first time."""
        windows = 0
        while windows < _WARM_WINDOWS or (self._run.applied_steps == 0 and windows < _MOST_WARM):
            self._window()
            windows += 1
        once_s = slowest(time_call(self._window, self._device))
        self._windows = max(1, min(_MOST_WINDOWS, math.ceil(_BLOCK_S / once_s)))

    def block_s(self) -> float:
        """Return seconds of a window, over a block of them that all ranks begin together; of the slowest rank."""
        total(0.0)
        return slowest(time_call(self._window, self._device, self._windows))

    def peak_bytes(self, beside_bytes: int) -> int:
        """Return what the rank that holds most held at most in a window.

        Args:
            beside_bytes: on CUDA, of what lies on the device and is not the run's.
        """
        drop_gradients(self._loop[1])  # what is freed in a count has to be in it
        counted = peak_bytes(self._window, self._device, self._alive)
        own = counted - beside_bytes if self.is_accelerated else counted + self._kept_bytes()
        return int(slowest(float(own)))

    def _window(self) -> None:
        _, _, loss_fn, batch = self._loop
        self._run.train_step(self._run.window(batch), loss_fn)
        if self._run.micro_batch_limit is not None:
            raise DidNotFit(f"memory ran out on a rank, which had room for {self._run.micro_batch_limit} rows at once")

    def _alive(self) -> Iterator[Tensor]:
        model, optimizer, _, batch = self._loop
        yield from map(local, alive_between_steps(model, optimizer))
        yield from tensors_in(batch)

    def _kept_bytes(self) -> int:
        """Return what a replica keeps besides: DDP's buckets, and what a window that is begun anew begins with."""
        model, plan = self._loop[0], self._run.plan
        if int(plan.zero_stage.value or 0) >= 2:
            return 0
        buckets = sum(each.numel() * each.element_size() for each in model.parameters() if each.requires_grad)
        return buckets + (bytes_to_begin_anew(model) if recovers_from(None, plan, model, may_retry=True) else 0)
