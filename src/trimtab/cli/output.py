"""Output of the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import typer

from trimtab.cli.streams import can_encode
from trimtab.core.serialization import escape_control_characters


def print_text(text: str) -> None:
    """Print text to standard output. Control characters in names and texts from files are escaped."""
    typer.echo(escape_control_characters(text))


def print_json(value: Any) -> None:
    """Print a JSON object on one line, in ASCII if the output encoding lacks a character."""
    from trimtab.core.serialization import to_jsonable

    text = json.dumps(to_jsonable(value), allow_nan=False, ensure_ascii=False)
    typer.echo(text if can_encode(text) else json.dumps(json.loads(text)))


def print_error(text: str) -> None:
    """Print text to standard error, escaped as by `print_text`."""
    typer.echo(escape_control_characters(text), err=True)


def print_figures(found: Mapping[str, Any], *, as_json: bool) -> None:
    """Print named values, on a line each or as a JSON object."""
    if as_json:
        print_json(found)
    else:
        print_text("\n".join(f"{key}: {value}" for key, value in found.items()))


def write_and_show(found: Any, folder: Path, *, as_json: bool) -> None:
    """Write and print the report of a comparison or ablation."""
    from trimtab.experiments.ablation.ablation_result import Ablation
    from trimtab.experiments.ablation.ablation_rows import ablation_object
    from trimtab.experiments.comparison.comparison_rows import benchmark_object
    from trimtab.experiments.report import terminal_report, write_report

    paths = write_report(found, folder)
    if as_json:
        print_json(ablation_object(found) if isinstance(found, Ablation) else benchmark_object(found))
        return
    _print_rich(terminal_report(found))
    print_text(f"report: {paths['html']}")


def show_gains(found: Any) -> None:
    """Print the sources of the gain, by phase."""
    from trimtab.experiments.report import gains_report

    _print_rich(gains_report(found.gains, found.thirds))


def _print_rich(renderable: Any) -> None:
    from rich.console import Console, ConsoleOptions
    from rich.segment import Segment

    class Escaped:
        """Rich renderable with control characters escaped and styles kept."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for segment in console.render(renderable, options):
                text = segment.text if segment.control else escape_control_characters(segment.text)
                yield Segment(text, segment.style, segment.control)

    Console(width=None if sys.stdout.isatty() else 120).print(Escaped())
