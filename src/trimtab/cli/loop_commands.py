"""Commands for loops that a function `setup(seed)` builds: race, and compare, ablate and plan for such functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import Json
from trimtab.cli.output import print_json, print_text
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.progress_bar import ProgressBar

Steps = Annotated[
    int | None, typer.Option(min=2, help="with a function setup(seed): optimizer steps of each loop per pair (100)")
]
FailBelow = Annotated[
    float | None,
    typer.Option(help="with a function setup(seed): exit with status 1 if the speed is below, such as 0.97"),
]


def setup_named(task: str) -> Callable[[int], Any] | None:
    """Return the function `setup(seed)` that a name stands for; None for a task, a profile or a plan."""
    if ":" not in task:
        return None
    from trimtab.tasks import load_task_or_setup

    found = load_task_or_setup(task)
    return found if callable(found) else None


def refuse_for_setup(task: str, options: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise `ValueGivenError` for options that differ from their default, as (value, default), with a setup."""
    for name, (value, default) in options.items():
        if value != default:
            raise ValueGivenError(
                name,
                problem=f"{name} applies to a task, but {task} is a function that builds a loop.",
                hint=f"Remove {name}.",
                code="option.needs_task",
            )


def refuse_for_task(task: str, options: Mapping[str, Any]) -> None:
    """Raise `ValueGivenError` for given options that apply to a setup only."""
    for name, value in options.items():
        if value is not None:
            raise ValueGivenError(
                name,
                problem=f"{name} applies to a function setup(seed), but {task} is a task, which has its own length.",
                hint=f"Remove {name}, or name a function: train.py:setup.",
                code="option.needs_setup",
            )


def run_loops(
    command: str,
    setup: Callable[[int], Any],
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
    loops: Annotated[list[str], typer.Argument(help="two or more functions setup(seed): a.py:setup b.py:setup")],
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

    setups = [setup_named(name) for name in loops]
    for name, setup in zip(loops, setups, strict=True):
        if setup is None:
            raise ValueGivenError(
                "loops", got=name, expected="a function setup(seed), as train.py:setup", code="race.not_setup"
            )
    folder = folder_of("race", loops[0], out)
    how = {} if steps is None else {"steps": steps}
    with ProgressBar() as progress:
        found = loop_comparison.race(*setups, pairs=pairs, names=loops, progress=progress, **how)  # type: ignore[arg-type]
    _write_and_show(found, folder, as_json=as_json)
    if fail_below is not None and found.is_below(fail_below):
        raise typer.Exit(1)


def _write_and_show(found: Any, folder: Path, *, as_json: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page = found.save(folder / "report.html")
    found.save(folder / "result.json")
    print_json(found) if as_json else print_text(f"{found}\nreport: {page}")


def plan_loop(setup: Callable[[int], Any], task: str, progress: Any, **planning: Any) -> Any:
    """Return the plan of a loop; further arguments of `trimtab.plan`."""
    from trimtab.experiments import loop_setup

    name = task.rpartition(":")[2]
    reference = loop_setup.observed_reference(setup, 0, name)
    return loop_setup.plan_of(loop_setup.build(setup, 0, name), reference, progress=progress, **planning)
