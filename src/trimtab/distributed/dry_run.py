"""Dry runs of plans by all ranks before training: a few steps measure the predicted time and memory.

Dry runs use copies; the user's model, optimizer, random generators and global modes are unchanged afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from trimtab.core.errors import RankError
from trimtab.core.progress import silent
from trimtab.distributed.backend_selection import backend_of
from trimtab.distributed.host_gather import RankExchange
from trimtab.distributed.process_group import backends, max_over_ranks, total
from trimtab.measure.gradient_norms import local_shard
from trimtab.measure.timing import time_call
from trimtab.planner.multi_rank_plan import DryRunResult, by_default, plan_for_gradients
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, turns
from trimtab.plans.plan import Plan
from trimtab.profiling.measurement_notes import describe
from trimtab.settings import unchanged
from trimtab.state.loop_state import unchanged_by
from trimtab.state.peak_memory import alive_between_steps, peak_bytes, storage_bytes
from trimtab.training.accumulation import drop_gradients
from trimtab.training.backend import Backend
from trimtab.training.batch import BY_CONTAINERS, BatchSplitting, tensors_in
from trimtab.training.out_of_memory import is_out_of_memory
from trimtab.training.run import LossFn, Run
from trimtab.training.window_snapshot import bytes_to_begin_anew, recovers_from

T = TypeVar("T")
RankLoop = tuple[nn.Module, Optimizer, LossFn, Any]  # of a rank, with its part of a batch on the model's device

_WARM_WINDOWS = 2  # DDP rebuilds its buckets in the second step
_MOST_WARM = 20  # fp16 adjusts its loss scale
_BLOCK_S, _MOST_WINDOWS = 0.25, 50
_PAIRS, _BLOCKS = 9, 5
_COUNTED = 7  # steps
_LONGEST_S = 60.0  # seconds after which no further optional round of blocks begins
_numbers = itertools.count()  # the same on all ranks, because they call in the same order


class DryRunOutOfMemory(Exception):
    """A rank ran out of memory and had to split its micro-batches; known on every rank."""


@contextlib.contextmanager
def dry_run_of(
    plan: Plan, copied: Callable[[], RankLoop], clip_norm: float | None, batching: BatchSplitting = BY_CONTAINERS
) -> Iterator[DryRun]:
    """Run a plan on copies inside the block, as `trimtab.start` would; a collective.

    Args:
        clip_norm: clipping limit of the loop, if the plan has none.
    """
    gc.collect()  # An error of an earlier run holds its frames, and the frames hold the run's tensors.
    model, optimizer, loss_fn, batch = copied()
    plan = plan.having(
        batch_rule=None,
        warmup_fraction=unchanged("warmup_fraction"),
        schedule=unchanged("schedule"),
        learning_rate_scale=unchanged("learning_rate_scale"),
        batch_policy=unchanged("batch_policy"),
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


def copied_together(model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
    """Return copies of a model and its optimizer without gradients; the optimizer's copy refers to the model's copy.

    Step hooks of the optimizer are not copied, as in `copy.deepcopy`, so dry runs exclude hooks.

    Raises:
        Exception: an object cannot be copied, for instance a non-leaf tensor or a lock.
    """
    memo: dict[int, Any] = {}
    own, its = copy.deepcopy(model, memo), copy.deepcopy(optimizer, memo)
    # deepcopy of an optimizer copies torch's attributes only. Functions are left out: a scheduler's `step` wrapper
    # would step the original.
    for name, value in vars(optimizer).items():
        if name not in vars(its) and not callable(value):
            setattr(its, name, copy.deepcopy(value, memo))
    return own, its


def num_sent() -> list[int]:
    """Return the number of groups created, and of collectives started on the world group by device type.

    If equal on all ranks, pending collectives complete normally; otherwise a pending collective would match a later one
    of a different rank. Backends without a count are left out.
    """
    group, distributed = dist.group.WORLD, dist.distributed_c10d
    assert group is not None
    found = [distributed._world.group_count]
    for kind in sorted(backends()):
        with contextlib.suppress(RuntimeError):
            found.append(group._get_backend(torch.device(kind))._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return found


class _Failure(NamedTuple):
    """Reason of a failed dry run, and its code."""

    text: str
    code: str


class DryRuns:
    """Dry runs on all ranks of a job; every method is a collective and returns the same value on all ranks.

    Args:
        copied: returns copies of model and optimizer, and the rank's loss function and batch.
        beside: returns other tensors on the device during the run.
        unchanged: returns a context that restores the user's objects, random generators and global modes.
    """

    def __init__(
        self,
        copied: Callable[[], RankLoop],
        *,
        clip_norm: float | None = None,
        beside: Callable[[], Iterable[Tensor]] = tuple,
        unchanged: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
        progress: Callable[[str], None] = silent,
        batching: BatchSplitting = BY_CONTAINERS,
    ) -> None:
        self._batching = batching
        self._copied, self._clip_norm, self._beside = copied, clip_norm, beside
        self._unchanged = unchanged
        self._progress = progress if dist.get_rank() == 0 else silent

    def refusal(self) -> str:
        """Return the reason why dry runs are not possible, such as a failed copy on a rank; or ""."""
        found = self._together(lambda: self._copied() is None)
        return found.text if isinstance(found, _Failure) else ""

    def of(self, plan: Plan, *, counts_memory: bool) -> DryRunResult:
        """Run a plan; if it changes gradient communication, interleaved with the default and an A/A control.

        The measurably better of the two plans is kept. The default runs twice, and the ratio of both is the resolution.

        Args:
            counts_memory: measure peaks too, with new copies per block, created one at a time. Otherwise a plan has a
                single run, and the control reuses the default's run, because a third copy may not fit; differences
                between two runs of a plan are then missing from the resolution.

        Raises:
            RankError: another rank ended or sent no answer, or ranks failed after different numbers of collectives.
            Exception: as raised on this rank only.
        """
        start, usual = time.perf_counter(), by_default(plan)
        self._progress(f"dry run: {plan.changes_in_words or 'the unchanged loop'}")
        arms = {"plan": plan} if usual is None else {"plan": plan, "usual": usual, "control": usual}
        found = self._together(lambda: self._rehearsed(arms, counts_memory=counts_memory))
        gc.collect()  # An error holds its frames, and the frames hold the run's tensors.
        took_s = max_over_ranks(time.perf_counter() - start)
        if isinstance(found, _Failure):
            return DryRunResult(plan, refusal=found.text, took_s=took_s, code=found.code)
        return replace(found, took_s=took_s)

    def _rehearsed(self, arms: Mapping[str, Plan], *, counts_memory: bool) -> DryRunResult:
        """Return the measurements of the plan that is kept."""
        block_s, plan = self._laps(arms, reopens=counts_memory and len(arms) > 1), arms["plan"]
        slower = None if plan.predicted is None else statistics.median(block_s["plan"]) / plan.predicted.step_s
        kept, of = plan, "plan"
        if "usual" in arms:
            kept = plan_for_gradients(plan, arms["usual"], (block_s["plan"], block_s["usual"], block_s["control"]))
            of = "usual" if by_default(kept) is None else "plan"
        return DryRunResult(kept, tuple(block_s[of]), self._peaks(kept) if counts_memory else (), slower)

    def _laps(self, arms: Mapping[str, Plan], *, reopens: bool) -> dict[str, list[float]]:
        """Return the seconds per step of each arm, by block, in interleaved order."""
        begin = time.perf_counter()
        laps, least = (_PAIRS, MIN_PAIRS_FOR_VERDICT) if len(arms) > 1 else (_BLOCKS, 1)
        block_s: dict[str, list[float]] = {name: [] for name in arms}
        last: str | None = None
        with contextlib.ExitStack() as open_until_the_end:
            runs: dict[int, DryRun] = {}
            for plan in () if reopens else {id(each): each for each in arms.values()}.values():
                runs[id(plan)] = open_until_the_end.enter_context(self._running(plan))
            for lap in range(laps):
                for name in turns(list(arms), lap, 0, last):
                    held = runs.get(id(arms[name]))
                    with contextlib.nullcontext(held) if held else self._running(arms[name]) as run:
                        block_s[name].append(run.block_s())
                    del run
                    last = name
                spent_s = max_over_ranks(time.perf_counter() - begin)
                if lap + 1 >= least and spent_s * (lap + 2) / (lap + 1) > _LONGEST_S:
                    break
        return block_s

    def _peaks(self, plan: Plan) -> tuple[int, ...]:
        beside = storage_bytes(each for each in self._beside() if each.is_cuda)
        with self._running(plan) as run:
            found = tuple(run.peak_bytes(beside) for _ in range(_COUNTED))
        # An accelerator run fails in the first step beyond the available memory, so the maximum counts.
        return (max(found),) if run.is_accelerated else found

    def _running(self, plan: Plan) -> contextlib.AbstractContextManager[DryRun]:
        return dry_run_of(plan, self._copied, self._clip_norm, self._batching)

    def _together(self, make: Callable[[], T]) -> T | _Failure:
        """Return the result of `make` on all ranks, or a failure, the same on all ranks."""
        exchange = RankExchange(None)

        def contained() -> T:
            with self._unchanged(), warnings.catch_warnings():
                # warnings about refused plans, which are reported with a reason
                warnings.simplefilter("ignore", RuntimeWarning)
                return make()

        def report(error: Exception | None) -> str:
            own = _failure_of(error)
            return json.dumps([own.text, own.code, num_sent()])

        made, failure, said = exchange.attempt(contained, f"rehearsal/{next(_numbers)}", report)
        exchange.close()
        reports = [json.loads(each) for each in said]
        first = next((rank for rank, (text, _, _) in enumerate(reports) if text), None)
        if first is None:
            return cast(T, made)
        text, code, _ = reports[first]
        # Pending messages would be matched with later collectives, so all ranks end.
        if any(sent != reports[0][2] for _, _, sent in reports):
            raise _left_over(first, text) from failure
        return _Failure(text, code)


def _failure_of(error: Exception | None) -> _Failure:
    """Return the failure for a rank's exception; empty without an exception."""
    if error is None:
        return _Failure("", "")
    is_memory = isinstance(error, DryRunOutOfMemory) or is_out_of_memory(error)
    text = str(error) if isinstance(error, DryRunOutOfMemory) else describe(error)
    return _Failure(text, "dry_run.out_of_memory" if is_memory else "dry_run.failed")


def _left_over(rank: int, text: str) -> RankError:
    found = RankError(
        f"rank {rank}",
        got=text,
        problem=f"Rank {rank} failed in a dry run of a plan ({text}), and the ranks cannot continue, because they were "
        "at different collectives.",
        hint="If memory ran out, plan with a lower memory limit or a smaller batch; otherwise fix the error.",
        code="ranks.dry_run_failed",
    )
    found.ranks = (rank,)
    return found if dist.get_rank() == rank else found.echoed()


def of_live(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn,
    batch: object,
    *,
    clip_norm: float | None = None,
    progress: Callable[[str], None] = silent,
    batching: BatchSplitting = BY_CONTAINERS,
) -> DryRuns:
    """Return dry runs on copies of the user's own model and optimizer."""

    def copied() -> RankLoop:
        return *copied_together(model, optimizer), loss_fn, batch

    beside, unchanged = partial(alive_between_steps, model, optimizer), partial(unchanged_by, loss_fn, model, optimizer)
    return DryRuns(
        copied, beside=beside, unchanged=unchanged, clip_norm=clip_norm, progress=progress, batching=batching
    )
