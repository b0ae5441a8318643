"""`trimtab train`: train a task with a plan and a record, to the end or up to a pause."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.api import Metering, start
from trimtab.carbon.intensity import Carbon, Intensity, carbon_of, sum_carbon
from trimtab.checkpoint.config import Checkpoints
from trimtab.core import validation
from trimtab.core.choice import Choice
from trimtab.core.energy_reading import Energy, Provenance, sum_energy
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.progress import Progress
from trimtab.core.record import Header, RecordWriter
from trimtab.core.serialization import to_jsonable
from trimtab.core.stateful import require_keys
from trimtab.distributed.process_group import job_position, total
from trimtab.distributed.rank_energy import meter_of_rank
from trimtab.distributed.sharded_loader import shard
from trimtab.energy.energy_meter import EnergyClock
from trimtab.experiments.task_plans import require_same_task
from trimtab.integrations.trackers import tracker_named
from trimtab.integrations.tracking import TrackedRecord
from trimtab.losses import parts_of
from trimtab.measure.finite_check import nonfinite_parameter
from trimtab.measure.machine import environment
from trimtab.measure.timing import synchronize
from trimtab.plans.plan import Plan
from trimtab.tasks.placement import device_here, place_data, prefetch
from trimtab.tasks.task import DataSource, Task, TaskData
from trimtab.training.run import Run


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of a training run of a task or a function.

    Args:
        seed: seed of weights and data order.
        record: path of a new record, or of this run's record if resuming from checkpoints.
        metering: source of energy figures.
        checkpoints: checkpoint settings, or None.
        grid: carbon intensity in grams per kWh, for carbon figures.
        tracks: experiment trackers, in the format of `tracker_named`.
        nonfinite: policy for a non-finite loss or parameter, as in `trimtab.start`.
    """

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


def require_trackers(tracks: Sequence[str], record: Path | None) -> None:
    """Raise an error, before measuring, if a tracker cannot follow the record.

    Raises:
        ValueGivenError: there is no record, or an unknown tracker.
        DependencyError: the tracker's package is missing.
    """
    for each in tracks:
        tracker_named(each)
    if tracks and record is None:
        raise ValueGivenError(
            "--track",
            problem=f"--track {tracks[0]} needs a record, whose lines are sent to the tracker.",
            hint="Add --record run.jsonl.",
            code="option.required",
        )


def record_of(path: Path | None, header: Header, tracks: Sequence[str], *, continues: bool) -> RecordWriter | None:
    """Return the writer of a run's record, with trackers; None without a record and on ranks other than 0.

    Raises:
        FormatError: the file exists already or cannot be written.
    """
    if path is None or job_position().rank:
        return None
    try:
        if tracks:
            return TrackedRecord(path, header, [tracker_named(each) for each in tracks], continues=continues)
        return RecordWriter(path, header, continues=continues)
    except FileExistsError:
        raise FormatError(
            "--record",
            problem=f"The file {path} exists already.",
            hint="Name a new file, or delete the old one.",
            code="record.exists",
        ) from None
    except OSError as error:
        raise FormatError(
            "--record",
            problem=f"The record {path} cannot be written: {error.strerror or error}.",
            hint="Name another file.",
            code="record.not_writable",
        ) from None


@dataclass(frozen=True)
class TrainingPart:
    """Training from a start to a pause, or to the end.

    Args:
        samples_before: samples trained on before this part.
        done: batches done at the end of this part.
        seconds: seconds of training.
        terms: loss terms counted.
        energy: energy of training.
        carbon: carbon emissions, or None.
        loss: the last loss.
        value: value of the task's metric; None if paused.
        data: source of the data.
        where: placement of the data (host or device), with the reason.
    """

    samples_before: int
    done: int
    seconds: float
    terms: float
    energy: Energy
    carbon: Carbon | None
    loss: float
    value: float | None
    data: DataSource
    where: Choice

    @property
    def is_paused(self) -> bool:
        """True if the run has remaining steps."""
        return self.value is None


def figures_of(task: Task, steps: int, parts: Sequence[TrainingPart]) -> dict[str, Any]:
    """Return the named figures of a run, summed over parts.

    For a resumed run, throughput covers only the resumed part.
    """
    first, last = parts[0], parts[-1]
    seconds = math.fsum(part.seconds for part in parts)
    energy = last.energy if len(parts) == 1 else sum_energy([part.energy for part in parts], in_turn=True)
    found = {
        "task": task.name,
        "steps": steps,
        "rows": steps * task.batch_size,
        "ranks": job_position().num_ranks,
        **({"resumed_at_rows": first.samples_before} if first.samples_before else {}),
        "train_s": round(seconds, 3),
        f"{task.terms}_per_s": round(math.fsum(part.terms for part in parts) / seconds, 1),
        "energy": energy.describe(),
        "energy_j": energy.joules,
        **carbon_figures([part.carbon for part in parts if part.carbon is not None]),
        # Absent if no step remained.
        **({} if last.done * task.batch_size == last.samples_before else {"loss": last.loss}),
        "data": f"{last.data.name} ({last.data.origin})",
        "data_on": f"{last.where.value}: {last.where.reason}",
    }
    return found | {_name_beside(task.metric.name, found): last.value}


