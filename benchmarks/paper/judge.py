"""The judge: compares claims of the paper and goals of trimtab with measured figures (math: section 8)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.paper.claims import (
    ABOUT,
    CLAIMS,
    GPU,
    IMAGES,
    LEAST,
    MOST,
    PRECISION,
    SPLITTING,
    Claim,
)
from benchmarks.paper.finding import Finding, Run
from benchmarks.paper.goals import MONITOR, NO_HARM, PREDICTED, Goal
from benchmarks.paper.results import finding_of_goal
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, Ratio, Verdict
from trimtab.experiments.comparison.comparison_statistics import as_ratio, bounds
from trimtab.planner.statistics import MIN_PAIRS_FOR_VERDICT, mean_interval

PASS, FAIL = "pass", "fail"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
# The paper's recipe as described in its text, and trimtab's plans. A component's effect belongs to the plan with it.
LITERAL, OURS = "paper", ("equivalent_plan", "tuned_plan", "plan", "plan_batch")
NEAR = 0.1  # Tolerance around a claimed fraction, as a fraction of the whole gain.
_ABSOLUTE = ("mfu",)  # Measures that depend on the device, unlike ratios of two loops.
_THIRDS = (("early",), ("middle",), ("late",))
# Baseline of a claim: the reference; none for an efficiency; the loop without it for a component.
_AGAINST = ("reference", "", "alone")


_WITHOUT_RUN = (MONITOR, NO_HARM, PREDICTED)  # measured by rows of a benchmark, or predicted
_SEE_KNOWN = "what was found of its races afterwards stands below, with the runs"
GOAL_WORDS = {PASS: "met", FAIL: "missed", NO_VERDICT: "not shown"}


@dataclass(frozen=True)
class Judged:
    """A claim or a goal compared with a measured figure.

    Args:
        limit: the claim or the goal, which has the threshold.
        status: pass, fail, no verdict, not comparable or not measured.
        finding: the finding, which has the figure and its interval; None if not measured.
        run: the run; None for a goal without a run, and if not measured.
        here: for a claim, the status regardless of machine and model size.
        why: for a claim, the reason for the status; for a goal, the measured figure as text.
    """

    limit: Claim | Goal
    status: str
    finding: Finding | None = None
    run: Run | None = None
    here: str = ""
    why: str = ""

    @property
    def is_literal(self) -> bool:
        """True for the paper's own recipe."""
        return self.finding is not None and self.finding.arm == LITERAL

    @property
    def goal_status(self) -> str:
        """The status in the words of goals: met, missed, not shown or not measured; "predicted met" of predictions."""
        word = GOAL_WORDS.get(self.status, self.status)
        return f"predicted {word}" if self.limit.measure == PREDICTED and self.status in (PASS, FAIL) else word


def judge(runs: Sequence[Run], claims: Sequence[Claim] = CLAIMS) -> dict[Claim, tuple[Judged, ...]]:
    """Return all claims with their judged findings, empty if not measured."""
    return {claim: tuple(_judged(claim, runs)) for claim in claims}


def status_of(judged: Sequence[Judged]) -> str:
    """Return the combined status of several findings: a failure makes the claim fail.

    Every model (for images: every stem) is judged separately, so that a pass on a model does not count for other
    measured models.
    """
    models: dict[tuple[str, ...], set[str]] = {}
    for each in judged:
        models.setdefault(each.limit.workload.model_of(each.run.task), set()).add(each.status)
    found = {_first(statuses, FAIL, PASS, NO_VERDICT, NOT_COMPARABLE) for statuses in models.values()}
    return _first(found, FAIL, NO_VERDICT, PASS, NOT_COMPARABLE)


def _first(found: set[str], *order: str) -> str:
    return next((status for status in order if status in found), NOT_MEASURED)


def _judged(claim: Claim, runs: Sequence[Run]) -> Iterator[Judged]:
    for run in runs:
        if run.task not in tasks_of(claim):
            continue
        for by, label, finding in _ways(claim, run):
            elsewhere, here = _elsewhere(by, run, finding), met(by.sense, by.bar, finding)
            if _is_even(by, finding) and here == PASS:
                here = NO_VERDICT
            status = NOT_COMPARABLE if elsewhere else here
            why = label + (elsewhere or (finding.told or _because(by, here, finding)) + _its_gpu(run, here))
            yield Judged(claim, status, finding, run, here, why)


