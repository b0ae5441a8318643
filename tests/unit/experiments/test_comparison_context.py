"""One process and several ranks: how long blocks are, what is refused, and what a report says of them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from raising import raises
from tiny_task import BATCH_SIZE, load_data
from tiny_task import task as tiny

from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.core.objective import Budget, Objective
from trimtab.core.serialization import from_json, to_json
from trimtab.distributed.coordinator import ALONE, BlockLength, Coordinator
from trimtab.distributed.rank_coordinator import _FixedBlockLength
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.comparison.arm_metrics import ArmMetrics
from trimtab.experiments.comparison.caveats import RankConditions, rank_notes
from trimtab.experiments.comparison.compare import CompareOptions, compare
from trimtab.experiments.comparison.comparison_result import Comparison
from trimtab.experiments.comparison.comparison_summary import headline, summarise
from trimtab.experiments.comparison_context import comparison_ranks
from trimtab.experiments.output_folder import claim_folder
from trimtab.experiments.paired_runs.inspect_arm import _mean, measure_arm
from trimtab.experiments.report.comparison_report import details_line
from trimtab.experiments.task_plans import Plans, given_plan
from trimtab.experiments.task_ranks import ranks_of_job, refuse_on_ranks, task_of_rank
from trimtab.plans.plan import Plan

PLANS = Plans({"equivalent": Plan.fixed(BATCH_SIZE)})


def length(pace: BlockLength, step_s: float) -> int:
    """Return how many steps a block of steps so long has."""
    steps = 0
    while pace.goes_on(steps, steps * step_s):
        steps += 1
    pace.ended(steps, steps * step_s)
    return steps


def test_blocks_of_one_process_end_by_its_clock_and_ranks_know_theirs_before():
    pace = BlockLength(8, 1.0)
    assert [length(pace, step_s) for step_s in (0.25, 0.0625, 0.25)] == [8, 16, 8]
    pace = _FixedBlockLength(8, 1.0)
    assert [length(pace, step_s) for step_s in (0.0625, 0.0625, 0.25, 0.0625)] == [8, 16, 16, 8]
    pace = _FixedBlockLength(8, 1.0)
    pace.ended(0, 0.0)
    assert length(pace, 1.0) == 8


def test_one_process_agrees_with_itself(tmp_path):
    with comparison_ranks() as alone:
        assert alone is ALONE
    assert (ALONE.each(3.0), ALONE.in_turn(lambda: 5)) == ([3.0], 5)
    path = tmp_path / "facts.json"
    assert ALONE.read(ArmMetrics, path) is None
    ALONE.write(path, ArmMetrics(7))
    assert ALONE.read(ArmMetrics, path) == ArmMetrics(7)
    before = torch.get_rng_state()
    ALONE.draw_apart(1)
    assert torch.equal(torch.get_rng_state(), before)
    error = ValueError("any")
    assert ALONE.may_leave(error)
    assert ALONE.ended(error) is error


@pytest.mark.parametrize(
    ("changes", "asked", "code", "field", "words"),
    [
        ({"step": lambda model, optimizer, batch: None}, {}, "step.several_ranks", "task.step", ("2 ranks",)),
        ({}, {"adapts": True}, "option.conflict", "--ranks", ("2 ranks", "--adapt")),
        ({}, {"peers": True, "adapts": True}, "option.conflict", "--ranks", ("2 ranks", "--adapt and --peers")),
        ({"batch_size": 1}, {}, "ranks.too_many", "--ranks", ("2 ranks", "1 samples")),
    ],
)
def test_what_ranks_cannot_race_is_refused(changes, asked, code, field, words):
    with raises(ValueGivenError, code=code, field=field) as caught:
        refuse_on_ranks(replace(tiny, **changes), 2, **({"adapts": None, "peers": None} | asked))
    assert all(word in caught.value.problem for word in words)


@pytest.mark.parametrize("asked", [{"adapts": False, "peers": False}, {"adapts": None, "peers": None}])
def test_what_is_left_out_by_itself_is_not_refused(asked):
    refuse_on_ranks(tiny, 2, **asked)


def test_a_job_has_the_ranks_that_were_asked_for_or_those_of_its_launcher(monkeypatch):
    assert (ranks_of_job(1), ranks_of_job(3)) == (1, 3)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (ranks_of_job(1), ranks_of_job(2)) == (2, 2)
    with raises(ValueGivenError, code="ranks.launcher_differs", field="--ranks"):
        ranks_of_job(3)


def test_a_given_plan_is_for_as_many_ranks_and_their_share():
    share = task_of_rank(tiny, 2)
    shared = Plan.fixed(BATCH_SIZE // 2, num_ranks=2, zero_stage=2)
    assert given_plan(share, shared, 2).plans == {"equivalent": shared}
    with raises(ValueGivenError, code="plan.ranks_differ", field="plan"):
        given_plan(tiny, shared)
    with raises(ValueGivenError, code="plan.batch_differs", field="plan"):
        given_plan(share, replace(shared, batch_size=BATCH_SIZE, micro_batch=Plan.fixed(BATCH_SIZE).micro_batch), 2)


def claimed(folder, num_ranks: int = 1, plan: Plan | None = None) -> None:
    claim_folder(folder, tiny, load_data(), {"quick": True}, Budget(), Objective(), plan, num_ranks)


def test_a_plan_that_was_written_before_it_had_a_choice_more_is_the_same_plan(tmp_path):
    claimed(tmp_path, plan=Plan.fixed(8, dropout=0.1))
    path = tmp_path / "settings.json"
    held = json.loads(path.read_text())
    plan = json.loads(held["plan"])
    del plan["weight_decay"]
    path.write_text(json.dumps(held | {"plan": json.dumps(plan)}))
    claimed(tmp_path, plan=Plan.fixed(8, dropout=0.1))
    with raises(FormatError, code="folder.settings_differ"):
        claimed(tmp_path, plan=Plan.fixed(8, dropout=0.1, weight_decay=0.1))
    path.write_text(json.dumps(held | {"plan": "{}"}))
    with raises(FormatError, code="folder.settings_differ"):
        claimed(tmp_path, plan=Plan.fixed(8, dropout=0.1))


def test_a_folder_is_of_so_many_ranks(tmp_path):
    claimed(tmp_path, 2)
    claimed(tmp_path, 2)
    for others in (1, 3):
        with raises(FormatError, code="folder.settings_differ"):
            claimed(tmp_path, others)


def test_a_folder_is_of_so_many_ranks_and_of_one_if_it_says_nothing(tmp_path):
    claimed(tmp_path)
    assert "ranks" not in (tmp_path / "settings.json").read_text()
    claimed(tmp_path)
    with raises(FormatError, code="folder.settings_differ"):
        claimed(tmp_path, 2)

    class Two(Coordinator):
        num_ranks = 2

    with raises(ValueGivenError, code="option.conflict", field="--ranks"):
        compare(tiny, tmp_path / "out", CompareOptions(), command="", together=Two())
    assert not (tmp_path / "out").exists()


def comparison(ranks: RankConditions, facts=None) -> Comparison:
    facts = facts or {name: ArmMetrics(100) for name in ("reference", "equivalent_plan")}
    return summarise(tiny, load_data(), PLANS, {}, facts, command="", environment={}, ranks=ranks)


def test_a_report_says_on_how_many_ranks_it_was_measured():
    found = comparison(RankConditions(2, "cores"))
    sentence = "Measured on 2 ranks; the reference is the loop in DistributedDataParallel."
    assert sentence in found.headline.sentence
    assert RankConditions(2, "cores").warning in found.headline.sentence
    assert "cores" in RankConditions(2, "cores").warning
    assert "on 2 ranks" in details_line(found)
    assert any("DistributedDataParallel" in note for note in found.notes)
    assert RankConditions(2, "cores").warning in found.notes
    roomy = comparison(RankConditions(2))
    assert sentence in roomy.headline.sentence
    assert "measure scaling" not in " ".join((roomy.headline.sentence, *roomy.notes))
    found = comparison(RankConditions())
    assert found.num_ranks == 1
    assert "rank" not in " ".join((found.headline.sentence, details_line(found), *found.notes))
    assert headline((), (), PLANS.plans["equivalent"], {}).sentence == "Nothing was measured."
    written = json.loads(to_json(comparison(RankConditions(2))))
    assert written.pop("num_ranks") == 2
    assert from_json(Comparison, json.dumps(written)).num_ranks == 1


@pytest.mark.parametrize(
    ("rows", "terms", "is_uneven"),
    [(32, (1.0, 1.0), False), (33, (1.0, 1.0), True), (32, (5.0, 7.0), True), (32, (), False)],
)
def test_a_reference_that_weighs_its_rows_unlike_is_named(rows, terms, is_uneven):
    notes = rank_notes(RankConditions(2), PLANS, {"reference": ArmMetrics(100, terms_by_rank=terms)}, rows)
    assert any("weights samples differently" in note for note in notes) is is_uneven


def test_a_peak_that_an_engine_hides_is_unknown():
    class Hidden(ReferenceLoop):
        hides_memory = True

    facts = measure_arm(Hidden, tiny, load_data(), torch.device("cpu"))
    assert facts.peak_bytes is None
    assert facts.is_current
    assert measure_arm(ReferenceLoop, tiny, load_data(), torch.device("cpu")).peak_bytes > 0
    assert _mean([6.0, 3.0], [1, 2]) == 4.0
    assert _mean([7.0], [3]) == 7.0
