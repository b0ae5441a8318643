"""Ranks that hold a model in shards are kept: killed, they go on to the bit, and as another number of them too."""

from __future__ import annotations

import os
import pickle
import random
import shutil

import pytest
from kept_job import job, trained
from saving import newest_good

pytestmark = pytest.mark.slow

STEPS = {"every_steps": 5}
OTHERS = {"accepts": ["ranks", "plan"]}
KINDS = {
    "1": {"stage": 1},
    "1, SGD, groups, channels_last": {"stage": 1, "mixed": True, "plan": {"memory_layout": "channels_last"}},
    "2": {"stage": 2},
    "3, SGD, groups": {"stage": 3, "mixed": True},
    "fully_shard": {"own": "fsdp"},
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def dead(request, tmp_path_factory):
    """Return a folder with a job that died after 13 windows, saved after 10; what one found that did not; options."""
    folder = tmp_path_factory.mktemp("kept")
    trained(folder, "dead", keep=STEPS, dies_after=13, **request.param)
    whole = job(tmp_path_factory.mktemp("whole"), "whole", keep={}, **request.param)
    return folder, whole, request.param


def copied(dead, tmp_path):
    shutil.copytree(dead[0] / "run", tmp_path / "run")
    return tmp_path


def everything(found, window):
    """Return every number of a job's model and optimizer, whichever rank has it."""
    numbers = {}
    for each in found:
        for name, values in each["state"][window].items():
            assert numbers.setdefault(name, values) == values, name
    return numbers


def test_shards_go_on_as_those_that_were_not_killed(dead, tmp_path):
    found = job(copied(dead, tmp_path), "again", keep=STEPS, reads_once=True, **dead[2])
    for ours, theirs in zip(found, dead[1], strict=True):
        assert min(int(window) for window in ours["said"] if window != "end") == 11
        assert ours["said"] == {window: loss for window, loss in theirs["said"].items() if window in ours["said"]}
        assert ours["state"]["10"] == theirs["state"]["10"]
        assert ours["state"]["20"] == theirs["state"]["20"]
        assert ours["consumed"] == theirs["consumed"][10:]
        assert "end" in ours["said"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_reads_from_all_shards_what_is_its_own(dead, tmp_path, ranks):
    """Of three, one holds nothing of the matrix with a single row. No row of the pass is lost or seen twice."""
    folder, (_, whole, options) = copied(dead, tmp_path), dead
    refused, _ = trained(folder, "refused", ranks=ranks, **options)
    assert {each["code"] for each in refused} == {"resume.ranks_differs"}
    assert not any(each["cut"] for each in refused if "own" not in options), "a model was put in shards, and refused"
    found = job(folder, "more", ranks=ranks, keep=OTHERS | STEPS, **options)
    assert everything(found, "10") == everything(whole, "10")
    assert everything(whole, "10") != everything(whole, "20")

    def rows(jobs, window):
        return sorted(row for each in jobs for number, rows in each["consumed"] if number == window for row in rows)

    for window in range(10, 32):
        assert rows(found, window) == rows(whole, window)
    assert (folder / "run" / "step-30").exists()


@pytest.mark.parametrize(("stage", "apart"), [(1, 1e-5), (3, 0)])
def test_three_ranks_go_on(tmp_path, stage, apart):
    """Of three DDP adds the first window up in another order than those after it, as at a run's start: to rounding."""
    options = {"ranks": 3, "stage": stage, "mixed": True, "keep": STEPS}
    trained(tmp_path, "dead", dies_after=13, **options)
    found = job(tmp_path, "again", **options)
    (tmp_path / "other").mkdir()
    whole = job(tmp_path / "other", "whole", **options)
    assert everything(found, "10") == everything(whole, "10")
    for name, numbers in everything(whole, "20").items():
        assert everything(found, "20")[name] == pytest.approx(numbers, rel=apart, abs=apart), name


def test_an_evaluation_before_it_is_saved_is_nothing_to_a_save(tmp_path):
    """At stage 2 it leaves whole parameters."""
    trained(tmp_path, "dead", keep=STEPS, dies_after=13, stage=2, evaluates=True)
    found = job(tmp_path, "again", keep=STEPS, stage=2, evaluates=True)
    (tmp_path / "other").mkdir()
    whole = job(tmp_path / "other", "whole", stage=2, evaluates=True)
    assert found[0]["state"]["10"] == whole[0]["state"]["10"]
    assert found[1]["said"]["end"] == whole[1]["said"]["end"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_write_its_shards_ends_all_with_one_reason(tmp_path, rank):
    said, _ = trained(tmp_path, "full", keep=STEPS, stage=2, cannot_write_shards=rank)
    assert all("No space left" in each["error"] for each in said)
    assert list((tmp_path / "run").glob("step-*")) == []


def test_a_run_whose_model_is_whole_does_not_become_one_in_shards(tmp_path):
    trained(tmp_path, "whole", keep=STEPS, dies_after=8)
    said, _ = trained(tmp_path, "shards", keep={"accepts": ["plan"]}, stage=3)
    assert {each["code"] for each in said} == {"resume.sharding_differs"}
    assert not any(each["cut"] for each in said)


def test_groups_in_another_order_are_refused(tmp_path):
    """They are as many: their rates and decay would be those of other parameters."""
    options = {"stage": 1, "mixed": True}
    trained(tmp_path, "dead", keep=STEPS, dies_after=8, **options)
    said, _ = trained(tmp_path, "swapped", keep=STEPS, swaps=True, **options)
    assert {each["code"] for each in said} == {"optimizer.groups_differ"}
    assert all("in group" in each["got"] for each in said)


def test_ranks_go_on_from_the_checkpoint_before_one_whose_shard_is_damaged_or_runs(dead, tmp_path):
    folder = copied(dead, tmp_path)

    class Runs:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'it-ran'}",)

    (shard, *_) = sorted((folder / "run" / "step-10").glob("shard-*"))
    shard.write_bytes(pickle.dumps(Runs()))
    (folder / "run" / "step-10" / ".metadata").write_bytes(pickle.dumps(Runs()))
    found = job(folder, "again", keep=STEPS, **dead[2])
    assert min(int(window) for window in found[0]["said"] if window != "end") == 6
    assert found[0]["state"]["10"] == dead[1][0]["state"]["10"]
    assert not (tmp_path / "it-ran").exists()


def test_no_damage_of_a_file_of_shards_is_overlooked(tmp_path):
    """304 each of files cut, bits flipped and blocks blanked: the file is named, and the checkpoint before used."""
    trained(tmp_path, "dead", keep=STEPS, dies_after=13, stage=2)
    parent, chance = tmp_path / "run", random.Random(0)
    files = sorted(path.name for path in (parent / "step-10").iterdir())
    assert sum(name.startswith("shard-") for name in files) == 2
    for kind in ("cut", "flipped", "blanked"):
        tried = 0
        while tried < 304:
            path = parent / "step-10" / files[tried % len(files)]
            content = path.read_bytes()
            at = chance.randrange(len(content))
            damaged = {
                "cut": content[:at],
                "flipped": content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :],
                "blanked": content[:at] + bytes(min(64, len(content) - at)) + content[at + 64 :],
            }[kind]
            if damaged == content:
                continue
            path.write_bytes(damaged)
            good = newest_good(parent)
            assert good.contents.step == 5
            assert good.refused[0][1].field == str(path)
            path.write_bytes(content)
            tried += 1
    assert newest_good(parent).contents.step == 10
