"""What defines a run is all kept: where one part of it is not put back, the losses that follow are others."""

from __future__ import annotations

import shutil

import pytest
from crashing import FORGOTTEN
from test_crash import said, started_once, whole

DIED, SAVED = 10, 8


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """Return a folder with a run that died, saved some windows before, and what it would have said."""
    folder = tmp_path_factory.mktemp("left-out")
    losses = folder / "dead.txt"
    assert started_once(folder / "run", losses, {"dies_after": DIED}) == 9
    assert sorted(each.name for each in (folder / "run").glob("step-*")) == ["step-4", f"step-{SAVED}"]
    return folder, whole(folder, {})


def went_on(dead, tmp_path, **options):
    """Return the windows that a run says otherwise than one that never died, and all it says."""
    folder, expected = dead
    shutil.copytree(folder / "run", tmp_path / "run")
    assert started_once(tmp_path / "run", tmp_path / "losses.txt", options) == 0
    found = said(tmp_path / "losses.txt")
    return sorted(window for window in found if found[window] != expected[window]), found


def test_with_all_of_it_no_loss_differs(dead, tmp_path):
    differing, found = went_on(dead, tmp_path)
    assert differing == []
    assert str(SAVED) in found
    assert str(SAVED - 1) not in found


@pytest.mark.parametrize("part", FORGOTTEN)
def test_without_one_part_they_do(dead, tmp_path, part):
    differing, _ = went_on(dead, tmp_path, forgets=part)
    assert "end" in differing
    assert len(differing) > 40
