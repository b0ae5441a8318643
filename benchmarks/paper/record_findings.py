"""Findings of the record of a single run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.paper.finding import Finding, Run
from trimtab.core.energy_reading import OTHER_RANKS, MeterFacts
from trimtab.core.record import RunRecord, RunSummary, summary_of
from trimtab.core.serialization import from_jsonable
from trimtab.experiments.comparison.comparison_result import NO_VERDICT, Verdict
from trimtab.experiments.comparison.comparison_statistics import trained


def of_record(name: str, record: RunRecord | RunSummary) -> Run:
    """Return the run of a single record, without ratios, because it is not paired."""
    found = summary_of(record) if isinstance(record, RunRecord) else record
    header, steps = found.header, found.steps
    rows, seconds = trained(found)
    ended = "cut off" if found.end is None else found.end.reason
    what = f"{len(steps)} windows of {rows:,} rows" if steps else f"{rows:,} rows of a race"
    said = f"{header.name}, seed {header.seed}: {what}, ended: {ended}"
    findings = [Finding("throughput", "run", value=rows / seconds)] if seconds > 0 and rows else []
    if found.last_evaluation is not None:
        metric, value = next(iter(found.last_evaluation.metrics.items()), ("", math.nan))
        findings.append(Finding("final_metric", "run", value=value, said=metric))
    ending, meter = {} if found.end is None else found.end.detail, _meter_of(found)
    # The record has the samples of all ranks, but not their joules.
    if meter is None or OTHER_RANKS not in meter.uncounted:
        findings += [Finding("energy", "run", value=each) for each in _joules_per_sample(found)]
    data = header.detail.get("data", {})
    return Run(
        name,
        "record",
        header.name,
        header.environment,
        Verdict(NO_VERDICT, said),
        tuple(findings),
        labels={"run": "one run"},
        data_sha256=str(data.get("sha256", "")) if isinstance(data, dict) else "",
        meter=_said_of(meter, ending),
    )


def _joules_per_sample(found: RunSummary) -> Iterator[float]:
    """Yield joules per sample, computed from mean power over the training time.

    Mean power is used because an evaluation cuts off up to a second of metered training before it. For a resumed run,
    only
    training after the resume counts.
    """
    ending = {} if found.end is None else found.end.detail
    joules, seconds, begun = (ending.get(f"energy_{key}") for key in ("j", "s", "from_step"))
    rows, trained_s = found.steps.trained(begun if isinstance(begun, int) else 0)
    if isinstance(joules, int | float) and rows:
        is_timed = isinstance(seconds, int | float) and seconds > 0 and trained_s > 0
        yield (joules / seconds * trained_s if is_timed else joules) / rows


def _meter_of(found: RunSummary) -> MeterFacts | None:
    """Return the energy meter of a run, or None if not recorded."""
    said = found.header.detail.get("meter")
    return from_jsonable(MeterFacts, said) if isinstance(said, Mapping) else None


def _said_of(meter: MeterFacts | None, ending: Mapping[str, Any]) -> str:
    """Return the description of a run's energy meter, or the reason for missing figures; "" without metering."""
    provenance = ending.get("energy")
    if not isinstance(provenance, str):
        return ""
    if ending.get("energy_j") is None:
        return f"not measured: {ending.get('energy_reason', '')}"
    return provenance if meter is None else meter.describe()
