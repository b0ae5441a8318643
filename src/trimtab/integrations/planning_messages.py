"""Log lines of a trainer while it plans: progress at most every ten seconds, and the result in one line.

The lines are records of the logger "trimtab" at level INFO. Without a handler of the user, they appear on stderr.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

import torch

from trimtab.core.progress import silent
from trimtab.core.units import format_seconds
from trimtab.plans.plan import Plan
from trimtab.settings import SETTINGS

LOGGER = logging.getLogger("trimtab")
LONGEST = 100  # Characters of the line with the result.
EVERY_S = 10.0


class _Stderr(logging.Handler):
    """Writes messages to stderr, above progress bars of tqdm."""

    def emit(self, record: logging.LogRecord) -> None:
        line, tqdm = self.format(record), sys.modules.get("tqdm")
        if tqdm is not None:
            tqdm.tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(f"{line}\n")


def _log(line: str) -> None:
    if LOGGER.level == logging.NOTSET:
        LOGGER.setLevel(logging.INFO)
    if not LOGGER.hasHandlers():
        LOGGER.addHandler(_Stderr())
    LOGGER.info(line)


class ProgressLines:
    """Progress callback of `trimtab.plan`: logs a line at most every `EVERY_S` seconds."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()

    def __call__(self, text: str, share: float | None = None) -> None:
        now = time.monotonic()
        if now - self._last >= EVERY_S:
            self._last = now
            _log(f"trimtab: planning for {format_seconds(now - self._start)}; {text}")


def announced(
    make: Callable[[Callable[[str], None]], Plan], optimizer: torch.optim.Optimizer, *, speaks: bool = True
) -> tuple[Plan, float]:
    """Make a plan, and log progress and result.

    Args:
        make: makes the plan, with a progress callback.
        optimizer: the optimizer named in the line.
        speaks: True on the first rank; other ranks log nothing.

    Returns:
        The plan, and the seconds of planning.
    """
    start = time.perf_counter()
    plan = make(ProgressLines() if speaks else silent)
    seconds = time.perf_counter() - start
    if speaks:
        _log(headline(plan, type(optimizer).__name__, seconds))
    return plan, seconds


def headline(plan: Plan, optimizer: str, seconds: float) -> str:
    """Return a line with the result of planning, of at most `LONGEST` characters.

    Args:
        plan: the plan.
        optimizer: name of the optimizer's class.
        seconds: time of planning.
    """
    end = f"planned in {format_seconds(seconds)}"
    if not plan.changes:
        return f"trimtab: no change is significantly better; {end}"
    if plan.speed is not None:
        end = f"{plan.speed:.3g}x {'predicted' if plan.verified is None else 'in trials'}; {end}"
    words = [SETTINGS[name].title_of(getattr(plan, name).value) for name in plan.changes]
    words = [each.replace("optimizer", optimizer) for each in words]
    for kept in range(len(words), 0, -1):
        rest = "" if kept == len(words) else f" and {len(words) - kept} more"
        if len(line := f"trimtab: {', '.join(words[:kept])}{rest}; {end}") <= LONGEST:
            return line
    return f"trimtab: {len(words)} changes; {end}"
