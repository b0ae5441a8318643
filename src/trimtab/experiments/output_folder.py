"""Ownership of an output folder: settings, task, data and machine of its comparison."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import trimtab
from trimtab.core.errors import FormatError
from trimtab.core.objective import Budget, Objective
from trimtab.core.serialization import from_json, to_json, write_whole
from trimtab.experiments.settings_file import NAME, read_settings
from trimtab.measure.machine import environment
from trimtab.plans.plan import Plan
from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import RECIPES, Task, TaskData

# Fingerprint of a task: hash of its source code, bound arguments, model and optimizer.

_PLAIN = (bool, int, float, str, type(None))


def code_of(task: Task) -> str:
    """Return the sha256 of the source files of the task's functions and of their bound arguments.

    Imported modules and closure variables are not included.
    """
    functions = _functions(task)
    # Sorted, to be independent of file locations.
    each = sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in _files(functions)})
    bound = repr([_bound(function) for function in functions])
    return hashlib.sha256(" ".join([*each, bound]).encode()).hexdigest()


def build_of(task: Task) -> str:
    """Return the sha256 of the model's tensors (name, shape, dtype) and of the optimizer's groups.

    A task that cannot be built gets a constant; the next step to run it reports the error.
    """
    outside = ProcessState.capture()
    try:
        torch.manual_seed(0)
        model = task.make_model()
        optimizer = task.make_optimizer(model)
    except Exception:
        return "cannot be built"
    finally:
        outside.restore()
    tensors = [(name, tuple(t.shape), str(t.dtype)) for name, t in model.state_dict().items() if _is_tensor(t)]
    groups = [_group(group) for group in optimizer.param_groups]
    said = (tensors, type(optimizer).__qualname__, groups)
    return hashlib.sha256(repr(said).encode()).hexdigest()


def _group(group: dict[str, Any]) -> list[tuple[str, Any]]:
    held = {name: value.tolist() if _is_tensor(value) else value for name, value in group.items() if name != "params"}
    named = [(name, value) for name, value in sorted(held.items()) if isinstance(value, (*_PLAIN, tuple, list))]
    return [*named, ("params", len(group["params"]))]


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _functions(task: Task) -> list[Callable[..., Any] | None]:
    functions = [task.make_model, task.make_optimizer, task.loss_fn, task.load_data, task.metric.evaluate, task.step]
    for recipe in task.recipes.values():
        functions += [recipe.make_optimizer, recipe.make_model, recipe.loss_fn]
    return functions


def _bound(value: object) -> object:
    """Return a representation of a value without memory addresses, including bound arguments of a `partial`."""
    if isinstance(value, functools.partial):
        named = [(name, _bound(each)) for name, each in sorted(value.keywords.items())]
        return "partial", _bound(value.func), [_bound(each) for each in value.args], named
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple | list | set | frozenset):
        each = [_bound(one) for one in value]
        return type(value).__name__, sorted(each, key=repr) if isinstance(value, set | frozenset) else each
    if isinstance(value, Mapping):
        return "mapping", sorted(((_bound(key), _bound(each)) for key, each in value.items()), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = [(field.name, _bound(getattr(value, field.name))) for field in dataclasses.fields(value)]
        return type(value).__qualname__, held
    return getattr(value, "__qualname__", type(value).__qualname__)


def _files(functions: Iterable[Callable[..., Any] | None]) -> Iterator[Path]:
    for function in functions:
        module = sys.modules.get(getattr(_plain(function), "__module__", None) or "")
        path = getattr(module, "__file__", None)
        if path is not None and Path(path).is_file():
            yield Path(path)


def _plain(function: Callable[..., Any] | None) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


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
