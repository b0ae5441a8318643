"""Commands without training: doctor, tasks, estimate, profile, plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trimtab.cli.options import (
    Adapt,
    EnergyWatts,
    EnergyWeight,
    Json,
    Memory,
    Quiet,
    StepTime,
    TaskName,
    Weight,
    WithoutMeter,
    conflict,
    refuse_adapt,
    require_folder,
    settings_to_adapt,
)
from trimtab.cli.output import print_error, print_json, print_text
from trimtab.experiments.progress_bar import ProgressBar


def doctor(as_json: Json = False) -> None:
    """Check the devices, libraries and meters of this machine, and print installation hints for missing parts."""
    from trimtab.experiments.doctor import diagnose

    findings = tuple(diagnose())
    if as_json:
        print_json({"schema": 1, "name": "doctor", "rows": [vars(f) for f in findings]})
        return
    for finding in findings:
        print_text(f"{'ok' if finding.ok else '--'}  {finding.name:<22} {finding.detail}")


def tasks(as_json: Json = False) -> None:
    """List the built-in tasks, and the ways to name your own."""
    import ast

    import trimtab.tasks
    from trimtab.tasks import BUILT_IN

    folder = Path(trimtab.tasks.__file__).parent
    sources = {name: ast.parse((folder / f"{name}.py").read_text(encoding="utf-8")) for name in BUILT_IN}
    about = {name: (ast.get_docstring(source) or "").partition("\n")[0] for name, source in sources.items()}
    if as_json:
        print_json({"schema": 1, "name": "tasks", "rows": [{"task": name, "about": about[name]} for name in about]})
        return
    print_text("\n".join(f"{name:<14} {text}" for name, text in about.items()))
    print_text(
        "\nYour own:\n"
        "  train.py:setup    a function setup(seed) that returns a trimtab.Loop\n"
        "  my_task.py:task   a trimtab.tasks.Task; `trimtab init` writes an example\n"
        "  my_module:task    the same, in a module of this folder"
    )


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help="type, folder or cached hub name of a Transformers model, a timm or torchvision name, or a task"
        ),
    ],
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="samples per optimizer step (default: 8, or the task's)")
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="tokens of a sample (default: the model's, up to 1024)")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="pixels of an image's side (default: the model's)")
    ] = None,
    device: Annotated[
        str, typer.Option(help="devices, separated by commas, such as 'RTX 4090'; cpu (this machine) or all")
    ] = "all",
    optimizer: Annotated[str | None, typer.Option(help="adamw (default) or sgd")] = None,
    memory: Annotated[str | None, typer.Option(help="memory limit instead of the device's, such as 16GiB")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Predict the step time and peak memory of a model on a device, and the fastest settings that fit. Runs nothing."""
    from trimtab.experiments.estimate import estimate as run

    size: dict[str, Any] = {"batch_size": batch_size, "length": length, "image_size": image_size}
    with ProgressBar() as progress:
        found = run(model, device, **size, optimizer=optimizer, memory=memory, progress=progress)
    print_json({"schema": 1, "name": "estimate", **found.as_json()}) if as_json else print_text(str(found))


