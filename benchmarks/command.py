"""What the commands of all benchmarks have in common: two options, and what they print."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trimtab.core.codec import to_json
from trimtab.measure.machine import environment


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options every benchmark has; the rest are its own.

    Args:
        doc: of the benchmark, whose first line says what it measures.
    """
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    made.add_argument("--quick", action="store_true", help="fewer cases or repeats: at most two minutes on 2 cores")
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return made


def show(name: str, rows: Sequence[dict[str, Any]], line: Callable[[dict[str, Any]], str], *, as_json: bool) -> None:
    """Print rows as a table, a `line` each, or as the benchmark's one JSON object."""
    if as_json:
        given = [Path(each).name if Path(each).is_absolute() else each for each in sys.argv[1:]]  # no machine's folders
        asked = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])
        found = {"schema": 1, "name": name, "environment": environment() | {"command": asked}, "rows": rows}
        print(to_json(found))
    else:
        print(*map(line, rows), sep="\n")
