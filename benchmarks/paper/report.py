"""Report of several runs next to the claims of the paper.

`python -m benchmarks.paper.report RUN ... [--out FOLDER] [--json]` writes `evaluation.html`, `evaluation.md` and
`evaluation.json`. README.md in this folder explains the page.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console

from benchmarks.paper.finding import Run
from benchmarks.paper.outline import document
from benchmarks.paper.results import read_runs
from benchmarks.paper.rows import evaluation_object
from trimtab.core.errors import TrimtabError
from trimtab.experiments.report import page_texts, write_pages
from trimtab.experiments.report.terminal import terminal_view

Goals = Sequence[tuple[str, str, str]]


def write_evaluation(runs: Sequence[Run], directory: Path, command: str, goals: Goals = ()) -> dict[str, Path]:
    """Write `evaluation.html`, `evaluation.md` and `evaluation.json` of several runs; return the paths by kind.

    Args:
        runs: the runs.
        directory: output folder.
        command: command line to reproduce the evaluation.
        goals: (goal, status, measurement) by goal.

    Raises:
        DependencyError: matplotlib is not installed; nothing is written.
    """
    return write_pages(evaluation_texts(runs, command, goals), "evaluation", directory)


def evaluation_texts(runs: Sequence[Run], command: str, goals: Goals = ()) -> dict[str, str]:
    """Return the texts written by `write_evaluation`, by kind; equal runs give equal texts.

    Raises:
        DependencyError: matplotlib is not installed.
    """

    def values() -> str:
        return json.dumps(evaluation_object(runs, command), indent=1, allow_nan=False, ensure_ascii=False)

    return page_texts(partial(document, runs, command, goals), values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write and print the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="folders or files of results, or records (.jsonl)")
    parser.add_argument("--out", type=Path, default=Path("runs") / "report", help="folder of the pages")
    parser.add_argument("--json", action="store_true", help="one JSON object of flat rows on standard output")
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "benchmarks.paper.report", *given])
    try:
        runs = read_runs(options.runs)
        paths = write_evaluation(runs, options.out, command)
    except TrimtabError as error:
        sys.exit(str(error))
    if options.json:
        print(json.dumps(evaluation_object(runs, command), allow_nan=False))
        return
    Console(width=None if sys.stdout.isatty() else 120).print(terminal_view(document(runs, command)))
    print(f"report: {paths['html']}")


if __name__ == "__main__":
    main()
