"""The command: doctor, profile, plan, train, compare, scale, report. Figures go to standard output, progress to error.

Exit status: 0 done, 1 an error that was explained, 2 a command line that does not parse, 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

from trimtab.core.errors import DependencyError, FormatError, RankError, TrimtabError, ValueGivenError
from trimtab.experiments.progress_bar import ProgressBar

try:
    import typer
except ImportError:  # the one optional package this module adapts
    raise DependencyError(
        "trimtab", given="no typer", expected="the command's packages", way_out="pip install 'trimtab[cli]'"
    ) from None

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Plan, apply and prove the compute settings of a PyTorch training loop.",
)

TaskName = Annotated[str, typer.Argument(help="a built-in task, my_module:task or path/to/file.py:task")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
Memory = Annotated[str | None, typer.Option(help="hard limit on a step's peak memory, such as 8GiB")]
StepTime = Annotated[float | None, typer.Option("--time", help="hard limit on seconds per optimizer step")]
Weight = Annotated[float, typer.Option(help="of peak memory, beside 1 of time, in what a plan makes small")]
Adapt = Annotated[
    str | None,
    typer.Option(
        help="what a plan may change beyond the same maths: learning-rate, batch, or both: learning-rate,batch"
    ),
]


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this machine can measure and run, what is missing, and how to get it."""
    from trimtab.experiments.doctor import examine

    findings = examine()
    if as_json:
        _print_json({"schema": 1, "name": "doctor", "rows": [vars(f) for f in findings]})
        return
    for finding in findings:
        typer.echo(f"{'ok' if finding.ok else '--'}  {finding.name:<22} {finding.detail}")


@app.command()
def profile(
    task: TaskName,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the profile as JSON")] = None,
    memory: Memory = None,
    step_time: StepTime = None,
    memory_weight: Weight = 0.0,
    as_json: Json = False,
) -> None:
    """Measure a task's loop and the settings worth trying on it."""
    from trimtab.core.codec import to_json
    from trimtab.core.objective import Budget, Objective
    from trimtab.experiments.text import profile_text

    _require_folder(out)
    plans = _plan(task, Budget(memory, step_time), Objective(1.0, memory_weight), adapt=None, traces=True)
    found = plans.profiles["S"]
    if out is not None:
        out.write_text(to_json(found, indent=1), encoding="utf-8")
    typer.echo(to_json(found) if as_json else profile_text(found))


@app.command()
def plan(
    task: Annotated[str, typer.Argument(help="a task, or a profile written by `trimtab profile TASK -o FILE.json`")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the plan as JSON")] = None,
    memory: Memory = None,
    step_time: StepTime = None,
    memory_weight: Weight = 0.0,
    device: Annotated[str | None, typer.Option(help="one not here, such as 'H100 SXM': all is predicted")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="processes to plan for, none of them here: all is predicted")] = 1,
    link: Annotated[
        str | None,
        typer.Option(help="what joins them: nvlink, ib, ethernet, ib:HDR and the like, or nodes: 8 x nvlink + ib"),
    ] = None,
    engine: Annotated[str, typer.Option(help="what shares the model between ranks: torch, deepspeed")] = "torch",
    adapt: Adapt = None,
    explain: Annotated[bool, typer.Option("--explain", help="all that was considered, and all that was tried")] = False,
    as_json: Json = False,
) -> None:
    """Decide what to change, and say why."""
    from trimtab.core.codec import to_json
    from trimtab.core.objective import Budget, Objective
    from trimtab.experiments.decided import decided

    _require_folder(out)
    if explain and as_json:
        raise ValueGivenError("--explain", given="with --json", expected="the one or the other: a page is no JSON")
    if task.endswith(".json") or device is not None:
        _refuse_adapt(adapt, task if task.endswith(".json") else "--device")
    limits, weights = Budget(memory, step_time), Objective(1.0, memory_weight)
    if ranks > 1 or link is not None or engine != "torch":
        asked = {"ranks": ranks, "link": link, "engine": engine, "device": device}
        _plan_ranks(task, asked, adapt, limits, weights, out, as_json=as_json, explain=explain)
        return
    wanted = _adaptation(adapt, ("learning-rate", "batch"))
    with ProgressBar() as progress:
        found = decided(task, limits, weights, device=device, adapt=wanted, progress=progress)
    if out is not None:
        out.write_text(to_json(found.plan, indent=1), encoding="utf-8")
    typer.echo(to_json(found.plan) if as_json else found.explained() if explain else str(found.plan))


