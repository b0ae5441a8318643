"""Interleaved timing of all loops in a job of a scaling table, with peak memory.

Every loop has a separate model and optimizer, because sharding cannot be undone: up to six loops per rank are in
memory
until their last block. Between blocks a loop holds no gradients.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from trimtab.api import FREED, default_rule
from trimtab.core.errors import NonFiniteError
from trimtab.core.objective import Budget
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress
from trimtab.distributed.process_group import job_position, max_over_ranks, total
from trimtab.distributed.sharded_loader import shard
from trimtab.experiments.baselines.loop import Loop, MakeLoop
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.experiments.paired_runs.inspect_arm import held_at_most
from trimtab.experiments.paired_runs.plan_loops import ON_ANOTHER_RANK, PlanLoop, nonfinite_in
from trimtab.experiments.scaling.scaling_plans import predicted_bytes
from trimtab.experiments.scaling.scaling_result import RECIPES, PlanSharding, RefusedRecipe, TimedArm, TimedBlocks
from trimtab.measure.timing import synchronize
from trimtab.planner.multi_rank_plan import for_one_process
from trimtab.planner.statistics import turns
from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import Task, TaskData

_MIN_WINDOWS = 4  # Per block.
_WARM_WINDOWS = 3
# An adaptive batch counts as settled after this many equal steps in a row, or is accepted after the maximum.
_SETTLED, _MOST_WINDOWS = 25, 120
_COUNTED = ("baseline", "plan")  # An adaptive batch has no fixed peak, and the control shares the baseline's.


@dataclass(frozen=True)
class JobSettings:
    """Options of a job.

    Args:
        modes: scaling modes, from `scaling.result.MODES`.
        blocks: number of blocks per loop.
        block_s: approximate seconds per block.
        adapts_batch_size: True to time a plan with adaptive batch size too.
        budget: limits of a rank; with a memory limit, the ranks choose a ZeRO stage.
        plan: a given plan, applied to every number of ranks; None to make a plan.
    """

    modes: tuple[str, ...] = ("weak", "strong")
    blocks: int = 4
    block_s: float = 0.6
    adapts_batch_size: bool = False
    budget: Budget = field(default_factory=Budget)
    plan: Plan | None = None


class _SteppedLoop:
    """A loop over this rank's shard of the batches, with separate global modes and random generators."""

    def __init__(self, loop: Loop, batches: Iterator[Any]) -> None:
        self._loop, self._batches, self._state = loop, batches, ProcessState.capture()
        self.settled = True

    def steps(self, windows: int) -> int:
        """Train for `windows` steps, and return the number of samples over all ranks."""
        return sum(self._loop.step(self._batches) for _ in range(windows))

    def enter(self) -> None:
        """Restore the process state of this loop."""
        self._state.restore()

    def leave(self) -> None:
        """Save the process state and free the gradients."""
        self._loop.model.zero_grad(set_to_none=True)
        self._state = ProcessState.capture()

    @property
    def nonfinite(self) -> str:
        """Description of a non-finite loss or parameter on any rank, or "". All ranks must read it."""
        found = nonfinite_in(self._loop)
        return (found or ON_ANOTHER_RANK) if total(float(bool(found))) else ""

    def end(self) -> None:
        """Close the loop."""
        self.enter()
        self._loop.close()


