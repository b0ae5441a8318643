"""Tables of several runs: the paper's claims, its tables next to the measurements, and the machines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.paper.arithmetic import checks
from benchmarks.paper.claims import CLAIMS, COMPONENTS, RANKS, Claim, Line, MainTable
from benchmarks.paper.finding import Finding, Run
from benchmarks.paper.judge import (
    FAIL,
    NOT_COMPARABLE,
    NOT_MEASURED,
    PASS,
    Judged,
    nearest,
    tasks_of,
    unmeasured,
)
from benchmarks.paper.machines import letters
from trimtab.core.units import format_count, format_joules
from trimtab.experiments.comparison.comparison_result import Ratio, Verdict
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.tables import Cell, Table

_DIFFERENCES = ("final_metric", "component_quality")
_SHARES = ("mfu", "scaling_efficiency", "gain_share")
_HERE = {PASS: "what was measured meets it", FAIL: "what was measured does not meet it"}
_FIGURES = ("Figure", "95% interval", "n")


def claim_table(judged: Mapping[Claim, Sequence[Judged]], title: str, runs: Sequence[Run], *, whole: bool) -> Table:
    """Return the claims with their measurements, a row each.

    Args:
        judged: judged findings by claim.
        title: title of the table.
        runs: all runs.
        whole: True to include claims without a measurement.
    """
    numbers = {id(run): number for number, run in enumerate(runs, 1)}
    rows = []
    for claim, found in judged.items():
        for each in found:
            finding, run = each.finding, each.run
            where = f"{numbers[id(run)]}: {say.one_line(run.task)}{_part(finding)}{_beside_of(finding, run)}"
            rows.append((claim.says, _verdict(each), *figures(finding, run), where, claim.source))
        if not found and whole:
            empty = Verdict(NOT_MEASURED, unmeasured(claim, runs))
            rows.append((claim.says, empty, "", "", "", "", claim.source))
    return Table(
        title,
        # The widest columns come last, because a narrow page cuts them off.
        ("Claim", "Verdict", *_FIGURES, "Run", "Source"),
        tuple(rows),
        "Nothing was measured of it.",
        "Pass: the whole interval is beyond what is claimed; fail: short of it. Between them, or below 5 pairs, there "
        "is no verdict. What was measured on a CPU or at another size is never a pass. Ratios of another GPU than the "
        "paper's, which is then named, are held against the paper's ratios; a share of its peak FLOP/s is not. Of a "
        "final perplexity the change is told as it is, so that more is worse.",
        _FIGURES,
    )


def _beside_of(finding: Finding, run: Run) -> str:
    """Return caveats of a figure: planning included, number of samples, or a target at which the arm is behind.

    Planning has the time budget of the run it was made for, possibly longer than the paired run.
    """
    said = [finding.said] if finding.measure == "final_metric" and finding.figure is not None and finding.said else []
    charged = [f"planning counted{f' ({run.planned})' if run.planned else ''}"] if finding.charged else []
    behind = [] if finding.behind_at is None else [f"behind at {say.metric(finding.behind_at)}"]
    return "".join(f", {say.one_line(each)}" for each in (*charged, *said, *behind))


def _part(finding: Finding) -> str:
    """Return the subject of a figure: a component with its setting, or a part of the gain."""
    set_in = f" {finding.against}" if finding.measure.startswith("component_") else ""
    return f", {say.one_line(finding.part).replace('_', ' ')}{set_in}" if finding.part else ""


def _verdict(each: Judged) -> Verdict:
    here = _HERE.get(each.here, "") if each.status == NOT_COMPARABLE else ""
    return Verdict(each.status, "; ".join(text for text in (each.why, here) if text))


def figures(finding: Finding, run: Run) -> tuple[str, str, str]:
    """Return a finding's figure, interval and number of pairs as text, or the reason for a missing figure."""
    if finding.figure is None:
        return say.one_line(finding.told) or say.UNMEASURED, "", ""
    is_turned = finding.measure in _DIFFERENCES and not run.higher_is_better
    figure = turned(finding.figure) if is_turned else finding.figure
    value, interval = say.estimate(figure, words_of(finding, run))
    return value, interval, str(figure.n)


def _sign_of(run: Run) -> str:
    """Return a note on the sign of a change for a metric with lower values better.

    A run's own report uses the opposite sign.
    """
    return "" if run.higher_is_better else f"Of {say.one_line(run.metric)} the change as it is: below 0 is better."


