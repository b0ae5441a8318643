"""Display of progress on standard error: a bar on a terminal, otherwise a line every ten seconds."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Literal

from trimtab.core.progress import Progress, silent
from trimtab.core.serialization import escape_control_characters
from trimtab.core.units import format_seconds

# The argument of long calls: "auto" shows a `ProgressDisplay`, None nothing, and a callback receives lines of text.
ProgressArgument = Callable[[str], None] | Literal["auto"] | None


def shown(wanted: ProgressArgument, *, is_first_rank: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Return a context with the callback for a progress argument; only the first rank shows a display."""
    if wanted == "auto":
        return ProgressDisplay(quiet=not is_first_rank)
    return contextlib.nullcontext(silent if wanted is None else wanted)


_REDRAW_S, _LINE_S = 0.1, 10.0
_NARROW = 70  # Columns below which the bar is shorter.
# A remaining time is shown from these seconds and this fraction on; earlier estimates are mostly wrong.
_FORESEEN_S, _FORESEEN_SHARE = 2.0, 0.03


class ProgressDisplay:
    """Progress on standard error: a transient bar on a terminal, otherwise a line of text every 10 seconds.

    A context manager that returns the callback. It is redrawn by the callback, at most ten times a second and without
    a thread, because times are measured meanwhile. The bar needs the package `rich`; without it, lines are written.

    Args:
        quiet: True to show nothing, as after `be_quiet`.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet or _is_quiet

    def __enter__(self) -> Progress:
        self._begun = time.monotonic()
        self._bar = None if self._quiet else _bar_of_terminal()
        self._first: tuple[float, float] | None = None  # Time and value of the first known fraction.
        self._shown_at = -math.inf if self._bar is not None else self._begun
        return silent if self._quiet else self._show

    def _show(self, text: str, share: float | None = None) -> None:
        now = time.monotonic()
        if now - self._shown_at < (_LINE_S if self._bar is None else _REDRAW_S):
            return
        self._shown_at = now
        text, elapsed_s = escape_control_characters(text), now - self._begun
        left = self._left(now, share)
        if self._bar is None:
            done = "" if share is None else f", {100 * share:.0f} %"
            sys.stderr.write(f"trimtab: {text} ({format_seconds(round(elapsed_s))}{done}{left})\n")
            sys.stderr.flush()
            return
        if not self._bar.tasks:
            self._bar.add_task("", total=None, left="")
        total, left = None if share is None else 1.0, left.removeprefix(", ")
        self._bar.update(self._bar.tasks[0].id, description=text, total=total, completed=share or 0.0, left=left)
        self._bar.start()  # No effect if already started.
        self._bar.refresh()

    def _left(self, now: float, share: float | None) -> str:
        """Return the remaining time as text, if the rest advances as fast as the work since the first known fraction.

        Work before, such as planning, has no fraction.
        """
        if share is None:
            return ""
        if self._first is None:
            self._first = now, share
        taken_s, done = now - self._first[0], share - self._first[1]
        if done < _FORESEEN_SHARE or taken_s < _FORESEEN_S or share >= 1:
            return ""
        return f", {format_seconds(max(1, round(taken_s * (1 - share) / done)))} left"

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _bar_of_terminal() -> Any:
    """Return a progress bar: text cut to the width, bar, elapsed and remaining time; None without terminal or rich."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from rich import progress
        from rich.console import Console
        from rich.table import Column
    except ImportError:
        return None
    console = Console(stderr=True)  # Honours NO_COLOR.
    return progress.Progress(
        progress.TextColumn(
            "{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
        ),
        progress.BarColumn(20 if console.width >= _NARROW else 8),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("{task.fields[left]}", markup=False),
        console=console,
        auto_refresh=False,
        transient=True,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


_is_quiet = False


def be_quiet(wanted: bool) -> None:
    """Show no progress in this process from now on, if wanted: the option `--quiet` of a command."""
    global _is_quiet
    _is_quiet = wanted
