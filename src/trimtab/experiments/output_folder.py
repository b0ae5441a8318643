"""Ownership of an output folder: settings, task, data and machine of its comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

import trimtab
from trimtab.core.errors import FormatError
from trimtab.core.objective import Budget, Objective
from trimtab.core.plan import Plan
from trimtab.core.serialization import from_json, to_json, write_whole
from trimtab.experiments.settings_file import NAME, read_settings
from trimtab.experiments.task_hash import build_of, code_of
from trimtab.measure.machine import environment
from trimtab.tasks.task import RECIPES, Task, TaskData

# A comparison may be extended by more pairs.
_MAY_DIFFER = ("num_pairs", "whole_pairs")
# These keys are written only if given; any other missing key indicates an older version.
_OPTIONAL = {"budget", "objective", "gpu", "plan", "number of ranks", "reference_cap_s"}
MACHINE = ("cpu", "threads", "gpu")


def folder_of(command: str, task: str, out: Path | None) -> Path:
    """Return the output folder of a command: the given folder, or a folder below `runs`.

    Raises:
        FormatError: the path is a file.
    """
    folder = out or Path("runs") / f"{command}-{folder_name(task)}"
    if folder.exists() and not folder.is_dir():
        raise FormatError(
            "--out", problem=f"{folder} is a file.", hint="Name a folder, new or existing.", code="folder.is_file"
        )
    return folder


def folder_name(task: str) -> str:
    """Return a task's name as a folder name."""
    return task.replace(":", "-").replace("/", "-")


def claim_folder(
    out: Path,
    task: Task,
    data: TaskData,
    settings: Mapping[str, object],
    budget: Budget,
    objective: Objective,
    plan: Plan | None = None,
    num_ranks: int = 1,
    machine: Sequence[str] = MACHINE,
) -> None:
    """Write the comparison's settings to the folder, or refuse a folder of a different comparison.

    Args:
        out: the folder.
        task: the task.
        data: data of the task.
        settings: options of the comparison.
        budget, objective: limits and weights of the plans.
        plan: a given plan, or None.
        num_ranks: number of ranks.
        machine: keys of the environment that must be equal.

    Raises:
        FormatError: the settings differ (the message names the keys), or the settings file is damaged.
    """
    path = out / NAME
    given = {key: value for key, value in settings.items() if key not in _MAY_DIFFER}
    given = {key: value for key, value in given.items() if value is not None or key not in _OPTIONAL}
    if budget != Budget() or objective != Objective():
        given |= {"budget": to_json(budget), "objective": to_json(objective)}
    if plan is not None:
        given |= {"plan": to_json(plan)}
    if num_ranks > 1:
        given |= {"number of ranks": num_ranks}
    wanted = {key: str(value) for key, value in {**given, **_subject(task, data), **_place(machine)}.items()}
    if not path.exists():
        write_whole(path, json.dumps(wanted, indent=1))
    elif (found := _as_written_now(read_settings(out))) != wanted:
        raise FormatError(
            str(out),
            problem=f"{out} contains results with different settings: {_difference(found, wanted)}.",
            hint="Name another folder with --out, or use the same settings to continue.",
            code="folder.settings_differ",
        )


def _as_written_now(found: Mapping[str, str]) -> Mapping[str, str]:
    """Return settings with the plan in today's format; new fields get their defaults."""
    try:
        return {**found, "plan": to_json(from_json(Plan, found["plan"]))} if "plan" in found else found
    except FormatError:
        return found


def _difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """Return the names of differing keys, including optional keys present on only one side."""
    both = found.keys() & wanted.keys()
    different = {key for key in both if found[key] != wanted[key]} | ((found.keys() ^ wanted.keys()) & _OPTIONAL)
    return ", ".join(sorted(different)) or "keys of another trimtab version"


def _subject(task: Task, data: TaskData) -> dict[str, object]:
    return {
        "task": task.name,
        "data_sha256": data.source.sha256,
        "batch_size": task.batch_size,
        "budget_samples": task.budget_samples,
        "eval_every_samples": task.eval_every_samples,
        "adapted_samples": task.adapted_samples,
        "planned_samples": task.planned_samples,
        **{f"{name}_budget_samples": getattr(task.recipes.get(name), "budget_samples", None) for name in RECIPES},
        "reference_precision": task.reference.precision,
        "clip_norm": task.reference.clip_norm,
        "terms_per_sample": task.terms_per_sample,
        "metric": task.metric.name,
        "code": code_of(task),
        "model or optimizer": build_of(task),
    }


def _place(machine: Sequence[str]) -> dict[str, str]:
    """Return the machine facts and versions that affect times."""
    found = environment()
    known = {key: found[key] for key in machine if key in found}
    return {"torch": torch.__version__, "trimtab": trimtab.__version__} | known
