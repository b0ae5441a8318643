"""Two ranks that are kept: killed, they go on as ranks that were not; where one cannot, all end with one reason."""

from __future__ import annotations

import json
import shutil

import pytest
from kept_job import job, statuses, trained
from raising import raises
from saving import newest_good

from trimtab.checkpoint.atomic_directory import verify, write_manifest
from trimtab.core.errors import DamagedError
from trimtab.core.record import read_record

pytestmark = pytest.mark.slow

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
    said, consumed = trained(copied(dead, tmp_path), "again", keep=STEPS, reads_once=True)
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
    assert {(each["code"], each["got"], each["expected"]) for each in refused} == {("resume.ranks_differs", "3", "2")}
    _, consumed = trained(folder, "three", ranks=3, keep={"accepts": ["ranks", "plan"]})

    def rows(of_ranks, window):
        return sorted(row for rank in of_ranks for number, rows in rank if number == window for row in rows)

    for window in range(10, 32):
        assert rows(consumed, window) == rows(dead[1][1], window)


UNLIKE = {"own_parts": True, "threads": [1, 2], "keep": STEPS}


@pytest.fixture(scope="module")
def unlike(tmp_path_factory):
    """Return a folder with a job that died, saved after 10 windows, whose ranks are unlike in all that is their own."""
    folder = tmp_path_factory.mktemp("unlike")
    trained(folder, "dead", dies_after=12, **UNLIKE)
    return folder


def recorded(folder, rank):
    """Return the indices of the windows in a rank's record."""
    return [step.index for step in read_record(folder / f"record-{rank}.jsonl").steps]


def test_each_rank_goes_on_with_its_own_record_threads_and_what_it_keeps_too(unlike, tmp_path):
    shutil.copytree(unlike, tmp_path, dirs_exist_ok=True)
    said, _ = trained(tmp_path, "again", **UNLIKE)
    assert [each["also"] for each in said] == [{"rank": rank, "windows": 32} for rank in (0, 1)]
    assert [recorded(tmp_path, rank) for rank in (0, 1)] == [[*range(32)]] * 2


def test_a_rank_that_is_added_begins_its_record_and_keeps_too_what_rank_0_does(unlike, tmp_path):
    """Its threads are compared with those of the rank that it takes its own from."""
    shutil.copytree(unlike, tmp_path, dirs_exist_ok=True)
    options = UNLIKE | {"ranks": 3, "threads": [1, 2, 1], "keep": STEPS | {"accepts": ["ranks", "plan"]}}
    said, _ = trained(tmp_path, "three", **options)
    assert [each["also"] for each in said] == [{"rank": rank, "windows": 32} for rank in (0, 1, 0)]
    assert [len(recorded(tmp_path, rank)) for rank in range(3)] == [32, 32, 22]


def test_ranks_with_each_other_s_threads_are_refused(unlike, tmp_path):
    shutil.copytree(unlike, tmp_path, dirs_exist_ok=True)
    said, _ = trained(tmp_path, "swapped", **UNLIKE | {"threads": [2, 1]})
    found = {(each["code"], each["got"], each["expected"]) for each in said}
    assert found == {("resume.threads_differs", "2, 1", "1, 2")}


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


@pytest.mark.parametrize("fails", ["put_aside", "warn", "begin", "record"])
def test_what_rank_0_alone_cannot_do_ends_all_before_weights_are_put_back(dead, tmp_path, fails):
    folder, why = copied(dead, tmp_path), {"warn": "UserWarning", "record": "no byte of it"}.get(fails, "No space left")
    if fails in ("put_aside", "warn"):
        (folder / "run" / "step-10" / "tensors.safetensors").write_bytes(b"damaged")
    said, _ = trained(folder, "again", cannot=fails)
    assert all(why in each["error"] for each in said)
    assert said[1]["error"].startswith("FormatError: ")
    assert (said[1]["code"], said[1]["field"]) == ("ranks.ended", "rank 0")
    assert not said[0]["moved"]


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
    assert saved == [31, 32]  # the last two: each window takes as long


def test_a_model_that_the_loop_wrapped_itself_is_kept_too(tmp_path):
    trained(tmp_path, "one", own=True, keep=STEPS, dies_after=8)
    said, _ = trained(tmp_path, "two", own=True, keep=STEPS)
    (tmp_path / "other").mkdir()
    whole, _ = trained(tmp_path / "other", "whole", own=True)
    for ours, theirs in zip(said, whole, strict=True):
        assert ours == {window: loss for window, loss in theirs.items() if window in ours}
        assert "6" in ours


