"""The command: doctor, profile, plan, train, compare, ablate, scale, report.

Figures go to standard output, progress to error.

Exit status: 0 done, 1 an error that was explained, 2 a command line that does not parse, 130 interrupted.
"""

from __future__ import annotations

from trimtab.core.errors import DependencyError

try:
    import typer  # noqa: F401 - its absence is explained before a module of this folder needs it
except ImportError:
    raise DependencyError(
        "trimtab", given="no typer", expected="the command's packages", way_out="pip install 'trimtab[cli]'"
    ) from None

from trimtab.cli.entry import app, main

__all__ = ["app", "main"]
