"""The long matrices can be run: what nobody collects for weeks is broken by the first who looks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from training_patterns import PATTERNS

ROOT = Path(__file__).parents[2]
# Five schedules alone and under DDP, two of them under FSDP2; three precisions; dropout or batch norm eager, dropout
# compiled.
CELLS = (5 * 2 + 2) * 3 * 3
KILLED = 2  # small checkpoints and large ones, fifty kills each
RUNS = 2 * 3 * 2 * 2  # precisions, micro-batches, recomputed or not, one rank or two
SHARDED = 2 * 3  # precisions, stages
INSIDE = 2  # kills inside of a save, on one rank and two
LONG = 1


def test_the_soak_collects_every_cell():
    asked = [sys.executable, "-m", "pytest", "tests/soak", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found = sum(int(line.rpartition(": ")[2]) for line in done.stdout.split("\n") if ": " in line)
    assert found == CELLS + KILLED + RUNS + SHARDED + INSIDE + LONG + len(PATTERNS)
