"""Commands for experiments: compare, ablate, phases, scale, and report."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.loop_commands import FailBelow, Steps, compare_as_loop
from trimtab.cli.options import (
    TRAINED,
    EnergyWatts,
    Json,
    Memory,
    PlanFile,
    Ranks,
    TaskName,
    refuse_adapt,
    refuse_memory,
    require_folder,
    settings_to_adapt,
)
from trimtab.cli.output import print_json, print_text, show_gains, write_and_show
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.progress_bar import ProgressBar


def compare(
    task: TaskName,
    pairs: Annotated[
        int, typer.Option(min=1, help="paired runs, each with its own seed: 5 for a verdict, 8 for a claim")
    ] = 5,
    whole: Annotated[
        int | None, typer.Option(min=0, help="pairs that train for the whole budget; the rest only times steps")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="first impression in two minutes: throughput and memory of the equivalent plan"),
    ] = False,
    adapt: Annotated[
        str | None,
        typer.Option(
            help=f"tuned settings, separated by commas: {', '.join(TRAINED)}, batch, or none (default: learning-rate)"
        ),
    ] = None,
    peers: Annotated[
        bool | None,
        typer.Option("--peers/--no-peers", help="also run the task's recipes (default)"),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="recipes, separated by commas: strict (fp32 without TF32), strong, muon, or baselines of a task"
        ),
    ] = None,
    cap: Annotated[float, typer.Option(help="limit on the training seconds of each arm")] = float("inf"),
    reference_cap: Annotated[float | None, typer.Option(help="separate limit for the baseline, if longer")] = None,
    memory: Memory = None,
    plan_file: PlanFile = None,
    out: Annotated[Path | None, typer.Option(help="folder; an interrupted comparison continues there")] = None,
    ranks: Ranks = 1,
    energy_watts: EnergyWatts = None,
    steps: Steps = None,
    fail_below: FailBelow = None,
    as_json: Json = False,
) -> None:
    """Compare the baseline loop with the plan in paired runs, and report the gain."""
    task_options = {
        "--whole": (whole, None),
        "--quick": (quick, False),
        "--adapt": (adapt, None),
        "--peers": (peers, None),
        "--against": (against, None),
        "--cap": (cap, float("inf")),
        "--reference-cap": (reference_cap, None),
        "--ranks": (ranks, 1),
        "--energy-watts": (energy_watts, None),
    }
    how: dict[str, Any] = {"steps": steps, "pairs": pairs, "memory": memory, "plan_file": plan_file, "out": out}
    if compare_as_loop("compare", task, task_options, fail_below=fail_below, as_json=as_json, **how):
        return
    import trimtab.experiments.report.svg  # noqa: F401 - fails now, not after hours, if a package for the report is missing
    from trimtab.experiments.comparison.compare_command import CompareRequest, run_comparison

    if plan_file is not None:
        refuse_adapt(adapt, "--plan")
    freed = None if adapt is None else settings_to_adapt(adapt)
    if memory is not None and "batch" in (freed or ()):
        raise ValueGivenError(
            "--adapt",
            problem=f"--adapt {adapt} cannot be combined with --memory, because peak memory would then be "
            "measured for steps of two batches, also for the equivalent plan.",
            hint="Remove batch from --adapt, or remove --memory.",
            code="option.conflict",
        )
    named = None if against is None else tuple(name.strip() for name in against.split(","))
    asked = CompareRequest(
        task,
        pairs=pairs,
        whole=whole,
        quick=quick,
        adapt=freed,
        peers=peers,
        cap_s=cap,
        memory=memory,
        plan=plan_file,
        out=out,
        ranks=ranks,
        energy_watts=energy_watts,
        against=named,
        reference_cap_s=reference_cap,
    )
    found = run_comparison(asked, shlex.join(["trimtab", *sys.argv[1:]]))
    if found is not None:
        write_and_show(found, asked.folder, as_json=as_json)


def ablate(
    task: TaskName,
    seeds: Annotated[
        int, typer.Option(min=1, help="paired runs, each with its own seed: 5 for a verdict, 8 for a claim")
    ] = 5,
    whole: Annotated[
        int | None,
        typer.Option(
            min=0, help="seeds that train for the whole budget, for quality (default: all); 0: only time steps"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="first impression in two minutes: throughput and memory")
    ] = False,
    pairwise: Annotated[bool, typer.Option("--pairwise", help="also run each pair of changes")] = False,
    adapt: Annotated[str | None, typer.Option(help="learning-rate: also tune learning rate and schedule")] = None,
    cap: Annotated[float, typer.Option(help="limit on the training seconds of each arm")] = float("inf"),
    memory: Memory = None,
    plan_file: PlanFile = None,
    out: Annotated[Path | None, typer.Option(help="folder; an interrupted ablation continues there")] = None,
    steps: Steps = None,
    as_json: Json = False,
) -> None:
    """Measure every change of a plan alone: added to the baseline, and removed from the plan."""
    task_options = {
        "--whole": (whole, None),
        "--quick": (quick, False),
        "--pairwise": (pairwise, False),
        "--adapt": (adapt, None),
        "--cap": (cap, float("inf")),
    }
    how: dict[str, Any] = {"steps": steps, "pairs": seeds, "memory": memory, "plan_file": plan_file, "out": out}
    if compare_as_loop("ablate", task, task_options, as_json=as_json, **how):
        return
    import trimtab.experiments.report.svg  # noqa: F401 - fails now, not after hours, if a package for the report is missing
    from trimtab.core.objective import Budget
    from trimtab.core.serialization import read_json
    from trimtab.experiments.ablation.ablate import AblateSettings
    from trimtab.experiments.ablation.ablate import ablate as run
    from trimtab.experiments.output_folder import folder_of
    from trimtab.plans.plan import Plan
    from trimtab.tasks import load_task

    if plan_file is not None:
        refuse_adapt(adapt, "--plan")
        refuse_memory(memory)
    adapts = settings_to_adapt(adapt, ("learning-rate",)) != ()
    settings = AblateSettings(
        num_seeds=seeds,
        whole_seeds=0 if quick and whole is None else whole,
        quick=quick,
        adapt=adapts,
        pairwise=pairwise,
        cap_s=cap,
    )
    limits, folder = Budget(memory), folder_of("ablate", task, out)
    plan = None if plan_file is None else read_json(Plan, plan_file)
    command = shlex.join(["trimtab", *sys.argv[1:]])
    with ProgressBar() as progress:
        found = run(load_task(task), folder, settings, command=command, budget=limits, plan=plan, progress=progress)
    write_and_show(found, folder, as_json=as_json)


def scale(
    task: TaskName,
    ranks: Annotated[str | None, typer.Option(help="numbers of processes on this machine, such as 1,2,4")] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="jobs per number of ranks: 5 for a verdict")] = None,
    scaling: Annotated[
        str | None,
        typer.Option(help="weak (constant batch size per rank), strong (constant global batch size), or weak,strong"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="first impression: two short rounds of weak scaling")] = False,
    adapt: Annotated[str | None, typer.Option(help="batch: also a plan with an adaptive batch size")] = None,
    memory: Annotated[
        str | None, typer.Option(help="hard limit on the memory of each rank, for the choice of the ZeRO stage")
    ] = None,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="JSON file of a plan to run on each number of ranks")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder; an interrupted table continues there")] = None,
    job: Annotated[int | None, typer.Option(hidden=True, help="run a single job on the present ranks")] = None,
    as_json: Json = False,
) -> None:
    """Measure baseline and plan on several numbers of ranks; under a launcher, run a single job on all ranks."""
    from trimtab.core.objective import Budget
    from trimtab.core.serialization import read_json
    from trimtab.distributed.process_group import is_launched
    from trimtab.experiments.output_folder import folder_of
    from trimtab.experiments.scaling.scale import ScaleSettings, numbers, run_scale
    from trimtab.experiments.scaling.scaling_job import JobSettings
    from trimtab.plans.plan import Plan

    frees = settings_to_adapt(adapt, ("batch",)) != ()
    if plan_file is not None:
        refuse_memory(memory)
    if frees and (plan_file is not None or memory is not None):
        other = "--memory" if plan_file is None else "--plan"
        raise ValueGivenError(
            "--adapt",
            problem=f"--adapt {adapt} cannot be combined with {other}, because an adaptive batch size needs the whole "
            "model on each rank.",
            hint=f"Remove --adapt or {other}.",
            code="option.conflict",
        )
    plan = None if plan_file is None else read_json(Plan, plan_file)
    modes = tuple(part.strip() for part in (scaling or ("weak" if quick else "weak,strong")).split(","))
    blocks, block_s = (2, 0.2) if quick else (JobSettings.blocks, JobSettings.block_s)
    asked = JobSettings(modes, blocks, block_s, adapts_batch_size=frees, budget=Budget(memory), plan=plan)
    settings = ScaleSettings(numbers(ranks or "1,2"), rounds or (2 if quick else 5), asked)
    which = [name for name, given in (("--ranks", ranks), ("--rounds", rounds)) if given is not None]
    folder = folder_of("scale", task, out)
    with ProgressBar() as progress:
        found = run_scale(task, folder, settings, job, progress, which)
    if found is not None:
        # Under a launcher the table may contain jobs on several machines; each row names its measured link.
        link = None if is_launched() else "local"
        _write_scaling_page(found, folder / "report.html", link, as_json=as_json)


def phases(
    sources: Annotated[
        list[str],
        typer.Argument(help="tasks to measure, or folders of comparisons and files of --out to show side by side"),
    ],
    rounds: Annotated[
        int | None, typer.Option(min=2, help="rounds per loop; default: 8, or fewer within two minutes")
    ] = None,
    memory: Memory = None,
    plan_file: PlanFile = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the result as JSON")] = None,
    ranks: Ranks = 1,
    as_json: Json = False,
) -> None:
    """Measure the time of all phases of a step, without and with the plan, and the bottleneck of the remaining time."""
    from trimtab.core.serialization import to_json, write_result
    from trimtab.experiments.comparison.gain_rows import phase_object
    from trimtab.experiments.phases_command import PhasesRequest, phases_of

    require_folder(out)
    found = phases_of(PhasesRequest(tuple(sources), memory, plan_file, rounds, ranks))
    if found is None:
        return
    try:
        if out is not None:
            write_result(out, to_json(found, indent=1))
    finally:
        print_json(phase_object(found.gains, found.thirds)) if as_json else show_gains(found)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="folders or files of compare, ablate, scale or phases, or records (.jsonl)"),
    ],
    out: Annotated[Path | None, typer.Option(help="folder; default: the folder of the run")] = None,
    as_json: Json = False,
) -> None:
    """Write reports again from recorded results."""
    from trimtab.experiments.output_folder import folder_of
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
        _show_result(found, file, out or file.parent, as_json=as_json)


def _show_result(found: Any, file: Path, folder: Path, *, as_json: bool) -> None:
    from trimtab.core.record import RunSummary
    from trimtab.experiments.comparison.gain_rows import phase_object
    from trimtab.experiments.phase_result import PhaseResult
    from trimtab.experiments.scaling.scaling_result import Scaling

    if isinstance(found, PhaseResult):
        print_json(phase_object(found.gains, found.thirds)) if as_json else show_gains(found)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if isinstance(found, RunSummary):
        _write_run_page(found, folder / f"{file.stem}.html", as_json=as_json)
    elif isinstance(found, Scaling):
        _write_scaling_page(found, folder / "report.html", None, as_json=as_json)
    else:
        write_and_show(found, folder, as_json=as_json)


def _write_scaling_page(found: Any, path: Path, link: str | None, *, as_json: bool) -> None:
    from trimtab.core.serialization import write_whole
    from trimtab.experiments.report.scaling_page import scaling_page
    from trimtab.experiments.scaling.scaling_result import benchmark_object, text

    write_whole(path, scaling_page(found))
    print_json(benchmark_object(found, link)) if as_json else print_text(f"{text(found)}\n\nreport: {path}")


def _write_run_page(found: Any, path: Path, *, as_json: bool) -> None:
    from trimtab.core.serialization import write_whole
    from trimtab.experiments.report.run_page import run_page

    write_whole(path, run_page(found))
    print_json({"html": str(path)}) if as_json else print_text(f"report: {path}")
