"""The paper's evaluation, divided into slices of minutes. An interrupted evaluation resumes at the next slice.

`python -m benchmarks.paper.evaluation [--size cpu|gpu|tiny] [--slice-minutes N] [--most N] [--only NAME ...]` runs the
outstanding slices in order and prints the status of the goals. `--dry-run` only lists the slices, `--summary` only
prints the status. `--json` prints the summary as a JSON object.

Results are in `runs/evaluations/evaluation-<machine>/`, with a folder or file per run. After every completed slice
the rows of all runs are written to `benchmarks/results/evaluation-<machine>.json`, which is committed and from which
all pages are made. `done` contains a file per completed slice, written atomically: command, seconds, machine and
fingerprint of the sources. Slices that are done, here or in the committed record, are not repeated. If the sources or
the command have changed, a slice is called stale; delete its file and its run to repeat it. Each kind of machine has a
separate folder, also for the same GPU in another host.

A slice over its time limit is ended. If it left new results, the next call resumes it. Otherwise it runs again only
with a higher `--slice-minutes`. On a GPU, paired runs to a target take the whole limit, so use the same
`--slice-minutes` for a folder. Goals of 20 and 30 times the baseline's speed need a baseline run that is as many times
longer than planning and training: 90 minutes for images (`resnet-freed`), 150 for text (`gpt2-freed`). The default
limit is 9 minutes on a GPU, for machines that are available for a short time, and 25 minutes on two cores.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import command
from benchmarks.command import ROOT
from benchmarks.paper.evaluation_folder import claim, machine_of, own_folder, slug
from benchmarks.paper.evaluation_record import record_of, text_of, updated
from benchmarks.paper.evaluation_slices import (
    DONE,
    GPU_TASKS,
    HALF,
    MINUTES,
    PLANS,
    SIZES,
    TASKS,
    TO_DO,
    Ran,
    Slice,
    slices,
)
from benchmarks.paper.tasks import argument_of
from trimtab.core.errors import FormatError, TrimtabError, ValueGivenError
from trimtab.core.serialization import read_json, to_json, write_whole
from trimtab.core.validation import integer, number
from trimtab.experiments.result_table import PEAK
from trimtab.experiments.results import SETTINGS
from trimtab.experiments.subject import MeasuredPart
from trimtab.measure.machine import environment
from trimtab.tasks import IN_CHECKOUT

HERE = Path(__file__).resolve().parent
UNPACKED = Path("runs") / "evaluations"
STALE, CANNOT = "stale", "cannot run here"
END_S = 10  # for a process to exit after a signal
RUN, CUT, FAILED = "run", "cut off", "failed"


@dataclass(frozen=True)
class Cut:
    """Record of a slice that exceeded its time limit without new results."""

    slice: str
    command: str
    limit_s: float
    schema: int = 1


@dataclass(frozen=True)
class Place:
    """Execution environment of slices.

    Args:
        folder: Folder of results.
        environment: Description of the machine and the sources.
        num_gpus: Number of GPUs.
        has_meter: True if energy can be measured.
        commands: Names of the available `trimtab` commands.
        limit_s: Time limit of a slice in seconds.
        record: Committed record, written after every completed slice; None for a folder without a record.
    """

    folder: Path
    environment: dict[str, str]
    num_gpus: int = 0
    has_meter: bool = False
    commands: tuple[str, ...] = ()
    limit_s: float = 60 * MINUTES["cpu"]
    record: Path | None = None

    def ran(self, each: Slice) -> Path:
        """Return the file of a completed slice."""
        return self.folder / "done" / f"{each.name}.json"

    @property
    def recorded(self) -> dict[str, Any]:
        """The committed record; {} without one."""
        if self.record is None or not self.record.is_file():
            return {}
        return dict(json.loads(self.record.read_text(encoding="utf-8")))

    def was_cut(self, each: Slice) -> Path:
        """Return the file of a slice that exceeded its limit without new results."""
        return self.folder / "cut" / f"{each.name}.json"

    def minutes(self, each: Slice) -> float:
        """Return the expected minutes of a slice: measured here, measured for a similar slice, or else as declared."""
        path = self._measured(each)
        return each.minutes if path is None else round(read_json(Ran, path).seconds / 60, 1)

    def _measured(self, each: Slice) -> Path | None:
        """Return the file with the seconds of the slice, or of the completed slice of the same kind with most pairs."""
        own, stem = self.ran(each), each.name.rstrip("0123456789")
        ended = {path.stem.removeprefix(stem): path for path in own.parent.glob(f"{stem}*.json")}
        races = {int(number): path for number, path in ended.items() if number.isdigit()}
        return own if own.is_file() else races[max(races)] if races else None

    def left(self, each: Slice) -> set[Path]:
        """Return the result files from which the slice can resume."""
        files = (self.folder / each.folder).rglob("*")
        return {path for path in files if path.is_file() and path.name != SETTINGS and ".partial" not in str(path)}

    def missing(self, each: Slice) -> str:
        """Return the unmet requirements of a slice, comma-separated; empty if all are met."""
        return ", ".join(need for need in each.needs if not self._has(need))

    def _has(self, need: str) -> bool:
        if match := re.fullmatch(r"(\d+) gpus", need):
            return self.num_gpus >= int(match[1])
        if need.startswith("command "):
            return need.removeprefix("command ") in self.commands
        known = {"gpu": self.num_gpus > 0, "meter": self.has_meter, "bf16": "bf16" in self.environment.get("cpu", "")}
        return known[need] if need in known else (self.folder / need).is_file()

    def state(self, each: Slice) -> tuple[str, str]:
        """Return the state of a slice and the reason."""
        path = self.ran(each)
        done = {row["slice"]: row for row in self.recorded.get("slices", {}).get("done", ())}
        if not path.is_file() and each.name in done:
            sources = done[each.name]["sources"]
            is_same = sources == self.environment.get("sources")
            return (DONE if is_same else STALE, f"in the record, measured with sources {sources}")
        if not path.is_file():
            missing, cut = self.missing(each), self._cut_at(each)
            if cut and not missing:
                hint = f"--slice-minutes {math.floor(cut) + 1} or more begins it again"
                return (
                    CUT,
                    f"at {cut:g} minutes with nothing to go on from: {hint}, and what waits for it in its folder",
                )
            return (CANNOT, f"needs {missing}") if missing else (TO_DO, f"about {self.minutes(each):g} minutes")
        ran = read_json(Ran, path)
        changed = [] if ran.command == shlex.join(each.command) else ["its command has changed"]
        if ran.sources != self.environment.get("sources"):
            changed.append(f"measured with sources {ran.sources}, now {self.environment.get('sources')}")
        return (STALE, "; ".join(changed)) if changed else (DONE, f"{ran.seconds:.0f} s")

    def _cut_at(self, each: Slice) -> float:
        """Return the minutes at which a slice was ended without results; 0 if never, or if the limit is higher now."""
        path = self.was_cut(each)
        limit_s = read_json(Cut, path).limit_s if path.is_file() else 0.0
        return limit_s / 60 if limit_s >= self.limit_s else 0.0


def main() -> None:
    """Run outstanding slices and print the status of the goals."""
    parser = command.parser(__doc__)
    parser.add_argument("--size", choices=SIZES, default="cpu", help="of tasks: for two cores, for a GPU, or a trial")
    parser.add_argument("--slice-minutes", type=float, help="that a slice may take; then it is ended")
    parser.add_argument("--most", type=int, help="slices to run now; all by default")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of these slices or their folders")
    parser.add_argument("--folder", type=Path, help="of results; by default named for this machine")
    parser.add_argument("--dry-run", action="store_true", help="list the slices, run nothing")
    parser.add_argument("--summary", action="store_true", help="say how the goals stand, run nothing")
    options = parser.parse_args()
    try:
        size = "tiny" if options.quick else options.size
        given = MINUTES[size] if options.slice_minutes is None else options.slice_minutes
        minutes = number("--slice-minutes", given, low=0, open_low=True)
        every = slices(size, minutes)
        most = None if options.most is None else integer("--most", options.most)
        wanted = chosen(every, options.only)
        place = here(size, options.folder, 60 * minutes, writes=not options.dry_run)
        if options.dry_run:
            print("\n".join(listed(wanted, place)))
            return
        if not options.summary:
            for line in run_slices(wanted, place, most, completed=lambda: summary(size, every, place)):
                print(line, file=sys.stderr, flush=True)
        found = summary(size, every, place)  # pages cover all slices, regardless of --only
        print(json.dumps(found) if options.json else "\n".join(text(found)))
    except TrimtabError as error:
        sys.exit(f"evaluation: {error}")


def chosen(found: Sequence[Slice], only: Sequence[str] | None) -> tuple[Slice, ...]:
    """Return the slices with the given names or folders; all if None.

    Raises:
        FormatError: A name matches no slice.
    """
    for name in only or ():
        if not any(name in (each.name, each.folder) for each in found):
            names = ", ".join(dict.fromkeys(each.folder for each in found))
            raise FormatError("--only", got=repr(name), expected=f"a slice, or all of a folder: {names}")
    return tuple(each for each in found if not only or each.name in only or each.folder in only)


def here(size: str, folder: Path | None = None, limit_s: float = 60 * MINUTES["cpu"], *, writes: bool = True) -> Place:
    """Return the execution environment of this machine.

    Args:
        size: "cpu", "gpu" or "tiny". Results of "tiny" are in `runs` and are not recorded.
        folder: Folder of results, which is not recorded; None for the folder named for this machine.
        limit_s: Time limit of a slice in seconds.
        writes: True to create a missing folder.

    Raises:
        FormatError: The folder belongs to another machine.
        ValueGivenError: The size is "cpu" on a machine with a GPU.
    """
    import torch

    from trimtab.cli.main import app
    from trimtab.energy.meter_selection import find_meter

    found, gpus = environment(), torch.cuda.device_count()
    refuse_gpu(size, gpus)
    meter = find_meter(torch.device("cuda" if gpus else "cpu"))
    record = None
    if folder is None:
        is_recorded = size != "tiny"
        first = ROOT / (UNPACKED if is_recorded else "runs") / f"evaluation-{slug(found, gpus)}"
        folder = own_folder(first, found)
        record = record_of(ROOT, folder.name) if is_recorded else None
        if folder != first:
            print(f"{first.name} is of another machine: results are in {folder.name}", file=sys.stderr)
    claim(folder, found, writes=writes)
    names = tuple(each.callback.__name__ for each in app.registered_commands if each.callback is not None)
    return Place(folder, found, gpus, not meter.facts.is_absent, names, limit_s, record)


def refuse_gpu(size: str, num_gpus: int) -> None:
    """Raise if the size is "cpu" and the machine has a GPU, which would run the loops."""
    if size == "cpu" and num_gpus:
        hint = "Hide it: CUDA_VISIBLE_DEVICES= python -m benchmarks.paper.evaluation --size cpu."
        raise ValueGivenError("--size", got="cpu on a machine with a GPU", expected="gpu", hint=hint)


def listed(found: Sequence[Slice], place: Place) -> Iterator[str]:
    """Yield the state and the command of each slice, then a total."""
    for each in found:
        state, why = place.state(each)
        yield f"{state:<16} {each.name:<22} {each.says} ({why})\n{'':17}{shlex.join(each.command)}"
    left = sum(place.minutes(each) for each in found if place.state(each)[0] == TO_DO)
    yield f"{len(found)} slices in {place.folder.name}; about {left:.0f} minutes are left to do here"


def run_slices(
    found: Sequence[Slice], place: Place, most: int | None = None, completed: Callable[[], object] | None = None
) -> Iterator[str]:
    """Run outstanding slices and yield progress lines. Skips the rest of a folder after an incomplete slice.

    Args:
        found: Slices.
        place: Execution environment.
        most: Largest number of slices to run; None for all.
        completed: Called after every completed slice.
    """
    left, broken = len(found) if most is None else most, set()
    for each in found:
        if left <= 0:
            return
        state, why = place.state(each)
        broken |= {each.folder} if state == CUT else set()
        if state != TO_DO or each.folder in broken:
            continue
        left -= 1
        yield f"{each.name}: {each.says}, {why}"
        outcome, said = run_slice(each, place)
        yield f"{each.name}: {outcome}, {said}"
        if outcome != RUN:
            broken.add(each.folder)
        elif completed is not None:
            completed()


def run_slice(each: Slice, place: Place) -> tuple[str, str]:
    """Run a slice within its time limit and return the outcome and a message."""
    result, begun, before = place.folder / each.result, time.perf_counter(), place.left(each)
    if each.begins_anew:
        result.unlink(missing_ok=True)
    if each.writes_file:
        result.parent.mkdir(exist_ok=True)
    try:
        argv = _argv(each, place.folder)
    except FormatError as error:  # The arm that defines the limit failed. Other slices do not need it.
        return FAILED, str(error)
    code, out, err = _run(argv, place.folder, place.limit_s)
    seconds = time.perf_counter() - begun
    if code is None:
        return _cut(each, place, has_more=bool(place.left(each) - before))
    if code:
        return FAILED, err.strip()[-2000:] or f"exit status {code}"
    if each.prints:
        write_whole(result, out)
    if not result.is_file():
        return FAILED, f"it left no {each.result}"
    path = place.ran(each)
    path.parent.mkdir(exist_ok=True)
    place.was_cut(each).unlink(missing_ok=True)
    sources = place.environment.get("sources", "unknown")
    ran = Ran(each.name, shlex.join(each.command), sources, place.environment, round(seconds, 1), each.result)
    write_whole(path, to_json(ran, indent=1))
    return RUN, f"{seconds:.0f} s"


def _cut(each: Slice, place: Place, *, has_more: bool) -> tuple[str, str]:
    """Return the outcome of a slice that exceeded its limit. Records the limit if there are no new results.

    Args:
        each: Slice.
        place: Execution environment.
        has_more: True if the slice left new results to resume from.
    """
    if has_more:
        return CUT, f"at {place.limit_s / 60:g} minutes: run again it goes on from what it left"
    path = place.was_cut(each)
    path.parent.mkdir(exist_ok=True)
    write_whole(path, to_json(Cut(each.name, shlex.join(each.command), place.limit_s), indent=1))
    return place.state(each)


def _argv(each: Slice, folder: Path) -> list[str]:
    """Return the command line of a slice, relative to the folder of results."""
    files = {TASKS: "evaluation_tasks.py", GPU_TASKS: "evaluation_gpu_tasks.py", PLANS: "plans"}
    first, *rest = (_limit(part, folder) for part in each.command)
    for stands, name in files.items():
        rest = [part.replace(stands, os.path.relpath(HERE / name, folder)) for part in rest]
    script = str(ROOT / "benchmarks" / "micro" / first)
    if not first.endswith(".py"):
        rest = [os.path.relpath(argument_of(part), folder) if part in IN_CHECKOUT else part for part in rest]
    program = [script] if first.endswith(".py") else ["-m", "trimtab.cli", first]
    return [sys.executable, *program, *rest]


def _limit(part: str, folder: Path) -> str:
    """Replace "half of FILE" by half the peak memory of the hand-tuned recipe in a file. Other parts are unchanged."""
    if not part.startswith(HALF):
        return part
    path = folder / part.removeprefix(HALF)
    peak = read_json(MeasuredPart, path).table.value(PEAK, "strong")
    if peak is None:
        raise FormatError(str(path), got="no peak of the recipe", expected="an arm that was counted")
    return f"{int(peak) // 2}B"


def _run(argv: Sequence[str], folder: Path, limit_s: float) -> tuple[int | None, str, str]:
    """Return (exit status, stdout, stderr). After the time limit, ends the process group and returns None as status."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    how = {"cwd": folder, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(argv, start_new_session=True, **how) as process:
        try:
            out, err = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return None, *_end(process)
        except BaseException:
            _end(process)
            raise
    return process.returncode, out, err


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    for what in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, what)
            return process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            break
    return process.communicate()


