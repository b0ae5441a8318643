"""All loops of one job of a scaling table, timed in turns; and what each of them holds at most.

Each has a model and an optimizer of its own, as sharding has no way back: up to six on each rank until the last lap of
blocks, where a loop ends with its last one. Between its blocks a loop holds no gradients.
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
from trimtab.decide.ranks import alone
from trimtab.decide.turns import turns
from trimtab.distributed.dealing import shard
from trimtab.distributed.process_group import place, slowest, total
from trimtab.experiments.racing.inspect_arm import held_at_most
from trimtab.experiments.racing.loops import PlanLoop, nonfinite_in
from trimtab.experiments.scaling.plans import told_bytes
from trimtab.experiments.scaling.result import RECIPES, Refused, Sharing, Timed, TimedArm
from trimtab.measure.process_state import ProcessState
from trimtab.measure.timing import synchronize
from trimtab.recipes.loop import Loop, MakeLoop
from trimtab.recipes.reference import ReferenceLoop
from trimtab.recipes.replica import ReplicaLoop
from trimtab.tasks.task import Task, TaskData

_MIN_WINDOWS = 4  # of a block
_WARM_WINDOWS = 3
# A batch that is freed has settled when it was the same in so many windows on end, or is taken as it is after so many.
_SETTLED, _MOST_WINDOWS = 25, 120
_COUNTED = ("baseline", "plan")  # a freed batch has no peak of its own, and the control the baseline's


@dataclass(frozen=True)
class JobSettings:
    """How much of a job to run.

    Args:
        modes: of `scaling.result.MODES`. blocks: of each loop, about `block_s` seconds each. frees_batch: whether a
            plan whose batch is freed runs too.
        budget: each rank's; with a limit on memory, ranks choose how they share the model. plan: given, whose settings
            run on each number of ranks; None: one is made.
    """

    modes: tuple[str, ...] = ("weak", "strong")
    blocks: int = 4
    block_s: float = 0.6
    frees_batch: bool = False
    budget: Budget = field(default_factory=Budget)
    plan: Plan | None = None


class _Stepped:
    """A loop over this rank's share of its batches, under global modes and random numbers of its own."""

    def __init__(self, loop: Loop, batches: Iterator[Any]) -> None:
        self._loop, self._batches, self._state = loop, batches, ProcessState.capture()
        self.settled = True

    def steps(self, windows: int) -> int:
        """Train on so many windows; returns the rows of all ranks."""
        return sum(self._loop.step(self._batches) for _ in range(windows))

    def enter(self) -> None:
        """Make the process as this loop left it."""
        self._state.restore()

    def leave(self) -> None:
        """Keep what it has made of the process, and of its memory no more than the next window begins with."""
        self._loop.model.zero_grad(set_to_none=True)
        self._state = ProcessState.capture()

    @property
    def nonfinite(self) -> str:
        """What of the loop is NaN or infinite, on any rank; "" if nothing is. Every rank asks."""
        found = nonfinite_in(self._loop)
        return (found or "a non-finite loss or parameter on another rank") if total(float(bool(found))) else ""

    def end(self) -> None:
        """Close the loop."""
        self.enter()
        self._loop.close()


