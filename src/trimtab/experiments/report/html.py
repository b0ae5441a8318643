"""The report as a self-contained HTML page: no network, no script, external strings escaped."""

from __future__ import annotations

import html
import re

from trimtab.experiments.comparison.comparison_result import Verdict
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.document import (
    Block,
    Bullets,
    Code,
    Document,
    Heading,
    Paragraph,
    Picture,
    Section,
    Tile,
)
from trimtab.experiments.report.figure_spec import FigureSpec, LegendEntry
from trimtab.experiments.report.stylesheet import style_sheet
from trimtab.experiments.report.svg import variable
from trimtab.experiments.report.tables import Cell, Table

# If a name contains markup, the browser still loads nothing and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_BADGES = dict.fromkeys(("gain", "pass", "met"), "gain") | dict.fromkeys(("harm", "fail", "missed"), "harm")
_MAX_ASIDE = 12
_TIGHT = 26  # Longest cell in characters to stay on one line.
_LONG_WORD = 22
_SENTENCE_END = re.compile(r"(?<=\.) (?=[A-Z])")
_PIECE = re.compile(r"[^/_.,;:=-]{1,22}[/_.,;:=-]?|[/_.,;:=-]{1,22}")


def html_page(document: Document) -> str:
    """Return the report as an HTML page."""
    parts = document.sections
    body = [_header(document), _contents(parts), *(_section(part, document) for part in parts)]
    return page(f"{document.task}: trimtab {document.kind}", "\n".join(body))


