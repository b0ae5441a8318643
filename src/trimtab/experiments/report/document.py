"""Structure of a report, shared by all formats: verdict, key figures and sections of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.experiments.comparison.comparison_result import Verdict
from trimtab.experiments.report.tables import Table

if TYPE_CHECKING:  # Imports matplotlib, which is not needed for text.
    from trimtab.experiments.report.figure_spec import FigureSpec


@dataclass(frozen=True)
class Heading:
    """A heading inside a section."""

    text: str


@dataclass(frozen=True)
class Paragraph:
    """Running text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """Sentences of equal rank."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Code:
    """A command line to type."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A figure by name, of a single kind of plan if plans are compared."""

    name: str
    plan_kind: str = ""


Block = Heading | Paragraph | Bullets | Code | Picture | Table


@dataclass(frozen=True)
class Section:
    """A titled part; `brief` sections also appear in the terminal."""

    title: str
    blocks: tuple[Block, ...]
    brief: bool = False


@dataclass(frozen=True)
class Tile:
    """A key figure: label, value and uncertainty."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Document:
    """A report.

    Args:
        kind: "comparison" or "ablation" of the `task`, or "evaluation" of several tasks.
        verdict: the headline verdict.
        description: description of the task.
        byline: number of runs, metric and date.
        tiles: key figures.
        sections: sections in reading order.
        draw: returns the drawing of a picture.
    """

    kind: str
    task: str
    verdict: Verdict
    description: str
    byline: str
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    draw: Callable[[Picture], FigureSpec]
