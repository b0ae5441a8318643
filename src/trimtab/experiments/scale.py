"""`trimtab scale`: rounds of jobs on several numbers of ranks (paper, table IV).

Every job writes a file to the output folder, so that a restarted command continues. Under a launcher, the ranks run a
single job, and the table covers all jobs in the folder; this allows jobs on several machines of a cluster.
"""

from __future__ import annotations

import contextlib
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.core import validation
from trimtab.core.errors import InfeasibleError, RankError, ValueGivenError
from trimtab.core.hardware import Link
from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import read_json, to_json, to_jsonable, write_whole
from trimtab.distributed.bandwidth_test import calibrate
from trimtab.distributed.coordinator import Coordinator
from trimtab.distributed.launch import launch
from trimtab.distributed.process_group import (
    first_ended_by,
    from_first,
    has_peers,
    is_launched,
    job_position,
    process_group,
)
from trimtab.experiments import loop_setup, loops
from trimtab.experiments.paired_run import Arm, PairedRun, RunLength, measure_step
from trimtab.experiments.result_folder import ResultFolder
from trimtab.experiments.result_table import BASELINE, PLANNED, ResultTable
from trimtab.experiments.scaling import ALONE, FILE, MODES, Scaling, ScalingJob
from trimtab.experiments.subject import Arms, RunOptions, Subject, plain_options, process_kept
from trimtab.experiments.task_loops import Setup
from trimtab.experiments.task_plans import job_ranks, refuse_on_ranks, require_same_task, task_of_rank
from trimtab.measure.machine import environment
from trimtab.planner.multi_rank_plan import for_one_process, for_replicas
from trimtab.plans.plan import Plan
from trimtab.tasks.placement import device_here
from trimtab.tasks.task import Task

_FILE = re.compile(r"job-(\d+)-(\d+)\.json")  # File name of a job: job-ROUND-RANKS.json.
Launch = Callable[[int, int], None]


@dataclass(frozen=True)
class ScaleOptions:
    """Options of a scaling table.

    Args:
        ranks: numbers of ranks; 1 is always added as the baseline of efficiency.
        rounds: jobs per number of ranks; 5 for a verdict.
        modes: scaling modes, from `MODES`.
        steps: optimizer steps of every loop in a job.
        plan: a given plan, applied to every number of ranks; None to make a plan.
        planning: further arguments of `trimtab.plan`, such as `memory`.
    """

    ranks: tuple[int, ...] = (1, 2)
    rounds: int = 5
    modes: tuple[str, ...] = MODES
    steps: int = 40
    plan: Plan | None = None
    planning: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        validation.integer("rounds", self.rounds, high=1000)
        validation.integer("steps", self.steps, low=3)
        for each in self.ranks:
            validation.integer("ranks", each)
        object.__setattr__(self, "ranks", tuple(sorted({1, *self.ranks})))
        for mode in self.modes:
            validation.one_of("scaling", mode, MODES)
        if self.plan is not None and self.plan.plan_kind != "equivalent":
            raise ValueGivenError(
                "--plan",
                problem=f"The plan is not an equivalent plan: it changes {self.plan.changes_in_words}.",
                hint="Make a plan without --adapt.",
                code="plan.not_equivalent",
            )


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


def scale(
    setup: Setup | Task,
    out: Path,
    options: ScaleOptions,
    *,
    name: str = "setup",
    job: int | None = None,
    progress: Progress = silent,
    asked: Sequence[str] = (),
) -> Scaling | None:
    """Write the scaling table of a loop to `scaling.json` and return it; None on ranks that do not report.

    Args:
        setup: function or task as in `trimtab.compare`. With a function, every rank has its own loader.
        out: output folder.
        options: options of the table.
        name: name of the loop.
        job: round number, in the processes that this command starts to run a job; None in a process started by the
            user or by a launcher such as torchrun.
        progress: called with a line of text and the completed fraction.
        asked: names of the given options among `--ranks` and `--rounds`, which determine the jobs to run.

    Raises:
        ValueGivenError: more ranks than samples, a task's own step, or `asked` under a launcher, whose ranks can run
            only a single job.
        InUseError: another table is being made in the folder.
    """
    subject, here = Subject.of(setup, name, RunOptions(progress=progress)), job_position()
    _require_possible(subject, options, max(options.ranks) if job is None and not is_launched() else here.num_ranks)
    if job is None and not is_launched():
        with ResultFolder(out).claimed(_settings(subject, options), any_threads=True):
            _run_rounds(out, options, _again(out), progress)
    else:
        if job is None and asked:
            raise ValueGivenError(
                asked[0],
                problem=f"{' and '.join(asked)} cannot be used under a launcher, whose {here.num_ranks} ranks run one "
                "job.",
                hint="Start the command once for each number of ranks, with the same --out.",
                code="option.conflict",
            )
        with _warnings_of_first(here.rank, job), process_group(), job_ranks() as together:
            number = job
            if number is None:
                with ResultFolder(out, together).claimed(_settings(subject, options), any_threads=True):
                    number = int(from_first(lambda: _next(out, here.num_ranks)))
            told = progress if job is None and not here.rank else silent
            found = run_job(subject, number, out, options, told, together)
            if here.rank == 0:
                write_whole(out / f"job-{number}-{found.ranks}.json", to_json(found))
        if job is not None or here.rank:
            return None
    jobs = [read_json(ScalingJob, path) for path in sorted(out.iterdir()) if _FILE.fullmatch(path.name)]
    table = Scaling(subject.name, tuple(jobs))
    write_whole(out / FILE, to_json(table))
    return table


