"""Several runs as flat rows, printed by `trimtab report RUN RUN ... --json`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.paper.arithmetic import checks
from benchmarks.paper.claims import Claim
from benchmarks.paper.finding import Finding, Run
from benchmarks.paper.judge import NOT_MEASURED, Judged, headline, judge
from benchmarks.paper.machines import letters
from trimtab.core.serialization import to_jsonable
from trimtab.experiments.comparison.comparison_result import Ratio
from trimtab.experiments.comparison.comparison_rows import ROWS_SCHEMA, interval_of


def evaluation_object(runs: Sequence[Run], command: str) -> dict[str, Any]:
    """Return the benchmark object of several runs; ratios are arm over other arm within a run."""
    judged = judge(runs)
    found = {
        "schema": ROWS_SCHEMA,
        "name": "report",
        "environment": _shared(runs) | {"command": command},
        "headline": headline(judged),
        "rows": [*_claims(judged), *_figures(runs), *({"metric": "arithmetic"} | vars(check) for check in checks())],
    }
    return dict(to_jsonable(found))


def _shared(runs: Sequence[Run]) -> dict[str, str]:
    """Return the environment values common to all runs."""
    first, *others = (dict(run.environment) for run in runs)
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _claims(judged: Mapping[Claim, Sequence[Judged]]) -> Iterator[dict[str, Any]]:
    for claim, found in judged.items():
        head = {"metric": "claim", "claim": claim.says, "source": claim.source, "sense": claim.sense, "bar": claim.bar}
        if not found:
            yield head | {"status": NOT_MEASURED}
        for each in found:
            where = {
                "run": each.run.name,
                "task": each.run.task,
                "arm": each.finding.arm,
                "plan_kind": each.finding.plan_kind,
            }
            status = {"status": each.status, "here": each.here, "why": each.why}
            yield head | status | where | _interval(each.finding.figure)


def _figures(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    named = letters(runs)
    for run in runs:
        head = {"run": run.name, "kind": run.kind, "task": run.task, "machine": named[run.machine]}
        for each in run.findings:
            meter = {"meter": run.meter} if each.measure == "energy" else {}
            yield {"metric": each.measure} | head | _figure(each) | meter


def _figure(found: Finding) -> dict[str, Any]:
    every = {"arm": found.arm, "against": found.against, "plan_kind": found.plan_kind}
    every |= {"value": found.value, "baseline": found.baseline, "said": found.said}
    where = {"target": found.target, "ranks": found.ranks, "part": found.part or None, "failed": found.failed or None}
    where |= {"at_least": found.at_least, "at_most": found.at_most}
    every |= {"charged": found.charged} if found.target is not None else {}
    return every | {key: value for key, value in where.items() if value is not None} | _interval(found.figure)


def _interval(figure: Ratio | None) -> dict[str, Any]:
    return {"mean": None, "low": None, "high": None, "n": 0} if figure is None else interval_of(figure)
