"""Commands for functions `setup(seed)`, which build a training loop: race; compare, ablate and plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import Json, refuse_memory
from trimtab.cli.output import print_json, print_text
from trimtab.core.errors import ValueGivenError
from trimtab.experiments.progress_bar import ProgressBar

Steps = Annotated[
    int | None, typer.Option(min=3, help="optimizer steps of each loop per pair (100 with a function setup(seed))")
]
FailBelow = Annotated[
    float | None,
    typer.Option(help="exit with status 1 if the speed is below this limit, such as 0.97"),
]


def setup_named(task: str, *, as_loop: bool = False) -> Any:
    """Return the function `setup(seed)` with a name; None for the name of a task or a file.

    Args:
        task: name of a task, a function or a file.
        as_loop: True to return tasks too, for a comparison over a number of steps.
    """
    if not as_loop and ":" not in task:
        return None
    from trimtab.tasks import load_task_or_setup

    found = load_task_or_setup(task)
    return found if as_loop or callable(found) else None


def refuse_for_setup(options: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise `ValueGivenError` for options, as (value, default), with a value different from the default."""
    for name, (value, default) in options.items():
        if value != default:
            raise ValueGivenError(
                name,
                problem=f"{name} applies to tasks without --steps.",
                hint=f"Remove {name}.",
                code="option.needs_task",
            )


def compare_as_loop(
    command: str,
    task: str,
    task_options: Mapping[str, tuple[Any, Any]],
    *,
    steps: int | None,
    pairs: int,
    memory: str | None,
    plan_file: Path | None,
    out: Path | None,
    as_json: bool,
    fail_below: float | None = None,
) -> bool:
    """Compare or ablate the loop of a function or, with `steps`, of a task; write and print the report.

    Args:
        command: "compare" or "ablate".
        task: name of the task or function.
        task_options: options for tasks without `steps`, as (value, default).

    Returns:
        False for a task without `steps`; nothing was done.
    """
    setup = setup_named(task, as_loop=steps is not None)
    if setup is None:
        if fail_below is not None:
            raise ValueGivenError(
                "--fail-below",
                problem=f"--fail-below needs --steps with the task {task}.",
                hint="Add --steps, or name a function: train.py:setup.",
                code="option.needs_steps",
            )
        return False
    refuse_for_setup(task_options)
    if plan_file is not None:
        refuse_memory(memory)
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
    _write_and_show(found, folder, fail_below, as_json=as_json)
    return True


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
    _write_and_show(found, folder, fail_below, as_json=as_json)


def _write_and_show(found: Any, folder: Path, fail_below: float | None, *, as_json: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    page = found.save(folder / "report.html")
    found.save(folder / "result.json")
    print_json(found) if as_json else print_text(f"{found}\nreport: {page}")
    if fail_below is not None and found.is_below(fail_below):
        raise typer.Exit(1)


def plan_loop(setup: Any, task: str, progress: Any, **planning: Any) -> Any:
    """Return the plan of a loop; `planning` are arguments of `trimtab.plan`."""
    from trimtab.experiments import loop_setup

    name = task.rpartition(":")[2]
    reference = loop_setup.observed_reference(setup, 0, name)
    return loop_setup.plan_of(loop_setup.build(setup, 0, name), reference, progress=progress, **planning)
