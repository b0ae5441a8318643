"""Result of `trimtab phases`: values only, readable without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.step_phases import TimedGain
from trimtab.experiments.comparison.comparison_result import ThirdRow

PAGE_SCHEMA = 2
FILE = "phases.json"  # File name in an evaluation's folder.


@dataclass(frozen=True)
class PhaseResult:
    """Gains, each with its comparison by thirds of training if recorded; a JSON value."""

    gains: tuple[TimedGain, ...]
    thirds: tuple[tuple[ThirdRow, ...], ...]
    schema: int = PAGE_SCHEMA


def merge_results(pages: Sequence[PhaseResult]) -> PhaseResult:
    """Return the pages merged into a single page."""
    return PhaseResult(tuple(g for page in pages for g in page.gains), tuple(t for page in pages for t in page.thirds))