class Bench:
    """All arms of a scaling mode, timed alternately, with and without communication.

    Attributes:
        refused: recipes that became non-finite, so that their times are meaningless; filled by `arms`.
    """

    def __init__(
        self,
        task: Task,
        data: TaskData,
        device: torch.device,
        mode: str,
        number: int,
        settings: JobSettings,
        progress: Progress,
    ) -> None:
        self._task, self._data, self._device = task, data, device
        self._mode, self._number, self._settings, self._progress = mode, number, settings, progress
        self._nonfinite: dict[str, str] = {}
        self.refused: list[RefusedRecipe] = []

    def arms(self, plan: Plan | None) -> list[TimedArm]:
        """Return the timings of all recipes; without a plan, of the plain loop.

        Raises:
            NonFiniteError: the plain loop became non-finite, so there is no baseline.
        """
        outside, makes = ProcessState.capture(), self._makes(plan)
        try:
            loops = {name: self._loop(name, make, outside) for name, make in makes.items()}
            settled = {name: loop.settled for name, loop in loops.items()}
            timed = self._timed(loops)
            peaks = {name: self._peak(makes[name], outside) for name in _COUNTED if name in makes}
        finally:
            outside.restore()
        found = []
        for recipe in RECIPES:
            if recipe not in timed:
                continue
            if why := self._nonfinite.get(recipe) or self._nonfinite.get(f"{recipe} alone"):
                self._refuse(recipe, why)
                continue
            together, windows = timed[recipe]
            own = timed.get(f"{recipe} alone", (None, 0))[0]
            of_plan = plan if recipe.startswith("plan") else None
            says, sharing = ("", None) if of_plan is None else (_says(of_plan), _sharing(of_plan))
            rows, peak = sum(together.rows) / windows, peaks.get(recipe)
            found.append(TimedArm(recipe, self._mode, together, own, rows, says, settled[recipe], sharing, peak))
        return found

    def _refuse(self, recipe: str, why: str) -> None:
        if recipe == "baseline":
            raise NonFiniteError(
                "the baseline loop",
                problem=f"The baseline loop became non-finite: {why}.",
                hint="Look for NaN or infinity in the data and in the loss, and lower the learning rate.",
                code="training.nonfinite",
            )
        said = f"training became non-finite: {why}"
        self.refused.append(RefusedRecipe(recipe, self._mode, job_position().num_ranks, said, nonfinite=True))

    def _makes(self, plan: Plan | None) -> dict[str, MakeLoop]:
        several = job_position().num_ranks > 1
        plain = ReplicaLoop if several else ReferenceLoop
        makes: dict[str, MakeLoop] = {"baseline": plain, "self": plain}
        if plan is not None:
            makes["plan"] = partial(PlanLoop, plan=plan)
        if plan is not None and self._settings.adapts_batch_size:
            makes["plan_batch"] = partial(PlanLoop, plan=plan.freed(default_rule(plan), FREED))
        if several:
            makes["baseline alone"] = ReferenceLoop
        if several and plan is not None:
            makes["plan alone"] = partial(PlanLoop, plan=for_one_process(plan))
        return makes

    def _loop(self, name: str, make: MakeLoop, outside: ProcessState) -> _SteppedLoop:
        """Return a new loop after warm-up, with its kernels selected and its batch size settled."""
        self._progress(f"{self._mode}: {name}")
        outside.restore()
        torch.manual_seed(0)
        made = _SteppedLoop(make(self._task, self._device), self._batches())
        made.steps(_WARM_WINDOWS)
        if name == "plan_batch":
            made.settled = _settle(made)
        made.leave()
        return made

    def _batches(self) -> Iterator[Any]:
        return iter(shard(self._data.batches(self._number, self._task.batch_size)))

    def _peak(self, make: MakeLoop, outside: ProcessState) -> int | None:
        """Return the peak bytes of a loop on the rank with the largest peak, without other loops in memory."""
        outside.restore()
        torch.manual_seed(0)
        loop, batches = make(self._task, self._device), self._batches()
        for _ in range(_WARM_WINDOWS):
            loop.step(batches)
        peak = held_at_most(loop, batches, self._device, job_position().num_ranks)
        loop.close()
        del loop
        gc.collect()  # A loop is part of a reference cycle and would be in the next loop's count.
        return None if peak is None else int(max_over_ranks(peak))

    def _timed(self, loops: dict[str, _SteppedLoop]) -> dict[str, tuple[TimedBlocks, int]]:
        """Return the blocks of all loops with their number of steps; a loop is closed after its last block."""
        counts = {name: self._windows_of(loop) for name, loop in loops.items()}
        rows: dict[str, list[int]] = {name: [] for name in loops}
        seconds: dict[str, list[float]] = {name: [] for name in loops}
        last: str | None = None
        for lap in range(self._settings.blocks):
            self._progress(f"{self._mode}: block {lap + 1} of {self._settings.blocks}", lap / self._settings.blocks)
            for name in turns(list(loops), lap, self._number, last):
                done, taken_s = self._block(loops[name], counts[name])
                rows[name].append(done)
                seconds[name].append(taken_s)
                last = name
                if lap == self._settings.blocks - 1:
                    if why := loops[name].nonfinite:
                        self._nonfinite[name] = why
                    loops.pop(name).end()
                    gc.collect()  # A run is part of a reference cycle and would be freed late.
        blocks = self._settings.blocks
        return {name: (TimedBlocks(tuple(rows[name]), tuple(seconds[name])), blocks * counts[name]) for name in counts}

    def _windows_of(self, loop: _SteppedLoop) -> int:
        """Return the number of steps per block, equal on all ranks."""
        _, seconds = self._block(loop, 2)
        return max(_MIN_WINDOWS, math.ceil(2 * self._settings.block_s / seconds))

    def _block(self, loop: _SteppedLoop, windows: int) -> tuple[int, float]:
        """Return the samples of all ranks and the seconds of the slowest rank; all ranks begin together."""
        loop.enter()
        total(0.0)
        synchronize(self._device)
        begin = time.perf_counter()
        rows = loop.steps(windows)
        synchronize(self._device)
        taken_s = max_over_ranks(time.perf_counter() - begin)
        loop.leave()
        return rows, taken_s


def _settle(loop: _SteppedLoop) -> bool:
    """Step a loop with adaptive batch size until the size is stable; return True if it became stable.

    Batch sizes, and so the number of steps, are equal on all ranks.
    """
    same, before = 0, -1
    for _ in range(_MOST_WINDOWS):
        rows = loop.steps(1)
        same, before = same + 1 if rows == before else 0, rows
        if same == _SETTLED:
            return True
    return False


def _sharing(plan: Plan) -> PlanSharding:
    """Return the sharding of a plan."""
    return PlanSharding(
        None if plan.zero_stage.value is None else int(plan.zero_stage.value),
        bool(plan.reduces_once.value),
        int(plan.micro_batch.value or 1),
        plan.num_micro_batches,
        str(plan.reduce_dtype.value),
        predicted_bytes(plan),
    )


def _says(plan: Plan) -> str:
    """Return a one-line description of a plan's training."""
    if plan.zero_stage.value is None:
        return f"{plan.precision.value}, {plan.num_micro_batches} micro-batches"
    bucket = "default buckets" if plan.bucket_bytes.value is None else f"buckets of {plan.bucket_bytes.value} bytes"
    sent = f"ZeRO stage {plan.zero_stage.value}, gradients reduced in {plan.reduce_dtype.value} with {bucket}"
    return f"{plan.precision.value}, {plan.num_micro_batches} micro-batches, {sent}"
