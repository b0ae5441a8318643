"""Runs that are killed six times each, in every pair of settings: no loss differs from a run that nobody killed."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from test_crash import crashed, whole

KILLS = 6
WINDOWS = {
    "k = 1": {},
    "k = 4": {"micro_batch": 2},
    "adaptive": {"rule": {"policy": "goodput", "k_max": 8, "min_windows": 3}, "micro_batch": 4},
}


@pytest.mark.parametrize(
    ("precision", "windows", "recompute", "ranks"),
    list(itertools.product(("fp32", "bf16"), WINDOWS, (False, True), (1, 2))),
)
def test_no_loss_differs(tmp_path, precision, windows, recompute, ranks):
    options = {"precision": precision, "recompute": recompute, "ranks": ranks} | WINDOWS[windows]
    found, lived = crashed(tmp_path, options, KILLS, seed=len(windows) + ranks)
    assert lived >= KILLS // 2, "too few of the kills came before the end"
    assert found == whole(tmp_path, options)


@pytest.mark.parametrize(("precision", "stage"), list(itertools.product(("fp32", "bf16"), (1, 2, 3))))
def test_no_loss_of_shards_differs(tmp_path, precision, stage):
    options = {"precision": precision, "micro_batch": 4, "ranks": 2, "stage": stage}
    found, lived = crashed(tmp_path, options, KILLS, seed=stage)
    assert lived >= KILLS // 2, "too few of the kills came before the end"
    assert found == whole(tmp_path, options)