class Bench:
    """All arms of one mode, timed in turns: each with its communication and without.

    Attributes:
        refused: recipes that have become non-finite, so that their times say nothing; known after `arms`.
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
        self.refused: list[Refused] = []

    def arms(self, plan: Plan | None) -> list[TimedArm]:
        """Return what was timed of each recipe; without a plan, of the plain loop.

        Raises:
            NonFiniteError: the plain loop has become non-finite: there is nothing to compare with.
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
                "the plain loop",
                given=why,
                expected="finite values",
                way_out="Look for NaN or infinity in the data and in the loss, and lower the learning rate.",
                code="training.nonfinite",
            )
        said = f"it became non-finite: {why}"
        self.refused.append(Refused(recipe, self._mode, place().num_ranks, said, nonfinite=True))

    def _makes(self, plan: Plan | None) -> dict[str, MakeLoop]:
        several = place().num_ranks > 1
        plain = ReplicaLoop if several else ReferenceLoop
        makes: dict[str, MakeLoop] = {"baseline": plain, "self": plain}
        if plan is not None:
            makes["plan"] = partial(PlanLoop, plan=plan)
        if plan is not None and self._settings.frees_batch:
            makes["plan_batch"] = partial(PlanLoop, plan=plan.freed(default_rule(plan), FREED))
        if several:
            makes["baseline alone"] = ReferenceLoop
        if several and plan is not None:
            makes["plan alone"] = partial(PlanLoop, plan=alone(plan))
        return makes

    def _loop(self, name: str, make: MakeLoop, outside: ProcessState) -> _Stepped:
        """Return a loop of its own, once its kernels are chosen and its batch has settled."""
        self._progress(f"{self._mode}: {name}")
        outside.restore()
        torch.manual_seed(0)
        made = _Stepped(make(self._task, self._device), self._batches())
        made.steps(_WARM_WINDOWS)
        if name == "plan_batch":
            made.settled = _settle(made)
        made.leave()
        return made

    def _batches(self) -> Iterator[Any]:
        return iter(shard(self._data.batches(self._number, self._task.batch_rows)))

    def _peak(self, make: MakeLoop, outside: ProcessState) -> int | None:
        """Return what a loop holds at most, on the rank where that is most, while there is no other."""
        outside.restore()
        torch.manual_seed(0)
        loop, batches = make(self._task, self._device), self._batches()
        for _ in range(_WARM_WINDOWS):
            loop.step(batches)
        peak = held_at_most(loop, batches, self._device, place().num_ranks)
        loop.close()
        del loop
        gc.collect()  # it refers to itself, and would be in the next loop's count
        return None if peak is None else int(slowest(peak))

    def _timed(self, loops: dict[str, _Stepped]) -> dict[str, tuple[Timed, int]]:
        """Return the blocks of each loop, and their windows; a loop ends with its last block."""
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
                    gc.collect()  # a run refers to itself, and would stay for a while
        blocks = self._settings.blocks
        return {name: (Timed(tuple(rows[name]), tuple(seconds[name])), blocks * counts[name]) for name in counts}

    def _windows_of(self, loop: _Stepped) -> int:
        """Return the windows of a block, as many on every rank."""
        _, seconds = self._block(loop, 2)
        return max(_MIN_WINDOWS, math.ceil(2 * self._settings.block_s / seconds))

    def _block(self, loop: _Stepped, windows: int) -> tuple[int, float]:
        """Return rows of all ranks, and seconds of the slowest; all begin together."""
        loop.enter()
        total(0.0)
        synchronize(self._device)
        begin = time.perf_counter()
        rows = loop.steps(windows)
        synchronize(self._device)
        taken_s = slowest(time.perf_counter() - begin)
        loop.leave()
        return rows, taken_s


def _settle(loop: _Stepped) -> bool:
    """Step a loop whose batch is freed until that stays, and return whether it did.

    It is the same on every rank, and so are the windows.
    """
    same, before = 0, -1
    for _ in range(_MOST_WINDOWS):
        rows = loop.steps(1)
        same, before = same + 1 if rows == before else 0, rows
        if same == _SETTLED:
            return True
    return False


def _sharing(plan: Plan) -> Sharing:
    """Return what a plan has a rank do."""
    return Sharing(
        None if plan.zero_stage.value is None else int(plan.zero_stage.value),
        bool(plan.reduces_once.value),
        int(plan.micro_batch.value or 1),
        plan.num_micro_batches,
        str(plan.reduce_dtype.value),
        told_bytes(plan),
    )


def _says(plan: Plan) -> str:
    """Return how a plan trains, in a line."""
    if plan.zero_stage.value is None:
        return f"{plan.precision.value}, {plan.num_micro_batches} micro-batches"
    bucket = "torch's buckets" if plan.bucket_bytes.value is None else f"buckets of {plan.bucket_bytes.value} bytes"
    sent = f"stage {plan.zero_stage.value}, gradients sent in {plan.reduce_dtype.value} by {bucket}"
    return f"{plan.precision.value}, {plan.num_micro_batches} micro-batches, {sent}"
