"""The report in a terminal: verdict, key figures and brief sections. The only module that imports rich."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.core.errors import DependencyError
from trimtab.experiments.comparison.comparison_result import Verdict
from trimtab.experiments.report import formatting as say
from trimtab.experiments.report.document import Block, Bullets, Code, Document, Heading, Paragraph, Section, Tile
from trimtab.experiments.report.tables import Cell, Table

try:
    from rich import box
    from rich.console import Group, RenderableType
    from rich.padding import Padding
    from rich.panel import Panel
    from rich.table import Table as RichTable
    from rich.text import Text
except ImportError as error:
    raise DependencyError(
        "rich",
        problem=f"The package rich, which prints the terminal report, cannot be imported: {error}.",
        hint="Run `pip install 'trimtab[cli]'`.",
    ) from error

_STYLES = {"gain": "bold green", "pass": "bold green", "harm": "bold red", "fail": "bold red"}


def terminal_view(document: Document) -> RenderableType:
    """Return the report for `rich.print`."""
    parts = [part for part in document.sections if part.brief]
    return Group(_headline(document), _tiles(document.tiles), *(_section(part) for part in parts))


def sections_view(parts: Iterable[Section]) -> RenderableType:
    """Return the given sections for `rich.print`."""
    return Group(*map(_section, parts))


def _text(words: object, style: str = "") -> Text:
    """Return literal text, because rich reads square brackets in a plain string as markup."""
    return Text(say.one_line(words, 4 * say.MAX_TEXT), style=style)


def _headline(document: Document) -> RenderableType:
    verdict = document.verdict
    words = Text.assemble(
        (say.one_line(verdict.kind), _STYLES.get(verdict.kind, "bold")),
        "\n",
        (say.one_line(verdict.sentence), "bold"),
        "\n",
        (document.byline, "dim"),
    )
    return Panel(words, title=_text(document.task), title_align="left", box=box.ROUNDED)


def _tiles(tiles: tuple[Tile, ...]) -> RenderableType:
    grid = RichTable.grid(padding=(0, 2))
    for tile in tiles:
        grid.add_row(_text(tile.label, "dim"), _text(tile.value, "bold"), _text(tile.detail, "dim"))
    return Padding(grid, (0, 1))


def _section(part: Section) -> RenderableType:
    shown = [_block(block) for block in part.blocks if not (isinstance(block, Table) and block.folded)]
    return Group(Text(), _text(part.title, "bold underline"), *(block for block in shown if block is not None))


def _block(block: Block) -> RenderableType | None:
    match block:
        case Table():
            return _table(block)
        case Heading(text):
            return _text(text, "bold")
        case Paragraph(text) | Code(text):
            return _text(text)
        case Bullets(items):
            return Group(*(_text(f"- {item}") for item in items))
        case _:
            return None


def _table(table: Table) -> RenderableType:
    title = [_text(table.title, "bold")] if table.title else []
    if not table.rows:
        return Group(*title, _text(table.empty, "dim"))
    note = [_text(table.note, "dim")] if table.note else []
    groups = dict.fromkeys(table.groups) or {"": None}
    return Group(*title, *(part for group in groups for part in _part(table, group)), *note)


def _part(table: Table, group: str) -> tuple[RenderableType, ...]:
    """Return the rows of a group under its name; rich has no spanning cells."""
    grid = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim")
    for name in table.columns:
        numeric = name in table.numeric
        fixed = numeric or any(isinstance(row[table.columns.index(name)], Verdict) for row in table.rows)
        justify = "right" if numeric else "left"
        grid.add_column(_text(name), justify=justify, no_wrap=fixed, overflow="fold")
    rows = table.rows if not group else [row for row, of in zip(table.rows, table.groups, strict=True) if of == group]
    for row in rows:
        grid.add_row(*(_cell(cell) for cell in row))
    return (_text(group, "italic"), grid) if group else (grid,)


def _cell(cell: Cell) -> Text:
    if isinstance(cell, Verdict):
        return _text(cell.kind, _STYLES.get(cell.kind, "bold"))
    return _text(cell)
