"""Reports: a self-contained HTML page, the same as Markdown, the values as JSON, and a terminal view.

Reads values only. matplotlib (figures) and rich (terminal) are optional and loaded on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.core.serialization import to_json, write_whole
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.comparison.comparison_result import Comparison, ThirdRow
from trimtab.experiments.report import ablation_report, comparison_report
from trimtab.experiments.report.document import Document

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "gains_report",
    "page_texts",
    "terminal_report",
    "write_pages",
    "write_report",
]


def write_report(found: Comparison | Ablation, directory: Path) -> dict[str, Path]:
    """Write `report.html`, `report.md` and `report.json`; return the paths by kind: html, md, json.

    Raises:
        DependencyError: matplotlib is not installed; nothing is written.
    """
    return write_pages(page_texts(partial(_document, found), partial(to_json, found, indent=1)), "report", directory)


def page_texts(make: Callable[[], Document], values: Callable[[], str]) -> dict[str, str]:
    """Return a report as text by kind: html, md, json.

    Args:
        make: returns the document.
        values: returns the JSON text.

    Raises:
        DependencyError: matplotlib is not installed.
    """
    # Imported first, so that a missing matplotlib is reported before the document is built.
    from trimtab.experiments.report.html import html_page
    from trimtab.experiments.report.markdown import markdown_page

    document = make()
    return {"html": html_page(document), "md": markdown_page(document), "json": values() + "\n"}


def write_pages(texts: Mapping[str, str], stem: str, directory: Path) -> dict[str, Path]:
    """Write the texts of a report as `<stem>.<kind>` into a folder, each atomically; return the paths by kind."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {kind: directory / f"{stem}.{kind}" for kind in texts}
    for kind, path in paths.items():
        write_whole(path, texts[kind])
    return paths


def terminal_report(found: Comparison | Ablation) -> RenderableType:
    """Return a view for `rich.print`: verdict, key figures and main tables.

    Raises:
        DependencyError: rich is not installed.
    """
    from trimtab.experiments.report.terminal import terminal_view

    return terminal_view(_document(found))


def gains_report(gains: Sequence[TimedGain], thirds: Sequence[Sequence[ThirdRow]]) -> RenderableType:
    """Return the attribution of every gain for `rich.print`, with a side-by-side table of several gains at the end.

    Raises:
        DependencyError: rich is not installed.
    """
    from trimtab.experiments.report.comparison_report import gain_sections
    from trimtab.experiments.report.terminal import sections_view

    return sections_view(gain_sections(gains, thirds))


def _document(found: Comparison | Ablation) -> Document:
    return ablation_report.document(found) if isinstance(found, Ablation) else comparison_report.document(found)
