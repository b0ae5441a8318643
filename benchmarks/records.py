"""Records as pages name them: their rows, their machine, and the link to where they stand whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.plan import Plan
from trimtab.experiments.ablation.rows import ablation_object
from trimtab.experiments.comparison.result import Comparison
from trimtab.experiments.comparison.rows import benchmark_object
from trimtab.experiments.report import read_report

Row = dict[str, Any]
EVALUATION = "evaluation-epyc-avx2-2core"


@dataclass(frozen=True)
class Record:
    """What was measured in one run of a benchmark.

    Args:
        name: as it is told. anchor: of its section of docs/RESULTS.md. machine: its GPU or processor, in words.
    """

    name: str
    anchor: str
    machine: str
    rows: tuple[Row, ...]

    @property
    def link(self) -> str:
        """The record's name, which leads to it."""
        return f"[{self.name}](RESULTS.md#{self.anchor})"

    def of(self, metric: str, **fields: Any) -> list[Row]:
        """Return the rows of a metric that hold these values."""
        sought = {"metric": metric} | fields
        return [row for row in self.rows if all(row.get(key) == value for key, value in sought.items())]

    def one(self, metric: str, **fields: Any) -> Row:
        """Return the row of a metric that holds these values.

        Raises:
            ValueError: there is none, or there are several.
        """
        found = self.of(metric, **fields)
        if len(found) != 1:
            raise ValueError(f"expected one row of {metric} with {fields} in {self.name}, found {len(found)}")
        return found[0]


def newest(root: Path, name: str) -> Record:
    """Return the last record, by date, of a benchmark's part."""
    paths = sorted((root / "benchmarks" / "results").glob(f"{name}-*.json"), key=lambda path: path.stem[-10:])
    return _read(paths[-1])


def every(root: Path, name: str) -> list[Record]:
    """Return all records of a benchmark's part, by name."""
    return [_read(path) for path in sorted((root / "benchmarks" / "results").glob(f"{name}-*.json"))]


def evaluated(root: Path, name: str, evaluation: str = EVALUATION) -> Record:
    """Return a run of an evaluation, of races or of an ablation."""
    folder = root / "benchmarks" / "results" / evaluation
    found = read_report(folder / name / "report.json")
    made = benchmark_object(found) if isinstance(found, Comparison) else ablation_object(found)
    machine = _machine(json.loads((folder / "machine.json").read_text(encoding="utf-8")))
    return Record(f"{evaluation}, {name}", f"{name}-{found.task}", machine, tuple(made["rows"]))


def is_evaluated(root: Path, name: str, evaluation: str = EVALUATION) -> bool:
    """Return whether a run of an evaluation has left its report."""
    return (root / "benchmarks" / "results" / evaluation / name / "report.json").is_file()


def plan_of(root: Path, name: str, tier: str) -> Plan:
    """Return the plan of a tier that a comparison of the evaluation raced.

    Raises:
        KeyError: it has none.
    """
    found = read_report(root / "benchmarks" / "results" / EVALUATION / name / "report.json")
    return (found.plans if isinstance(found, Comparison) else {})[tier]


def _read(path: Path) -> Record:
    held = json.loads(path.read_text(encoding="utf-8"))
    return Record(path.stem, path.stem, _machine(held.get("environment", {})), tuple(held["rows"]))


def timed_on_gpus(root: Path) -> list[Record]:
    """Return what was timed of plans against the plain loop on GPUs."""
    folders = sorted(path.name for path in (root / "benchmarks" / "results").glob("evaluation-*"))
    names = [(folder, name) for folder in folders for name in ("gpt2-timed", "resnet-timed")]
    return [evaluated(root, name, folder) for folder, name in names if is_evaluated(root, name, folder)]


def _machine(environment: Mapping[str, str]) -> str:
    return environment.get("gpu", environment.get("cpu", "")).replace("(R)", "").replace(" Processor", "")