def turned(difference: Ratio) -> Ratio:
    """Return a difference with its sign reversed: from "positive is better" to the change of the metric itself."""
    low, high = (None if end is None else -end for end in (difference.high, difference.low))
    pairs = tuple(-pair for pair in difference.pairs)
    return Ratio(-difference.mean, low, high, difference.n, pairs, difference.counted)


def words_of(finding: Finding, run: Run) -> Callable[[float], str]:
    """Return the formatter of a finding's figure: a fraction, a difference or a relative change."""
    if finding.measure in _SHARES:
        return say.share
    if finding.measure in _DIFFERENCES:
        return say.words_of("final_metric_difference", run.unit)
    return lambda ratio: say.percent(ratio - 1)


def goal_table(goals: Sequence[tuple[str, str, str]]) -> Table:
    """Return the status of goals set for trimtab's plans, independent of the paper."""
    rows = tuple((say.one_line(says), Verdict(status, say.one_line(told))) for says, status, told in goals)
    note = (
        "Met and missed by the whole interval, or by a count; not shown: between them, or too few pairs for a verdict. "
        "Of quality a difference above 0 is better."
    )
    return Table("", ("Goal", "Stands"), rows, "There is none.", note)


def arithmetic_table() -> Table:
    """Return the paper's statements next to results computed from its own figures."""
    kinds = {True: "holds", False: "does not hold"}
    rows = tuple((each.says, each.source, each.gives, kinds[each.holds]) for each in checks())
    return Table("", ("The paper says", "Source", "Its own figures give", "So it"), rows, "Nothing was checked.")


def paper_table(table: MainTable) -> Table:
    """Return the paper's own figures."""
    rows = tuple((_first(line.says), *_printed(line)) for line in table.lines)
    columns = ("Measure", "Baseline", "Optimised", "Change")
    return Table("As the paper has it", columns, rows, "", "", columns[1:])


def _printed(line: Line) -> tuple[str, str, str]:
    unit = line.unit if line.unit in ("", "%") else f" {line.unit}"
    return f"{line.baseline:,g}{unit}", f"{line.optimised:,g}{unit}", line.change


def beside_table(table: MainTable, run: Run, arm: str) -> Table:
    """Return the lines of table I or II for an arm of a run against the reference, next to the paper's change."""
    rows = tuple(row for line in table.lines for row in _beside(table, line, run, arm))
    plan_kind = next((each.plan_kind for each in run.findings if each.arm == arm and each.plan_kind), "")
    label = say.one_line(run.labels.get(arm, arm)) + (
        f" ({plan_kind} plan)" if plan_kind and plan_kind not in run.labels.get(arm, arm) else ""
    )
    columns = ("Measure", "Paper", "Reference", "This arm", "Change", "95% interval", "n")
    return Table(f"{label}, against the reference", columns, rows, "", _sign_of(run), columns[1:])


def _beside(table: MainTable, line: Line, run: Run, arm: str) -> Iterator[tuple[Cell, ...]]:
    """Yield a line's row, and for a time with known planning cost a second row including it."""
    wanted = (line.measure, arm, "reference")
    found = [each for each in run.findings if (each.measure, each.arm, each.against) == wanted]
    if not found:
        yield (_first(line.says), line.change, *(say.UNMEASURED for _ in range(3)), "", "")
    for is_charged in (False, True):
        if each := [one for one in found if one.charged is is_charged]:
            yield _row(table, line, run, nearest(each, table.target) if line.measure == "time_to_target" else each[0])


def _row(table: MainTable, line: Line, run: Run, one: Finding) -> tuple[Cell, ...]:
    says = line.says if one.target in (None, table.target) else f"time to {run.metric} {say.metric(one.target)}"
    values = (_value(one, value, run) for value in (one.baseline, one.value))
    change = _more(one, run) if line.measure == "mfu" else figures(one, run)
    return (_first(says) + _beside_of(one, run), line.change, *values, *change)


def _first(text: str) -> str:
    return text[:1].upper() + text[1:]


