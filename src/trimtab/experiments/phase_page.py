"""What `trimtab phases` writes: values only, which are read without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.core.phases import Gain
from trimtab.experiments.comparison.result import ThirdRow

PAGE_SCHEMA = 1
FILE = "phases.json"  # what an evaluation calls it


@dataclass(frozen=True)
class PhasePage:
    """Gains, and for each the thirds of training that its records tell; a JSON value."""

    gains: tuple[Gain, ...]
    thirds: tuple[tuple[ThirdRow, ...], ...]
    schema: int = PAGE_SCHEMA


def merged(pages: Sequence[PhasePage]) -> PhasePage:
    """Return several pages as one."""
    return PhasePage(tuple(g for page in pages for g in page.gains), tuple(t for page in pages for t in page.thirds))
