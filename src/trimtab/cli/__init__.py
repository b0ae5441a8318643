"""Command line: init, doctor, profile, plan, train, compare, ablate, phases, scale, report, checkpoint.

Results go to standard output, progress to standard error.

Exit status: 0 success, 1 an error with explanation, 2 invalid command line, 130 interrupted.
"""

from __future__ import annotations

import sys
from typing import Any

from trimtab.core.errors import DependencyError

try:
    import typer  # noqa: F401 - a missing typer is reported before a module of this package imports it
except ImportError:
    _MISSING = DependencyError(
        "typer",
        problem="The package typer is not installed, which the command needs.",
        hint="Run `pip install 'trimtab[cli]'`.",
    )

    def main(launched: Any = None) -> None:
        """Print the extra that the command needs. The console script exists even in an installation without it."""
        sys.stderr.write(f"trimtab: {_MISSING} [{_MISSING.code}]\n")
        sys.exit(1)

    def __getattr__(name: str) -> Any:
        if name == "app":
            raise _MISSING
        raise AttributeError(name)

else:
    from trimtab.cli.main import app, main

__all__ = ["app", "main"]
