"""Progress of a command."""

from __future__ import annotations

import contextlib
import sys

from trimtab.core.progress import Progress
from trimtab.progress_display import ProgressDisplay


class ProgressBar(ProgressDisplay):
    """Progress on standard error. What the user's code prints meanwhile goes to standard error too."""

    def __enter__(self) -> Progress:
        self._redirect = contextlib.redirect_stdout(sys.stderr)
        self._redirect.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        self._redirect.__exit__(None, None, None)
        super().__exit__(*exc)