def _more(finding: Finding, run: Run) -> tuple[str, str, str]:
    """Return the relative change of an arm's MFU: the throughput ratio, scaled by the ratio of peak FLOP/s."""
    same = ("throughput", finding.arm, finding.against)
    rate = next((each for each in run.findings if (each.measure, each.arm, each.against) == same), None)
    known = (finding.value, finding.baseline, rate and rate.value, rate and rate.baseline)
    if rate is None or rate.figure is None or not all(known):
        return say.UNMEASURED, "", ""
    peaks = (finding.value / finding.baseline) / (rate.value / rate.baseline)  # type: ignore[operator]
    low, high = (None if end is None else peaks * end for end in (rate.figure.low, rate.figure.high))
    pairs = tuple(peaks * pair for pair in rate.figure.pairs)
    return figures(replace(rate, figure=Ratio(peaks * rate.figure.mean, low, high, rate.figure.n, pairs)), run)


def _value(finding: Finding, value: float | None, run: Run) -> str:
    words: Mapping[str, Callable[[float | None], str]] = {
        "time_to_target": say.seconds,
        "peak_memory": say.size,
        "final_metric": say.metric,
        "mfu": say.share,
        "throughput": lambda rate: say.rate(rate, run.terms),
    }
    return words[finding.measure](value)


def component_paper_table() -> Table:
    """Return table III of the paper, in which every line includes all lines above."""
    base = COMPONENTS[0]
    rows = tuple(
        (
            _first(each.says),
            f"{each.minutes:g} min",
            f"{each.memory_gb:g} GB",
            f"{each.accuracy:g}%",
            "" if each is base else f"{say.percent(each.minutes / base.minutes - 1)}",
            "" if each is base else f"{say.percent(each.memory_gb / base.memory_gb - 1)}",
        )
        for each in COMPONENTS
    )
    columns = ("Configuration", "Time to 85%", "Memory", "Accuracy", "Time, against the baseline", "Memory, against it")
    return Table("As the paper has it", columns, rows, "", "Every line has all lines above it.", columns[1:])


def component_table(run: Run, plan_kind: str) -> Table:
    """Return the gain of every change in an ablation's plan, with the matching component of the paper."""
    of = {choice: each.says for each in COMPONENTS for choice in each.choices}
    rows = tuple(
        (
            say.one_line(run.labels.get(each.part, each.part)),
            of.get(each.part, ""),
            _measure(each),
            each.against,
            *figures(each, run),
        )
        for each in run.findings
        if each.plan_kind in (plan_kind, "") and each.measure.startswith("component_")
    )
    columns = ("Change", "Paper's component", "Measure", "Set in, or against", "With it", "95% interval", "n")
    note = (
        "Alone: over the loop that changes nothing. In the plan: over the plan without it. Interaction: what it is "
        "worth in the plan over what it is worth alone, of quality beyond that. A loop again is the same loop once "
        "more: what is no further from nothing than that is not told from nothing."
    )
    note = " ".join(filter(None, (note, _sign_of(run))))
    return Table(f"{_title(run)}: {say.PLAN_KINDS[plan_kind]}", columns, rows, "It changes nothing.", note, columns[4:])


def _measure(component: Finding) -> str:
    """Return the measure of a component, with the target for a time."""
    what = component.measure.removeprefix("component_")
    counted = ", search counted" if component.charged else ""
    return what if component.target is None else f"{what} to {say.metric(component.target)}{counted}"


def gain_table(run: Run, plan_kind: str) -> Table:
    """Return the fractions of the saved time by phase and third, next to the paper's claim for such a model."""
    of_it = [each for each in CLAIMS if each.measure == "gain_share" and run.task in tasks_of(each)]
    claimed = {part: f"{100 * each.bar:g}%" for each in of_it for part in each.part}
    rows = tuple(
        (say.one_line(each.part).replace("_", " "), claimed.get(each.part, ""), *figures(each, run))
        for each in run.findings
        if each.plan_kind == plan_kind and each.measure == "gain_share"
    )
    columns = ("Part", "Paper", "Share of what is saved", "95% interval", "n")
    return Table(f"{_title(run)}: {say.PLAN_KINDS[plan_kind]}", columns, rows, "Nothing was saved.", "", columns[1:])


def ranks_paper_table() -> Table:
    """Return table IV of the paper."""
    rows = tuple(
        (
            str(each.num),
            f"{each.baseline_per_s:,g} img/s",
            f"{each.optimised_per_s:,g} img/s",
            say.share(each.baseline_efficiency),
            say.share(each.optimised_efficiency),
        )
        for each in RANKS
    )
    columns = ("GPUs", "Baseline", "Optimised", "Efficiency, baseline", "Efficiency, optimised")
    return Table("As the paper has it", columns, rows, "", "", columns)