def page(title: str, body: str) -> str:
    """Return a self-contained HTML page (no network, no script) with the given body."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f"<title>{escape(title)}</title>\n<style>{style_sheet()}</style></head>\n<body><main>\n"
        f"{body}\n</main></body></html>\n"
    )


def escape(text: object, limit: int = say.MAX_TEXT) -> str:
    """Return text that is safe between tags and in a quoted attribute."""
    return html.escape(say.one_line(text, limit))


def _header(document: Document) -> str:
    verdict = document.verdict
    title, *more = _SENTENCE_END.split(verdict.sentence, maxsplit=1)
    lead = "".join(f'<p class="lead">{escape(text)}</p>' for text in more)
    return (
        f'<header><p class="over">trimtab {document.kind} · {escape(document.task)}</p>{_badge(verdict.kind)}'
        f"<h1>{escape(title)}</h1>{lead}<p>{escape(document.description)}</p>"
        f'<p class="muted">{escape(document.byline)}</p>{_tiles(document.tiles)}</header>'
    )


def _badge(kind: str) -> str:
    return f'<span class="badge {_BADGES.get(kind, "other")}">{escape(kind, 24)}</span>'


def _tiles(tiles: tuple[Tile, ...]) -> str:
    items = (
        f'<div class="tile"><dt>{escape(tile.label)}</dt><dd class="value">{escape(tile.value)}</dd>'
        f"<dd>{escape(tile.detail)}</dd></div>"
        for tile in tiles
    )
    return f'<dl class="tiles">{"".join(items)}</dl>' if tiles else ""


def _contents(parts: tuple[Section, ...]) -> str:
    links = (f'<a href="#{_anchor(part)}">{escape(part.title)}</a>' for part in parts)
    return f'<nav aria-label="Contents">{" ".join(links)}</nav>'


def _anchor(part: Section) -> str:
    return "".join(c if c.isalnum() else "-" for c in part.title.lower())


def _section(part: Section, document: Document) -> str:
    blocks = "\n".join(_block(block, document) for block in part.blocks)
    return f'<section id="{_anchor(part)}"><h2>{escape(part.title)}</h2>\n{blocks}</section>'


def _block(block: Block, document: Document) -> str:
    match block:
        case Table():
            return _table(block)
        case Picture():
            return _figure(document.draw(block))
        case Heading(text):
            return f"<h3>{escape(text)}</h3>"
        case Paragraph(text):
            return f"<p>{escape(text, 4 * say.MAX_TEXT)}</p>"
        case Bullets(items):
            return _list(items)
        case Code(text):
            return f"<pre><code>{html.escape(say.without_control_characters(text))}</code></pre>"


def _list(items: tuple[str, ...]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item, 4 * say.MAX_TEXT)}</li>' for item in items)}</ul>"


def _table(table: Table) -> str:
    title = f"<h3>{escape(table.title)}</h3>" if table.title and not table.folded else ""
    if not table.rows:
        return f'{title}<p class="muted">{escape(table.empty)}</p>'
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    kind = "" if any(name.strip() for name in table.columns) else ' class="facts"'
    body = f'<div class="scroll"><table{kind}>{_head(table)}<tbody>{_rows(table)}</tbody></table></div>{note}'
    if not table.folded:
        return title + body
    return f'<details class="block"><summary>{escape(table.title)}</summary>{body}</details>'


def _head(table: Table) -> str:
    if not any(name.strip() for name in table.columns):
        return ""
    cells = (f'<th scope="col" class="{_kind(table, name)}">{escape(name)}</th>' for name in table.columns)
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _rows(table: Table) -> str:
    rows, previous = [], ""
    for index, row in enumerate(table.rows):
        group = table.groups[index] if table.groups else ""
        if group != previous:
            previous = group
            rows.append(_group(group, len(table.columns)))
        extra = _extra(table.extras_label, table.extras[index]) if table.extras else ""
        pairs = list(zip(table.columns, row, strict=True))
        cells = [_cell(table, name, cell) for name, cell in pairs[:-1]] + [_cell(table, *pairs[-1], extra)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return "".join(rows)


def _group(name: str, width: int) -> str:
    return f'<tr class="group"><th colspan="{width}" scope="rowgroup">{with_line_breaks(name)}</th></tr>'


def _cell(table: Table, column: str, cell: Cell, extra: str = "") -> str:
    kind = _kind(table, column)
    kind += " tight" if isinstance(cell, str) and len(cell) <= _TIGHT else ""
    return labelled_cell(column, f"{_content(cell)}{extra}", kind)


def labelled_cell(column: str, content: str, kind: str = "text") -> str:
    """Return a table cell with its column label, because a narrow page shows labels instead of a head row."""
    label = escape(column).strip()
    return f'<td class="{kind}{"" if label else " bare"}" data-label="{label}"><div>{content}</div></td>'


def _content(cell: Cell) -> str:
    if isinstance(cell, Verdict):
        return f"{_badge(cell.kind)}<span>{with_line_breaks(cell.sentence)}</span>"
    return with_line_breaks(cell)


def with_line_breaks(text: str) -> str:
    """Return escaped text with line-break opportunities in long words, at separators where possible."""
    words = (_PIECE.findall(word) if len(word) > _LONG_WORD else [word] for word in say.one_line(text).split(" "))
    return " ".join("<wbr>".join(html.escape(piece) for piece in pieces) for pieces in words)


def _kind(table: Table, column: str) -> str:
    return "n" if column in table.numeric else "text"


def _extra(label: str, items: tuple[str, ...]) -> str:
    if not items:
        return ""
    return f"<details><summary>{escape(label)} ({len(items)})</summary>{_list(items)}</details>"


def _figure(drawing: FigureSpec) -> str:
    aside = _aside(drawing.aside)
    if not drawing.svg:
        return f'<p class="muted">{escape(drawing.caption)}</p>{aside}'
    legend = f'<ul class="legend">{"".join(_key(key) for key in drawing.legend)}</ul>' if drawing.legend else ""
    return f"<figure>{legend}{drawing.svg}<figcaption>{escape(drawing.caption)}</figcaption></figure>{aside}"


def _key(key: LegendEntry) -> str:
    style = f"border-top-color:{variable(key.role)};border-top-style:{key.border}"
    return f'<li><span class="swatch" style="{style}"></span>{escape(key.text)}</li>'


def _aside(items: tuple[str, ...]) -> str:
    if not items:
        return ""
    more = len(items) - _MAX_ASIDE
    shown = items[:_MAX_ASIDE] + ((f"and {more} more, in the table of every trial",) if more > 0 else ())
    return f'<p class="muted">Not in the figure:</p>{_list(shown)}'