@contextlib.contextmanager
def _warnings_of_first(rank: int, job: int | None) -> Iterator[None]:
    """Show the warnings of rank 0 in the first round only, because the other processes repeat them."""
    with warnings.catch_warnings():
        if rank or job:
            warnings.simplefilter("ignore")
        yield


def _run_rounds(out: Path, options: ScaleOptions, launch: Launch, progress: Progress) -> None:
    for number in range(options.rounds):
        order = options.ranks if number % 2 == 0 else options.ranks[::-1]
        for index, ranks in enumerate(order):
            if not (out / f"job-{number}-{ranks}.json").exists():
                done = (number + index / len(order)) / options.rounds
                progress(f"round {number + 1} of {options.rounds}: {ranks} ranks", done)
                launch(ranks, number)


def _again(out: Path) -> Launch:
    """Return a function that runs this command again as the ranks of a job."""
    given = [arg for arg in sys.argv[1:] if arg != "--json"]
    return lambda ranks, number: launch([*given, "--out", str(out), "--job", str(number)], ranks)


def _next(out: Path, ranks: int) -> str:
    """Return the first round without a job on this number of ranks."""
    return str(next(number for number in range(1000) if not (out / f"job-{number}-{ranks}.json").exists()))


def _settings(subject: Subject, options: ScaleOptions) -> dict[str, Any]:
    found = {"command": "scale", "name": subject.name, "modes": list(options.modes), "steps": options.steps}
    found |= {"plan": None if options.plan is None else to_jsonable(options.plan), "loop": subject.fingerprint()}
    return found | {"planning": plain_options(options.planning or {})}


def _require_possible(subject: Subject, options: ScaleOptions, most: int) -> None:
    """Validate the options before any job runs."""
    if subject.task is None:
        if "strong" in options.modes and options.modes != MODES:
            raise ValueGivenError(
                "scaling",
                got="strong",
                expected="weak for a function setup(seed), whose loader decides the batch of a rank",
                code="scaling.not_task",
            )
        return
    task, rows = subject.task, subject.task.load_data().num_samples
    refuse_on_ranks(task if "strong" in options.modes else replace(task, batch_size=most), most)
    if "weak" in options.modes and most * task.batch_size > rows:
        raise ValueGivenError(
            "--ranks",
            problem=f"{most} ranks need {most * task.batch_size} samples for one step of weak scaling, but the data "
            f"has {rows}.",
            hint=f"Use at most {rows // task.batch_size} ranks, or --scaling strong.",
            code="ranks.too_many",
        )


def run_job(
    subject: Subject, number: int, folder: Path, options: ScaleOptions, progress: Progress, together: Coordinator
) -> ScalingJob:
    """Run a job on the present ranks, and return its values. Collective: all ranks must call it.

    Args:
        subject: the loop.
        number: number of the round.
        folder: folder of plans, shared by jobs with the same number of ranks.
        options: options of the table.
    """
    ranks = together.num_ranks
    if subject.task is not None and subject.task_loops is not None:
        require_same_task(subject.task, subject.task_loops.data)
    tables, failures, plans = dict[str, ResultTable](), dict[str, dict[str, str]](), dict[str, Plan]()
    modes = options.modes if subject.task is not None else ("weak",)
    for mode in modes if ranks > 1 else ("weak",):
        progress(f"{mode} scaling on {ranks} ranks")
        own = _of_mode(subject, mode, ranks, together)
        with process_kept():
            tables[mode], failures[mode], plan = _measured(own, mode, number, folder, options, together)
        plans |= {} if plan is None else {mode: plan}
    link = _link() if has_peers() and not number else None  # Once per number of ranks: a slow link takes seconds.
    kept = {mode: failed for mode, failed in failures.items() if failed}
    threads = torch.get_num_threads()
    return ScalingJob(ranks, number, tables, kept, plans, together.crowded, link, threads, environment())


def _of_mode(subject: Subject, mode: str, ranks: int, together: Coordinator) -> Subject:
    """Return the loop of a mode: in weak scaling the ranks share a batch of as many times the samples."""
    options = replace(subject.options, together=together)
    if subject.task is None or mode == "strong":
        return replace(subject, options=options)
    return Subject.of(replace(subject.task, batch_size=ranks * subject.task.batch_size), subject.name, options)


