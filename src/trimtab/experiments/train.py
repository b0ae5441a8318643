"""`trimtab train`: one task through one plan, with a record."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimtab.api import start
from trimtab.core.codec import to_jsonable
from trimtab.core.errors import FormatError
from trimtab.core.plan import Plan
from trimtab.core.record import End, Evaluation, Header, RecordWriter
from trimtab.measure.machine import environment
from trimtab.measure.timing import synchronize
from trimtab.tasks.task import Task


def train_task(
    task: Task,
    plan: Plan,
    *,
    steps: int,
    seed: int,
    record: Path | None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Train `steps` windows and evaluate; returns the final figures, terms per second without evaluation."""
    if plan.batch_rows != task.batch_rows:
        raise FormatError(
            "plan.batch_rows", given=f"{plan.batch_rows}, made for another batch", expected=f"{task.batch_rows}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = task.load_data()
    torch.manual_seed(seed)
    model = task.make_model().to(device).train()
    optimizer = task.make_optimizer(model)
    header = Header(task.name, seed, to_jsonable(plan), environment(), {"data": to_jsonable(data.source)})
    writer = None if record is None else _new_record(record, header)
    total = steps * task.batch_rows
    batches = data.batches(seed, task.batch_rows)
    begin = time.perf_counter()
    with start(model, optimizer, plan, total_samples=total, record=writer) as run:
        for index in range(steps):
            run.train_step(run.window(next(batches)), task.loss_fn)
            progress(f"step {index + 1} of {steps}")
        synchronize(device)
        seconds = time.perf_counter() - begin
        loss = float(run.loss)
    value = task.metric.evaluate(model, data.held_out)
    if writer is not None:
        writer.write(Evaluation(total, seconds, {task.metric.name: value}))
        writer.write(End("budget", {"rows": total, "train_s": seconds}))
        writer.close()
    return {
        "task": task.name,
        "steps": steps,
        "rows": total,
        "train_s": round(seconds, 3),
        f"{task.terms}_per_s": round(total * task.terms_per_row / seconds, 1),
        "loss": loss,
        task.metric.name: value,
        "data": f"{data.source.name} ({data.source.origin})",
    }


def _new_record(path: Path, header: Header) -> RecordWriter:
    try:
        return RecordWriter(path, header)
    except FileExistsError:
        raise FormatError("--record", given=f"{path}, which exists", expected="a new file") from None
    except OSError as error:
        raise FormatError("--record", given=str(error), expected="a file that can be written") from None
