"""Trials of a few milliseconds, where what is faster decides nothing that a test looks at; `brief_trials` is for tests.

Then a trial's steps are mostly one, no more blocks are run than were asked for while nothing is in doubt, blocks that
are computed again take the fewest turns, and a plan may change less than it would.
"""

from __future__ import annotations

from collections.abc import Callable

from trimtab.profiling import block_profile, trials

BLOCK_S, STAGE_S, MEASURING_S = 0.003, 0.0, 0.1
# For a program, or a task's file that one imports.
CODE = f"""
from trimtab.profiling import block_profile, trials

trials.BLOCK_S, trials._STAGE_S, block_profile._MEASURING_S = {BLOCK_S}, {STAGE_S}, {MEASURING_S}
"""


def shorten(set_to: Callable[[object, str, float], None] = setattr) -> None:
    """Time trials briefly from here on; with a `monkeypatch.setattr`, to its end."""
    set_to(trials, "BLOCK_S", BLOCK_S)
    set_to(trials, "_STAGE_S", STAGE_S)
    set_to(block_profile, "_MEASURING_S", MEASURING_S)
