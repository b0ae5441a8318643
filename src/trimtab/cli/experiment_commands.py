"""Commands for experiments: compare, race, ablate, phases, scale, and report."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import (
    TRAINED,
    EnergyWatts,
    Json,
    Memory,
    PlanFile,
    Quiet,
    Ranks,
    TaskName,
    refuse_adapt,
    refuse_memory,
    require_folder,
    settings_to_adapt,
)
from trimtab.cli.output import print_error, print_json, print_text
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.progress_bar import ProgressBar

Steps = Annotated[int | None, typer.Option(min=3, help="optimizer steps of each loop per pair (default: 100)")]
Pairs = Annotated[int, typer.Option(min=1, help="paired runs, each with its own seed: 5 for a verdict, 8 for a claim")]
ToEnd = Annotated[bool, typer.Option("--to-end", help="train a task for its whole budget, for times to its targets")]
EvaluateEvery = Annotated[
    int | None, typer.Option(min=1, help="optimizer steps between evaluations (default: at the end)")
]
Cap = Annotated[float, typer.Option(help="limit on the training seconds of each arm")]
FailBelow = Annotated[
    float | None, typer.Option(help="exit with status 1 if the speed is below this limit, such as 0.97")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="print all figures and the conditions of the measurement")]
Out = Annotated[Path | None, typer.Option(help="folder; an interrupted command continues there")]


def loop_named(name: str) -> Any:
    """Return a task or a function `setup(seed)` by name."""
    from trimtab.tasks import load_task_or_setup

    return load_task_or_setup(name)


def short_name(name: str) -> str:
    """Return the name of a function without its file."""
    return name.rpartition(":")[2]


def plan_from(plan_file: Path | None, memory: str | None, adapt: str | None = None) -> Any:
    """Return the plan in a file, or None; refuses options of planning beside a file, and an invalid limit."""
    from trimtab.core.objective import Budget

    Budget(memory)  # Validated before anything is measured, and before ranks start.
    if plan_file is None:
        return None
    from trimtab.plans.plan import Plan

    refuse_adapt(adapt, "--plan")
    refuse_memory(memory)
    return Plan.load(plan_file)


@contextmanager
def running(loop: Any, num_ranks: int, **given: Any) -> Iterator[Any]:
    """Yield the options of an experiment on the ranks of this job; None in the process that started the ranks.

    Args:
        loop: task or function, for ranks.
        num_ranks: number of ranks that the user asked for.
        given: fields of `RunOptions`.
    """
    from trimtab.core.progress import silent
    from trimtab.distributed.launch import launch
    from trimtab.distributed.process_group import job_position, process_group
    from trimtab.experiments.subject import RunOptions
    from trimtab.experiments.task_plans import job_ranks, ranks_of_job, refuse_on_ranks
    from trimtab.tasks import Task

    wanted, here = ranks_of_job(num_ranks), job_position()
    if wanted > 1 and isinstance(loop, Task):
        refuse_on_ranks(
            loop, wanted, adapts=bool(given.pop("adapts", False)), recipes=bool(given.pop("recipes", False))
        )
    given = {name: value for name, value in given.items() if name not in ("adapts", "recipes")}
    options = RunOptions(command=shlex.join(["trimtab", *sys.argv[1:]]), **given)  # Validated before ranks start.
    if wanted > here.num_ranks:
        launch(sys.argv[1:], wanted)
        yield None
        return
    from dataclasses import replace

    with process_group(), ProgressBar() as progress, job_ranks() as together:
        yield replace(options, progress=progress if here.rank == 0 else silent, together=together)


def write_and_show(
    found: Any, folder: Path, *, as_json: bool, verbose: bool = False, fail_below: float | None = None
) -> None:
    """Write and print the report of a comparison, race or ablation."""
    from trimtab.experiments.benchmark_rows import benchmark_object
    from trimtab.experiments.comparison import screen_of
    from trimtab.experiments.results import RESULT

    folder.mkdir(parents=True, exist_ok=True)
    page = found.save(folder / "report.html")
    found.save(folder / RESULT)
    if as_json:
        print_json(benchmark_object(found))
    else:
        width = max(40, min(80, shutil.get_terminal_size((80, 24)).columns))
        print_text(f"{found.details()}\nreport: {page}" if verbose else screen_of(found, width, str(page)))
    if fail_below is not None and found.is_below(fail_below):
        print_error(f"The speed is below --fail-below {fail_below:g}, or a plan failed.")
        raise typer.Exit(1)


def compare(
    task: TaskName,
    steps: Steps = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="paired runs, each with its own seed: 5 for a verdict, 8 for a claim (default: 5, or 3 with --quick)",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="first impression: short runs")] = False,
    to_end: ToEnd = False,
    evaluate_every: EvaluateEvery = None,
    adapt: Annotated[
        str | None,
        typer.Option(help=f"also a tuned plan with these settings, separated by commas: {', '.join(TRAINED)}, batch"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="also recipes of the task, separated by commas: strict (fp32 without TF32), strong, muon, or own ones"
        ),
    ] = None,
    cap: Cap = float("inf"),
    baseline_cap: Annotated[float | None, typer.Option(help="separate limit for the baseline, if longer")] = None,
    memory: Memory = None,
    plan_file: PlanFile = None,
    out: Out = None,
    ranks: Ranks = 1,
    energy_watts: EnergyWatts = None,
    fail_below: FailBelow = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare a training loop with the plan in paired runs, and report the gain."""
    from trimtab.api import Metering
    from trimtab.experiments.result_folder import folder_of

    given = plan_from(plan_file, memory, adapt)
    tuned = settings_to_adapt(adapt)
    if memory is not None and "batch" in tuned:
        raise ValueGivenError(
            "--adapt",
            problem=f"--adapt {adapt} cannot be combined with --memory, because peak memory would then be "
            "measured for steps of two batches, also for the equivalent plan.",
            hint="Remove batch from --adapt, or remove --memory.",
            code="option.conflict",
        )
    loop, folder = loop_named(task), folder_of("compare-quick" if quick else "compare", task, out)
    recipes = tuple(name.strip() for name in against.split(",")) if against else ()
    if quick and (to_end or steps is not None):
        other = "--to-end" if to_end else "--steps"
        raise ValueGivenError(
            "--quick",
            problem=f"--quick sets the length of the runs, as {other} does.",
            hint="Remove one of the two options.",
            code="option.conflict",
        )
    how: dict[str, Any] = {"steps": 20 if quick else steps, "pairs": pairs or (3 if quick else 5)}
    how |= {"to_end": to_end, "evaluate_every": evaluate_every, "cap_s": cap, "baseline_cap_s": baseline_cap}
    how |= {"out": folder, "metering": Metering(energy_watts), "adapts": tuned, "recipes": recipes}
    planning: dict[str, Any] = {} if memory is None else {"memory": memory}
    planning |= {"adapt": tuned} if tuned else {}
    with running(loop, ranks, **how) as options:
        if options is None:
            return
        from trimtab.experiments.compare import compare as run

        found = run(loop, plan=given, against=recipes, name=short_name(task), options=options, **planning)
    if options.together.rank == 0:
        write_and_show(found, folder, as_json=as_json, verbose=verbose, fail_below=fail_below)


