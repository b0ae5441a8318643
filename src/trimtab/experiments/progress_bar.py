"""Progress bar of the command, on a terminal."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from trimtab.core.serialization import escape_control_characters

_REDRAW_S = 0.1


class ProgressBar:
    """A transient progress bar on standard error, shown only on a terminal; standard output is redirected to it.

    Redrawn on updates and at most ten times a second, without a thread, because times are measured meanwhile.
    """

    def __enter__(self) -> Callable[..., None]:
        self._bar: Any = _bar() if sys.stderr.isatty() else None
        self._drawn_at = -math.inf
        self._redirect = contextlib.redirect_stdout(sys.stderr)
        self._redirect.__enter__()
        if self._bar is not None:
            self._task = self._bar.add_task("", total=None)
        return self._show

    def _show(self, text: str, share: float | None = None) -> None:
        now = time.monotonic()
        if self._bar is None or now - self._drawn_at < _REDRAW_S:
            return
        self._drawn_at = now
        self._bar.update(
            self._task,
            description=escape_control_characters(text),
            total=None if share is None else 1.0,
            completed=share or 0.0,
        )
        self._bar.start()  # No effect if already started.
        self._bar.refresh()

    def __exit__(self, *exc: object) -> None:
        self._redirect.__exit__(None, None, None)
        if self._bar is not None:
            self._bar.stop()


def _bar() -> Any:
    """Return a one-line progress bar: text cut to the width, bar, percentage if known, and elapsed time."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    what = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False, table_column=what),
        progress.BarColumn(20),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        console=Console(stderr=True),
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
