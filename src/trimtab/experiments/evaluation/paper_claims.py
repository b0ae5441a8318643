"""Whether what was measured shows what the paper claims: of its own recipe, and of our plans (math: section 8)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trimtab.decide.statistics import MIN_PAIRS_FOR_VERDICT
from trimtab.experiments.comparison.result import NO_VERDICT, Ratio, Verdict
from trimtab.experiments.comparison.stats import bounds
from trimtab.experiments.evaluation.paper_figures import (
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
from trimtab.experiments.evaluation.result import Finding, Run

PASS, FAIL = "pass", "fail"
NOT_COMPARABLE, NOT_MEASURED = "not comparable", "not measured"
# The paper's recipe, as it stands in its text; and ours. A component's effect is of the plan that has it.
LITERAL, OURS = "paper", ("plan_S", "plan_F", "plan", "plan_batch")
NEAR = 0.1  # of the whole, around a share that is claimed, what is about it
_ABSOLUTE = ("mfu",)  # which is of a device, as no ratio of two loops on it is
_THIRDS = (("early",), ("middle",), ("late",))
# What a claim is over: the reference; of an efficiency nothing else; of a component the loop without it.
_AGAINST = ("reference", "", "alone")


@dataclass(frozen=True)
class Judged:
    """A claim held against one finding of one run.

    Args:
        status: pass, fail, no verdict, not comparable. here: what it would be, were the machine and the size no matter.
        why: what the status rests on.
    """

    claim: Claim
    run: Run
    finding: Finding
    status: str
    here: str
    why: str = ""

    @property
    def is_literal(self) -> bool:
        """Whether it is of the paper's own recipe."""
        return self.finding.arm == LITERAL


def judge(runs: Sequence[Run], claims: Sequence[Claim] = CLAIMS) -> dict[Claim, tuple[Judged, ...]]:
    """Return each claim with all that was measured of it; nothing where it was not."""
    return {claim: tuple(_judged(claim, runs)) for claim in claims}


def status_of(judged: Sequence[Judged]) -> str:
    """Return one status of findings that may differ: one that fails makes the claim fail.

    Each model (of images: each stem) is judged by itself. A pass on one does not speak for another that was measured.
    """
    models: dict[tuple[str, ...], set[str]] = {}
    for each in judged:
        models.setdefault(each.claim.workload.model_of(each.run.task), set()).add(each.status)
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
            yield Judged(claim, run, finding, status, here, why)


def _ways(claim: Claim, run: Run) -> Iterator[tuple[Claim, str, Finding]]:
    """Yield what a run can judge a claim by, and how that is labelled where it is not what the claim speaks of.

    A component's time to the target is its throughput where both loops learn as much of a row: in tier S, not in F.
    """
    own = tuple(_of(claim, run))
    if claim.measure != "component_time" or any(map(_tells, _of(replace(claim, target=None), run))):
        yield from ((claim, "", finding) for finding in own)
        return
    yield from ((claim, "", finding) for finding in own if finding.tier == "F")
    by = replace(claim, measure="component_throughput", sense=LEAST, bar=1 / claim.bar, target=None)
    label = "by throughput, as no time to a target is known: "
    yield from ((by, label, finding) for finding in _of(by, run) if finding.tier != "F")


def _tells(rung: Finding) -> bool:
    """Return whether something is known of a time: itself, a bound, or that one of the two came there more often."""
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
    """Return whether a claim is of a third of training, and a third of the gain is in its interval."""
    ends = _ends(finding.figure)
    return claim.part in _THIRDS and ends is not None and ends[0] <= 1 / 3 <= ends[1]


def _open(finding: Finding) -> str:
    """Say what keeps a finding from a verdict."""
    figure = finding.figure
    if figure is None or not math.isfinite(figure.mean):
        return "there is no figure"
    if figure.n < MIN_PAIRS_FOR_VERDICT and not figure.counted:
        return f"{figure.n} pairs: a verdict needs {MIN_PAIRS_FOR_VERDICT}"
    return "the interval holds it" if finding.has_verdict else "its run has no verdict on it"


def _of(claim: Claim, run: Run) -> Iterator[Finding]:
    """Yield the findings of a run that a claim is about; of times, to its target or the next, uncharged and charged."""
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
    """Return what tells a ladder from another of the same run."""
    return finding.arm, finding.charged, finding.part