def _name_beside(metric: str, found: Mapping[str, Any]) -> str:
    """Return the name of the held-out metric, prefixed if it collides with a training figure such as the loss."""
    return f"held_out_{metric}" if metric in {*found, "loss"} else metric


def carbon_figures(parts: Sequence[Carbon]) -> dict[str, Any]:
    """Return the named carbon figures of a run in parts; empty without parts."""
    if not parts:
        return {}
    found = sum_carbon(parts)
    return {"carbon": found.describe(), "carbon_g": found.grams, "carbon_kind": found.kind}


def told_carbon(seconds: float, energy: Energy, grid: Intensity) -> Carbon:
    """Return the carbon emissions of a run that ended just now after `seconds` seconds, at constant power."""
    try:
        return carbon_of(time.time() - seconds, energy, grid)
    except ValueGivenError as error:  # An intensity file that ends before the run does must not lose the training.
        return Carbon(None, grid.kind, Provenance.ABSENT, str(error))


# A task's loss with a count of its terms, for throughput.


class CountedTerms:
    """A task's loss with a count of its terms.

    Attributes:
        pending: remaining zero-weight micro-batches, run only to take part in collectives; their counts are ignored.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._is_mean = False
        self._sum: Any = 0.0  # A tensor if the counts are tensors: reading a count would synchronise with the device.
        self._last: Any = 0.0
        self.pending = 0

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the task's loss."""
        self._add_last()
        result = self._task.loss_fn(model, batch)
        count = parts_of(result).count
        self._is_mean, self._last = count is None, 0.0 if count is None or self.pending > 0 else count
        self.pending -= 1
        return result

    def _add_last(self) -> None:
        """Add the last count, delayed until the run has accepted it (otherwise the run raises)."""
        last = self._last.detach().double() if isinstance(self._last, Tensor) else self._last
        self._sum, self._last = self._sum + last, 0.0

    def terms(self, rows: int) -> float:
        """Return the terms of all `rows` samples over all ranks."""
        self._add_last()
        return rows * float(self._task.terms_per_sample) if self._is_mean else total(float(self._sum))


# Resumable batches of a task.


class ResumableBatches:
    """This rank's shard of a run's batches, as a resumable loader of a single epoch.

    Args:
        data: data of the task.
        device: device of the batches.
        seed: seed of the data order.
        batch_size: batch size of the whole job.
        steps: number of batches in the epoch.
        may_differ: True to allow different data on resuming.
    """

    def __init__(
        self, data: TaskData, device: torch.device, *, seed: int, batch_size: int, steps: int, may_differ: bool = False
    ) -> None:
        self._data, self._device, self._may_differ = data, device, may_differ
        self._seed, self._batch_size, self._steps = seed, batch_size, steps
        self._drawn = 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the remaining batches of the epoch."""
        whole = self._data.batches(self._seed, self._batch_size, begin=self._drawn)
        for batch in prefetch(shard(itertools.islice(whole, max(0, self._steps - self._drawn))), self._device):
            self._drawn += 1  # Counted when taken, because batches are also prefetched.
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches taken, with the identity of the data."""
        return {"drawn": self._drawn, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume after the batches taken.

        Raises:
            ValueGivenError: the seed, batch size or data differ.
            FormatError: the state is malformed.
        """
        identity = self._identity()
        require_keys("state.data.loader", state, ("drawn", *identity))
        for name, here in identity.items():
            if state[name] != here and not (name == "data" and self._may_differ):
                raise ValueGivenError(
                    f"resume: {name}",
                    got=repr(here),
                    expected=f"{state[name]!r}, as in the checkpoint",
                    hint="Pass the value that the run started with, or start a new run in another folder.",
                    code=f"resume.{name}_differs",
                )
        self._drawn = validation.integer("state.data.loader.drawn", state["drawn"], low=0)

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed, "batch_size": self._batch_size, "data": self._data.source.sha256}


Note = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True)
class TrainingOptions(RunSettings):
    """Options of a training run of a task.

    Args:
        task: the task to train.
        plan: the plan to apply.
        steps: number of batches.
        The rest as in `RunSettings`.

    Raises:
        FormatError: the plan was made for another batch size or number of ranks.
    """

    task: Task
    plan: Plan
    steps: int

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
