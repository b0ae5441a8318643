"""Comparisons, races and ablations of loops: what they measure, how they fail, and how they are kept."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import FormatError, LoopError, ValueGivenError
from trimtab.experiments.comparison import Comparison, sparkline
from trimtab.experiments.loops import Loop
from trimtab.experiments.result_table import CONTROL, PEAK, SAMPLES, SECONDS, ResultTable, Row
from trimtab.experiments.subject import RunOptions
from trimtab.plans.plan import Plan
from trimtab.tasks import load_task

BATCHES = [torch.randn(8, 4, generator=torch.Generator().manual_seed(index)) for index in range(4)]


def square_loss(model, batch):
    return model(batch).square().mean()


def make_loop(wait_s=0.0, **changes):
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))

    def loss_fn(model, batch):
        time.sleep(wait_s)
        return square_loss(model, batch)

    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, BATCHES, **changes)


def quick(seed):
    return make_loop()


def slow(seed):
    return make_loop(0.02)


def test_a_race_finds_the_faster_loop_and_equal_losses():
    found = trimtab.race(slow, quick, steps=20, pairs=2)
    assert found.arms == ("slow", "quick")
    assert found.speed().mean > 1.5
    assert found.loss_difference().mean == pytest.approx(0.0, abs=1e-3)
    assert found.memory() == pytest.approx(1.0)
    assert 0.5 < trimtab.race(quick, quick, steps=20, pairs=1, names=("one", "other")).speed().mean < 2.0
    assert found.num_pairs == 2


@pytest.mark.parametrize("names", [("one",), ("same", "same"), (CONTROL, "other")])
def test_a_race_needs_two_loops_of_different_names(names):
    with raises(ValueGivenError, code="race.names"):
        trimtab.race(quick, quick, names=names)
    with raises(ValueGivenError, code="race.names"):
        trimtab.race(quick)


def test_a_plan_of_the_user_is_compared_and_undone():
    plan = Plan.fixed(8, 4, fused_optimizer=True)
    seen = []

    def setup(seed):
        seen.append(make_loop(evaluate=lambda model: {"norm": model[0].weight.norm()}))
        return seen[-1]

    found = trimtab.compare(setup, steps=12, pairs=1, plan=plan)
    assert not found.failures
    assert abs(found.loss_difference().mean) < 0.1
    assert all(group["fused"] in (None, False) for loop in seen for group in loop.optimizer.param_groups)
    assert "norm" in str(found)
    assert len(str(found).splitlines()) <= 25
    assert all(len(line) <= 80 for line in str(found).splitlines())


def test_a_split_without_proof_is_warned_of_once():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trimtab.ablate(quick, steps=4, pairs=1, plan=Plan.fixed(8, 4, fused_optimizer=True))
    assert [each.category for each in seen].count(trimtab.UnprovedSplitWarning) == 1


def test_a_batch_larger_than_the_loop_accumulates_is_a_change():
    plan = replace(Plan.fixed(16), reference=trimtab.Reference("fp32", accumulate=2))
    found = trimtab.compare(lambda seed: make_loop(accumulate=2), plan=plan, steps=4, pairs=1)
    assert found.changes["plan"] == ("micro_batch",)
    assert "8 samples -> 16 samples" in str(found)


def test_an_ablation_has_each_change_alone_and_left_out():
    found = trimtab.ablate(quick, steps=10, pairs=1, plan=Plan.fixed(8, 4, fused_optimizer=True))
    alone = {"micro batch alone", "fused optimizer alone"}  # The plan without one change has only the other.
    assert set(found.arms) == {"baseline", "plan", *alone}
    assert not found.failures
    assert all(found.speed(arm) is not None for arm in alone)


def test_an_arm_that_fails_drops_out_and_the_baseline_raises():
    def failing(seed):
        calls = []

        def step(model, optimizer, batch):
            calls.append(1)
            if len(calls) > 6:
                raise RuntimeError("worn out")

        return replace(make_loop(), step=step)

    found = trimtab.race(quick, failing, steps=20, pairs=1)
    assert set(found.failures) == {"failing"}
    assert found.is_below(0.1)
    assert "worn out" in str(found)
    with raises(LoopError, code="baseline.failed"):
        trimtab.race(failing, quick, steps=20, pairs=1)


def test_a_loss_that_is_not_finite_drops_the_arm():
    found = trimtab.race(quick, lambda seed: replace(make_loop(), loss_fn=lambda m, x: m(x).mean() * float("nan")),
                         steps=10, pairs=1, names=("finite", "nan"))  # fmt: skip
    assert "nan" in found.failures
    assert "nan" in str(found)
    assert "nan" not in found._repr_html_().partition("<polyline")[2].partition("/>")[0]


def test_arms_of_one_model_are_refused():
    loop = make_loop()
    with raises(ValueGivenError, code="setup.shares_objects"):
        trimtab.race(lambda seed: loop, lambda seed: loop, steps=4, pairs=1, names=("one", "other"))


def test_the_process_is_left_as_it_was():
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    trimtab.race(quick, slow, steps=4, pairs=1)
    assert torch.equal(torch.rand(2), expected)


def result_of(ratios, control=1.0):
    rows = []
    for seed, ratio in enumerate(ratios):
        for arm, seconds in (("baseline", 1.0), (CONTROL, control + 0.001 * seed), ("plan", 1.0 / ratio)):
            for number in range(8):
                rows.append(Row(arm, seed, number, SECONDS, seconds, "s"))
                rows.append(Row(arm, seed, number, SAMPLES, 8.0, "samples"))
    rows += [Row("baseline", -1, -1, PEAK, 100.0, "B"), Row("plan", -1, -1, PEAK, 50.0, "B")]
    return Comparison("loop", ("baseline", "plan"), 80, ResultTable.of(rows))


def test_an_arm_that_failed_late_has_no_verdict():
    found = replace(result_of([1.5, 1.51, 1.49, 1.5, 1.52]), failures={"plan": "diverged"})
    assert found.verdict() == "no verdict"
    assert found.is_below(0.1)


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([1.5, 1.51, 1.49, 1.5, 1.52], "gain"),
        ([0.5, 0.51, 0.49, 0.5, 0.52], "harm"),
        ([1.0, 1.1, 0.9, 1.05, 0.95], "no gain"),
        ([1.5] * 4, "no verdict"),
    ],
)
def test_verdicts_need_five_pairs_and_an_interval_beside_one(ratios, verdict):
    found = result_of(ratios)
    assert found.verdict() == verdict
    assert found.memory() == 0.5
    assert verdict in str(found)


def test_results_are_saved_as_a_page_and_as_json(tmp_path):
    found = trimtab.race(slow, quick, steps=10, pairs=1)
    again = Comparison.load(found.save(tmp_path / "result.json"))
    assert str(again) == str(found)
    page = found.save(tmp_path / "report.html").read_text()
    assert found._repr_html_() in page
    assert "<polyline" in page
    assert "http" not in page
    with raises(FormatError, code="result.suffix"):
        found.save(tmp_path / "report.txt")


def test_a_sparkline_is_as_wide_as_asked():
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert len(sparkline(range(1000), 40)) == 40
    assert sparkline([1.0]) == "▁"


def changed_loop(lr=0.1, accumulate=1, evaluate=None, width=16):
    def setup(seed):
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        return Loop(model, optimizer, square_loss, BATCHES, evaluate, accumulate=accumulate)

    return setup


@pytest.mark.parametrize("change", [{"lr": 5.0}, {"accumulate": 2}, {"evaluate": len}, {"width": 8}], ids=str)
def test_a_folder_is_not_continued_with_a_changed_loop(tmp_path, change):
    def raced(*loops):
        options = RunOptions(6, 1, out=tmp_path)
        return trimtab.race(*loops, names=("one", "other"), options=options)

    raced(changed_loop(), changed_loop())
    raced(changed_loop(), changed_loop())
    with raises(FormatError, code="folder.settings_differ"):
        raced(changed_loop(), changed_loop(**change))
    with raises(FormatError, code="folder.settings_differ"):
        raced(changed_loop(**change), changed_loop())


def test_a_plan_with_a_schedule_trains_a_function():
    plan = Plan.fixed(8, 8, schedule="warmup_cosine")
    found = trimtab.compare(quick, plan=plan, steps=6, pairs=1)
    assert not found.failures
    assert "tuned plan" in found.arms


def test_a_baseline_without_losses_is_told():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        square_loss(model, batch).backward()
        optimizer.step()

    found = trimtab.compare(lambda seed: make_loop(step=step), plan=Plan.fixed(8, 8), steps=6, pairs=1)
    assert any("returns no loss" in note for note in found.notes)


def test_evaluations_of_a_task_that_is_trained_to_the_end_may_be_more_frequent():
    task = load_task("digits_resnet")
    assert RunOptions(to_end=True, evaluate_every=3).of_task(task).evaluate_every == 3
    assert RunOptions(to_end=True).of_task(task).evaluate_every > 3


def test_a_plan_for_batches_of_another_size_is_told():
    found = trimtab.compare(quick, plan=Plan.fixed(16, 16), steps=6, pairs=1)
    assert any("batches of 16 samples" in note for note in found.notes)
    assert not any("batches of" in n for n in trimtab.compare(quick, plan=Plan.fixed(8, 8), steps=6, pairs=1).notes)


def test_lead_steps_have_the_same_loss_in_every_arm():
    found = trimtab.compare(quick, plan=Plan.fixed(8, 8), steps=6, pairs=1)
    first = {row.value for arm in found.table.arms for row in found.table.select("loss", arm) if row.round == 0}
    assert max(first) == pytest.approx(min(first), rel=1e-5)


@pytest.mark.parametrize("value", ["high", torch.zeros(3), None])
def test_an_evaluation_that_is_no_number_is_refused(value):
    with raises(ValueGivenError, code="evaluate.not_number"):
        trimtab.race(changed_loop(evaluate=lambda model: value), quick, steps=6, pairs=1)


def test_a_damaged_part_of_a_folder_is_named(tmp_path):
    options = RunOptions(6, 1, out=tmp_path)
    trimtab.race(quick, slow, options=options)
    (tmp_path / "pair-0.json").write_text('{"x":')
    with raises(FormatError, code="json.invalid", field=str(tmp_path / "pair-0.json")):
        trimtab.race(quick, slow, options=options)


def test_the_headline_tells_a_precision_above_the_baseline_s():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = square_loss(model, batch)
        loss.backward()
        optimizer.step()
        return loss

    found = trimtab.compare(lambda seed: make_loop(step=step), plan=Plan.fixed(8, 8), steps=6, pairs=1)
    assert "bf16 -> fp32" in str(found)