def race(
    loops: Annotated[
        list[str], typer.Argument(help="two or more functions setup(seed) or tasks: a.py:setup b.py:setup")
    ],
    steps: Steps = None,
    pairs: Pairs = 5,
    out: Out = None,
    fail_below: FailBelow = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compare any training loops in paired runs, without a plan; the first is the baseline."""
    from trimtab.experiments.compare import race as run
    from trimtab.experiments.result_folder import folder_of

    found_loops = [loop_named(name) for name in loops]
    folder = folder_of("race", loops[0], out)
    with running(None, 1, steps=steps, pairs=pairs, out=folder) as options:
        found = run(*found_loops, names=loops, options=options)
    if options.together.rank == 0:
        write_and_show(found, folder, as_json=as_json, verbose=verbose, fail_below=fail_below)


def ablate(
    task: TaskName,
    steps: Steps = None,
    pairs: Pairs = 5,
    to_end: ToEnd = False,
    pairwise: Annotated[bool, typer.Option("--pairwise", help="also run each pair of changes")] = False,
    adapt: Annotated[str | None, typer.Option(help="also changes of the training: learning-rate, schedule")] = None,
    cap: Cap = float("inf"),
    memory: Memory = None,
    plan_file: PlanFile = None,
    out: Out = None,
    verbose: Verbose = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure every change of a plan alone: added to the baseline, and removed from the plan."""
    from trimtab.experiments.compare import ablate as run
    from trimtab.experiments.result_folder import folder_of

    given = plan_from(plan_file, memory, adapt)
    tuned = settings_to_adapt(adapt, ("learning-rate", "schedule"))
    loop, folder = loop_named(task), folder_of("ablate", task, out)
    planning: dict[str, Any] = {} if memory is None else {"memory": memory}
    planning |= {"adapt": tuned} if tuned else {}
    with running(loop, 1, steps=steps, pairs=pairs, to_end=to_end, cap_s=cap, out=folder, adapts=tuned) as options:
        found = run(loop, plan=given, pairwise=pairwise, name=short_name(task), options=options, **planning)
    if options.together.rank == 0:
        write_and_show(found, folder, as_json=as_json, verbose=verbose)


def scale(
    task: TaskName,
    ranks: Annotated[str | None, typer.Option(help="numbers of processes on this machine, such as 1,2,4")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="jobs per number of ranks: 5 for a verdict")] = None,
    scaling: Annotated[
        str | None,
        typer.Option(help="weak (constant batch size per rank), strong (constant global batch size), or weak,strong"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="first impression: two short rounds of weak scaling")] = False,
    steps: Annotated[
        int | None, typer.Option(min=3, help="optimizer steps of each loop in a job (default: 40)")
    ] = None,
    memory: Annotated[
        str | None, typer.Option(help="hard limit on the memory of each rank, for the choice of the ZeRO stage")
    ] = None,
    plan_file: PlanFile = None,
    out: Out = None,
    job: Annotated[int | None, typer.Option(hidden=True, help="run a single job on the present ranks")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure baseline and plan on several numbers of ranks; under a launcher, run a single job on all ranks."""
    from trimtab.distributed.process_group import is_launched
    from trimtab.experiments.result_folder import folder_of
    from trimtab.experiments.scale import ScaleOptions, numbers
    from trimtab.experiments.scale import scale as run
    from trimtab.experiments.scaling import MODES

    given = plan_from(plan_file, memory)
    modes = tuple(part.strip() for part in scaling.split(",")) if scaling else ("weak",) if quick else MODES
    planning = {} if memory is None else {"memory": memory}
    length = steps or (12 if quick else ScaleOptions.steps)
    asked = ScaleOptions(numbers(ranks or "1,2"), rounds or (2 if quick else 5), modes, length, given, planning)
    which = [name for name, value in (("--ranks", ranks), ("--rounds", rounds)) if value is not None]
    folder = folder_of("scale", task, out)
    with ProgressBar() as progress:
        how: dict[str, Any] = {"name": short_name(task), "job": job, "progress": progress, "asked": which}
        found = run(loop_named(task), folder, asked, **how)
    if found is not None:
        # Under a launcher the table may contain jobs on several machines; each row names its measured link.
        _show_scaling(found, None if is_launched() else "local", as_json=as_json)


def _show_scaling(found: Any, link: str | None, *, as_json: bool) -> None:
    from trimtab.experiments.scaling import benchmark_rows

    rows = list(benchmark_rows(found, link)) if as_json else []
    environment = found.environment
    if as_json:
        print_json({"schema": 1, "name": "scale", "environment": environment, "rows": rows})
    else:
        print_text(str(found))


def phases(
    task: TaskName,
    rounds: Annotated[
        int | None, typer.Option(min=2, help="rounds per loop; default: 8, or fewer within two minutes")
    ] = None,
    memory: Memory = None,
    plan_file: PlanFile = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the result as JSON")] = None,
    ranks: Ranks = 1,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure the time of all phases of a step, without and with the plan, and the bottleneck of the remaining time."""
    from trimtab.core.serialization import to_json, write_result

    require_folder(out)
    given, loop = plan_from(plan_file, memory), loop_named(task)
    planning: dict[str, Any] = {} if memory is None else {"memory": memory}
    with running(loop, ranks) as options:
        if options is None:
            return
        from trimtab.experiments.phases import phases as run

        found = run(loop, plan=given, rounds=rounds, name=short_name(task), options=options, **planning)
    if options.together.rank:
        return
    try:
        if out is not None:
            write_result(out, to_json(found))
    finally:
        _show_phases(found, as_json=as_json)


def _show_phases(found: Any, *, as_json: bool) -> None:
    from trimtab.experiments.phase_result import rows_of

    rows = list(rows_of(found))
    shown = {"schema": 1, "name": "phases", "environment": dict(found.environment), "rows": rows}
    print_json(shown) if as_json else print_text(str(found))


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="folders or files of compare, race, ablate, scale or phases, or records (.jsonl)"),
    ],
    out: Annotated[Path | None, typer.Option(help="folder; default: the folder of the run")] = None,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Write reports again from recorded results."""
    from trimtab.experiments.result_folder import folder_of
    from trimtab.experiments.results import read_result, result_file

    if out is not None and len(runs) > 1:
        raise ValueGivenError(
            "--out",
            problem=f"--out names one folder, but {len(runs)} runs were given.",
            hint="Remove --out to write each report into the folder of its run.",
            code="option.conflict",
        )
    if out is not None:
        folder_of("report", "", out)
    files = [result_file(run) for run in runs]
    for file, found in zip(files, [read_result(file) for file in files], strict=True):
        _show_result(found, file, out or file.parent, as_json=as_json, verbose=verbose)


def _show_result(found: Any, file: Path, folder: Path, *, as_json: bool, verbose: bool) -> None:
    from trimtab.core.record import RunSummary
    from trimtab.core.serialization import write_whole
    from trimtab.experiments.pages import run_page
    from trimtab.experiments.phase_result import PhaseResult
    from trimtab.experiments.scaling import Scaling

    if isinstance(found, PhaseResult):
        _show_phases(found, as_json=as_json)
    elif isinstance(found, Scaling):
        _show_scaling(found, None, as_json=as_json)
    elif isinstance(found, RunSummary):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{file.stem}.html"
        write_whole(path, run_page(found))
        print_json({"html": str(path)}) if as_json else print_text(f"report: {path}")
    else:
        write_and_show(found, folder, as_json=as_json, verbose=verbose)