def _link() -> Link | None:
    try:
        return calibrate(device_here()).link
    except ValueGivenError:  # Unusable link times: the table is made without a link.
        return None


def _measured(
    subject: Subject, mode: str, number: int, folder: Path, options: ScaleOptions, together: Coordinator
) -> tuple[ResultTable, dict[str, str], Plan | None]:
    """Return the measured values of a mode, the failures of arms, and the plan."""
    failures, ranks = dict[str, str](), together.num_ranks
    reference = loop_setup.observed_reference(subject.setup, number, subject.name)
    if ranks > 1 and subject.task is None:
        loop_setup.require_reduced(subject.setup, subject.name)
    arms = Arms()
    arms.plain(BASELINE, subject.setup, reference)
    plan = _plan(subject, mode, folder, options, failures, together)
    if plan is not None:
        arms.planned(PLANNED, subject.setup, reference, plan, samples=None, horizon=subject.horizon(plan))
    made = list(arms.arms)
    rows = [
        row
        for arm in made
        for row in measure_step(arm, is_baseline=arm is made[0], failures=failures, together=together)
    ]
    running = [arm for arm in made if arm.name not in failures]
    running.insert(1, running[0].again())
    if ranks > 1 and _may_train_apart(subject):
        running.append(Arm(f"{BASELINE}{ALONE}", made[0].setup, loops.separate_steps))
        if plan is not None and PLANNED not in failures:
            own, single = Arms(), for_one_process(plan)
            how = {"samples": None, "horizon": subject.horizon(plan)}
            own.planned(f"{PLANNED}{ALONE}", subject.setup, reference, single, **how)
            running += own.arms
    how: dict[str, Any] = {"failures": failures, "progress": subject.options.progress, "together": together}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This job has several ranks, but the plan")  # Intended in ALONE arms.
        rows += PairedRun(running, number, RunLength(options.steps), **how).run()
    return ResultTable.of(rows), failures, plan


def _may_train_apart(subject: Subject) -> bool:
    """Return True if the loop's ranks can train without communication: not with a step or DDP model of the user."""
    loop = loop_setup.build(subject.setup, loop_setup.PLANNING_SEED, subject.name)
    return loop.step is None and not loop_setup.is_reduced(loop.model)


def _plan(
    subject: Subject,
    mode: str,
    folder: Path,
    options: ScaleOptions,
    failures: dict[str, str],
    together: Coordinator,
) -> Plan | None:
    """Return the plan of a job; jobs with equal ranks share the first job's. None if no plan meets the limits."""
    ranks = together.num_ranks
    if options.plan is not None:
        rows = options.plan.batch_size if subject.task is None else task_of_rank(subject.task, ranks).batch_size
        return fit_plan_to_ranks(options.plan, rows, ranks)
    reference = loop_setup.observed_reference(subject.setup, 0, subject.name)
    make = partial(_made_plan, subject, reference, options.planning or {}, together)
    found = ResultFolder(folder, together).part(f"plan-{mode}-{ranks}", PlanOfJob, make)
    if found.plan is None:
        failures[PLANNED] = f"no plan meets the limit: {found.refusal}"
    return found.plan


@dataclass(frozen=True)
class PlanOfJob:
    """A job's plan, or None with the reason if no plan meets the limit. A JSON value."""

    plan: Plan | None
    refusal: str = ""


def _made_plan(subject: Subject, reference: Any, planning: Mapping[str, Any], together: Coordinator) -> PlanOfJob:
    try:
        return PlanOfJob(subject.made_plan(subject.setup, reference, planning))
    except InfeasibleError as error:
        return PlanOfJob(None, error.reason)
    except RankError as error:
        if not first_ended_by(error, InfeasibleError):
            raise
        return PlanOfJob(None, error.reason)


def fit_plan_to_ranks(plan: Plan, rows: int, ranks: int) -> Plan:
    """Return a given plan's settings for a number of ranks and samples per rank.

    The plan is unchanged if both numbers match; otherwise its predictions and measurements are dropped. The
    micro-batch size is kept if the plan splits the batch. A single rank uses the same settings without sharding.
    """
    if (plan.batch_size, plan.num_ranks) == (rows, ranks):
        return plan
    size = min(int(plan.micro_batch.value or 1), rows) if plan.splits else rows
    micro = replace(plan.micro_batch, value=size, changed=size < rows)
    found = replace(plan, batch_size=rows, micro_batch=micro, predicted=None, measured=None, stages=())
    if ranks == 1:
        return for_one_process(found) if found.num_ranks > 1 else found
    return replace(found, num_ranks=ranks) if found.num_ranks > 1 else for_replicas(found, ranks)
