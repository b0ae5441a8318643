"""Benchmark records for the pages of docs: rows, machine, and link to the full results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.evaluation_record import record_of, records, rows_of

Row = dict[str, Any]
EVALUATION = "evaluation-epyc-avx2-2core"
# Sections of docs/RESULTS.md, with the kinds of their records.
SECTIONS = {
    "Plans and recipes compared with the unchanged loop": ("compare", "phases"),
    "Plans for hand-tuned recipes, and searches": ("no_harm", "strong_sweep", "exhaustive", "planted"),
    "Single settings on unmodified models": ("settings_on_models", "compile_time"),
    "Memory limits and recomputation": ("budget_sweep", "frontier", "frontier_compiled", "frontier_walk"),
    "Predictions": ("prediction", "published", "published_ranks", "rank_memory"),
    "Planning time": ("planning_time", "probing", "import_time"),
    "Overhead": ("overhead", "hosts", "monitor"),
    "Adaptive batch size": ("regret",),
    "Ranks": ("scaling", "sending"),
    "Checkpoints and faults": ("faults", "checkpoint_cost"),
}


def section_of(kind: str) -> str:
    """Return the section of docs/RESULTS.md with the records of a kind."""
    return next(title for title, kinds in SECTIONS.items() if kind in kinds)


def anchor_of(title: str) -> str:
    """Return the anchor of a heading."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


@dataclass(frozen=True)
class Record:
    """Results of a benchmark run.

    Args:
        name: Display name.
        anchor: Anchor of its section in docs/RESULTS.md.
        machine: GPU or CPU as text.
        rows: Results.
    """

    name: str
    anchor: str
    machine: str
    rows: tuple[Row, ...]

    @property
    def link(self) -> str:
        """Markdown link to the record."""
        return f"[{self.name}](RESULTS.md#{self.anchor})"

    def of(self, metric: str, **fields: Any) -> list[Row]:
        """Return the rows of a metric with the given field values."""
        sought = {"metric": metric} | fields
        return [row for row in self.rows if all(row.get(key) == value for key, value in sought.items())]

    def one(self, metric: str, **fields: Any) -> Row:
        """Return the only row of a metric with the given field values.

        Raises:
            ValueError: There is no such row, or several.
        """
        found = self.of(metric, **fields)
        if len(found) != 1:
            raise ValueError(f"expected one row of {metric} with {fields} in {self.name}, found {len(found)}")
        return found[0]


def newest(root: Path, name: str) -> Record:
    """Return the newest record whose name starts with `name`."""
    paths = sorted((root / "benchmarks" / "results").glob(f"{name}-*.json"), key=lambda path: path.stem[-10:])
    return _read(paths[-1])


def every(root: Path, name: str) -> list[Record]:
    """Return all records whose name starts with `name`, sorted by name."""
    return [_read(path) for path in sorted((root / "benchmarks" / "results").glob(f"{name}-*.json"))]


def evaluated(root: Path, name: str, evaluation: str = EVALUATION) -> Record:
    """Return a run of an evaluation."""
    found = json.loads(record_of(root, evaluation).read_text(encoding="utf-8"))
    run = next(run for run in found["runs"] if run["name"] == name)
    return Record(f"{evaluation}, {name}", evaluation, _machine(found["environment"]), tuple(map(_whole, rows_of(run))))


def _whole(row: Row) -> Row:
    """Return a row of an evaluation with the keys that are left out if they are false or empty."""
    defaults = {"low": None, "high": None, "charged": False, "censored": "bound" in row, "verdict": ""}
    counted = {"reached": 0, "reached_against": 0} if row["metric"] == "time_to_target_ratio" else {}
    return defaults | counted | row


def is_evaluated(root: Path, name: str, evaluation: str = EVALUATION) -> bool:
    """Return True if an evaluation has a run."""
    path = record_of(root, evaluation)
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"runs": []}
    return any(run["name"] == name for run in found["runs"])


def _read(path: Path) -> Record:
    held = json.loads(path.read_text(encoding="utf-8"))
    anchor = anchor_of(section_of(held["name"]))
    return Record(path.stem, anchor, _machine(held.get("environment", {})), tuple(held["rows"]))


def timed_on_gpus(root: Path) -> list[Record]:
    """Return the timed comparisons of plans with the baseline on GPUs."""
    names = [(evaluation, name) for evaluation in records(root) for name in ("gpt2-timed", "resnet-timed")]
    return [evaluated(root, name, evaluation) for evaluation, name in names if is_evaluated(root, name, evaluation)]


def _machine(environment: Mapping[str, str]) -> str:
    return environment.get("gpu", environment.get("cpu", "")).replace("(R)", "").replace(" Processor", "")
