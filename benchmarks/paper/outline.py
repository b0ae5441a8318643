"""Report of several runs: the paper's claims with verdicts, the paper's tables, and the list of runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from benchmarks.paper import tables
from benchmarks.paper.claims import IMAGES, MACHINE, MAIN_TABLES, TOKENS, Claim, MainTable
from benchmarks.paper.finding import Run
from benchmarks.paper.judge import LITERAL, NEAR, Judged, headline, judge
from benchmarks.paper.machines import sameness
from benchmarks.paper.projection import projection_sentences
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.comparison_report import side_by_side
from trimtab.experiments.report.document import (
    Block,
    Bullets,
    Code,
    Document,
    Heading,
    Paragraph,
    Picture,
    Section,
)

_CLAIMED = (
    f"The paper's figures are of {MACHINE}. P1 is its recipe as section IV.B lists it, in the precision that its label "
    "says: half precision where the device has it, fp32 elsewhere. That list has no clipping (eq. 12), and so P1 has "
    "none. It holds the gradient of each micro-batch until its "
    "window ends, for the variance of eq. 7; ZeRO-2 has nothing to share out on one device. What trimtab's plans reach "
    "is told apart, and equivalent plans apart from tuned plans. Times stand without planning and "
    "with it."
)
_SHARES = (
    "Shares of the seconds that an arm saves: by where a step spends them, of laps of both arms in turns under a "
    "clock, and by thirds of training, of the races. Each is a mean of noisy pairs, and what the clock itself takes is "
    "in no phase: they need not add up to 100%. The paper gives percentages without saying how they were measured; a "
    f"claim passes where the whole interval is within {100 * NEAR:g} points of it, and fails where no part of it is. A "
    "third of training has a third of the gain where nothing depends on how far training went: an interval that holds "
    "that shows nothing of when the gain comes."
)


def document(runs: Sequence[Run], command: str, goals: Sequence[tuple[str, str, str]] = ()) -> Document:
    """Return the report of several runs, with the status of goals if given."""
    judged = judge(runs)
    return Document(
        "evaluation",
        "the paper, re-made",
        headline(judged),
        "What the paper claims, beside what these runs measured.",
        f"{len(runs)} runs of {len({run.task for run in runs})} tasks · {sameness(runs)[0]}",
        (),
        (
            *((Section("Goals", (tables.goal_table(goals),), brief=True),) if goals else ()),
            *_sections(runs, judged, command),
        ),
        _no_drawing,
    )


def _known(runs: Sequence[Run]) -> Iterator[Block]:
    """Yield defects found in paired runs after they were recorded, with the affected runs."""
    of: dict[str, list[str]] = {}
    for number, run in enumerate(runs, 1):
        for says in run.known:
            of.setdefault(says, []).append(f"{number} ({run.name})")
    if of:
        told = ((f"Run{'s' * (len(which) > 1)} {', '.join(which)}", says) for says, which in of.items())
        yield Bullets(tuple(f"{which}: {say.one_line(says)}" for which, says in told))


def _no_drawing(picture: Picture) -> NoReturn:
    raise ValueError(f"{picture.name}: this report draws nothing")


def _sections(runs: Sequence[Run], judged: Mapping[Claim, Sequence[Judged]], command: str) -> Iterator[Section]:
    yield Section("The paper's claims", tuple(_claims(runs, judged)), brief=True)
    yield Section("What the paper's own figures come to", (tables.arithmetic_table(),), brief=True)
    for table in MAIN_TABLES:
        yield Section(f"{table.name}: {table.workload.says}", tuple(_main(table, runs)), brief=True)
    yield Section("Table III: what each component is worth", tuple(_components(runs)), brief=True)
    yield Section("Where the gain comes from (section V.D)", tuple(_gains(runs)), brief=True)
    yield Section("Table IV: ranks", tuple(_ranks(runs)), brief=True)
    yield Section("Energy", (tables.energy_table(runs),), brief=True)
    yield Section("Single runs", (tables.record_table(runs),))
    where = (Bullets(sameness(runs)), tables.run_table(runs), tables.machine_table(runs))
    yield Section("Runs and machines", where, brief=True)
    yield Section("Reproduce", (Code(command), *_commands(runs)))


def _claims(runs: Sequence[Run], judged: Mapping[Claim, Sequence[Judged]]) -> Iterator[Block]:
    yield Paragraph(_CLAIMED)
    yield from _known(runs)
    literal = {claim: [each for each in found if each.is_literal] for claim, found in judged.items()}
    yield tables.claim_table(literal, "By the paper's own recipe (P1)", runs, whole=True)
    for plan_kind in ("equivalent", "tuned"):
        ours = {
            claim: [each for each in found if not each.is_literal and each.finding.plan_kind == plan_kind]
            for claim, found in judged.items()
        }
        yield tables.claim_table(ours, f"By trimtab's plans. {say.PLAN_KINDS[plan_kind]}", runs, whole=False)


def _main(table: MainTable, runs: Sequence[Run]) -> Iterator[Block]:
    yield tables.paper_table(table)
    known = (*table.workload.tasks, *table.workload.smaller)
    found = [(number, run) for number, run in enumerate(runs, 1) if run.kind == "comparison" and run.task in known]
    if not found:
        yield Paragraph("Not measured: no comparison of it was given.")
    for number, run in found:
        yield Heading(f"Run {number}: {say.one_line(run.task)}, {_where(run)}")
        for arm in (LITERAL, "strict", "strong", "muon", "equivalent_plan", "tuned_plan"):
            if any(each.arm == arm and each.against == "reference" for each in run.findings):
                yield tables.beside_table(table, run, arm)


def _where(run: Run) -> str:
    return say.one_line(run.environment.get("gpu") or run.environment.get("cpu") or "machine not recorded")


def _components(runs: Sequence[Run]) -> Iterator[Block]:
    yield tables.component_paper_table()
    found = [run for run in runs if run.kind == "ablation"]
    if not found:
        yield Paragraph("Not measured: no ablation was given.")
    for run in found:
        plan_kinds = [
            plan_kind
            for plan_kind in ("equivalent", "tuned")
            if any(each.plan_kind == plan_kind and each.part for each in run.findings)
        ]
        yield from (tables.component_table(run, plan_kind) for plan_kind in plan_kinds or ["equivalent"])


def _gains(runs: Sequence[Run]) -> Iterator[Block]:
    yield Paragraph(_SHARES)
    found = [(run, plan_kind) for run in runs for plan_kind in ("equivalent", "tuned") if _has_shares(run, plan_kind)]
    if not found:
        yield Paragraph("No arm saved anything that could be shared out.")
    yield from (tables.gain_table(run, plan_kind) for run, plan_kind in found)
    compared = [(number, run) for number, run in enumerate(runs, 1) if run.kind in ("comparison", "phases")]
    clocked = [(number, run.gain) for number, run in compared if run.gain is not None]
    if clocked:
        beside = _of_each_kind(clocked)
        yield side_by_side([gain for _, gain in beside])
        if len(beside) < len(clocked):
            which = " and ".join(f"run {number}" for number, _ in beside)
            told = "of images and of text the run with most laps in one process, of equals the last that is given"
            yield Paragraph(f"Beside one another stand {which}: {told}. Those of the others are in their records.")
        yield Bullets(tuple(f"Run {number}: {' '.join(projection_sentences(gain))}" for number, gain in clocked))
    if others := [f"{number}: {say.one_line(run.task)}" for number, run in compared if run.gain is None]:
        yield Paragraph(f"Not clocked by phase: {'; '.join(others)}.")


def _of_each_kind(clocked: Sequence[tuple[int, TimedGain]]) -> list[tuple[int, TimedGain]]:
    """Return the run with the most rounds for images (a CNN) and for text (a transformer); the last of equals.

    Only single-process runs of plans with changes count. If a kind is missing, all runs are returned.
    """
    found = []
    for workload in (IMAGES, TOKENS):
        known = (*workload.tasks, *workload.smaller)
        of_it = [each for each in clocked if each[1].task in known and each[1].changes and not each[1].on_ranks]
        found += [max(reversed(of_it), key=lambda each: len(each[1].plan.laps))] if of_it else []
    return found if len(found) == 2 else list(clocked)


def _has_shares(run: Run, plan_kind: str) -> bool:
    return any(each.measure == "gain_share" and each.plan_kind == plan_kind for each in run.findings)


def _ranks(runs: Sequence[Run]) -> Iterator[Block]:
    yield tables.ranks_paper_table()
    found = [run for run in runs if any(each.ranks for each in run.findings)]
    if not found:
        yield Paragraph("Not measured: no scaling table was given.")
    for run in found:
        yield tables.ranks_table(run, "equivalent")
        if any(each.ranks and each.plan_kind == "tuned" for each in run.findings):
            yield tables.ranks_table(run, "tuned")


def _commands(runs: Sequence[Run]) -> Iterator[Block]:
    told = [run for run in runs if run.command]
    if told:
        yield Bullets(tuple(f"{say.one_line(run.name)}: {say.one_line(run.command)}" for run in told))
