"""Common options and output of the benchmark commands."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.serialization import to_json
from trimtab.measure.machine import environment

ROOT = Path(__file__).resolve().parents[1]


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark, `--quick` and `--json`.

    Args:
        doc: Docstring of the benchmark. Its first line is the description.
    """
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="fewer cases or repeats: at most two minutes on 2 cores")
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return made


def show(name: str, rows: Sequence[dict[str, Any]], line: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """Print rows as lines of text or as a JSON object.

    Args:
        name: Name of the benchmark.
        rows: Results.
        line: Formats a row as text.
        as_json: True for JSON.
    """
    if as_json:
        given = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]  # no local folders
        script = Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("")
        asked = shlex.join(["python", "-m", ".".join(script.parts), *given])
        found = {"schema": 1, "name": name, "environment": environment() | {"command": asked}, "rows": rows}
        print(to_json(found))
    else:
        print(*map(line, rows), sep="\n")