def _ways(claim: Claim, run: Run) -> Iterator[tuple[Claim, str, Finding]]:
    """Yield the findings of a run to judge a claim by, with a label if the measure differs from the claim's.

    For an equivalent plan, a component's time to target can be replaced by throughput, because both loops learn
    equally per sample; for a tuned plan it cannot.
    """
    own = tuple(_of(claim, run))
    if claim.measure != "component_time" or any(map(_tells, _of(replace(claim, target=None), run))):
        yield from ((claim, "", finding) for finding in own)
        return
    yield from ((claim, "", finding) for finding in own if finding.plan_kind == "tuned")
    by = replace(claim, measure="component_throughput", sense=LEAST, bar=1 / claim.bar, target=None)
    label = "by throughput, as no time to a target is known: "
    yield from ((by, label, finding) for finding in _of(by, run) if finding.plan_kind != "tuned")


def _tells(rung: Finding) -> bool:
    """Return True if a time is informative: a value, a bound, or a different number of reached targets."""
    return rung.figure is not None or rung.is_bounded or rung.reached[0] != rung.reached[1]


def _because(claim: Claim, here: str, finding: Finding) -> str:
    figure = finding.figure
    if here == NO_VERDICT and finding.behind_at is not None:
        return f"the other arm came further: to {finding.behind_at:g} in more pairs"
    if here == NO_VERDICT:
        return "the interval holds a third" if _is_even(claim, finding) else _open(finding)
    if claim.sense == ABOUT:
        whole = "the whole interval is" if here == PASS else "no part of the interval is"
        return f"{whole} within {100 * NEAR:g} points of it"
    what = "the count is" if figure is not None and figure.counted else "the whole interval is"
    return f"{what} {'as claimed or beyond' if here == PASS else 'short of it'}"


def _is_even(claim: Claim, finding: Finding) -> bool:
    """Return True if a claim concerns a third of training and the interval includes 1/3."""
    ends = _ends(finding.figure)
    return claim.part in _THIRDS and ends is not None and ends[0] <= 1 / 3 <= ends[1]


def _open(finding: Finding) -> str:
    """Return the reason for a missing verdict."""
    figure = finding.figure
    if figure is None or not math.isfinite(figure.mean):
        return "there is no figure"
    if figure.n < MIN_PAIRS_FOR_VERDICT and not figure.counted:
        return f"{figure.n} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}"
    return "the interval holds it" if finding.has_verdict else "its run has no verdict on it"


def _of(claim: Claim, run: Run) -> Iterator[Finding]:
    """Yield the findings relevant for a claim; for times, at its target or the nearest, with and without planning."""
    found = [
        finding
        for finding in run.findings
        if finding.measure == claim.measure
        and finding.arm in (LITERAL, *OURS)
        and finding.against in _AGAINST
        and finding.ranks == claim.ranks
        and (not claim.part or finding.part in claim.part)
    ]
    if claim.target is None:
        yield from found
        return
    for way in dict.fromkeys(map(_way_of, found)):
        yield nearest([finding for finding in found if _way_of(finding) == way], claim.target)


def _way_of(finding: Finding) -> tuple[str, bool, str]:
    """Return the key of a series of targets within a run."""
    return finding.arm, finding.charged, finding.part


def nearest(rungs: Sequence[Finding], target: float | None) -> Finding:
    """Return the finding for a target; otherwise the hardest target with a known time, or the last target.

    An upper bound belongs to an arm that fell behind. `behind_at` is set to a harder target reached more often by the
    other arm, because a gain at an easier target does not speak for an arm that falls behind later.

    Args:
        rungs: findings by target, easiest first.
        target: the target, or None for no preference.
    """
    if exact := [each for each in rungs if target is not None and each.target == target]:
        return exact[-1]
    known = [at for at, each in enumerate(rungs) if each.figure or each.at_least is not None]
    if not known:
        return next((each for each in reversed(rungs) if each.at_most is not None), rungs[-1])
    behind = [each.target for each in rungs[known[-1] + 1 :] if each.reached[0] < each.reached[1]]
    return replace(rungs[known[-1]], behind_at=behind[-1]) if behind else rungs[known[-1]]


