"""A job of a scaling table: the plain loop and the plans, timed alternately on all ranks, with peak memory.

Every loop has a separate model and optimizer, because sharding cannot be undone: up to six loops per rank are in
memory until their last block. Between blocks a loop holds no gradients.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.api import FREED, default_rule
from trimtab.core.errors import InfeasibleError, NonFiniteError, RankError, ValueGivenError
from trimtab.core.files import read_text
from trimtab.core.hardware import Link
from trimtab.core.objective import Budget
from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import from_json, read_json, to_json, write_whole
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.cpu_affinity import oversubscribed_resource
from trimtab.distributed.plan_on_ranks import BroadcastPlan, plan_together
from trimtab.distributed.process_group import first_ended_by, from_first, job_position, max_over_ranks, total
from trimtab.distributed.sharded_loader import shard
from trimtab.experiments.baselines.loop import MakeLoop, SteppedLoop
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.baselines.replica import ReplicaLoop
from trimtab.experiments.paired_runs.inspect_arm import held_at_most
from trimtab.experiments.paired_runs.plan_loops import ON_ANOTHER_RANK, PlanLoop, nonfinite_in
from trimtab.experiments.scaling.scaling_result import (
    RECIPES,
    PlanSharding,
    RefusedRecipe,
    ScalingJob,
    TimedArm,
    TimedBlocks,
)
from trimtab.experiments.task_plans import make_plans
from trimtab.experiments.task_ranks import plan_on_ranks, rehearsal_of, require_same_task, task_of_rank
from trimtab.measure.machine import environment
from trimtab.measure.timing import synchronize
from trimtab.planner.multi_rank_plan import for_one_process, for_replicas
from trimtab.planner.statistics import turns
from trimtab.plans.plan import Plan
from trimtab.profiling.communication_profile import step_shape
from trimtab.state.process_state import ProcessState
from trimtab.tasks.placement import device_here
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


def run_job(task: Task, number: int, folder: Path, settings: JobSettings, progress: Progress) -> ScalingJob | None:
    """Time a task on the current ranks, and return the job on rank 0. Collective: all ranks must call it.

    Args:
        task: the task.
        number: number of the round.
        folder: folder of plans, shared by jobs with the same number of samples per rank.
        settings: options of the job.
        progress: receives progress messages.
    """
    here, data = job_position(), task.load_data()
    require_same_task(task, data)
    device = device_here()
    arms: list[TimedArm] = []
    refused: list[RefusedRecipe] = []
    for mode in settings.modes if here.num_ranks > 1 else ("weak",):
        whole = replace(task, batch_size=task.batch_size * here.num_ranks) if mode == "weak" else task
        share = task if mode == "weak" else task_of_rank(task, here.num_ranks)
        progress(f"planning for {share.batch_size} samples per rank")
        found = _planned(whole, share, data, device, folder, settings, progress)
        bench = Bench(whole, data, device, mode, number, settings, progress)
        arms += bench.arms(found.plan)
        refused += bench.refused
        refused += [] if found.plan is not None else [RefusedRecipe("plan", mode, here.num_ranks, found.refusal)]
    # Once per number of ranks, because a slow link takes seconds.
    link = _link(device) if here.num_ranks > 1 and not number else None
    shared = oversubscribed_resource()
    if here.rank:
        return None
    how = {"threads": torch.get_num_threads(), "device": device.type, "refused": tuple(refused)}
    return ScalingJob(here.num_ranks, number, tuple(arms), shared, link, **how, environment=environment())


def _planned(
    whole: Task,
    share: Task,
    data: TaskData,
    device: torch.device,
    folder: Path,
    settings: JobSettings,
    progress: Progress,
) -> JobPlan:
    if settings.plan is not None:
        return JobPlan(fit_plan_to_ranks(settings.plan, share.batch_size, job_position().num_ranks))
    if settings.budget.memory_bytes is not None:
        return plan_within_limit(settings.budget, whole, share.batch_size, folder, progress)
    return plan_of_job(share, data, device, folder)


def _link(device: torch.device) -> Link | None:
    try:
        return calibrate(device).link
    except ValueGivenError:  # Unusable link times: the table is made without a link.
        return None


class _SteppedLoop:
    """A loop over this rank's shard of the batches, with separate global modes and random generators."""

    def __init__(self, loop: SteppedLoop, batches: Iterator[Any]) -> None:
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