def _plan_ranks(
    task: str,
    options: dict[str, Any],
    adapt: str | None,
    limits: Any,
    weights: Any,
    out: Path | None,
    *,
    as_json: bool,
    explain: bool,
) -> None:
    from trimtab.core.codec import to_json
    from trimtab.experiments.rank_page import RanksAsked, rank_page, said

    asked = RanksAsked(**options)
    if task.endswith(".json") or explain:
        raise ValueGivenError("--ranks", given=f"{task}, --explain" if explain else task, expected="a task alone")
    _refuse_adapt(adapt, "--ranks")
    with ProgressBar() as progress:
        found = rank_page(task, asked, budget=limits, objective=weights, progress=progress)
    beside = None if out is None else found.write(out)
    typer.echo(to_json(found.plan) if as_json else found.text(beside))
    if as_json and beside is not None:
        typer.echo(said(beside), err=True)


@app.command()
def train(
    task: TaskName,
    steps: Annotated[int, typer.Option(min=1, help="optimizer steps")] = 100,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="a plan's JSON; without it, one is made")] = None,
    seed: Annotated[int, typer.Option(help="weights and data order")] = 0,
    record: Annotated[Path | None, typer.Option(help="write a line per step (JSON lines, a new file)")] = None,
    memory: Memory = None,
    adapt: Adapt = None,
    ranks: Annotated[int, typer.Option(min=1, help="processes on this machine; a launcher's are joined")] = 1,
    as_json: Json = False,
) -> None:
    """Train a task through a plan, and evaluate it."""
    from trimtab.core.codec import read_json
    from trimtab.core.objective import Budget
    from trimtab.core.plan import Plan
    from trimtab.decide.ranks import replicated
    from trimtab.distributed.launch import launch
    from trimtab.distributed.process_group import joined, place
    from trimtab.experiments.ranks import plan_on_ranks, task_of_rank
    from trimtab.experiments.train import train_task
    from trimtab.tasks import load_task

    here, loaded, limits = place(), load_task(task), Budget(memory)
    _require_new(None if here.rank else record)
    if plan_file is not None:
        _refuse_adapt(adapt, "--plan")
        if memory is not None:
            raise ValueGivenError("--memory", given="a limit with --plan", expected="one where the plan is made")
    if ranks > 1 and here.num_ranks == 1:
        task_of_rank(loaded, ranks)
        launch(sys.argv[1:], ranks)
        return
    with joined():
        if plan_file is None:
            with ProgressBar() as progress:
                chosen = plan_on_ranks(loaded, limits, _adaptation(adapt, ("learning-rate", "batch")), progress)
        else:
            chosen = replicated(read_json(Plan, plan_file), here.num_ranks)
        with ProgressBar() as progress:
            found = train_task(loaded, chosen, steps=steps, seed=seed, record=record, progress=progress)
    if here.rank == 0:
        _print_json(found) if as_json else typer.echo("\n".join(f"{key}: {value}" for key, value in found.items()))