def nearest(rungs: Sequence[Finding], target: float | None) -> Finding:
    """Return the rung of a target; where the ladder has none, the hardest whose time is known, or the last.

    A bound from above is one of an arm that was left behind. With a harder one, where the other arm reached that in
    more pairs: a gain on an easier rung does not speak for an arm that was left behind.

    Args:
        rungs: easiest first. target: None, where no rung is meant more than another.
    """
    if exact := [each for each in rungs if target is not None and each.target == target]:
        return exact[-1]
    known = [at for at, each in enumerate(rungs) if each.figure or each.at_least is not None]
    if not known:
        return next((each for each in reversed(rungs) if each.at_most is not None), rungs[-1])
    behind = [each.target for each in rungs[known[-1] + 1 :] if each.reached[0] < each.reached[1]]
    return replace(rungs[known[-1]], behind_at=behind[-1]) if behind else rungs[known[-1]]


def _elsewhere(claim: Claim, run: Run, finding: Finding) -> str:
    """Say why a figure is not of what the paper speaks of, or ""."""
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
    """Name the device of what passes or fails by the paper's ratios on another one than the paper's."""
    is_another = here in (PASS, FAIL) and run.has_gpu and not run.has_gpu_of(GPU)
    return f"; on another GPU, {run.environment['gpu']}" if is_another else ""


def met(sense: str, bar: float, finding: Finding) -> str:
    """Return whether a figure's whole interval is beyond a bar (pass), or short of it (fail); else no verdict.

    A count has no interval: it is the figure itself that is beyond or short. A time that is bounded lies beyond its
    bound, which passes where it is clear of chance too. What is reached on an easier target is not, where the arm was
    left behind on a harder one. Of a difference of the final metric where training is another one, tier F's or P1's,
    only what is worse counts (math: section 8).
    """
    ends = _ends(finding.figure) if finding.has_verdict else None
    ends = _shares(finding) if finding.figure is None else ends
    if ends is None:
        return NO_VERDICT
    found = _beyond(sense, bar, ends, finding)
    is_open = finding.behind_at is not None or not finding.has_verdict
    return NO_VERDICT if found == PASS and is_open else found


def _beyond(sense: str, bar: float, ends: tuple[float, float], finding: Finding) -> str:
    low, high = ends
    if sense == MOST:
        return PASS if high <= bar else FAIL if low > bar else NO_VERDICT
    if sense == LEAST:
        return PASS if low >= bar else FAIL if high < bar else NO_VERDICT
    if sense == ABOUT:
        low, high, bar = low - bar, high - bar, NEAR
    is_another_training = finding.tier == "F" or finding.arm == LITERAL
    beyond = math.inf if is_another_training and sense != ABOUT else bar
    return PASS if -bar <= low and high <= beyond else FAIL if low > beyond or high < -bar else NO_VERDICT


def _shares(finding: Finding) -> tuple[float, float] | None:
    """Return between which shares of the other's a time lies of which a bound on the speed is all that is known."""
    if len(finding.values) < MIN_PAIRS_FOR_VERDICT:
        return None
    if finding.at_least is not None:
        return 0.0, _share(finding.at_least)
    return None if finding.at_most is None else (_share(finding.at_most), math.inf)


def _share(speed: float) -> float:
    return 1 / speed if speed > 0 else math.inf


def _ends(figure: Ratio | None) -> tuple[float, float] | None:
    """Return between what a figure lies, by its interval or as it was counted; None where it allows no verdict."""
    if figure is None or not math.isfinite(figure.mean):
        return None
    return (figure.mean, figure.mean) if figure.counted else bounds(figure)


def unmeasured(claim: Claim, runs: Sequence[Run]) -> str:
    """Say why there is no figure of the paper's own recipe for a claim."""
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
    """Return the tasks that a claim speaks of: at the paper's size, and smaller ones."""
    return (*claim.workload.tasks, *claim.workload.smaller)


def headline(judged: Mapping[Claim, Sequence[Judged]]) -> Verdict:
    """Return what is read first: how many claims the paper's own recipe shows, and how many our plans reach."""
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
