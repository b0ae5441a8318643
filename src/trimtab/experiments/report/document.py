"""What a report is made of, once for every rendering: the verdict, key figures, and sections of blocks in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.experiments.comparison.result import Verdict
from trimtab.experiments.report.tables import Table

if TYPE_CHECKING:  # it comes with matplotlib, without which the text is written
    from trimtab.experiments.report.drawing import Drawing


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
    """Something to type."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A figure by name, of one tier where plans are compared."""

    name: str
    tier: str = ""


Block = Heading | Paragraph | Bullets | Code | Picture | Table


@dataclass(frozen=True)
class Section:
    """A titled part; `brief` ones are shown in the terminal too."""

    title: str
    blocks: tuple[Block, ...]
    brief: bool = False


@dataclass(frozen=True)
class Tile:
    """One key figure: what it is, the figure, and how sure it is."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True)
class Document:
    """A report.

    Args:
        kind: "comparison" or "ablation" of the `task`, or "evaluation" of several. verdict: read first.
            byline: of what it is. draw: returns the drawing of a picture.
    """

    kind: str
    task: str
    verdict: Verdict
    description: str
    byline: str
    tiles: tuple[Tile, ...]
    sections: tuple[Section, ...]
    draw: Callable[[Picture], Drawing]