def summary(size: str, found: Sequence[Slice], place: Place) -> dict[str, Any]:
    """Return the status of slices and goals, and write the record."""
    facts = {**machine_of(place.folder), "command": f"python -m benchmarks.paper.evaluation --size {size}"}
    known = updated(size, found, place.folder, place.recorded, facts)
    if place.record is not None and any((place.folder / "done").glob("*.json")):
        write_whole(place.record, text_of(known))
    goals = [{"metric": "goal", **row} for row in known["goals"]]
    states = [(each, *place.state(each)) for each in found]
    slices = [{"metric": "slice", "slice": each.name, "state": state, "why": why} for each, state, why in states]
    environment = facts | place.environment
    return {"schema": 1, "name": "evaluation", "environment": environment, "rows": [*goals, *slices]}


def text(found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the status of each goal, the number of slices per state, and the stale or ended slices."""
    goals = [row for row in found["rows"] if row["metric"] == "goal"]
    states = [row["state"] for row in found["rows"] if row["metric"] == "slice"]
    for row in goals:
        yield f"{row['status']:<16} {row['says']}{': ' if row.get('figure') else ''}{row.get('figure', '')}"
    counted = ", ".join(
        f"{states.count(state)} {state}" for state in (DONE, STALE, TO_DO, CUT, CANNOT) if state in states
    )
    yield f"slices: {counted}"
    for row in found["rows"]:
        if row["metric"] == "slice" and row["state"] in (STALE, CUT):
            yield f"{row['state']}: {row['slice']}, {row['why']}"


def end_with_children() -> None:
    """Turn SIGTERM into SystemExit, so that child processes are ended as well."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


if __name__ == "__main__":
    end_with_children()
    main()
