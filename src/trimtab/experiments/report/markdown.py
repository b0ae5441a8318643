"""The report as Markdown: the same tables and text, without figures."""

from __future__ import annotations

import html
import re

from trimtab.experiments.comparison.comparison_result import Verdict
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report import tables
from trimtab.experiments.report.document import Block, Bullets, Code, Document, Heading, Paragraph, Picture, Section
from trimtab.experiments.report.tables import Cell, Table

# An underscore inside a word is not emphasis in Markdown, and `equivalent_plan` reads better unescaped.
_SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def markdown_page(document: Document) -> str:
    """Return the report as GitHub-flavoured Markdown."""
    lines = [
        f"# {escape(document.task)}: trimtab {document.kind}",
        f"**{escape(document.verdict.kind)}**: {escape(document.verdict.sentence)}",
        escape(document.description),
        escape(document.byline),
    ]
    if document.tiles:
        lines.append(
            "\n".join(f"- {escape(t.label)}: **{escape(t.value)}** ({escape(t.detail)})" for t in document.tiles)
        )
    lines += [_section(part) for part in document.sections]
    return "\n\n".join(line for line in lines if line) + "\n"


def escape(text: object, limit: int = say.MAX_TEXT) -> str:
    """Return text on one line, with Markdown and HTML special characters escaped."""
    line = html.escape(say.one_line(text, limit), quote=False)
    return _SPECIAL.sub(lambda match: "\\" + match[0], line)


def _section(part: Section) -> str:
    blocks = [_block(block) for block in part.blocks if not isinstance(block, Picture)]
    shown = [block for block in blocks if block] or ["The figure is in report.html."]
    return "\n\n".join([f"## {part.title}", *shown])


def _block(block: Block) -> str:
    match block:
        case Table():
            return _table(block)
        case Heading(text):
            return f"### {escape(text)}"
        case Paragraph(text):
            return escape(text, 4 * say.MAX_TEXT)
        case Bullets(items):
            return "\n".join(f"- {escape(item, 4 * say.MAX_TEXT)}" for item in items)
        case Code(text):
            return _code(text)
        case Picture():
            return ""


def _code(text: str) -> str:
    """Return a fenced block with a fence longer than any inside the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}sh\n{say.without_control_characters(text)}\n{fence}"


def _table(table: Table) -> str:
    title = f"### {escape(table.title)}\n\n" if table.title else ""
    if not table.rows:
        return title + escape(table.empty)
    grouped = tables.with_groups(table)
    rule = ["---:" if name in table.numeric else "---" for name in grouped.columns]
    lines = [_line([escape(name) for name in grouped.columns]), _line(rule)]
    lines += [_line([_cell(cell) for cell in row]) for row in grouped.rows]
    note = f"\n\n{escape(table.note)}" if table.note else ""
    return title + "\n".join(lines) + note


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    if isinstance(cell, Verdict):
        return f"**{escape(cell.kind)}**: {escape(cell.sentence)}" if cell.sentence else f"**{escape(cell.kind)}**"
    return escape(cell)
