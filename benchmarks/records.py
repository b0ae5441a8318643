"""Benchmark records for the pages of docs: rows, machine, and link to the full results."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.paper.evaluation_archive import unpack_all, unpacked
from trimtab.experiments.ablation.ablation_rows import ablation_object
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison.comparison_rows import benchmark_object
from trimtab.experiments.results import read_result
from trimtab.plans.plan import Plan

Row = dict[str, Any]
EVALUATION = "evaluation-epyc-avx2-2core"
# Sections of docs/RESULTS.md, with the kinds of their records.
SECTIONS = {
    "Plans and recipes compared with the unchanged loop": ("compare", "phases"),
    "Plans for hand-tuned recipes, and searches": ("no_harm", "strong_sweep", "exhaustive", "planted"),
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
    """Return a comparison or an ablation of an evaluation."""
    folder = unpacked(root, evaluation)
    found = read_result(folder / name / "report.json")
    made = benchmark_object(found) if isinstance(found, Comparison) else ablation_object(found)
    machine = _machine(json.loads((folder / "machine.json").read_text(encoding="utf-8")))
    return Record(f"{evaluation}, {name}", evaluation, machine, tuple(made["rows"]))


def is_evaluated(root: Path, name: str, evaluation: str = EVALUATION) -> bool:
    """Return True if a run of an evaluation has a report."""
    return (unpacked(root, evaluation) / name / "report.json").is_file()


def plan_of(root: Path, name: str, plan_kind: str) -> Plan:
    """Return a plan of a kind from a comparison of the evaluation.

    Raises:
        KeyError: The comparison has no plan of the kind.
    """
    found = read_result(unpacked(root, EVALUATION) / name / "report.json")
    return (found.plans if isinstance(found, Comparison) else {})[plan_kind]


def _read(path: Path) -> Record:
    held = json.loads(path.read_text(encoding="utf-8"))
    anchor = anchor_of(section_of(held["name"]))
    return Record(path.stem, anchor, _machine(held.get("environment", {})), tuple(held["rows"]))


def timed_on_gpus(root: Path) -> list[Record]:
    """Return the timed comparisons of plans with the baseline on GPUs."""
    folders = [path.name for path in unpack_all(root)]
    names = [(folder, name) for folder in folders for name in ("gpt2-timed", "resnet-timed")]
    return [evaluated(root, name, folder) for folder, name in names if is_evaluated(root, name, folder)]


def _machine(environment: Mapping[str, str]) -> str:
    return environment.get("gpu", environment.get("cpu", "")).replace("(R)", "").replace(" Processor", "")
