"""Two ranks that are kept: killed, they go on as ranks that were not; where one cannot, all end with one reason."""

from __future__ import annotations

import shutil

import pytest
from kept_job import trained

STEPS = {"every_steps": 5}


@pytest.fixture(scope="module")
def dead(tmp_path_factory):
    """Return a folder with a job that died after 13 windows, saved after 10; and what one says that did not."""
    folder = tmp_path_factory.mktemp("kept")
    trained(folder, "dead", keep=STEPS, dies_after=13)
    assert sorted(each.name for each in (folder / "run").glob("step-*")) == ["step-10", "step-5"]
    other = tmp_path_factory.mktemp("whole")
    return folder, trained(other, "whole", keep={})


def copied(dead, tmp_path):
    shutil.copytree(dead[0] / "run", tmp_path / "run")
    return tmp_path


def test_ranks_go_on_as_ranks_that_were_not_killed(dead, tmp_path):
    """Losses of each rank, and at the end parameters, and buffers of their own."""
    said, consumed = trained(copied(dead, tmp_path), "again", keep=STEPS)
    for rank in range(2):
        whole_said, whole_consumed = dead[1][0][rank], dead[1][1][rank]
        assert min(int(window) for window in said[rank] if window != "end") == 11
        assert said[rank] == {window: loss for window, loss in whole_said.items() if window in said[rank]}
        assert consumed[rank] == whole_consumed[10:]
        assert "end" in said[rank]
    assert said[0]["11"] != said[1]["11"]


def test_more_ranks_go_on_where_that_is_accepted_and_no_row_is_lost_or_seen_twice(dead, tmp_path):
    folder = copied(dead, tmp_path)
    refused, _ = trained(folder, "refused", ranks=3)
    assert all("resume: ranks: given 3; expected 2" in each["error"] for each in refused)
    _, consumed = trained(folder, "three", ranks=3, keep={"accepts": ["ranks", "plan"]})

    def rows(of_ranks, window):
        return sorted(row for rank in of_ranks for number, rows in rank if number == window for row in rows)

    for window in range(10, 32):
        assert rows(consumed, window) == rows(dead[1][1], window)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_ends_all_with_one_reason(dead, tmp_path, rank):
    folder = copied(dead, tmp_path)
    said, _ = trained(folder, "full", keep=STEPS, cannot_write=rank)
    assert all("No space left" in each["error"] for each in said)
    assert sorted(each.name for each in (folder / "run").iterdir() if "step" in each.name) == ["step-10", "step-5"]


def test_a_rank_that_cannot_read_ends_all_before_anything_is_changed(dead, tmp_path):
    said, _ = trained(copied(dead, tmp_path), "unread", cannot_read=1)
    assert "another disk" in said[0]["error"]
    assert said[1]["error"] == "ValueError: another disk"


def test_a_signal_to_one_rank_saves_and_ends_all_and_they_go_on(dead, tmp_path):
    said, _ = trained(tmp_path, "signalled", keep={"every_steps": None}, signal=[1, 6])
    assert [each["left"] for each in said] == [128 + 15] * 2
    (saved,) = (tmp_path / "run").glob("step-*")
    assert saved.name == "step-8"  # seen after the seventh window, and told in the eighth
    said, _ = trained(tmp_path, "again")
    for ours, theirs in zip(said, dead[1][0], strict=True):
        assert ours == {window: loss for window, loss in theirs.items() if window in ours}
        assert {"9", "end"} <= ours.keys()


def test_seconds_are_agreed_upon(tmp_path):
    trained(tmp_path, "timed", every_s=1e-3)
    saved = sorted(int(each.name.partition("-")[2]) for each in (tmp_path / "run").glob("step-*"))
    assert saved == [25, 30]


def test_a_model_that_the_loop_wrapped_itself_is_kept_too(tmp_path):
    trained(tmp_path, "one", own=True, keep=STEPS, dies_after=8)
    said, _ = trained(tmp_path, "two", own=True, keep=STEPS)
    (tmp_path / "other").mkdir()
    whole, _ = trained(tmp_path / "other", "whole", own=True)
    for ours, theirs in zip(said, whole, strict=True):
        assert ours == {window: loss for window, loss in theirs.items() if window in ours}
        assert "6" in ours