@dataclass(frozen=True)
class JobPlan:
    """A job's plan, or None with the reason if no plan meets the limit. A JSON value."""

    plan: Plan | None
    refusal: str = ""


def plan_of_job(share: Task, data: TaskData, device: torch.device, folder: Path) -> JobPlan:
    """Return the plan of the current ranks, without limits. Collective: all ranks must call it.

    Args:
        share: the task as seen from a rank.
        data: data of the task.
        device: device of the rank.
        folder: folder of plans, see `plan_maker`.
    """
    make = plan_maker(share, data, device, folder)
    if job_position().num_ranks == 1:
        return JobPlan(make().plan)
    return JobPlan(plan_together(make, device, lambda: rehearsal_of(share, device, silent)))


def plan_maker(share: Task, data: TaskData, device: torch.device, folder: Path) -> Callable[[], BroadcastPlan]:
    """Return a function that makes the plan of a rank's shard, or reads the plan of an earlier job."""
    path = folder / f"plan-{share.batch_size}.json"

    def make() -> BroadcastPlan:
        if not path.exists():
            plans = make_plans(share, data, device, adapt=(), strong=False, progress=lambda *_: None)
            with torch.device("meta"):
                model = share.make_model()
            plan = plans.plans["equivalent"]
            write_whole(
                path, to_json(BroadcastPlan(plan, step_shape(model, plans.profiles["equivalent"], plan)), indent=1)
            )
        return read_json(BroadcastPlan, path)

    return make


def plan_within_limit(budget: Budget, whole: Task, rows: int, folder: Path, progress: Progress) -> JobPlan:
    """Return the plan chosen under a limit, including the ZeRO stage. Collective: all ranks must call it.

    Jobs with the same number of ranks and samples share the plan of the first job.

    Args:
        budget: the limits.
        whole: the task over all ranks.
        rows: samples per batch and rank.
        folder: folder of plans.
        progress: receives progress messages.
    """
    here = job_position()
    path = folder / f"plan-{rows}-{here.num_ranks}.json"
    text = from_first(lambda: read_text(path, "a plan's JSON file") if path.exists() else "")
    if text:
        return from_json(JobPlan, text)
    found = _chosen(budget, whole, progress)
    if here.rank == 0:
        write_whole(path, to_json(found, indent=1))
    return found


def _chosen(budget: Budget, whole: Task, progress: Progress) -> JobPlan:
    try:
        return JobPlan(plan_on_ranks(whole, budget, (), progress))
    except InfeasibleError as error:
        return JobPlan(None, error.reason)
    except RankError as error:
        if not first_ended_by(error, InfeasibleError):
            raise
        return JobPlan(None, error.reason)


def fit_plan_to_ranks(plan: Plan, rows: int, ranks: int) -> Plan:
    """Return a given plan's settings for a number of ranks and samples per rank.

    The plan is unchanged if both numbers match; otherwise its predictions and measurements are dropped. The
    micro-batch
    size is kept if the plan splits the batch. A single rank uses the same settings without sharding.
    """
    if (plan.batch_size, plan.num_ranks) == (rows, ranks):
        return plan
    size = min(int(plan.micro_batch.value or 1), rows) if plan.splits else rows
    micro = replace(plan.micro_batch, value=size, changed=size < rows)
    found = replace(plan, batch_size=rows, micro_batch=micro, predicted=None, measured=None, stages=())
    if ranks == 1:
        return for_one_process(found) if found.num_ranks > 1 else found
    return replace(found, num_ranks=ranks) if found.num_ranks > 1 else for_replicas(found, ranks)


def refuse_other_maths(plan: Plan | None) -> None:
    """Raise an error if a given plan is tuned, because it would be timed next to equivalent plans.

    Raises:
        ValueGivenError: the plan is tuned.
    """
    if plan is not None and plan.plan_kind != "equivalent":
        raise ValueGivenError(
            "--plan",
            problem=f"The plan is not an equivalent plan: it changes {plan.changes_in_words}.",
            hint="Make a plan without --adapt.",
            code="plan.not_equivalent",
        )


def predicted_bytes(plan: Plan) -> int | None:
    """Return the predicted peak bytes of a rank; None if unknown or predicted for a single process.

    A plan chosen among ZeRO stages has no single-process baseline.
    """
    if plan.predicted is None or (plan.num_ranks > 1 and plan.baseline is not None):
        return None
    return plan.predicted.peak_bytes
