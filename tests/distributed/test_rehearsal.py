"""What a job's ranks run of its plans before they train, and what is chosen by it."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from ranks import reports, run_program

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parents[1] / "rehearsal_rank.py"
SENT = ("fast_link", "unrehearsed", "slow_hook", "slow_usual", "no_copies", "all_raise")
SHARED = ("replicas", "shards", "no_room")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("rehearsed")
    run_program(PROGRAM, folder, *SENT, *SHARED)
    return reports(folder)


@pytest.mark.parametrize("case", SENT + SHARED)
def test_the_user_s_own_is_as_it_was_and_all_ranks_have_one_plan(found, case):
    """Weights, buffers, gradients, flags, hooks, optimizer state, random numbers and modes, bit for bit."""
    one, other = (rank[case] for rank in found)
    assert (one.get("error"), other.get("error")) == (None, None)
    assert one["unchanged"]
    assert other["unchanged"]
    assert one["plan"] == other["plan"]


def test_where_nothing_is_to_be_changed_nothing_is_run(found):
    assert found[0]["fast_link"]["rehearsals"] == 0
    assert found[0]["fast_link"]["plan"]["planning_s"] == 0


def test_where_it_is_not_wanted_what_is_predicted_is_taken(found):
    assert found[0]["unrehearsed"]["rehearsals"] == 0
    plan = found[0]["unrehearsed"]["plan"]
    assert (plan["reduce_dtype"]["value"], plan["reduce_dtype"]["changed"]) == ("bf16", True)
    assert "rehears" not in plan["reduce_dtype"]["reason"]


def test_what_is_predicted_to_be_faster_and_is_slower_is_not_chosen(found):
    plan = found[0]["slow_hook"]["plan"]
    assert (plan["reduce_dtype"]["value"], plan["reduce_dtype"]["changed"]) == ("fp32", False)
    assert plan["bucket_bytes"]["value"] is None
    assert "is predicted to take" in plan["reduce_dtype"]["reason"]
    assert plan["reduce_dtype"]["code"] == "dry_run.small_gain"
    assert "6 pairs of blocks: 0." in plan["reduce_dtype"]["reason"]
    assert plan["reduce_dtype"]["rejected"][0]["value"] == "bf16"
    assert plan["planning_s"] > 0


def test_what_is_faster_as_predicted_is(found):
    plan = found[0]["slow_usual"]["plan"]
    assert (plan["reduce_dtype"]["value"], plan["reduce_dtype"]["changed"]) == ("bf16", True)
    assert plan["reduce_dtype"]["code"] == "dry_run.faster"
    assert "x the speed of fp32 in buckets of the default size" in plan["reduce_dtype"]["reason"]


@pytest.mark.parametrize(("case", "why"), [("no_copies", "deepcopy"), ("all_raise", "ValueError: no loss")])
def test_what_cannot_be_run_is_not_changed_and_says_why(found, case, why):
    plan = found[0][case]["plan"]
    assert plan["reduce_dtype"]["value"] == "fp32"
    assert plan["reduce_dtype"]["code"] == "dry_run.not_run"
    assert why in plan["reduce_dtype"]["reason"]


@pytest.mark.parametrize(("case", "stage"), [("replicas", 0), ("shards", 3)])
def test_the_peak_that_was_counted_is_what_a_run_then_takes(found, case, stage):
    """To 5%, where collectives wait 10 ms and of each the window that gloo's threads were soonest in to let go."""
    plan = found[0][case]["plan"]
    assert plan["zero_stage"]["value"] == stage
    taken, counted = max(min(rank[case]["taken"]) for rank in found), found[0][case]["peaks"]
    assert min(counted) == pytest.approx(taken, rel=0.05)
    assert plan["measured"]["peak_bytes"] == statistics.median_high(counted)
    assert plan["measured"]["step_s"] > 0
    assert plan["predicted"]["peak_bytes"] > 5 * taken  # as planted: it was not told by this
    assert "this plan, measured" in found[0][case]["text"]


def test_where_memory_runs_out_on_one_replica_the_next_is_tried(found):
    job = found[0]["no_room"]
    assert (job["rehearsals"], job["plan"]["zero_stage"]["value"]) == (2, 1)
    assert job["plan"]["measured"]["step_s"] > 0


def test_where_memory_is_counted_no_copy_is_there_beside_another(tmp_path):
    run_program(PROGRAM, tmp_path, "one_at_once", "one_at_once_fails")
    for rank in range(2):
        ran, failed = json.loads((tmp_path / f"rank-{rank}.json").read_text()).values()
        assert (ran["most"], ran["left"], ran["refusal"]) == (1, 0, "")
        assert ran["made"] == 6 * 3 + 1  # of each block, and of the peaks
        assert (failed["made"], failed["most"], failed["left"]) == (2, 1, 0)
        assert (failed["refusal"], failed["code"]) == ("ValueError: no loss", "dry_run.failed")
