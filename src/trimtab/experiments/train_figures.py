"""What `trimtab train` says at the end: the figures of a run, of one part or of several with pauses between them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.core.carbon import Carbon, Intensity, added, carbon_of
from trimtab.core.choice import Choice
from trimtab.core.energy import Energy, Provenance, summed
from trimtab.core.errors import ValueGivenError
from trimtab.distributed.process_group import place
from trimtab.tasks.task import DataSource, Task


@dataclass(frozen=True)
class Part:
    """What was trained from a start to a pause, or to the end.

    Args:
        rows_before: that the run had trained on as it began. done: steps of the run that are over as it ends.
        seconds: of training. terms: what the loss counted. loss: the last one.
        value: of the task's metric; None: it was paused. data, where: what was read, and where it lay.
    """

    rows_before: int
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
        """Whether there is more of the run to come."""
        return self.value is None


def figures_of(task: Task, steps: int, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the figures of a run by their names; of several parts those that add up are added.

    Where the run was gone on with, speed is that of what was left of it.
    """
    first, last = parts[0], parts[-1]
    seconds = math.fsum(part.seconds for part in parts)
    energy = last.energy if len(parts) == 1 else summed([part.energy for part in parts], in_turn=True)
    found = {
        "task": task.name,
        "steps": steps,
        "rows": steps * task.batch_rows,
        "ranks": place().num_ranks,
        **({"resumed_at_rows": first.rows_before} if first.rows_before else {}),
        "train_s": round(seconds, 3),
        f"{task.terms}_per_s": round(math.fsum(part.terms for part in parts) / seconds, 1),
        "energy": energy.describe(),
        "energy_j": energy.joules,
        **_carbon_figures([part.carbon for part in parts if part.carbon is not None]),
        **({} if last.done * task.batch_rows == last.rows_before else {"loss": last.loss}),  # where a step was left
        "data": f"{last.data.name} ({last.data.origin})",
        "data_on": f"{last.where.value}: {last.where.reason}",
    }
    return found | {_name_beside(task.metric.name, found): last.value}


def _name_beside(metric: str, found: Mapping[str, Any]) -> str:
    """Return what a held-out metric is called among figures of training: one called loss is not the training's."""
    return f"held_out_{metric}" if metric in {*found, "loss"} else metric


def _carbon_figures(parts: Sequence[Carbon]) -> dict[str, Any]:
    if not parts:
        return {}
    found = added(parts)
    return {"carbon": found.describe(), "carbon_g": found.grams, "carbon_kind": found.kind}


def told_carbon(seconds: float, energy: Energy, grid: Intensity) -> Carbon:
    """Return the carbon of what has just ended, so many seconds after it began: its power is the same all along."""
    try:
        return carbon_of([(time.time() - seconds, energy)], grid)
    except ValueGivenError as error:  # the file ends before the run did: no reason to lose what it trained
        return Carbon(None, grid.kind, Provenance.ABSENT, str(error))