@app.command()
def compare(
    task: TaskName,
    pairs: Annotated[int, typer.Option(min=1, help="races, one per seed: 5 for a verdict, 8 for a claim")] = 5,
    whole: Annotated[
        int | None, typer.Option(min=0, help="races that run to the end of the budget; the others time a few steps")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="a first look in about two minutes: throughput and memory of tier S")
    ] = False,
    adapt: Annotated[
        str | None, typer.Option(help="learning-rate (tier F beside tier S, the default), or none")
    ] = None,
    peers: Annotated[
        bool | None, typer.Option("--peers/--no-peers", help="race the paper's and the strong recipe (the default)")
    ] = None,
    cap: Annotated[float, typer.Option(help="training seconds after which an arm is stopped")] = float("inf"),
    memory: Memory = None,
    plan_file: Annotated[Path | None, typer.Option("--plan", help="a plan's JSON; without it, one is made")] = None,
    out: Annotated[Path | None, typer.Option(help="folder; an interrupted comparison goes on there")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="processes on this machine; a launcher's are joined")] = 1,
    as_json: Json = False,
) -> None:
    """Race the reference loop against the plan, in pairs, and report what it bought."""
    import trimtab.experiments.report.svg  # noqa: F401 - what draws the report is missing before the races, not after
    from trimtab.experiments.compare_command import Asked, compared

    if plan_file is not None:
        _refuse_adapt(adapt, "--plan")
    adapts = None if adapt is None else _adaptation(adapt, ("learning-rate",)) != ()
    asked = Asked(task, pairs, whole, quick, adapts, peers, cap, memory, plan_file, out, ranks)
    found = compared(asked, _command())
    if found is not None:
        _write_and_show(found, asked.folder, as_json=as_json)


@app.command()
def scale(
    task: TaskName,
    ranks: Annotated[str | None, typer.Option(help="numbers of processes on this machine, such as 1,2,4")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="jobs of each number of ranks: 5 for a verdict")] = None,
    scaling: Annotated[
        str | None, typer.Option(help="weak (a batch for every rank), strong (shared), or weak,strong")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a first look: two short rounds of weak scaling")] = False,
    adapt: Annotated[str | None, typer.Option(help="batch: also a plan whose batch is freed (tier F)")] = None,
    out: Annotated[Path | None, typer.Option(help="folder; an interrupted table goes on there")] = None,
    job: Annotated[int | None, typer.Option(hidden=True, help="time one job of the ranks there are")] = None,
    as_json: Json = False,
) -> None:
    """Time the plain loop and the plan on several numbers of ranks; under a launcher one job, of its ranks."""
    from trimtab.experiments.scale import ScaleSettings, numbers
    from trimtab.experiments.scale_command import run_scale
    from trimtab.experiments.scale_job import JobSettings

    frees = _adaptation(adapt, ("batch",)) != ()
    modes = tuple(part.strip() for part in (scaling or ("weak" if quick else "weak,strong")).split(","))
    asked = JobSettings(modes, *((2, 0.2) if quick else ()), frees_batch=frees)
    settings = ScaleSettings(numbers(ranks or "1,2"), rounds or (2 if quick else 5), asked)
    which = [name for name, given in (("--ranks", ranks), ("--rounds", rounds)) if given is not None]
    folder = out or Path("runs") / f"scale-{task.replace(':', '-').replace('/', '-')}"
    with ProgressBar() as progress:
        found = run_scale(task, folder, settings, job, progress, which)
    if found is not None:
        _print_json(found.as_benchmark()) if as_json else typer.echo(f"{found.text}\n\nreport: {found.path}")


@app.command()
def report(
    source: Annotated[Path, typer.Argument(help="a comparison's folder or report.json, or a run's record (.jsonl)")],
    out: Annotated[Path | None, typer.Option(help="folder for the report; default: where it came from")] = None,
    as_json: Json = False,
) -> None:
    """Write a comparison's report again (HTML, Markdown, JSON) and print it; of a run's record, its page."""
    from trimtab.core.codec import read_json
    from trimtab.experiments.result import Comparison

    if source.suffix == ".jsonl":
        _write_run_page(source, out or source.parent, as_json=as_json)
        return
    path = source / "report.json" if source.is_dir() else source
    found = read_json(Comparison, path)
    folder = out or path.parent
    folder.mkdir(parents=True, exist_ok=True)
    _write_and_show(found, folder, as_json=as_json)