def _elsewhere(claim: Claim, run: Run, finding: Finding) -> str:
    """Return the reason why a figure is not comparable with the paper, or ""."""
    found = []
    if run.task in claim.workload.smaller:
        found.append("a smaller task")
    if not run.has_gpu:
        found.append("on a CPU")
    elif claim.measure in _ABSOLUTE and not run.has_gpu_of(GPU):
        found.append(f"on another GPU ({run.environment['gpu']}), of another peak")
    if claim.target is not None and finding.target != claim.target:
        found.append(f"to {finding.target:g}, not to {claim.target:g}")
    return "; ".join(found)


def _its_gpu(run: Run, here: str) -> str:
    """Return the name of the GPU if a verdict rests on a GPU other than the paper's, or ""."""
    is_another = here in (PASS, FAIL) and run.has_gpu and not run.has_gpu_of(GPU)
    return f"; on another GPU, {run.environment['gpu']}" if is_another else ""


def met(sense: str, bar: float, finding: Finding) -> str:
    """Return pass if a figure's whole interval meets a limit, fail if none of it does, otherwise no verdict.

    A count has no interval, so its value decides. A bounded time passes if the bound meets the limit and the verdict is
    significant. A gain at an easier target does not pass if the arm falls behind at a harder target. For a final metric
    under different training (a tuned plan or the paper's recipe), only a worse value counts (math: section 8).
    """
    ends = _ends(finding.figure) if finding.has_verdict else None
    ends = _shares(finding) if finding.figure is None else ends
    if ends is None:
        return NO_VERDICT
    found = _beyond(sense, bar, ends, finding)
    is_open = finding.behind_at is not None or not finding.has_verdict
    return NO_VERDICT if found == PASS and is_open else found


def compare(sense: str, bar: float, low: float, high: float) -> str:
    """Return pass if a whole interval is at most or at least a limit, fail if none of it is, otherwise no verdict."""
    if sense == MOST:
        return PASS if high <= bar else FAIL if low > bar else NO_VERDICT
    return PASS if low >= bar else FAIL if high < bar else NO_VERDICT


def _beyond(sense: str, bar: float, ends: tuple[float, float], finding: Finding) -> str:
    low, high = ends
    if sense in (MOST, LEAST):
        return compare(sense, bar, low, high)
    if sense == ABOUT:
        low, high, bar = low - bar, high - bar, NEAR
    is_another_training = finding.plan_kind == "tuned" or finding.arm == LITERAL
    beyond = math.inf if is_another_training and sense != ABOUT else bar
    return PASS if -bar <= low and high <= beyond else FAIL if low > beyond or high < -bar else NO_VERDICT


def _shares(finding: Finding) -> tuple[float, float] | None:
    """Return the range of a time relative to the other arm's, from bounds on the speed-up; None if unknown."""
    if len(finding.values) < MIN_PAIRS_FOR_VERDICT:
        return None
    if finding.at_least is not None:
        return 0.0, _share(finding.at_least)
    return None if finding.at_most is None else (_share(finding.at_most), math.inf)


def _share(speed: float) -> float:
    return 1 / speed if speed > 0 else math.inf


def _ends(figure: Ratio | None) -> tuple[float, float] | None:
    """Return the interval of a figure (a count is its own interval), or None without a basis for a verdict."""
    if figure is None or not math.isfinite(figure.mean):
        return None
    return (figure.mean, figure.mean) if figure.counted else bounds(figure)


def unmeasured(claim: Claim, runs: Sequence[Run]) -> str:
    """Return the reason why the paper's own recipe has no figure for a claim."""
    given = [run for run in runs if run.task in tasks_of(claim)]
    precisions = [run.precisions.get(LITERAL, "") for run in given if LITERAL in run.labels]
    if claim.part == PRECISION and precisions and all(each == "fp32" for each in precisions):
        return "there is no fast half precision on this processor: P1 was computed in fp32, and no plan in less"
    if claim.part == SPLITTING and claim.workload is IMAGES:
        return "its models have batch statistics, which a batch that is cut would change; whole batches hold no less"
    if claim.measure.startswith("component_"):
        return "P1 is raced whole; what such a change of a plan of ours is worth is below, where a plan makes it"
    if claim.measure == "scaling_efficiency":
        return "P1 is run on one device; how our plans scale is below"
    raced = any(finding.arm == LITERAL for run in runs for finding in run.findings if run.task in tasks_of(claim))
    if claim.measure == "gain_share":
        if raced and claim.part not in _THIRDS:
            clocked = "P1's steps are clocked by phase once, not in paired laps: no share of its gain is told"
            return f"{clocked}; where our plans' gain lies is below"
        return "P1 saved nothing that could be shared out" if raced else "no run of it was given"
    return "it has no figure" if raced else "no run of it was given"


