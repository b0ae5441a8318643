"""`trimtab train`: one task through one plan, with a record."""

from __future__ import annotations

import contextlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trimtab.api import Metering, start
from trimtab.checkpoint.settings import Checkpoints
from trimtab.core.carbon import Carbon, Intensity, carbon_of
from trimtab.core.codec import to_jsonable
from trimtab.core.energy import Energy, Provenance
from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.plan import Plan
from trimtab.core.progress import Progress
from trimtab.core.record import Header, RecordWriter
from trimtab.distributed.energy import meter_of_rank
from trimtab.distributed.process_group import place, total
from trimtab.experiments.kept_batches import KeptBatches
from trimtab.measure.energy import EnergyClock
from trimtab.measure.machine import environment
from trimtab.measure.timing import synchronize
from trimtab.tasks.placement import placed
from trimtab.tasks.task import Task


def train_task(
    task: Task,
    plan: Plan,
    *,
    steps: int,
    seed: int,
    record: Path | None,
    metering: Metering | None = None,
    checkpoints: Checkpoints | None = None,
    grid: Intensity | None = None,
    progress: Progress,
) -> dict[str, Any]:
    """Train `steps` windows and evaluate; returns the final figures, terms per second without evaluation.

    Where the run is gone on with, its record is too, and speed is that of what was left of it.

    Terms are what the loss counted; where it is a mean, rows times what the task says that a row holds. `grid`: grams
    per kWh, by which carbon is told.
    """
    here = place()
    rows = -(-task.batch_rows // here.num_ranks)
    if plan.batch_rows != rows:
        given = f"{plan.batch_rows}, made for another batch or other ranks"
        raise FormatError("plan.batch_rows", given=given, expected=f"{rows}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data, where = placed(task.load_data(), device)
    torch.manual_seed(seed)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    metered = meter_of_rank(device, metering)
    about = {"data": to_jsonable(data.source), "data_on": to_jsonable(where), "meter": to_jsonable(metered.own)}
    header = Header(task.name, seed, to_jsonable(plan), environment(), about)
    writer = None if record is None or here.rank else _new_record(record, header, continues=checkpoints is not None)
    counted, rows = _Counted(task), steps * task.batch_rows
    may_differ = checkpoints is not None and "data" in checkpoints.accepts
    batches = KeptBatches(data, device, seed=seed, batch_rows=task.batch_rows, steps=steps, may_differ=may_differ)
    clock = EnergyClock(metered.meter)
    recorded = None if writer is None or metered.own.is_absent else clock
    begin = time.perf_counter()
    kept = {"record": writer, "energy": recorded, "checkpoints": checkpoints}
    with writer or contextlib.nullcontext(), start(model, optimizer, plan, total_samples=rows, **kept) as run:
        clock.start()
        before = run.consumed_rows
        done = -(-before // task.batch_rows)
        for window in run.windows(batches):
            counted.pending = window.num_padding
            run.train_step(window, counted.loss)
            clock.tick()
            done += window.num_batches
            progress(f"batch {done} of {steps}", done / steps)
            if done == steps and checkpoints is not None:  # before its data are over, so that more of them can follow
                run.checkpoint()
        synchronize(device)
        seconds = time.perf_counter() - begin
        energy = metered.of_all(clock.read(), total)
        carbon = {} if grid is None else _carbon(time.time() - seconds, energy, grid)
        loss = float(run.loss)
        value = task.metric.evaluate(model, data.held_out)
        run.evaluated(value, task.metric.name)
    return {
        "task": task.name,
        "steps": steps,
        "rows": rows,
        "ranks": here.num_ranks,
        **({"resumed_at_rows": before} if before else {}),
        "train_s": round(seconds, 3),
        f"{task.terms}_per_s": round(counted.terms(rows - before) / seconds, 1),
        "energy": energy.describe(),
        "energy_j": energy.joules,
        **carbon,
        **({} if math.isnan(loss) and before >= rows else {"loss": loss}),  # of the last step, where one was left
        task.metric.name: value,
        "data": f"{data.source.name} ({data.source.origin})",
        "data_on": f"{where.value}: {where.reason}",
    }


def _carbon(begun_at_s: float, energy: Energy, grid: Intensity) -> dict[str, Any]:
    """Return what is said of a run's carbon: its power is taken to be the same all along."""
    try:
        found = carbon_of([(begun_at_s, energy)], grid)
    except ValueGivenError as error:  # the file ends before the run did: no reason to lose what it trained
        found = Carbon(None, grid.kind, Provenance.ABSENT, str(error))
    return {"carbon": found.describe(), "carbon_g": found.grams, "carbon_kind": found.kind}


class _Counted:
    """A task's loss, and what it counted."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._is_mean = False
        self._sum: Any = 0.0  # a tensor where the counts are: to read each of them would be to wait for it
        self._last: Any = 0.0
        self.pending = 0  # micro-batches that are run for other ranks' sake, and count nothing

    def loss(self, model: torch.nn.Module, batch: Any) -> Any:
        """Return the task's loss."""
        self._add_last()
        result = self._task.loss_fn(model, batch)
        count = result[1] if isinstance(result, tuple) and len(result) == 2 else None
        self._is_mean, self._last = count is None, 0.0 if count is None or self.pending > 0 else count
        self.pending -= 1
        return result

    def _add_last(self) -> None:
        """Add the last count, which the run has accepted by now: it had raised else."""
        last = self._last.detach().double() if isinstance(self._last, Tensor) else self._last
        self._sum, self._last = self._sum + last, 0.0

    def terms(self, rows: int) -> float:
        """Return the terms of so many rows, all there were, on all ranks."""
        self._add_last()
        return rows * float(self._task.terms_per_row) if self._is_mean else total(float(self._sum))


def _new_record(path: Path, header: Header, *, continues: bool) -> RecordWriter:
    try:
        return RecordWriter(path, header, continues=continues)
    except FileExistsError:
        raise FormatError("--record", given=f"{path}, which exists", expected="a new file") from None
    except OSError as error:
        raise FormatError("--record", given=str(error), expected="a file that can be written") from None
