"""One job of a scaling table: on every rank of it, the plain loop and the plans, timed in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.api import FREED, default_rule
from trimtab.calibrate.step_shape import step_shape
from trimtab.core.codec import read_json, to_json, write_whole
from trimtab.core.errors import ValueGivenError
from trimtab.core.link import Link
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress
from trimtab.decide.ranks import alone
from trimtab.decide.turns import turns
from trimtab.distributed.crowding import crowded
from trimtab.distributed.dealing import shard
from trimtab.distributed.link_speed import calibrate
from trimtab.distributed.planning import Made, plan_together
from trimtab.distributed.process_group import place, slowest, total
from trimtab.experiments.loops import PlanLoop
from trimtab.experiments.planning import make_plans
from trimtab.experiments.ranks import task_of_rank
from trimtab.experiments.scaling import RECIPES, Job, Timed, TimedArm
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


@dataclass(frozen=True)
class JobSettings:
    """How much of a job to run.

    Args:
        modes: of `scaling.MODES`. blocks: of each loop, about `block_s` seconds each. frees_batch: whether a plan whose
            batch is freed runs too.
    """

    modes: tuple[str, ...] = ("weak", "strong")
    blocks: int = 4
    block_s: float = 0.6
    frees_batch: bool = False


def run_job(task: Task, number: int, folder: Path, settings: JobSettings, progress: Progress) -> Job | None:
    """Time a task on the ranks there are, and return what was found on rank 0; every rank calls it.

    Args:
        number: of the round. folder: that plans are kept in, for all jobs with as many rows a rank.
    """
    here, data = place(), task.load_data()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arms: list[TimedArm] = []
    for mode in settings.modes if here.num_ranks > 1 else ("weak",):
        whole = replace(task, batch_rows=task.batch_rows * here.num_ranks) if mode == "weak" else task
        share = task if mode == "weak" else task_of_rank(task, here.num_ranks)
        progress(f"planning {share.batch_rows} rows a rank")
        make = kept(share, data, device, folder)
        plan = plan_together(make, device) if here.num_ranks > 1 else make().plan
        bench = _Bench(whole, data, device, mode, number, settings, progress)
        arms += bench.arms(plan)
    link = _link(device) if here.num_ranks > 1 and not number else None  # once: it takes seconds over a slow one
    shared = crowded()
    if here.rank:
        return None
    return Job(here.num_ranks, number, tuple(arms), shared, link, torch.get_num_threads(), device.type)


def kept(share: Task, data: TaskData, device: torch.device, folder: Path) -> Callable[[], Made]:
    """Return what makes a plan of one rank's share, or reads from the folder the one that an earlier job made."""
    path = folder / f"plan-{share.batch_rows}.json"

    def make() -> Made:
        if not path.exists():
            plans = make_plans(share, data, device, adapt=(), strong=False, progress=lambda *_: None)
            with torch.device("meta"):
                model = share.make_model()
            plan = plans.plans["S"]
            write_whole(path, to_json(Made(plan, step_shape(model, plans.profiles["S"], plan)), indent=1))
        return read_json(Made, path)

    return make


def _link(device: torch.device) -> Link | None:
    try:
        return calibrate(device).link
    except ValueGivenError:  # times that say nothing of a link: the table stands without
        return None


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
        """Keep what it has made of the process."""
        self._state = ProcessState.capture()


class _Bench:
    """All arms of one mode, timed in turns: each with its communication and without."""

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

    def arms(self, plan: Plan) -> list[TimedArm]:
        """Return what was timed of each recipe."""
        with ExitStack() as loops:
            made = self._loops(plan, loops)
            timed = self._timed(made)
        found = []
        for recipe in RECIPES:
            if recipe not in made:
                continue
            together, windows = timed[recipe]
            own = timed.get(f"{recipe} alone", (None, 0))[0]
            says = _says(plan) if recipe.startswith("plan") else ""
            rows, settled = sum(together.rows) / windows, made[recipe].settled
            found.append(TimedArm(recipe, self._mode, together, own, rows, says, settled))
        return found

    def _loops(self, plan: Plan, close: ExitStack) -> dict[str, _Stepped]:
        """Return every loop, once its kernels are chosen and its batch has settled."""
        several = place().num_ranks > 1
        makes: dict[str, MakeLoop] = {
            "baseline": ReplicaLoop if several else ReferenceLoop,
            "self": ReplicaLoop if several else ReferenceLoop,
            "plan": partial(PlanLoop, plan=plan),
        }
        if self._settings.frees_batch:
            makes["plan_batch"] = partial(PlanLoop, plan=plan.freed(default_rule(plan), FREED))
        if several:
            makes["baseline alone"] = ReferenceLoop
            makes["plan alone"] = partial(PlanLoop, plan=alone(plan))
        made, outside = {}, ProcessState.capture()
        close.callback(outside.restore)
        for name, make in makes.items():
            self._progress(f"{self._mode}: {name}")
            outside.restore()
            torch.manual_seed(0)
            loop = make(self._task, self._device)
            close.callback(loop.close)
            made[name] = _Stepped(loop, iter(shard(self._data.batches(self._number, self._task.batch_rows))))
            made[name].steps(_WARM_WINDOWS)
            if name == "plan_batch":
                made[name].settled = _settle(made[name])
            made[name].leave()
        return made

    def _timed(self, loops: dict[str, _Stepped]) -> dict[str, tuple[Timed, int]]:
        """Return the blocks of each loop, and their windows."""
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
        blocks = self._settings.blocks
        return {name: (Timed(tuple(rows[name]), tuple(seconds[name])), blocks * counts[name]) for name in loops}

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


def _says(plan: Plan) -> str:
    """Return how a plan trains, in a line."""
    if plan.zero_stage.value is None:
        return f"{plan.precision.value}, {plan.num_micro_batches} micro-batches"
    bucket = "torch's buckets" if plan.bucket_bytes.value is None else f"buckets of {plan.bucket_bytes.value} bytes"
    sent = f"stage {plan.zero_stage.value}, gradients sent in {plan.reduce_dtype.value} by {bucket}"
    return f"{plan.precision.value}, {plan.num_micro_batches} micro-batches, {sent}"