def _write_run_page(source: Path, folder: Path, *, as_json: bool) -> None:
    from trimtab.core.codec import write_whole
    from trimtab.core.record import read_record
    from trimtab.experiments.report.run_page import run_page

    page = run_page(read_record(source))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{source.stem}.html"
    write_whole(path, page)
    _print_json({"html": str(path)}) if as_json else typer.echo(f"Report: {path}")


def main() -> None:
    """Run the command; errors are explained without a traceback (`TRIMTAB_TRACEBACK=1` shows it)."""
    # Before torch is loaded: its profiler and allocator report on standard error what is no news.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        app()
    except (TrimtabError, OSError) as error:
        if os.environ.get("TRIMTAB_TRACEBACK"):
            raise
        if not (isinstance(error, RankError) and error.is_echo):
            typer.echo(f"trimtab: {error}", err=True)
        sys.exit(1)
    except Exception as error:  # a task's own code, mostly
        if os.environ.get("TRIMTAB_TRACEBACK"):
            raise
        from trimtab.calibrate.failures import describe

        typer.echo(f"trimtab: {describe(error)} (TRIMTAB_TRACEBACK=1 shows where)", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _plan(task: Any, budget: Any, objective: Any, adapt: str | None, *, traces: bool = False) -> Any:
    import torch

    from trimtab.experiments.planning import make_plans
    from trimtab.tasks import load_task

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wanted = _adaptation(adapt, ("learning-rate", "batch"))
    with ProgressBar() as progress:
        loaded = load_task(task) if isinstance(task, str) else task
        data = loaded.load_data()
        return make_plans(
            loaded,
            data,
            device,
            adapt=wanted,
            strong=False,
            budget=budget,
            objective=objective,
            traces=traces,
            progress=progress,
        )


def _adaptation(adapt: str | None, known: tuple[str, ...]) -> tuple[str, ...]:
    from trimtab.core.checks import one_of

    if adapt is None or adapt == "none":
        return ()
    return tuple(one_of("--adapt", name, (*known, "none")).replace("-", "_") for name in adapt.split(","))


def _refuse_adapt(adapt: str | None, recorded: str) -> None:
    if _adaptation(adapt, ("learning-rate", "batch")):
        raise ValueGivenError(
            "--adapt",
            given=f"{adapt} with {recorded}, which is decided from what was recorded",
            expected="a task alone, because a range test trains",
        )


def _require_folder(out: Path | None) -> None:
    """Raise before minutes of work, not after them."""
    if out is not None and out.is_dir():
        raise FormatError("--out", given=f"{out}, which is a folder", expected="a file")
    if out is not None and not out.parent.is_dir():
        raise FormatError("--out", given=f"{out}, whose folder does not exist", expected="a file in a folder that does")


def _require_new(record: Path | None) -> None:
    """Raise before minutes of planning, not after them."""
    if record is not None and record.exists():
        raise FormatError("--record", given=f"{record}, which exists", expected="a new file")
    if record is not None and not record.parent.is_dir():
        raise FormatError(
            "--record", given=f"{record}, whose folder does not exist", expected="a file in one that does"
        )


def _write_and_show(found: Any, folder: Path, *, as_json: bool) -> None:
    from trimtab.experiments.report import terminal_report, write_report
    from trimtab.experiments.rows import benchmark_object

    paths = write_report(found, folder)
    if as_json:
        _print_json(benchmark_object(found))
        return
    _print_rich(terminal_report(found))
    typer.echo(f"report: {paths['html']}")


def _print_json(value: Any) -> None:
    from trimtab.core.codec import to_jsonable

    typer.echo(json.dumps(to_jsonable(value), allow_nan=False, ensure_ascii=False))


def _print_rich(renderable: Any) -> None:
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(renderable)


def _command() -> str:
    return shlex.join(["trimtab", *sys.argv[1:]])