UNEVEN = {
    "a row too few": (65, 8),
    "one ends": ([32, 18], 4),
    "one has ended": ([32, 18], 6),
    "one has a single batch": ([32, 4], 5),
    "one has a batch that voids its window": ([32, 8], 5),
}
NO_NUMBER = {"one has a batch that voids its window": 3}  # a row of the second rank's first batch


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", UNEVEN)
def test_ranks_go_on_where_one_has_no_rows(tmp_path, stage, kind):
    """It joins the others by what weighs nothing, and its dropout draws as it would have."""
    rows, saved = UNEVEN[kind]
    options = {"rows": rows, "stage": stage, "keep": {"every_steps": saved}, "no_number": NO_NUMBER.get(kind)}
    trained(tmp_path, "dead", dies_after=saved + 1, **options)
    said, _ = trained(tmp_path, "again", **options)
    (tmp_path / "other").mkdir()
    whole, consumed = trained(tmp_path / "other", "whole", **options | {"keep": {}})
    assert [] in [rows for _, rows in consumed[1][saved:]]
    assert ("nan" in whole[1].values()) is (kind in NO_NUMBER)
    assert "nan" not in whole[0].values()  # nor did a window of the second rank end the training of both
    for ours, theirs, seen in zip(said, whole, consumed, strict=True):
        joined = {str(window + 1) for window, rows in seen if not rows}  # of which a rank has no loss of its own
        assert str(saved + 1) in ours
        ours, theirs = (
            {window: loss for window, loss in each.items() if window not in joined} for each in (ours, theirs)
        )
        assert ours == {window: loss for window, loss in theirs.items() if window in ours}
        assert "end" in ours


@pytest.mark.parametrize("fault", ["raises", "dies", "discards"])
def test_a_ranks_fault_and_a_kill_while_they_go_on_lose_nothing(dead, tmp_path, fault):
    """Ended by one rank in window 12, killed as one of them goes on, and gone on with."""
    folder = copied(dead, tmp_path)
    assert statuses(folder, "fault", fault=[fault, 12]) == [0, -9 if fault == "dies" else 0]
    assert statuses(folder, "killed", killed_in_reading=1) == [0, -9]
    assert json.loads((folder / "killed-0.json").read_text())["said"]["code"] == "ranks.silent"
    said, _ = trained(folder, "again", keep=STEPS)
    for ours, theirs in zip(said, dead[1][0], strict=True):
        assert ours == {window: loss for window, loss in theirs.items() if window in ours}
        assert {"11", "end"} <= ours.keys()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_may_take_longer_than_a_rank_may_be_silent(tmp_path, monkeypatch, rank):
    monkeypatch.chdir(tmp_path)
    options = {"keep": {"every_steps": 15, "on_failure": "warn"}, "slow": [rank, 2.5, 1.0]}
    said, _ = trained(tmp_path, "slow", **options)
    assert all("end" in each for each in said)
    assert [each.name for each in tmp_path.glob("rank-*")] == []
    assert newest_good(tmp_path / "run").contents.step == 30


def test_ranks_whose_older_checkpoints_cannot_be_deleted_are_saved_and_go_on(tmp_path):
    """All of them know that it was saved: of what failed after it each tells once."""
    options = {"keep": STEPS | {"on_failure": "warn", "keep_last": 1}, "cannot_delete": True, "saves_twice": 10}
    said, _ = trained(tmp_path, "kept", **options)
    assert all("end" in each for each in said)
    assert newest_good(tmp_path / "run").contents.step == 30
    assert len([*(tmp_path / "run").glob("step-*")]) == 6
    for rank in range(2):
        told = (tmp_path / f"said-{rank}").read_text()
        assert told.count("step 10 was saved") == 1
        assert "was not saved" not in told


def test_no_word_of_a_save_stays_in_the_jobs_store(tmp_path):
    """Those that another rank has yet to hear are there a little longer: of as many windows, they are as few."""
    for each in job(tmp_path, "many", keep={"every_steps": 1}):
        assert len(each["keys"]) > 20
        assert min(each["keys"][-6:]) <= max(each["keys"][:6])


def test_a_checkpoint_without_the_files_of_a_rank_is_not_whole(dead, tmp_path):
    """Though its manifest knows of none: it was sealed without them."""
    newest = copied(dead, tmp_path) / "run" / "step-10"
    about = verify(newest).about
    for each in (newest / "manifest.json", *newest.glob("rank-1-*")):
        each.unlink()
    write_manifest(newest, about)
    with raises(DamagedError, code="checkpoint.file_missing"):
        verify(newest)
    assert newest_good(tmp_path / "run").contents.step == 5


def test_a_rank_that_interrupts_alone_is_not_saved_with_others_that_left_the_pass(tmp_path):
    """They are in the next one, and it is not: no place in the data is that of both."""
    said = {}
    for name, interrupts in (("both", [0, 1]), ("one", [1])):
        (tmp_path / name).mkdir()
        options = {"keep": {"every_steps": None}, "leaves_after": 6, "interrupts": interrupts}
        said[name], _ = trained(tmp_path / name, name, **options)
        is_saved = [*(tmp_path / name / "run").glob("step-6")] != []
        assert is_saved is (name == "both")
    found = {(each["code"], each["got"]) for each in said["one"]}
    assert found == {("checkpoint.epochs_differ", "epoch 1 on rank 0, epoch 0 on rank 1")}
