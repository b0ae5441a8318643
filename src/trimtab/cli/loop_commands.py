"""Commands for loops that a function `setup(seed)` builds: race, and compare, ablate and plan for such functions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import Json
from trimtab.cli.output import print_json, print_text
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.progress_bar import ProgressBar

Steps = Annotated[
    int | None, typer.Option(min=2, help="optimizer steps of each loop per pair (100 with a function setup(seed))")
]
FailBelow = Annotated[
    float | None,
    typer.Option(help="with a function setup(seed): exit with status 1 if the speed is below, such as 0.97"),
]


def setup_named(task: str, *, as_loop: bool = False) -> Any:
    """Return what builds the loop that a name stands for, or None for a task, a profile or a plan.

    Args:
        task: name of a task or of a function `setup(seed)`.
        as_loop: True to return a task too, whose loop is then compared without its metric and recipes.
    """
    if not as_loop and ":" not in task:
        return None
    from trimtab.tasks import load_task_or_setup

    found = load_task_or_setup(task)
    return found if as_loop or callable(found) else None


def refuse_for_setup(task: str, options: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise `ValueGivenError` for options that differ from their default, as (value, default), with a setup."""
    for name, (value, default) in options.items():
        if value != default:
            raise ValueGivenError(
                name,
                problem=f"{name} applies to the comparison of a task over its own length.",
                hint=f"Remove {name}; with a function setup(seed), or with --steps, a loop is compared for some steps.",
                code="option.needs_task",
            )


def refuse_for_task(task: str, fail_below: float | None) -> None:
    """Raise `ValueGivenError` for `--fail-below` with a task that is compared over its own length."""
    if fail_below is not None:
        raise ValueGivenError(
            "--fail-below",
            problem=f"--fail-below needs --steps with {task}, a task, whose comparison has verdicts of its own.",
            hint="Add --steps, or name a function: train.py:setup.",
            code="option.needs_steps",
        )


def run_loops(
    command: str,
    setup: Any,
    task: str,
    *,
    steps: int | None,
    pairs: int,
    memory: str | None,
    plan_file: Path | None,
    out: Path | None,
    fail_below: float | None,
    as_json: bool,
) -> None:
    """Compare or ablate a loop, write its report, and print it."""
    from trimtab.experiments import loop_comparison
    from trimtab.experiments.output_folder import folder_of
    from trimtab.plans.plan import Plan

    folder = folder_of(command, task, out)
    how: dict[str, Any] = {"pairs": pairs} | ({} if steps is None else {"steps": steps})
    if plan_file is not None:
        how["plan"] = Plan.load(plan_file)
    elif memory is not None:
        how["memory"] = memory
    with ProgressBar() as progress:
        found = getattr(loop_comparison, command)(setup, name=task.rpartition(":")[2], progress=progress, **how)
    _write_and_show(found, folder, as_json=as_json)
    if fail_below is not None and found.is_below(fail_below):
        raise typer.Exit(1)


def race(
    loops: Annotated[
        list[str], typer.Argument(help="two or more functions setup(seed) or tasks: a.py:setup b.py:setup")
    ],
    steps: Steps = None,
    pairs: Annotated[
        int, typer.Option(min=1, help="paired runs, each with its own seed: 5 for a verdict, 8 for a claim")
    ] = 5,
    out: Annotated[Path | None, typer.Option(help="folder for the report")] = None,
    fail_below: FailBelow = None,
    as_json: Json = False,
) -> None:
    """Compare any training loops in paired runs, without a plan; the first is the baseline."""
    from trimtab.experiments import loop_comparison
    from trimtab.experiments.output_folder import folder_of

    setups = [setup_named(name, as_loop=True) for name in loops]
    folder = folder_of("race", loops[0], out)
    how: dict[str, Any] = {} if steps is None else {"steps": steps}
    with ProgressBar() as progress:
        found = loop_comparison.race(*setups, pairs=pairs, names=loops, progress=progress, **how)
    _write_and_show(found, folder, as_json=as_json)
    if fail_below is not None and found.is_below(fail_below):
        raise typer.Exit(1)


def _write_and_show(found: Any, folder: Path, *, as_json: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page = found.save(folder / "report.html")
    found.save(folder / "result.json")
    print_json(found) if as_json else print_text(f"{found}\nreport: {page}")


def plan_loop(setup: Any, task: str, progress: Any, **planning: Any) -> Any:
    """Return the plan of a loop; further arguments of `trimtab.plan`."""
    from trimtab.experiments import loop_setup

    name = task.rpartition(":")[2]
    reference = loop_setup.observed_reference(setup, 0, name)
    return loop_setup.plan_of(loop_setup.build(setup, 0, name), reference, progress=progress, **planning)
