"""Machines of runs: figures of different machines appear side by side, never in a common ratio."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from benchmarks.paper.finding import Run

UNKNOWN = "not recorded"
Machine = tuple[tuple[str, str], ...]


def letters(runs: Sequence[Run]) -> dict[Machine, str]:
    """Return a letter for every machine (A, B, ...), in the order of the runs."""
    found = dict.fromkeys(run.machine for run in runs)
    known = [machine for machine in found if machine]
    named = {machine: _letter(index) for index, machine in enumerate(known)}
    return {machine: named.get(machine, UNKNOWN) for machine in found}


def _letter(index: int) -> str:
    more, last = divmod(index, len(ascii_uppercase))
    return (_letter(more - 1) if more else "") + ascii_uppercase[last]


def sameness(runs: Sequence[Run]) -> tuple[str, ...]:
    """Return caveats about comparing runs: machines, versions and data."""
    machines = {run.machine for run in runs}
    found = []
    if () in machines:
        found.append("Of some runs the machine was not recorded: what they show is held against nothing.")
    if len(machines) > 1:
        found.append(
            f"The runs are of {len(machines)} kinds of machine. Every ratio is of one run, and so of one machine; "
            "figures of different machines are not to be held against each other."
        )
    differ = _differing(runs)
    if len(machines) == 1 and () not in machines:
        found.append(f"All runs are of one kind of machine{'' if differ else ' and of the same versions'}.")
    if differ:
        found.append(f"Not all runs are of the same {', '.join(differ)}.")
    for task in dict.fromkeys(run.task for run in runs):
        if len({run.data_sha256 for run in runs if run.task == task and run.data_sha256}) > 1:
            found.append(f"Runs of {task} are of different data.")
    return tuple(found)


def _differing(runs: Sequence[Run]) -> list[str]:
    each = [dict(run.versions) for run in runs if run.versions]
    names = dict.fromkeys(name for found in each for name in found)
    return [name for name in names if len({found.get(name) for found in each}) > 1]
