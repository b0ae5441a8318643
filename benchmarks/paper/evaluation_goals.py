"""Goals of the evaluation, and their status by the records of a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.paper.claims import LEAST, MOST, WITHIN
from benchmarks.paper.evaluation_slices import Slice
from benchmarks.paper.finding import Finding, Run
from benchmarks.paper.judge import FAIL, PASS, met, nearest
from benchmarks.paper.runs import read_runs
from trimtab.core.errors import FormatError
from trimtab.core.plan import Plan
from trimtab.core.serialization import read_json
from trimtab.experiments.comparison.comparison_result import Ratio
from trimtab.experiments.results import KINDS, RECORD
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, mean_interval

MET, MISSED, NOT_SHOWN, NOT_MEASURED = "met", "missed", "not shown", "not measured"
TOLD_MET, TOLD_MISSED = "predicted met", "predicted missed"  # for goals that are only predicted
_UNFOUNDED = "not to be believed, by what was found since (docs/RESULTS.md)"
KNOWN = "known.json"  # defects found after runs were recorded, with the affected runs or source versions
MONITOR, NO_HARM, TOLD = "monitor_overhead_ratio", "do_no_harm_ratio", "predicted_time_ratio"
SMALL_BYTES = 4.5e9  # memory limit for training GPT-2


@dataclass(frozen=True)
class Goal:
    """A required value of a measurement.

    Args:
        says: Description.
        size: Size of the evaluation.
        run: Folder or file of the run. For predictions, the file of the plan under the limit; for measurements step by
            step, the file of a benchmark's rows.
        measure: Name of the measure.
        arm: Measured arm; for measurements step by step, the task.
        against: Arm to compare with. For predictions, the file of the plan without a limit.
        sense: Direction of the requirement: at least, at most or within.
        bar: Required value. For predictions, the ratio of step times with and without the limit.
        charged: True if planning and search time is included.
        target: Value of the metric; None for the hardest target with a known time.
        of_value: True if the requirement is on the arm's value, not on its ratio to `against`.
        unit: Unit in messages.
    """

    says: str
    size: str
    run: str
    measure: str
    arm: str
    against: str
    sense: str
    bar: float
    charged: bool = False
    target: float | None = None
    of_value: bool = False
    unit: str = "x"


def _cpu(kind: str, same: float, freed: float) -> tuple[Goal, ...]:
    recipes = f"{kind}-recipes"
    lengths = {"freed": "", "long": ", in a longer run"} if kind == "cifar" else {"long": ""}
    beside = f"{kind}-{next(iter(lengths))}"  # comparison with both S and F
    harm, quality = f"{kind}: no harm to P2, 0.97", f"{kind}: S within 0.5% of P0's quality"
    of_freed = f"{kind}: F ends no more than 0.5% below P0's quality"
    unit = "%" if kind == "wikitext" else " points"
    of_quality = ("final_metric", "equivalent_plan", "reference", WITHIN, 0.5)
    by_all = Goal(f"{quality}, by all test images", "cpu", "cifar-judged", *of_quality, unit=unit)
    by_steps = Goal(f"{harm}, step by step", "cpu", "no-harm.json", NO_HARM, "cifar10_resnet", "", LEAST, 0.97)
    return (
        Goal(f"{kind}: S {same}x P0", "cpu", recipes, "throughput", "equivalent_plan", "reference", LEAST, same),
        Goal(
            f"{kind}: S {same}x P0, beside F", "cpu", beside, "throughput", "equivalent_plan", "reference", LEAST, same
        ),
        *(
            Goal(
                f"{kind}: F {freed:g}x P0 to the target, search charged{which}",
                *("cpu", f"{kind}-{run}", "time_to_target", "tuned_plan", "reference", MOST, 1 / freed, True),
            )
            for run, which in lengths.items()
        ),
        Goal(harm, "cpu", recipes, "do_no_harm", "strong_plan", "strong", LEAST, 0.97),
        Goal(quality, "cpu", recipes, *of_quality, unit=unit),
        Goal(of_freed, "cpu", f"{kind}-long", "final_metric", "tuned_plan", "reference", WITHIN, 0.5, unit=unit),
        *([by_all, by_steps] if kind == "cifar" else []),
    )


GOALS = (
    *_cpu("wikitext", 1.3, 4.0),
    *_cpu("cifar", 1.8, 3.0),
    Goal("GPT-2: S 8x P0", "gpu", "gpt2-timed", "throughput", "equivalent_plan", "reference", LEAST, 8),
    Goal(
        "GPT-2: S 370,000 tokens/s",
        *("gpu", "gpt2-timed", "throughput", "equivalent_plan", "reference", LEAST, 370e3),
        of_value=True,
        unit=" tokens/s",
    ),
    Goal(
        "GPT-2: S 465,000 tokens/s (stretch: the published H100 level)",
        *("gpu", "gpt2-timed", "throughput", "equivalent_plan", "reference", LEAST, 465e3),
        of_value=True,
        unit=" tokens/s",
    ),
    Goal("ResNet-50 3x3: S 4x P0", "gpu", "resnet-timed", "throughput", "equivalent_plan", "reference", LEAST, 4),
    Goal(
        "ResNet-50 3x3: S 4x P0 in strict FP32",
        "gpu",
        "resnet-timed",
        "throughput",
        "equivalent_plan",
        "strict",
        LEAST,
        4,
    ),
    Goal(
        "ResNet-50 3x3: S 15,000 images/s",
        *("gpu", "resnet-timed", "throughput", "equivalent_plan", "reference", LEAST, 15e3),
        of_value=True,
        unit=" images/s",
    ),
    Goal(
        "GPT-2: F 30x P0 to the target, search charged",
        *("gpu", "gpt2-freed", "time_to_target", "tuned_plan", "reference", MOST, 1 / 30, True),
    ),
    Goal(
        "ResNet-50 3x3: F 20x P0 to the target, search charged",
        *("gpu", "resnet-freed", "time_to_target", "tuned_plan", "reference", MOST, 1 / 20, True),
    ),
    Goal(
        "ResNet-50 3x3: F 85% in 60 s, planning counted",
        *("gpu", "resnet-minute", "time_to_target", "tuned_plan", "reference", MOST, 60.0, True, 0.85),
        of_value=True,
        unit=" s",
    ),
    Goal("GPT-2: half of P2's memory", "gpu", "gpt2-half", "peak_memory", "strong_plan", "strong", MOST, 0.5),
    Goal("GPT-2: and 0.98x its speed", "gpu", "gpt2-half", "do_no_harm", "strong_plan", "strong", LEAST, 0.98),
    Goal(
        "GPT-2: within 4.5 GB",
        *("gpu", "gpt2-small", "peak_memory", "strong_plan", "strong", MOST, SMALL_BYTES),
        of_value=True,
        unit=" bytes",
    ),
    Goal("GPT-2: and 1.35x P2's time", "gpu", "gpt2-small", "do_no_harm", "strong_plan", "strong", LEAST, 1 / 1.35),
    *(
        Goal(
            "GPT-2: within 4.5 GB at 1.35x the time without a limit, as told for an H200",
            *(size, "prediction-small.json", TOLD, "", "prediction.json", MOST, 1.35),
        )
        for size in ("cpu", "gpu")
    ),
    *(
        Goal("the noise monitor takes 0.25%", size, "monitor.json", MONITOR, "", "", MOST, 1.0025)
        for size in ("cpu", "gpu")
    ),
)


@dataclass(frozen=True)
class Reached:
    """A goal with its status and the measured figure as text."""

    goal: Goal
    status: str
    figure: str

    @property
    def told(self) -> tuple[str, str, str]:
        """Description of the goal, status, and measured figure."""
        return self.goal.says, self.status, self.figure


_SEE_KNOWN = "what was found of its races afterwards stands below, with the runs"


def reached(goals: Sequence[Goal], folder: Path, runs: Mapping[str, Run]) -> tuple[Reached, ...]:
    """Return the status of each goal.

    Args:
        goals: Goals.
        folder: Folder of results.
        runs: Runs by folder name.
    """
    return tuple(_reached(goal, folder, runs) for goal in goals)


def _reached(goal: Goal, folder: Path, runs: Mapping[str, Run]) -> Reached:
    if goal.measure == MONITOR:
        return _monitor(goal, folder / goal.run)
    if goal.measure == NO_HARM:
        return _by_steps(goal, folder / goal.run)
    if goal.measure == TOLD:
        return _told(goal, folder / goal.run, folder / goal.against)
    run = runs.get(goal.run)
    found = None if run is None else _finding(goal, run)
    if run is None or found is None:
        return Reached(goal, NOT_MEASURED, "")
    stands = _of_value(goal, found) if goal.of_value else _of_figure(goal, found, run)
    return replace(stands, figure=f"{stands.figure}; {_SEE_KNOWN}") if run.known and stands.figure else stands


def _finding(goal: Goal, run: Run) -> Finding | None:
    wanted = (goal.measure, goal.arm, goal.against, goal.charged)
    found = [
        each
        for each in run.findings
        if (each.measure, each.arm, each.against, each.charged) == wanted
        and (goal.target is None or each.target == goal.target)
    ]
    return nearest(found, goal.target) if found else None


def _of_value(goal: Goal, found: Finding) -> Reached:
    """Return the status of a goal on the arm's value: a count, or values per pair whose interval is compared.

    The other arm is irrelevant, because it may never reach the target.
    """
    if found.failed:
        return Reached(goal, NOT_SHOWN, found.said)
    if found.figure is not None and found.figure.counted and found.value is not None:
        beyond = found.value >= goal.bar if goal.sense == LEAST else found.value <= goal.bar
        return Reached(goal, MET if beyond else MISSED, f"{_number(found.value)}{goal.unit}")
    if not found.values:
        return Reached(goal, NOT_MEASURED, found.said)
    told = f"{', '.join(map(_number, found.values))}{goal.unit}"
    if len(found.values) < MIN_PAIRS_FOR_VERDICT:
        return Reached(goal, NOT_SHOWN, f"{told}; {len(found.values)} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}")
    if not all(map(math.isfinite, found.values)):
        return Reached(goal, NOT_SHOWN, told)
    of = mean_interval(found.values)
    near, far = (of.low, of.high) if goal.sense == LEAST else (-of.high, -of.low)
    bar = goal.bar if goal.sense == LEAST else -goal.bar
    status = MET if near >= bar else MISSED if far < bar else NOT_SHOWN
    return Reached(
        goal, status, f"{_number(of.mean)}{goal.unit} (95% {_number(of.low)} to {_number(of.high)}, n = {of.n})"
    )


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _of_figure(goal: Goal, found: Finding, run: Run) -> Reached:
    """Return the status of a goal on a ratio. Times are shown as speed-ups, quality with the length of training."""
    figure, is_time = found.figure, goal.measure == "time_to_target"
    if figure is None:
        return _bounded(goal, found)
    status = {PASS: MET, FAIL: MISSED}.get(met(goal.sense, goal.bar, found), NOT_SHOWN)
    shown = figure.inverse if is_time else figure
    rung = "" if found.target is None else f" to {found.target:g}"
    went = f"after {run.trained}" if goal.measure == "final_metric" and run.trained else ""
    beside = "".join(f"; {each}" for each in (found.said, went) if each)
    return Reached(goal, status, f"{_told_of(shown, goal.unit)}{rung}{_behind(found)}{beside}")


def _told_of(shown: Ratio, unit: str) -> str:
    """Return a ratio with its interval as text, or the single pairs if there are too few for a verdict."""
    if shown.low is None or shown.high is None:
        return f"{shown.mean:.3f}{unit}"
    if shown.n < MIN_PAIRS_FOR_VERDICT:
        return f"pairs {', '.join(f'{pair:.3f}' for pair in shown.pairs)}{unit}"
    mean, low, high = (f"{round(figure, 3) + 0.0:.3f}" for figure in (shown.mean, shown.low, shown.high))  # no -0.000
    return f"{mean}{unit} (95% {low} to {high}, n = {shown.n})"


def _bounded(goal: Goal, found: Finding) -> Reached:
    """Return the status of a goal on a time that is only bounded, such as `>= 3.1x` or `<= 0.8x`."""
    status = {PASS: MET, FAIL: MISSED}.get(met(goal.sense, goal.bar, found), NOT_SHOWN)
    is_time = found.said and found.target is not None
    said = f"{found.said} to {found.target:g}, n = {len(found.values)}" if is_time else found.said
    return Reached(goal, status if found.said else NOT_MEASURED, f"{said}{_behind(found)}")


def _behind(found: Finding) -> str:
    return "" if found.behind_at is None else f"; the other arm came further, to {found.behind_at:g} in more pairs"


def _monitor(goal: Goal, path: Path) -> Reached:
    """Return the status of the noise monitor: upper end at most bar plus control's half-width (math: section 8)."""
    row = _row(path, MONITOR)
    if row is None:
        return Reached(goal, NOT_MEASURED, "")
    bar = goal.bar + row["control_half_width"]
    status = MET if row["high"] <= bar else NOT_SHOWN if row["low"] <= bar else MISSED
    return Reached(goal, status, f"{row['task']}: {_of_row(row)}, bar {bar:.4f}")


