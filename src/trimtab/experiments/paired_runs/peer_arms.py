"""Baseline recipes for paired runs, by name, and their availability in a task."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from trimtab.core.errors import ValueGivenError
from trimtab.experiments.baselines.loop import MakeLoop
from trimtab.experiments.baselines.strong import StrongLoop
from trimtab.tasks.task import RECIPES, Task

HAND_TUNED: Mapping[str, MakeLoop] = {field: partial(StrongLoop, field=field) for field in RECIPES}


def peers_of(task: Task) -> tuple[str, ...]:
    """Return the names that `--against` accepts for a task, including recipes that the task lacks."""
    return ("strict", *task.baselines, *RECIPES)


def usual_peers(task: Task) -> tuple[str, ...]:
    """Return the recipes of a comparison without `--against`: the task's own baselines and its hand-tuned recipe."""
    return (*task.baselines, "strong")


def require_peers(task: Task, named: Iterable[str]) -> None:
    """Raise an error if a named baseline recipe is unavailable for the task.

    Raises:
        ValueGivenError: the task has no such recipe, or "strict" was named and the reference is not fp32.
    """
    named, known = tuple(named), peers_of(task)
    lacking = {name: f"Task {task.name} has no recipe {name}." for name in named if name not in known}
    lacking |= {name: f"Task {task.name} has no recipe {name}." for name in RECIPES if name not in task.recipes}
    if task.reference.precision != "fp32":
        lacking["strict"] = (
            f"The recipe strict (fp32 without TF32) needs an fp32 baseline, but {task.name} uses "
            f"{task.reference.precision}."
        )
    for name in named:
        if name in lacking:
            others = ", ".join(p for p in known if p not in lacking)
            hint = f"Choose from {others}."
            if name in RECIPES:
                hint = f"Choose from {others}, or add Task(..., {name}=StrongRecipe(...))."
            elif name != "strict":
                hint = f"Choose from {others}, or add Task(..., baselines={{{name!r}: ...}})."
            raise ValueGivenError("against", problem=lacking[name], hint=hint, code="recipe.missing")
