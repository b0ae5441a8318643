"""Which peers a comparison races: named, refused, shown beside the plans."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from raising import raises
from tiny_task import BATCH_SIZE, load_data
from tiny_task import task as tiny
from torch.nn import functional as F

from benchmarks.paper.recipes.paper import PaperLoop
from benchmarks.paper.tasks import load_task
from trimtab.core.errors import ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments.baselines.strong import StrongLoop
from trimtab.experiments.comparison.compare import ArmSelection, CompareOptions, compare
from trimtab.experiments.comparison.compare_command import CompareRequest
from trimtab.experiments.output_folder import code_of
from trimtab.experiments.paired_runs.inspect_arm import measure_arm
from trimtab.experiments.paired_runs.plan_loops import HAND_TUNED, peers_of, require_peers, usual_peers
from trimtab.experiments.task_plans import Plans, example_batch
from trimtab.plans.plan import Plan
from trimtab.state.process_state import ProcessState
from trimtab.tasks.task import RECIPES

CPU = torch.device("cpu")


def all_peers():
    muon = replace(tiny.strong, budget_samples=8 * BATCH_SIZE)
    return replace(tiny, muon=muon, baselines={"paper": PaperLoop})


def entries(task, **settings):
    plans = Plans({"equivalent": Plan.fixed(BATCH_SIZE)})
    found = ArmSelection(task, plans, CompareOptions(adapt=(), **settings), 0.001, brief=False).entries()
    return {entry.name: entry for entry in found}


def test_peers_are_raced_by_name_or_the_usual_ones():
    assert list(entries(all_peers())) == ["reference", "self", "equivalent_plan", "paper", "strong"]
    assert list(entries(all_peers(), peers=False)) == ["reference", "self", "equivalent_plan"]
    assert usual_peers(all_peers()) == ("paper", "strong")
    assert usual_peers(tiny) == ("strong",)
    found = entries(all_peers(), against=peers_of(all_peers()))
    assert list(found) == ["reference", "self", "equivalent_plan", "strict", "paper", "strong", "muon"]
    assert found["strict"].budget_samples == tiny.budget_samples
    assert found["muon"].budget_samples == 8 * BATCH_SIZE
    assert list(entries(all_peers(), against=("muon",))) == ["reference", "self", "equivalent_plan", "muon"]
    assert list(entries(replace(all_peers(), strong=None))) == ["reference", "self", "equivalent_plan", "paper"]
    with raises(ValueGivenError, code="recipe.missing", field="against"):
        require_peers(all_peers(), ("strong", "fast"))
    assert set(HAND_TUNED) == set(RECIPES)


@pytest.mark.parametrize(
    ("changes", "named", "lacking", "others"),
    [
        ({"muon": None}, ("strong", "muon"), "muon", "strict, paper, strong"),
        ({"strong": None}, ("paper", "strong"), "strong", "strict, paper, muon"),
        ({"reference": Reference("bf16")}, ("muon", "strict"), "strict", "paper, strong, muon"),
    ],
)
def test_every_peer_that_is_named_is_checked_before_anything_runs(changes, named, lacking, others, tmp_path):
    def nothing():
        raise AssertionError("the data was read")

    task = replace(all_peers(), load_data=nothing, **changes)
    with raises(ValueGivenError, code="recipe.missing", field="against") as caught:
        compare(task, tmp_path / "out", CompareOptions(2, against=named), command="")
    assert lacking in caught.value.problem
    assert others in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_naming_peers_is_asking_for_them():
    named = CompareRequest("tiny", against=("strict",))
    assert named.races_peers is True
    assert CompareRequest("tiny").races_peers is None
    assert named.settings(1).raced(tiny) == ("strict",)
    with raises(ValueGivenError, code="option.conflict", field="--against"):
        CompareRequest("tiny", peers=False, against=("strict",)).settings(1)
    with raises(ValueGivenError, code="option.conflict", field="quick"):
        CompareRequest("tiny", quick=True, against=("strict",)).settings(1)


@pytest.mark.usefixtures("brief_trials")
def test_a_comparison_shows_every_peer_beside_the_plan(tmp_path):
    before, task = ProcessState.capture(), all_peers()
    task = replace(task, muon=replace(task.muon, rates="published rates, not swept here"))
    found = compare(task, tmp_path, CompareOptions(2, adapt=(), against=("strict", "muon")), command="")
    assert [arm.name for arm in found.arms] == ["reference", "self", "equivalent_plan", "strict", "muon"]
    assert {"strict", "muon"} <= {row.against for row in found.ratios if row.arm == "equivalent_plan"}
    assert {row.against for row in found.target_rows if row.arm == "equivalent_plan"} == {"reference", "strict"}
    assert set(found.plans) == {"equivalent"}  # a plan is made for the strong recipe where that is raced
    assert found.arm("muon").final_samples == 8 * BATCH_SIZE
    assert not found.arm("strict").error
    assert "muon: published rates, not swept here" in found.notes
    assert not any(note.startswith("strong:") for note in found.notes)
    after = ProcessState.capture()
    assert (after.fp32_modes, after.num_threads) == (before.fp32_modes, before.num_threads)


def smoothed(model, batch):
    points, labels = batch
    return F.cross_entropy(model(points), labels, label_smoothing=0.1)


def test_a_recipes_own_loss_is_timed_as_its_forward_pass():
    task = replace(tiny, strong=replace(tiny.strong, loss_fn=smoothed))
    facts = measure_arm(StrongLoop, task, load_data(), CPU)
    assert "forward" in facts.phases_s
    assert code_of(task) != code_of(tiny)


def test_a_task_with_an_example_is_traced_without_its_data(monkeypatch):
    def nothing():
        raise AssertionError("the data was read")

    task = replace(load_task("wikitext2_gpt2"), load_data=nothing)
    (tokens,) = example_batch(task)
    assert tokens.shape == (32, 1025)
    assert example_batch(replace(tiny, batch_size=4))[0].shape[1] == 16  # one without, by a batch of its own


@pytest.mark.parametrize("name", ["strong", "equivalent_plan", "not a name"])
def test_a_baseline_cannot_have_the_name_of_another_arm(name):
    with raises(ValueGivenError, code="value.invalid", field="task.baselines"):
        replace(tiny, baselines={name: PaperLoop})
