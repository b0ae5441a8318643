"""Final figures of `trimtab train`, for a run in a single part or with pauses."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.carbon.intensity import Carbon, Intensity, carbon_of, sum_carbon
from trimtab.core.choice import Choice
from trimtab.core.energy_reading import Energy, Provenance, sum_energy
from trimtab.core.errors import ValueGivenError
from trimtab.distributed.process_group import job_position
from trimtab.tasks.task import DataSource, Task


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
