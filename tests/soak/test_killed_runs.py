"""Runs that are killed six times each, in every pair of settings: no loss differs from a run that nobody killed."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "faults"))

from test_crash import WINDOWS, cell_of, crashed, ks_of, whole

KILLS = 6
TOO_FEW = "too few of the kills came between its start and its end"


@pytest.mark.parametrize(
    ("precision", "windows", "recompute", "ranks"),
    list(itertools.product(("fp32", "bf16"), WINDOWS, (False, True), (1, 2))),
)
def test_no_loss_differs(tmp_path, precision, windows, recompute, ranks):
    options = cell_of(precision, windows, recompute, ranks)
    found, kills = crashed(tmp_path, options, KILLS, seed=len(windows) + ranks)
    assert kills.counted >= KILLS // 2, TOO_FEW
    assert found == whole(tmp_path, options)
    assert windows != "adaptive" or len(ks_of(tmp_path)) > 1


@pytest.mark.parametrize(("precision", "stage"), list(itertools.product(("fp32", "bf16"), (1, 2, 3))))
def test_no_loss_of_shards_differs(tmp_path, precision, stage):
    options = {"precision": precision, "micro_batch": 4, "ranks": 2, "stage": stage}
    found, kills = crashed(tmp_path, options, KILLS, seed=stage)
    assert kills.counted >= KILLS // 2, TOO_FEW
    assert found == whole(tmp_path, options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_some_kills_fall_inside_a_save_and_no_loss_differs(tmp_path, ranks):
    options = {"ranks": ranks, "keep": {"every_steps": 1}}
    found, kills = crashed(tmp_path, options, 2 * KILLS, seed=ranks)
    assert kills.counted >= KILLS // 2, TOO_FEW
    assert kills.in_saves >= 1
    assert found == whole(tmp_path, options)
