"""The tasks of the paper by name, at full size and at the size of two CPU cores."""

from __future__ import annotations

import importlib
from pathlib import Path

import trimtab.tasks
from trimtab.tasks import IN_CHECKOUT, Task

HERE = Path(__file__).resolve().parent


def load_task(name: str) -> Task:
    """Return a task of the paper by name, or any other task as `trimtab.tasks.load_task` does."""
    if name in IN_CHECKOUT:
        task: Task = importlib.import_module(f"benchmarks.paper.{name}").task
        return task
    return trimtab.tasks.load_task(name)


def argument_of(name: str) -> str:
    """Return the argument for a `trimtab` command: the task's file and attribute for a task of the paper."""
    return f"{HERE / name}.py:task" if name in IN_CHECKOUT else name
