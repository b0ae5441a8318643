"""`trimtab train`: train a task with a plan and a record, to the end or up to a pause."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.api import Metering, start
from trimtab.carbon.intensity import Intensity
from trimtab.checkpoint.config import Checkpoints
from trimtab.core.errors import FormatError
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress
from trimtab.core.record import Header
from trimtab.core.serialization import to_jsonable
from trimtab.distributed.process_group import job_position, total
from trimtab.distributed.rank_energy import meter_of_rank
from trimtab.energy.energy_meter import EnergyClock
from trimtab.experiments.loss_term_counter import CountedTerms
from trimtab.experiments.resumable_batches import ResumableBatches
from trimtab.experiments.task_ranks import require_same_task
from trimtab.experiments.train_record import record_of
from trimtab.experiments.train_summary import TrainingPart, figures_of, told_carbon
from trimtab.measure.finite_check import nonfinite_parameter
from trimtab.measure.machine import environment
from trimtab.measure.timing import synchronize
from trimtab.tasks.placement import device_here, place_data
from trimtab.tasks.task import Task
from trimtab.training.run import Run

Note = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class TrainingOptions:
    """Options of a training run.

    Args:
        task: the task to train.
        plan: the plan to apply.
        steps: number of batches.
        seed: seed of weights and data order.
        record: path of a new record, or of this run's record if resuming from checkpoints.
        metering: source of energy figures.
        checkpoints: checkpoint settings, or None.
        grid: carbon intensity in grams per kWh, for carbon figures.
        tracks: experiment trackers, in the format of `tracker_named`.
        nonfinite: policy for a non-finite loss or parameter, as in `trimtab.start`.

    Raises:
        FormatError: the plan was made for another batch size or number of ranks.
    """

    task: Task
    plan: Plan
    steps: int
    seed: int = 0
    record: Path | None = None
    metering: Metering | None = None
    checkpoints: Checkpoints | None = None
    grid: Intensity | None = None
    tracks: tuple[str, ...] = ()
    nonfinite: str = "error"

    @property
    def begins_record(self) -> bool:
        """True if the run starts a new record instead of continuing an existing record."""
        return self.record is not None and not self.record.exists()

    def __post_init__(self) -> None:
        rows = -(-self.task.batch_size // job_position().num_ranks)
        if self.plan.batch_size != rows:
            raise FormatError(
                "plan.batch_size",
                got=f"{self.plan.batch_size} samples per step and rank",
                expected=f"{rows}, as in {self.task.name} on {job_position().num_ranks} rank(s)",
                hint="Make a plan for this batch size and number of ranks, or remove --plan.",
                code="plan.batch_differs",
            )


def train_whole(asked: TrainingOptions, progress: Progress) -> dict[str, Any]:
    """Train all batches and evaluate; return the final figures. Throughput excludes evaluation.

    A resumed run continues its record, and its throughput covers only the resumed part. Terms are counted in the loss;
    for a mean loss they are samples times the task's terms per sample.
    """
    return figures_of(asked.task, asked.steps, [train_part(asked, progress)])


def train_part(
    asked: TrainingOptions,
    progress: Progress,
    *,
    notes: Sequence[Note] = (),
    is_over: Callable[[], bool] = lambda: False,
) -> TrainingPart:
    """Train from the start or the newest checkpoint to the end and evaluate, or stop at a pause.

    Args:
        asked: options of the run.
        progress: receives progress messages.
        notes: events recorded before the first step.
        is_over: called after every step except the last. If True, the run is checkpointed and left, so that the next
            call resumes; this requires checkpoints.
    """
    task, plan = asked.task, asked.plan
    device = device_here()
    loaded = task.load_data()
    require_same_task(task, loaded)
    data, where = place_data(loaded, device)
    torch.manual_seed(asked.seed)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    metered = meter_of_rank(device, asked.metering, idle=asked.begins_record)
    about = {"data": to_jsonable(data.source), "data_on": to_jsonable(where), "meter": to_jsonable(metered.own)}
    header = Header(task.name, asked.seed, to_jsonable(plan), environment(), about)
    writer = record_of(asked.record, header, asked.tracks, continues=asked.checkpoints is not None)
    counted, rows = CountedTerms(task), asked.steps * task.batch_size
    may_differ = asked.checkpoints is not None and "data" in asked.checkpoints.accepts
    of = {"seed": asked.seed, "batch_size": task.batch_size, "steps": asked.steps, "may_differ": may_differ}
    batches = ResumableBatches(data, device, **of)
    clock = EnergyClock(metered.meter)
    recorded = None if writer is None or metered.own.is_absent else clock
    begin = time.perf_counter()
    kept = {"record": writer, "energy": recorded, "checkpoints": asked.checkpoints, "nonfinite": asked.nonfinite}
    with writer or contextlib.nullcontext(), start(model, optimizer, plan, total_samples=rows, **kept) as run:
        for note in notes:
            run.note(*note)
        clock.start()
        before, is_paused = run.consumed_samples, False
        for done in _trained(run, batches, asked, counted, before):
            clock.tick()
            progress(f"batch {done} of {asked.steps}", done / asked.steps)
            if is_paused := done < asked.steps and is_over():
                break
        synchronize(device)
        seconds = time.perf_counter() - begin
        energy = metered.of_all(clock.read(), total)
        carbon = None if asked.grid is None else told_carbon(seconds, energy, asked.grid)
        ended = -(-run.consumed_samples // task.batch_size)
        _check_parameters(run)
        said = (seconds, counted.terms(run.consumed_samples - before), energy, carbon, float(run.loss))
        value = _paused(run) if is_paused else _evaluated(run, task, model, data.held_out)
    return TrainingPart(before, ended, *said, value, data.source, where)


def _trained(run: Run, batches: Any, asked: TrainingOptions, counted: CountedTerms, before: int) -> Iterator[int]:
    """Train step by step, and yield the number of batches done after every step."""
    done = -(-before // asked.task.batch_size)
    for window in run.windows(batches):
        counted.pending = window.num_padding
        run.train_step(window, counted.loss)
        done += window.num_batches
        yield done
        # Saved before the loader is exhausted, so that the run can be extended.
        if done == asked.steps and asked.checkpoints is not None:
            run.checkpoint()


def _check_parameters(run: Run) -> None:
    """Report non-finite parameters of any rank according to the run's policy. Collective: all ranks must call it."""
    name = nonfinite_parameter(run.model)
    if total(0.0 if name is None else 1.0):
        where = f"parameter {name}" if name else "a parameter on another rank"
        run.report_nonfinite(f"NaN or infinity in {where} at the end of training")


def _evaluated(run: Run, task: Task, model: torch.nn.Module, held_out: Sequence[Any]) -> float:
    # No check of the metric's unit here: the unit matters only for differences, and an error would lose the run.
    value = task.metric.figure(task.metric.evaluate(model, held_out))
    run.evaluated(value, task.metric.name)
    return value


def _paused(run: Run) -> None:
    """Checkpoint a run that will be resumed."""
    run.note("paused", {"rows": run.consumed_samples})
    run.interrupt()
    run.checkpoint()
