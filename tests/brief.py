"""Trials of a few milliseconds, where what is faster decides nothing that a test looks at; `brief_trials` is for tests.

Then a trial's steps are mostly one, and a plan may change less than it would.
"""

from __future__ import annotations

BLOCK_S = 0.003
# For a program, or a task's file that one imports.
CODE = f"""
from trimtab.calibrate import trials

trials.BLOCK_S = {BLOCK_S}
"""
