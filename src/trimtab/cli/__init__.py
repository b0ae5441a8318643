"""The command: doctor, profile, plan, train, compare, ablate, phases, scale, report.

Figures go to standard output, progress to error.

Exit status: 0 done, 1 an error that was explained, 2 a command line that does not parse, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

from trimtab.core.errors import DependencyError

try:
    import typer  # noqa: F401 - its absence is explained before a module of this folder needs it
except ImportError:
    _MISSING = DependencyError(
        "command", given="no typer", expected="the packages it needs", way_out="Run `pip install 'trimtab[cli]'`."
    )

    def main(launched: Any = None) -> None:
        """Say which extra has what the command needs: an install without it has the console script all the same."""
        sys.stderr.write(f"trimtab: {_MISSING}\n")
        sys.exit(1)

    def __getattr__(name: str) -> Any:
        if name == "app":
            raise _MISSING
        raise AttributeError(name)

else:
    from trimtab.cli.entry import app, main

__all__ = ["app", "main"]
