"""Reports: one self-contained page, the same as Markdown, the values as JSON, and a terminal view.

Reads values only. matplotlib (figures) and rich (terminal) are optional and loaded on first use.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.core.codec import read_json, to_json, write_whole
from trimtab.experiments.ablation import Ablation
from trimtab.experiments.report import ablation_outline, outline
from trimtab.experiments.report.document import Document
from trimtab.experiments.result import Comparison

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["read_report", "terminal_report", "write_report"]


def write_report(found: Comparison | Ablation, directory: Path) -> dict[str, Path]:
    """Write `report.html`, `report.md` and `report.json`; return their paths by kind: html, md, json.

    Raises:
        DependencyError: matplotlib is not installed; nothing is written then.
    """
    from trimtab.experiments.report.html import html_page
    from trimtab.experiments.report.markdown import markdown_page

    document = _document(found)
    texts = {
        "html": html_page(document),
        "md": markdown_page(document),
        "json": to_json(found, indent=1) + "\n",
    }
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    paths = {kind: directory / f"report.{kind}" for kind in texts}
    for kind, path in paths.items():
        write_whole(path, texts[kind])
    return paths


def read_report(path: Path) -> Comparison | Ablation:
    """Return what a `report.json` holds.

    Raises:
        FormatError: it is neither.
    """
    kind: type[Comparison] | type[Ablation] = Comparison
    with contextlib.suppress(OSError, ValueError, AttributeError):
        kind = Ablation if json.loads(path.read_text(encoding="utf-8")).get("kind") == "ablation" else Comparison
    return read_json(kind, path)


def terminal_report(found: Comparison | Ablation) -> RenderableType:
    """Return what `rich.print` shows: verdict, key figures and the main tables.

    Raises:
        DependencyError: rich is not installed.
    """
    from trimtab.experiments.report.terminal import terminal_view

    return terminal_view(_document(found))


def _document(found: Comparison | Ablation) -> Document:
    return ablation_outline.document(found) if isinstance(found, Ablation) else outline.document(found)