def tasks_of(claim: Claim) -> tuple[str, ...]:
    """Return the tasks of a claim, at the paper's size and smaller."""
    return (*claim.workload.tasks, *claim.workload.smaller)


def headline(judged: Mapping[Claim, Sequence[Judged]]) -> Verdict:
    """Return the headline verdict: number of claims shown by the paper's recipe, and reached by trimtab's plans."""
    literal = [_stands(claim, [each for each in found if each.is_literal]) for claim, found in judged.items()]
    ours = [_stands(claim, [each for each in found if not each.is_literal]) for claim, found in judged.items()]
    reached = sum(status == PASS for status in ours)
    parts = [
        f"{literal.count(PASS)} shown, {literal.count(FAIL)} missed, {literal.count(NO_VERDICT)} without a verdict",
        f"{literal.count(NOT_COMPARABLE)} measured where they cannot be compared",
        f"{literal.count(NOT_MEASURED)} not measured",
    ]
    said = f"Of the paper's {len(judged)} claims, by its own recipe (P1): {', '.join(parts)}. By trimtab's plans: "
    said += f"{reached} reached, {ours.count(FAIL)} missed, {_left(ours)} without a comparable verdict."
    if not any(status in (PASS, FAIL, NO_VERDICT) for status in (*literal, *ours)):
        return Verdict(
            "nothing to compare", f"No run is at the paper's size on a GPU: none speaks for or against it. {said}"
        )
    return Verdict(f"{literal.count(PASS)} of {len(judged)} shown", said)


def _stands(claim: Claim, found: Sequence[Judged]) -> str:
    return status_of(found) if found else NOT_MEASURED


def _left(statuses: Sequence[str]) -> int:
    return sum(status not in (PASS, FAIL) for status in statuses)


def judge_goals(goals: Sequence[Goal], folder: Path, runs: Mapping[str, Run]) -> tuple[Judged, ...]:
    """Return every goal with its status and the measured figure.

    Args:
        goals: Goals.
        folder: Folder of results.
        runs: Runs by folder name.
    """
    return tuple(_judged_goal(goal, folder, runs.get(goal.run)) for goal in goals)


def _judged_goal(goal: Goal, folder: Path, run: Run | None) -> Judged:
    is_of_a_run = goal.measure not in _WITHOUT_RUN
    finding = _of_goal(goal, run) if is_of_a_run else finding_of_goal(goal, folder)
    if finding is None:
        return Judged(goal, NOT_MEASURED)
    text = _figure_text(goal, finding, run)
    if is_of_a_run and run is not None and run.known and text:
        text = f"{text}; {_SEE_KNOWN}"
    if not _is_measured(goal, finding):
        return Judged(goal, NOT_MEASURED, finding, run, why=text)
    judged = _value_of_arm(finding) if goal.of_value else finding
    status = met(goal.sense, goal.bar + finding.resolution, judged)
    if goal.measure == PREDICTED and finding.failed:
        status = FAIL
    return Judged(goal, status, judged, run, why=text)


def _of_goal(goal: Goal, run: Run | None) -> Finding | None:
    """Return the finding of a run for a goal, at its target or the nearest; None if the run has no such finding."""
    wanted = (goal.measure, goal.arm, goal.against, goal.charged)
    found = [
        each
        for each in (() if run is None else run.findings)
        if (each.measure, each.arm, each.against, each.charged) == wanted
        and (goal.target is None or each.target == goal.target)
    ]
    return nearest(found, goal.target) if found else None


