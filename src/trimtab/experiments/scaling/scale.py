"""`trimtab scale`: rounds of jobs on several numbers of ranks, and the scaling table (paper, table IV).

Every job writes a file to the output folder, so that a restarted command resumes. Under a launcher, the ranks time a
single job, and the table covers all jobs in the folder; this allows jobs on several machines of a cluster.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from trimtab.checkpoint.run_lock import lock_run_folder
from trimtab.core import validation
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Objective
from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import read_json, to_json, write_whole
from trimtab.distributed.launch import launch
from trimtab.distributed.process_group import from_first, is_launched, job_position, process_group
from trimtab.experiments.comparison_context import comparison_ranks
from trimtab.experiments.output_folder import claim_folder
from trimtab.experiments.scaling.scaling_job import JobSettings, refuse_other_maths, run_job
from trimtab.experiments.scaling.scaling_result import MODES, Scaling, ScalingJob, summarise
from trimtab.experiments.task_ranks import refuse_on_ranks
from trimtab.measure.machine import environment
from trimtab.tasks import load_task
from trimtab.tasks.task import Task

# File name of a launch: job-ROUND-RANKS.json.
_FILE = re.compile(r"job-(\d+)-(\d+)\.json")
Launch = Callable[[int, int], None]


@dataclass(frozen=True)
class ScaleSettings:
    """Options of a scaling table.

    Args:
        ranks: numbers of ranks; 1 is always added as the baseline of efficiency.
        rounds: jobs per number of ranks; 5 for a verdict.
        job: options of a job.
    """

    ranks: tuple[int, ...] = (1, 2)
    rounds: int = 5
    job: JobSettings = field(default_factory=JobSettings)

    def __post_init__(self) -> None:
        validation.integer("rounds", self.rounds, high=1000)
        for each in self.ranks:
            validation.integer("ranks", each)
        object.__setattr__(self, "ranks", tuple(sorted({1, *self.ranks})))
        for mode in self.job.modes:
            validation.one_of("scaling", mode, MODES)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks in a command-line value such as "1,2,4".

    Raises:
        ValueGivenError: the value is malformed.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise ValueGivenError(
            "--ranks", got=repr(text), expected="numbers of processes, such as 1,2,4", code="ranks.invalid"
        )
    return tuple(map(int, parts))


def scale(task: Task, out: Path, settings: ScaleSettings, launch: Launch, progress: Progress) -> Scaling:
    """Launch the jobs missing from the folder, and return the table of all jobs.

    Args:
        task: the task.
        out: output folder, locked while jobs run.
        settings: options of the table.
        launch: `launch(ranks, round)` runs `one_job` on a number of ranks, and waits for them.
        progress: receives progress messages.

    Raises:
        InUseError: another table is being made in the folder.
    """
    _require_possible(task, settings)
    with lock_run_folder(out, "--out"):
        claim_scaling_folder(task, out, settings.job)
        for number in range(settings.rounds):
            order = settings.ranks if number % 2 == 0 else settings.ranks[::-1]
            for i, ranks in enumerate(order):
                if not path_of(out, number, ranks).exists():
                    done = (number + i / len(order)) / settings.rounds
                    progress(f"round {number + 1} of {settings.rounds}: {ranks} ranks", done)
                    launch(ranks, number)
    return _table(task, out)


def _require_possible(task: Task, settings: ScaleSettings) -> None:
    """Validate the options before any job runs.

    Raises:
        ValueGivenError: more ranks than samples in a batch or in the data, a custom step function, or a tuned plan.
    """
    refuse_other_maths(settings.job.plan)
    most, rows = settings.ranks[-1], task.load_data().num_samples
    refuse_on_ranks(task if "strong" in settings.job.modes else replace(task, batch_size=most), most)
    if "weak" in settings.job.modes and most * task.batch_size > rows:
        raise ValueGivenError(
            "--ranks",
            problem=f"{most} ranks need {most * task.batch_size} samples for one step of weak scaling, but the data "
            f"has {rows}.",
            hint=f"Use at most {rows // task.batch_size} ranks, or --scaling strong.",
            code="ranks.too_many",
        )


def one_job(task: Task, out: Path, number: int, settings: JobSettings, progress: Progress) -> None:
    """Time a job on the current ranks and write its file. Collective: all ranks must call it."""
    found = run_job(task, number, out, settings, progress)
    if found is not None:
        write_whole(path_of(out, number, found.ranks), to_json(found, indent=1))


def claim_scaling_folder(task: Task, out: Path, settings: JobSettings) -> None:
    """Claim the folder for this table.

    Raises:
        FormatError: the folder contains a different table.
    """
    out.mkdir(parents=True, exist_ok=True)
    of = (settings.budget, Objective(), settings.plan)  # These have separate keys in the settings file.
    plain = {name: value for name, value in vars(settings).items() if name not in ("budget", "plan")}
    claim_folder(out, task, task.load_data(), {"scaling": plain}, *of, machine=("cpu", "gpu"))


def path_of(out: Path, number: int, ranks: int) -> Path:
    """Return the file of a round's job."""
    return out / f"job-{number}-{ranks}.json"


def run_scale(
    task: str, out: Path, settings: ScaleSettings, job: int | None, progress: Progress, asked: Sequence[str] = ()
) -> Scaling | None:
    """Write the scaling table of a task to `scaling.json` and return it; None on ranks that do not report.

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
        found = scale(loaded, out, settings, _again(out), progress)
    else:
        if job is None and asked:
            raise ValueGivenError(
                asked[0],
                problem=f"{' and '.join(asked)} cannot be used under a launcher, whose {here.num_ranks} ranks run one "
                "job.",
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
        found = _table(loaded, out)
    write_whole(out / "scaling.json", to_json(found, indent=1))
    return found


def _table(task: Task, out: Path) -> Scaling:
    jobs = [read_json(ScalingJob, path) for path in sorted(out.iterdir()) if _FILE.fullmatch(path.name)]
    return summarise(task.name, jobs, environment())


def _again(out: Path) -> Launch:
    """Return a function that runs this command again as the ranks of a job."""
    given = [arg for arg in sys.argv[1:] if arg != "--json"]
    return lambda ranks, number: launch([*given, "--out", str(out), "--job", str(number)], ranks)


def _next(task: Task, out: Path, settings: ScaleSettings, ranks: int) -> str:
    """Return the first round without a job on this number of ranks."""
    claim_scaling_folder(task, out, settings.job)
    return str(next(number for number in range(1000) if not path_of(out, number, ranks).exists()))