def _by_steps(goal: Goal, path: Path) -> Reached:
    """Return the status of the do-no-harm goal: lower end of the speed ratio of interleaved steps at least the bar.

    Interleaved steps share a process, so a plan that changes the allocator affects both and shows nothing.
    """
    row = _row(path, NO_HARM, goal.arm)
    if row is None:
        return Reached(goal, NOT_MEASURED, "")
    if "allocator" in row["changes"]:
        return Reached(goal, NOT_MEASURED, f"{row['changes']} is of the process, and so of both")
    status = MET if row["low"] >= goal.bar else MISSED if row["high"] < goal.bar else NOT_SHOWN
    return Reached(goal, status, f"{_of_row(row)} of a plan that changes {row['changes']}")


def _row(path: Path, metric: str, task: str | None = None) -> dict[str, Any] | None:
    """Return the first row of a metric, restricted to a task if given; None if missing."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else []
    found = [row for row in rows if row["metric"] == metric and task in (None, row["task"])]
    return found[0] if found else None


def _of_row(row: Mapping[str, Any]) -> str:
    return f"{row['mean']:.4f}x (95% {row['low']:.4f} to {row['high']:.4f}, n = {row['n']})"


def _told(goal: Goal, limited: Path, unlimited: Path) -> Reached:
    """Return the status of a predicted goal: ratio of step times with and without a memory limit."""
    if not (limited.is_file() and unlimited.is_file()):
        return Reached(goal, NOT_MEASURED, "")
    small, large = (read_json(Plan, path).predicted for path in (limited, unlimited))
    if small is None or large is None or small.peak_bytes is None:
        return Reached(goal, NOT_MEASURED, "nothing was told")
    ratio = small.step_s / large.step_s
    seconds = f"{ratio:.3f}x the time ({small.step_s:.3g} s a step for {large.step_s:.3g})"
    is_met = ratio <= goal.bar and small.peak_bytes <= SMALL_BYTES
    return Reached(goal, TOLD_MET if is_met else TOLD_MISSED, f"{seconds}, {small.peak_bytes:,} bytes; not measured")


def runs_in(found: Sequence[Slice], folder: Path) -> dict[str, Run]:
    """Return the runs of the slices by folder or file name, with defects that were found later."""
    files = {kind.file for kind in KINDS}
    there = dict.fromkeys(each.result for each in found if (folder / each.result).is_file())
    wanted = [path for path in there if Path(path).name in files or path.endswith(RECORD)]
    named = [
        replace(run, name=path.partition("/")[0])
        for path, run in zip(wanted, read_runs([folder / path for path in wanted]), strict=True)
    ]
    return {run.name: _with_what_is_known(folder, run) for run in named}


def _with_what_is_known(folder: Path, run: Run) -> Run:
    gone = {"figure": None, "value": None, "baseline": None, "has_verdict": False, "said": _UNFOUNDED}
    unfounded = unfounded_in(folder, run)
    findings = tuple(replace(each, **gone) if each.measure in unfounded else each for each in run.findings)
    return replace(run, findings=findings, known=tuple(each.says for each in _found_of(folder, run)))


def unfounded_in(folder: Path, run: Run) -> set[str]:
    """Return the measures of a run that were found to be invalid after it was recorded."""
    return {measure for each in _found_of(folder, run) for measure in each.unfounded}


@dataclass(frozen=True)
class _Found:
    """A defect that was found after runs were recorded.

    Args:
        says: Description.
        runs: Names of the affected runs.
        sources: Fingerprints of the affected source versions.
        unfounded: Names of the invalid measures.
    """

    says: str
    runs: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    unfounded: tuple[str, ...] = ()


@dataclass(frozen=True)
class _AllFound:
    found: tuple[_Found, ...]


def _all_found(path: Path) -> tuple[_Found, ...]:
    try:
        return read_json(_AllFound, path).found if path.is_file() else ()
    except FormatError as error:
        raise FormatError(str(path), got=f"{error.field}: {error.got}", expected=error.expected) from None


def _found_of(folder: Path, run: Run) -> Iterator[_Found]:
    for each in _all_found(folder / KNOWN):
        by_state = any(state in run.environment.get("sources", "") for state in each.sources)
        if by_state or run.name in each.runs:
            yield each