def profile(
    task: TaskName,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the profile as JSON")] = None,
    memory: Memory = None,
    step_time: StepTime = None,
    memory_weight: Weight = 0.0,
    energy_weight: EnergyWeight = 0.0,
    energy_watts: EnergyWatts = None,
    without_meter: WithoutMeter = "refuse",
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure a task's training loop and the candidate settings for it."""

    from trimtab.api import Metering
    from trimtab.core.objective import Budget, Objective
    from trimtab.core.serialization import to_json, write_result
    from trimtab.experiments.plan_source import profile_text
    from trimtab.experiments.task_plans import profile_task
    from trimtab.tasks import load_task

    require_folder(out)
    with ProgressBar() as progress:
        loaded = load_task(task)
        found = profile_task(
            loaded,
            total_steps=loaded.planned_steps,
            budget=Budget(memory, step_time),
            objective=Objective(1.0, memory_weight, energy_weight),
            traces=True,
            metering=Metering(energy_watts, without=without_meter),
            progress=progress,
        )
    try:
        if out is not None:
            write_result(out, to_json(found, indent=1))
    finally:  # a full disk must not prevent printing, nor a closed pipe writing
        print_json(found) if as_json else print_text(profile_text(found))


def plan(
    task: Annotated[str, typer.Argument(help="task, or profile from `trimtab profile TASK -o FILE.json`")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="write the plan as JSON")] = None,
    memory: Memory = None,
    step_time: StepTime = None,
    memory_weight: Weight = 0.0,
    energy_weight: EnergyWeight = 0.0,
    energy_watts: EnergyWatts = None,
    without_meter: WithoutMeter = "refuse",
    device: Annotated[
        str | None, typer.Option(help="plan for another device, such as 'H100 SXM', by prediction")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="plan for this number of ranks, by prediction")] = 1,
    link: Annotated[
        str | None,
        typer.Option(help="link between ranks: nvlink, ib, ethernet, ib:HDR, or nodes: 8 x nvlink + ib"),
    ] = None,
    engine: Annotated[str, typer.Option(help="sharding backend: torch, deepspeed")] = "torch",
    adapt: Adapt = None,
    explain: Annotated[bool, typer.Option("--explain", help="print all combinations and trials")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Choose settings for a task and explain the choices."""
    from trimtab.core.objective import Budget, Objective
    from trimtab.core.serialization import to_json, write_result
    from trimtab.experiments.plan_source import plan_with_profile

    require_folder(out)
    if explain and as_json:
        problem = "--explain prints text and cannot be combined with --json."
        raise conflict("--explain", problem, "Remove one of the two options.")
    if task.endswith(".json") or device is not None:
        refuse_adapt(adapt, task if task.endswith(".json") else "--device")
    limits, weights = Budget(memory, step_time), Objective(1.0, memory_weight, energy_weight)
    is_here = not task.endswith(".json") and device is None and ranks == 1
    if not is_here and (energy_watts is not None or without_meter != "refuse"):
        raise conflict(
            "--energy-watts, --without-meter",
            "--energy-watts and --without-meter apply to measurements on this machine, but this plan is predicted from "
            "a profile, or for another device or several ranks.",
            "Remove these options.",
        )
    if ranks > 1 or link is not None or engine != "torch":
        asked = {"ranks": ranks, "link": link, "engine": engine, "device": device}
        _plan_ranks(task, asked, adapt, limits, weights, out, as_json=as_json, explain=explain)
        return
    how: dict[str, Any] = {"adapt": settings_to_adapt(adapt)}
    if is_here:
        from trimtab.api import Metering  # imports torch, which planning from a recorded profile does not need

        how["metering"] = Metering(energy_watts, without=without_meter)
    setup = _setup_named(task) if is_here else None
    with ProgressBar() as progress:
        if setup is not None:
            found = _plan_setup(setup, task, limits, weights, progress=progress, **how)
        else:
            found = plan_with_profile(task, limits, weights, device=device, progress=progress, **how)
    try:
        if out is not None:
            write_result(out, to_json(found.plan, indent=1))
    finally:
        print_json(found.plan) if as_json else print_text(found.explained() if explain else str(found.plan))


def _setup_named(task: str) -> Any:
    """Return the function `setup(seed)` with a name; None for a task."""
    if ":" not in task:
        return None
    from trimtab.tasks import Task, load_task_or_setup

    found = load_task_or_setup(task)
    return None if isinstance(found, Task) else found


def _plan_setup(setup: Any, task: str, limits: Any, weights: Any, *, adapt: tuple[str, ...], **how: Any) -> Any:
    from trimtab.experiments import loop_setup
    from trimtab.experiments.plan_source import PlanWithProfile

    name, seed = task.rpartition(":")[2], loop_setup.PLANNING_SEED
    reference, loop = loop_setup.observed_reference(setup, seed, name), loop_setup.build(setup, seed, name)
    has_step = loop.step is not None
    made = loop_setup.plan_of(loop, reference, adapt=adapt or None, budget=limits, objective=weights, **how)
    if has_step:
        print_error(
            f"The gain below is over a plain loop of the same loss. For the gain over your own step, run "
            f"trimtab compare {task}"
        )
    return PlanWithProfile(made, None, limits, weights)


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
    from trimtab.experiments.rank_plan_output import RankPlanOptions, configuration_line, rank_page

    asked = RankPlanOptions(**options)
    if task.endswith(".json") or explain:
        what = "--explain" if explain else f"the profile {task}"
        hint = "Remove --explain." if explain else "Pass the task that the profile was measured on."
        raise conflict("--ranks", f"Planning for several ranks cannot be combined with {what}.", hint)
    refuse_adapt(adapt, "--ranks")
    with ProgressBar() as progress:
        found = rank_page(task, asked, budget=limits, objective=weights, progress=progress)
    beside = found.beside(out)
    try:
        if out is not None:
            found.write(out)
    finally:
        print_json(found.plan) if as_json else print_text(found.text(beside))
    if as_json and beside is not None:
        print_error(configuration_line(beside))
