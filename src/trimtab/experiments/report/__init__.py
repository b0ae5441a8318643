"""Reports: a self-contained HTML page, the same as Markdown, the values as JSON, and a terminal view.

Reads values only. matplotlib (figures) and rich (terminal) are optional and loaded on first use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.core.serialization import to_json, write_whole
from trimtab.core.step_phases import TimedGain
from trimtab.experiments.ablation.ablation_result import Ablation
from trimtab.experiments.comparison.comparison_result import Comparison, ThirdRow
from trimtab.experiments.evaluation.result import Run
from trimtab.experiments.evaluation.rows import evaluation_object
from trimtab.experiments.report import ablation_report, comparison_report, evaluation_outline
from trimtab.experiments.report.document import Document

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "evaluation_texts",
    "gains_report",
    "terminal_evaluation",
    "terminal_report",
    "write_evaluation",
    "write_report",
]


def write_report(found: Comparison | Ablation, directory: Path) -> dict[str, Path]:
    """Write `report.html`, `report.md` and `report.json`; return the paths by kind: html, md, json.

    Raises:
        DependencyError: matplotlib is not installed; nothing is written.
    """
    return _write(_texts(partial(_document, found), partial(to_json, found, indent=1)), "report", directory)


def write_evaluation(
    runs: Sequence[Run], directory: Path, command: str, goals: Sequence[tuple[str, str, str]] = ()
) -> dict[str, Path]:
    """Write `evaluation.html`, `evaluation.md` and `evaluation.json` of several runs; return the paths by kind.

    Args:
        runs: the runs.
        directory: output folder.
        command: command line to reproduce the evaluation.
        goals: (goal, status, measurement) by goal.

    Raises:
        DependencyError: matplotlib is not installed; nothing is written.
    """
    return _write(evaluation_texts(runs, command, goals), "evaluation", directory)


def evaluation_texts(runs: Sequence[Run], command: str, goals: Sequence[tuple[str, str, str]] = ()) -> dict[str, str]:
    """Return the texts written by `write_evaluation`, by kind; equal runs give equal texts.

    Raises:
        DependencyError: matplotlib is not installed.
    """

    def values() -> str:
        return json.dumps(evaluation_object(runs, command), indent=1, allow_nan=False, ensure_ascii=False)

    return _texts(partial(evaluation_outline.document, runs, command, goals), values)


def _texts(make: Callable[[], Document], values: Callable[[], str]) -> dict[str, str]:
    # Imported first, so that a missing matplotlib is reported before the document is built.
    from trimtab.experiments.report.html import html_page
    from trimtab.experiments.report.markdown import markdown_page

    document = make()
    return {"html": html_page(document), "md": markdown_page(document), "json": values() + "\n"}


def _write(texts: Mapping[str, str], stem: str, directory: Path) -> dict[str, Path]:
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


def terminal_evaluation(runs: Sequence[Run], command: str) -> RenderableType:
    """Return the view of several runs for `rich.print`.

    Raises:
        DependencyError: rich is not installed.
    """
    from trimtab.experiments.report.terminal import terminal_view

    return terminal_view(evaluation_outline.document(runs, command))


def _document(found: Comparison | Ablation) -> Document:
    return ablation_report.document(found) if isinstance(found, Ablation) else comparison_report.document(found)
