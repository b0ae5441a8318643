"""What the command `scale` does: start ranks or be one of them, and write the table down."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.codec import to_json, write_whole
from trimtab.core.progress import Progress
from trimtab.distributed.launch import launch
from trimtab.distributed.process_group import from_first, joined, place
from trimtab.experiments import scaling
from trimtab.experiments.report.scaling_page import scaling_page
from trimtab.experiments.scale import ScaleSettings, jobs_in, next_round, one_job, scale, take
from trimtab.experiments.scaling import Scaling
from trimtab.experiments.together import together
from trimtab.measure.machine import environment
from trimtab.tasks import load_task


@dataclass(frozen=True)
class Found:
    """A table, and where it was written."""

    table: Scaling
    path: Path

    @property
    def text(self) -> str:
        """For a terminal."""
        return scaling.text(self.table)

    def as_benchmark(self) -> dict[str, Any]:
        """Return the one object of a benchmark."""
        rows = list(scaling.benchmark_rows(self.table, "local"))
        return {"schema": 1, "name": "scale", "environment": self.table.environment or {}, "rows": rows}


def run_scale(task: str, out: Path, settings: ScaleSettings, job: int | None, progress: Progress) -> Found | None:
    """Return the table of a task; nothing on a rank that another one speaks for.

    Args:
        task: as it was named. job: the round that this process times a job of, started by this very command; None: it
            was started by a person, or by a launcher.
    """
    loaded, here = load_task(task), place()
    if job is None and here.num_ranks == 1:
        again = [arg for arg in sys.argv[1:] if arg != "--json"]

        def start(ranks: int, number: int) -> None:
            launch([*again, "--out", str(out), "--job", str(number)], ranks)

        return _written(scale(loaded, out, settings, start, progress), out)
    with joined(), together():
        if job is None:

            def claimed() -> str:
                take(loaded, out, settings.job)
                return str(next_round(out, here.num_ranks))

            number = int(from_first(claimed))
        else:
            number = job
        one_job(loaded, out, number, settings.job, progress)
    if job is not None or here.rank:
        return None
    return _written(scaling.summarise(loaded.name, jobs_in(out), environment()), out)


def _written(found: Scaling, out: Path) -> Found:
    write_whole(out / "scaling.json", to_json(found, indent=1))
    path = out / "report.html"
    write_whole(path, scaling_page(found))
    return Found(found, path)
