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
from trimtab.experiments.report.svg import variable
from trimtab.experiments.report.tables import Cell, Table

# Style sheet of the page: system fonts, a single accent colour, dark and light mode, narrow layout, print.

_ROLES = ("page", "ink", "muted", "line", "panel", "accent", "gain", "harm")
_SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "s6", "s7")
_PARTS = ("p0", "p1", "p2", "p3", "p4", "p5", "p6")
_NAMES = _ROLES + _SERIES + _PARTS
_LIGHT = """
#fdfdfc #1e2329 #5a646e #dfe3e6 #f4f5f5 #1f6fb5 #1d7048 #a8401f
#7a828c #a3abb3 #ad7d1f #7d5ba6 #1f6fb5 #c4542d #2f8f83 #7b8030
#3a78ad #cf9f4a #7fae88 #ad86ad #8fb8d8 #9aa2aa #c97d6b
"""
_DARK = """
#15181c #e3e7eb #9aa5af #2c333a #1c2126 #6db0ee #6cc795 #f0937a
#98a1ab #6f7983 #d9ab55 #b598da #62a8e8 #ec8a62 #5cc0b3 #bcc06a
#5b9bd3 #d3a655 #7db58a #b690b8 #375f80 #7f8993 #d38a78
"""

_PAGE = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--page);color:var(--ink);
 font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Helvetica Neue",sans-serif;
 font-variant-numeric:tabular-nums;overflow-wrap:break-word}
main{max-width:1000px;margin:0 auto;padding:40px 24px 72px}
p{margin:.5em 0;max-width:44em}
h1{font-size:clamp(1.45rem,3.4vw,2.1rem);line-height:1.25;font-weight:650;letter-spacing:-.012em;margin:.45em 0 .35em;
 max-width:30em;overflow-wrap:anywhere}
h2{font-size:1.22rem;font-weight:650;margin:3.2rem 0 .5rem;padding-top:1.1rem;border-top:1px solid var(--line)}
h3{font-size:1rem;font-weight:650;margin:1.8rem 0 .4rem;overflow-wrap:anywhere}
a{color:var(--accent);text-decoration:none}
a:hover{text-decoration:underline}
.lead{font-size:1.1rem}
.over{color:var(--muted);font-size:.875rem;margin:0 0 1.1rem;overflow-wrap:anywhere}
.note{max-width:62em}
.muted,.note,figcaption{color:var(--muted);font-size:.875rem;overflow-wrap:anywhere}
nav{margin-top:2rem;font-size:.875rem;line-height:2}
nav a{margin-right:1.15em;white-space:nowrap}
.badge{display:inline-block;padding:.1em .6em;border-radius:99px;border:1px solid currentColor;font-size:.8rem;
 font-weight:600;line-height:1.5;white-space:nowrap;color:var(--muted)}
.badge.gain{color:var(--gain)}
.badge.harm{color:var(--harm)}
header>.badge{font-size:.95rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(200px,1fr));gap:12px;margin:1.8rem 0 0}
.tile{background:var(--panel);border-radius:10px;padding:14px 16px 13px}
.tile dt{font-size:.84rem;color:var(--muted);line-height:1.35}
.tile .value{font-size:1.72rem;font-weight:620;letter-spacing:-.015em;margin:.12em 0;line-height:1.25}
.tile dd{margin:0;font-size:.8rem;color:var(--muted);line-height:1.4;overflow-wrap:anywhere}
.tile dd.value{color:var(--ink)}
"""

_TABLES = """
.scroll{overflow-x:auto;margin:.7rem 0}
table{border-collapse:collapse;width:100%;font-size:.875rem;line-height:1.45}
th,td{text-align:left;vertical-align:baseline;padding:8px 14px 8px 0;border-bottom:1px solid var(--line);
 overflow-wrap:break-word}
th:last-child,td:last-child{padding-right:0}
thead th{font-weight:600;color:var(--muted);font-size:.8rem;vertical-align:bottom}
td.n,th.n{text-align:right}
.tight{white-space:nowrap}
tr.group th{padding-top:20px;font-size:.875rem;color:var(--ink);overflow-wrap:anywhere}
tbody tr.group:first-child th{padding-top:12px}
table.facts td:first-child{width:14em;color:var(--muted)}
td .badge+span{margin-left:.6em;color:var(--muted);font-size:.84rem}
details{margin:.35em 0}
summary{cursor:pointer;color:var(--muted);font-size:.82rem}
details.block>summary{font-size:.9rem;color:var(--accent);margin:.8em 0}
td ul{margin:.3em 0;padding-left:1.1em;font-size:.82rem;color:var(--muted)}
main>ul,section>ul{padding-left:1.2em;max-width:44em;overflow-wrap:anywhere}
pre{background:var(--panel);border-radius:10px;padding:14px 16px;font-size:.84rem;white-space:pre-wrap;
 overflow-wrap:anywhere;font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
figure{margin:1.2rem 0;max-width:620px}
figure svg{display:block;width:100%;height:auto;color:var(--ink)}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figure svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif!important}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.2em 1.3em;padding:0;margin:.5rem 0;font-size:.84rem}
.legend li{overflow-wrap:anywhere}
.swatch{display:inline-block;width:1.5em;border-top:3px solid;vertical-align:.26em;margin-right:.45em}
@media (max-width:720px){
 main{padding:24px 16px 56px}
 .tiles{grid-template-columns:1fr 1fr;gap:8px}
 .tile{padding:11px 12px}.tile .value{font-size:1.35rem}
 .scroll{overflow-x:visible}
 table,tbody,tr,td,tr.group th{display:block}
 .tight{white-space:normal}
 tr.group{border:0;padding:6px 0 0}
 tr.group th{border:0;padding-bottom:0}
 table.facts td:first-child{width:auto}
 thead{display:none}
 tr{border-bottom:1px solid var(--line);padding:9px 0}
 td,td.n{border:0;padding:2px 0;text-align:left;display:grid;grid-template-columns:8.5em minmax(0,1fr);gap:.6em}
 td::before{content:attr(data-label);color:var(--muted)}
 td:first-child{font-weight:600}
 td.bare{display:block}
 td>div{min-width:0;overflow-wrap:anywhere}
}
@media print{
 main{max-width:none;padding:0}
 nav,summary{display:none}
 section,figure,tr,.tile{break-inside:avoid}
 h2,h3{break-after:avoid}
 section{break-inside:auto}
 details::details-content{content-visibility:visible;height:auto}
 body{font-size:11pt}
}
"""


def style_sheet() -> str:
    """Return the CSS of the page; print is always light."""
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{_variables(_DARK)}}}}}"
    return f":root{{color-scheme:light dark;{_variables(_LIGHT)}}}\n{dark}{_PAGE}{_TABLES}"


def _variables(colours: str) -> str:
    return ";".join(f"--{name}:{colour}" for name, colour in zip(_NAMES, colours.split(), strict=True))


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
