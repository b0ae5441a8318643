"""Output of the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