def _is_measured(goal: Goal, finding: Finding) -> bool:
    if goal.measure in _WITHOUT_RUN:
        return finding.figure is not None
    if goal.of_value:
        return bool(finding.failed or finding.values) or _is_count(finding)
    return finding.figure is not None or bool(finding.said)


def _is_count(finding: Finding) -> bool:
    return finding.figure is not None and finding.figure.counted and finding.value is not None


def _value_of_arm(finding: Finding) -> Finding:
    """Return a finding on the arm's own value instead of its ratio: a count, or the interval of the values per pair.

    The other arm is irrelevant, because it may never reach the target.
    """
    figure = None
    if _is_count(finding) and not finding.failed:
        figure = Ratio(finding.value, None, None, 1, (finding.value,), counted=True)
    elif finding.values and all(map(math.isfinite, finding.values)) and not finding.failed:
        figure = as_ratio(mean_interval(finding.values), finding.values)
    return replace(finding, figure=figure, has_verdict=True, at_least=None, at_most=None, behind_at=None)


def _figure_text(goal: Goal, finding: Finding, run: Run | None) -> str:
    """Return the measured figure of a goal as text; of a missing figure, the reason."""
    if goal.measure in _WITHOUT_RUN:
        return _text_without_run(goal, finding)
    if goal.of_value:
        return _value_text(goal, finding)
    behind = (
        "" if finding.behind_at is None else f"; the other arm came further, to {finding.behind_at:g} in more pairs"
    )
    if finding.figure is None:
        of_pairs = f" to {finding.target:g}, n = {len(finding.values)}" if finding.said and finding.target else ""
        return f"{finding.said}{of_pairs}{behind}"
    shown = finding.figure.inverse if goal.measure == "time_to_target" else finding.figure
    rung = "" if finding.target is None else f" to {finding.target:g}"
    is_quality = goal.measure == "final_metric" and run is not None and bool(run.trained)
    notes = (finding.said, f"after {run.trained}" if is_quality else "")
    return f"{_ratio_text(shown, goal.unit)}{rung}{behind}{''.join(f'; {each}' for each in notes if each)}"


def _ratio_text(shown: Ratio, unit: str) -> str:
    """Return a ratio with its interval as text, or the single pairs if there are too few for a verdict."""
    if shown.low is None or shown.high is None:
        return f"{shown.mean:.3f}{unit}"
    if shown.n < MIN_PAIRS_FOR_VERDICT:
        return f"pairs {', '.join(f'{pair:.3f}' for pair in shown.pairs)}{unit}"
    mean, low, high = (f"{round(figure, 3) + 0.0:.3f}" for figure in (shown.mean, shown.low, shown.high))  # no -0.000
    return f"{mean}{unit} (95% {low} to {high}, n = {shown.n})"


def _value_text(goal: Goal, finding: Finding) -> str:
    """Return the value of an arm as text: a count, the values of all pairs, or their mean with its interval."""
    if finding.failed:
        return finding.said
    if _is_count(finding):
        return f"{_number(finding.value)}{goal.unit}"
    if not finding.values:
        return finding.said
    values = f"{', '.join(map(_number, finding.values))}{goal.unit}"
    if len(finding.values) < MIN_PAIRS_FOR_VERDICT:
        return f"{values}; {len(finding.values)} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}"
    if not all(map(math.isfinite, finding.values)):
        return values
    of = mean_interval(finding.values)
    return f"{_number(of.mean)}{goal.unit} (95% {_number(of.low)} to {_number(of.high)}, n = {of.n})"


def _number(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _text_without_run(goal: Goal, finding: Finding) -> str:
    """Return the figure of a benchmark's row or of a prediction as text."""
    figure = finding.figure
    if figure is None:
        return finding.said
    if goal.measure == PREDICTED:
        seconds = f"({finding.value:.3g} s a step for {finding.baseline:.3g})"
        return f"{figure.mean:.3f}x the time {seconds}, {finding.said}; not measured"
    interval = f"{figure.mean:.4f}x (95% {figure.low:.4f} to {figure.high:.4f}, n = {figure.n})"
    if goal.measure == MONITOR:
        return f"{finding.arm}: {interval}, bar {goal.bar + finding.resolution:.4f}"
    return f"{interval} of a plan that changes {finding.part}"
