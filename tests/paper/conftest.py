"""Tests of the paper's evaluation use results that the tests of experiments make."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "experiments"))