def ranks_table(run: Run, plan_kind: str) -> Table:
    """Return the scaling efficiency of the loops of a kind of plan next to the plain loop's, from the same rounds."""
    rows = tuple(
        (
            say.one_line(run.labels.get(each.arm, each.arm)),
            str(each.ranks),
            "" if each.value is None else f"{format_count(each.value)} rows/s",
            *(("100%", "", "") if each.ranks == 1 else figures(each, run)),
        )
        for each in run.findings
        if each.measure == "scaling_efficiency" and each.plan_kind in ("", plan_kind)
    )
    columns = ("Loop", "Ranks", "Throughput", "Efficiency", "95% interval", "n")
    return Table(f"{_title(run)}: {say.PLAN_KINDS[plan_kind]}", columns, rows, "No ranks were timed.", "", columns[1:])


def _title(run: Run) -> str:
    return f"{say.one_line(run.task)}, {say.one_line(run.name)}"


def run_table(runs: Sequence[Run]) -> Table:
    """Return all runs with their machines."""
    named = letters(runs)
    rows = tuple(
        (
            str(number),
            say.one_line(run.name),
            f"{run.kind} of {say.one_line(run.task)}",
            say.one_line(run.trained),
            named[run.machine],
            say.one_line(run.headline.sentence),
        )
        for number, run in enumerate(runs, 1)
    )
    return Table("Runs", ("Run", "From", "What", "Trained on", "Machine", "It says"), rows, "No run was given.")


def machine_table(runs: Sequence[Run]) -> Table:
    """Return the machines, with the versions used on each."""
    rows = tuple(_machines(runs))
    columns = ("Machine", "Processor", "GPU", "Versions", "Runs")
    return Table("Machines", columns, rows, "No machine was recorded.")


def _machines(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    for machine, letter in letters(runs).items():
        facts = dict(machine)
        cores = f", {facts['cpu_cores']} cores" if "cpu_cores" in facts else ""
        for versions in dict.fromkeys(run.versions for run in runs if run.machine == machine):
            which = [str(n) for n, run in enumerate(runs, 1) if (run.machine, run.versions) == (machine, versions)]
            said = ", ".join(f"{name} {say.one_line(value)}" for name, value in versions)
            processor = say.one_line(facts.get("cpu", "unknown")) + cores
            yield letter, processor, say.one_line(facts.get("gpu", "none")), said or "not recorded", ", ".join(which)


def energy_table(runs: Sequence[Run]) -> Table:
    """Return joules per sample of all arms, ratios to other arms, and the energy meter."""
    rows = tuple(
        row
        for number, run in enumerate(runs, 1)
        if run.meter
        for row in _joules(f"{number}: {say.one_line(run.task)}", run)
    )
    note = (
        "Below nothing: the arm takes less than the reference, where no other is named. Joules are of the whole device "
        "or processor, with all else that ran there."
    )
    columns = ("Run", "Arm", "Meter", "Energy per row", *_FIGURES)
    return Table("", columns, rows, "No run was asked for joules.", note, columns[3:])


def _joules(name: str, run: Run) -> Iterator[tuple[str, ...]]:
    found = [each for each in run.findings if each.measure == "energy" and (each.value, each.figure) != (None, None)]
    for each in found:
        figure = figures(each, run) if each.figure is not None else ("", "", "")
        arm = say.one_line(run.labels.get(each.arm, each.arm))
        if each.against not in ("", "reference"):
            arm += f", against {say.one_line(run.labels.get(each.against, each.against))}"
        joules = say.UNMEASURED if each.value is None else format_joules(each.value)
        yield name, arm, say.one_line(run.meter), joules, *figure
    if not found:
        yield name, "", say.one_line(run.meter), say.UNMEASURED, "", "", ""


def record_table(runs: Sequence[Run]) -> Table:
    """Return single runs from their records, without ratios, because they are not paired."""
    rows = tuple(_records(runs))
    columns = ("Run", "Task", "Throughput", "Final metric")
    return Table("", columns, rows, "No record of a single run was given.", numeric=columns[2:])


def _records(runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    for number, run in enumerate(runs, 1):
        if run.kind == "record":
            found = {each.measure: each for each in run.findings}
            rate, final = found.get("throughput"), found.get("final_metric")
            said = say.UNMEASURED if final is None else f"{say.one_line(final.said)} {say.metric(final.value)}"
            yield str(number), say.one_line(run.task), say.rate(rate and rate.value, "rows"), said
