"""The report of a comparison: one self-contained page, the same as Markdown, the values as JSON, and a terminal view.

Reads values of `Comparison` only. matplotlib (figures) and rich (terminal) are optional and loaded on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.core.codec import to_json, write_whole
from trimtab.core.phases import Gain
from trimtab.experiments.result import Comparison, ThirdRow

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["gains_report", "terminal_report", "write_report"]


def write_report(comparison: Comparison, directory: Path) -> dict[str, Path]:
    """Write `report.html`, `report.md` and `report.json`; return their paths by kind: html, md, json.

    Raises:
        DependencyError: matplotlib is not installed; nothing is written then.
    """
    from trimtab.experiments.report.html import html_report
    from trimtab.experiments.report.markdown import markdown_report

    texts = {
        "html": html_report(comparison),
        "md": markdown_report(comparison),
        "json": to_json(comparison, indent=1) + "\n",
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {kind: directory / f"report.{kind}" for kind in texts}
    for kind, path in paths.items():
        write_whole(path, texts[kind])
    return paths


def terminal_report(comparison: Comparison) -> RenderableType:
    """Return what `rich.print` shows: verdict, key figures and the main tables.

    Raises:
        DependencyError: rich is not installed.
    """
    from trimtab.experiments.report.terminal import terminal_view

    return terminal_view(comparison)


def gains_report(gains: Sequence[Gain], thirds: Sequence[Sequence[ThirdRow]]) -> RenderableType:
    """Return where the gain of each comes from, for `rich.print`; several side by side at the end.

    Raises:
        DependencyError: rich is not installed.
    """
    from trimtab.experiments.report.outline import gain_sections
    from trimtab.experiments.report.terminal import sections_view

    return sections_view(gain_sections(gains, thirds))
