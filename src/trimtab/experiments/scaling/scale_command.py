"""`trimtab scale`: start ranks or run as a rank, and write the table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.errors import ValueGivenError
from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import to_json, write_whole
from trimtab.distributed.launch import launch
from trimtab.distributed.process_group import from_first, is_launched, job_position, process_group
from trimtab.experiments.comparison_context import comparison_ranks
from trimtab.experiments.report.scaling_page import scaling_page
from trimtab.experiments.scaling import scaling_result as scaling
from trimtab.experiments.scaling import scaling_table as scaling_table
from trimtab.experiments.scaling.scale import (
    Launch,
    ScaleSettings,
    claim_scaling_folder,
    jobs_in,
    next_round,
    one_job,
    scale,
)
from trimtab.experiments.scaling.scaling_result import Scaling
from trimtab.measure.machine import environment
from trimtab.tasks import load_task
from trimtab.tasks.task import Task


@dataclass(frozen=True)
class FoundTable:
    """A table with its report path and the name of the link; None to use the link of every row."""

    table: Scaling
    path: Path
    link: str | None

    @property
    def text(self) -> str:
        """Text for a terminal."""
        return scaling_table.text(self.table)

    def as_benchmark(self) -> dict[str, Any]:
        """Return the benchmark object."""
        return scaling_table.benchmark_object(self.table, self.link)


def run_scale(
    task: str, out: Path, settings: ScaleSettings, job: int | None, progress: Progress, asked: Sequence[str] = ()
) -> FoundTable | None:
    """Return the scaling table of a task; None on ranks that do not report.

    Args:
        task: name of the task.
        out: output folder.
        settings: options of the table.
        job: round number, in the processes that this command starts to time a job (one run on a number of ranks); None
            in a process started by the user or by a launcher such as torchrun.
        progress: receives progress messages.
        asked: names of the given options among `--ranks` and `--rounds`, which determine the jobs to run.

    Raises:
        ValueGivenError: `asked` is not empty under a launcher, whose ranks can time only a single job.
    """
    loaded, here = load_task(task), job_position()
    if job is None and not is_launched():
        return _written(scale(loaded, out, settings, _again(out), progress), out, "local")
    if job is None and asked:
        raise ValueGivenError(
            asked[0],
            problem=f"{' and '.join(asked)} cannot be used under a launcher, whose {here.num_ranks} ranks run one job.",
            hint="Start the command once for each number of ranks, with the same --out.",
            code="option.conflict",
        )
    with process_group(), comparison_ranks():
        number = job
        if number is None:
            number = int(from_first(lambda: _next(loaded, out, settings, here.num_ranks)))
        one_job(loaded, out, number, settings.job, progress if job is None and not here.rank else silent)
    if job is not None or here.rank:
        return None
    found = scaling.summarise(loaded.name, jobs_in(out), environment())
    return _written(found, out, None)


def _again(out: Path) -> Launch:
    """Return a function that runs this command again as the ranks of a job."""
    given = [arg for arg in sys.argv[1:] if arg != "--json"]
    return lambda ranks, number: launch([*given, "--out", str(out), "--job", str(number)], ranks)


def _next(task: Task, out: Path, settings: ScaleSettings, ranks: int) -> str:
    claim_scaling_folder(task, out, settings.job)
    return str(next_round(out, ranks))


def _written(found: Scaling, out: Path, link: str | None) -> FoundTable:
    write_whole(out / "scaling.json", to_json(found, indent=1))
    path = out / "report.html"
    write_whole(path, scaling_page(found))
    return FoundTable(found, path, link)
