"""DataLoader settings: which are tried, which are recommended, and the advice on padding."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from simulated_machine import CPU, GPU, Machine, measured

from trimtab.core.objective import Budget, Objective
from trimtab.planner.loader_settings import LoaderSettings, best_settings, next_settings, settings_of
from trimtab.planner.plan_choice import choose
from trimtab.plans.profile import LoaderTrial, LoaderTrials, PaddingCount

STEP_S = 0.02
NO_WORKERS = LoaderSettings(0, None, False)


def trial(settings: LoaderSettings, fetch_s: float, copy_s: float = 0.0) -> LoaderTrial:
    """A loader whose workers take `fetch_s` for a batch each; copies to the device take `copy_s` if not pinned."""
    workers = settings.num_workers
    step_s = STEP_S + (0.0 if settings.pin_memory else copy_s)
    step_s = max(step_s, fetch_s / workers) if workers else step_s + fetch_s
    return LoaderTrial(*settings, step_s, fetch_s + 0.1 * workers)


def compared(fetch_s: float, own=NO_WORKERS, cores=8, copy_s=0.0) -> LoaderTrials:
    found = LoaderTrials(STEP_S, trial(own, fetch_s, copy_s), 0.0, (), 8, 100)
    drawing_s = fetch_s / max(1, own.num_workers)
    while (wanted := next_settings(found, drawing_s, cores, pins=copy_s > 0)) is not None:
        assert len(found.others) < 4
        found = replace(found, others=(*found.others, trial(wanted, fetch_s, copy_s)))
    return replace(found, best=min(found.others, key=lambda each: each.step_s, default=None))


@pytest.mark.parametrize(
    ("fetch_s", "own", "cores", "tried"),
    [
        (0.0005, 0, 8, []),  # no loss worth a trial
        (0.015, 0, 8, [1]),
        (0.05, 0, 8, [3]),
        (0.08, 0, 2, [2, 2]),  # then with more prefetched batches
        (0.05, 1, 8, [3]),
        (0.05, 4, 8, []),
        (0.05, 0, 0, []),
    ],
)
def test_the_least_workers_that_keep_up_are_tried_first(fetch_s, own, cores, tried):
    found = compared(fetch_s, LoaderSettings(own, 2 if own else None, False), cores)
    assert [each.num_workers for each in found.others] == tried
    assert len({settings_of(each) for each in found.others}) == len(tried)


def test_pinned_memory_is_tried_where_copies_take_time():
    found = compared(0.01, copy_s=0.01)
    assert [each.pin_memory for each in found.others][-1]
    assert best_settings(found).pin_memory
    assert not any(each.pin_memory for each in compared(0.01).others)


@pytest.mark.parametrize(
    ("own_s", "noise_s", "is_better"), [(0.04, 0.0, True), (0.04, 0.019, False), (0.0205, 0.0, False)]
)
def test_a_gain_within_the_control_is_not_recommended(own_s, noise_s, is_better):
    other = LoaderTrial(2, 2, False, 0.02, 0.1)
    found = LoaderTrials(0.02, LoaderTrial(0, None, False, own_s, 0.02), noise_s, (other,), 8, 100, best=other)
    assert best_settings(found) == (other if is_better else None)
    assert best_settings(replace(found, best=None)) is None  # not measured again


def advice(profile):
    return choose(profile, Objective(), Budget()).advice


@pytest.mark.parametrize(("epoch", "persists"), [(100, True), (10_000, False)])
def test_measured_settings_replace_the_general_advice(epoch, persists):
    phases_s = {"data": 0.05, "forward": 0.02}
    found = replace(compared(0.05), epoch=epoch)
    (said,) = advice(replace(measured(Machine()), phases_s=phases_s, loader=found))
    assert said.code == "loader.settings"
    assert "num_workers=3, prefetch_factor=2" in said.text
    assert ("persistent_workers=True" in said.text) is persists
    assert re.findall(r"([\d.]+) ms", said.text) == ["50", "70", "50"]
    assert "18 steps" in said.text  # two rounds of eight, rounded up to whole groups of three workers


@pytest.mark.parametrize(
    ("facts", "codes"),
    [
        ({"noise_s": 0.06}, ["data.waiting"]),
        ({"best": None}, ["data.waiting"]),
        ({"best": None, "others": ()}, ["data.waiting"]),
        ({"best": None, "alone_s": 0.07}, []),  # The loader costs nothing.
    ],
)
def test_a_loss_that_no_settings_removed_is_reported(facts, codes):
    found = replace(compared(0.05), **facts)
    said = advice(replace(measured(Machine()), phases_s={"data": 0.05, "forward": 0.02}, loader=found))
    assert [each.code for each in said] == codes
    assert not any("DataLoader(" in each.text for each in said)


def test_no_more_than_the_cost_is_saved_if_the_user_pins_memory_already():
    best = LoaderTrial(1, 2, True, 0.018, 0.1)
    found = LoaderTrials(0.02, LoaderTrial(0, None, True, 0.03, 0.01), 0.0, (best,), 8, 100, best=best)
    (said,) = advice(replace(measured(Machine()), phases_s={"data": 0.01, "forward": 0.02}, loader=found))
    assert re.findall(r"([\d.]+) ms", said.text) == ["10", "30", "10"]


def padded(fixed=0, library="", device=CPU, padding=40, split_s=0.0):
    count = PaddingCount(100, padding, fixed, 3, "attention_mask", library)
    return replace(
        measured(Machine(split_s=split_s), padding=count, device=device),
        phases_s={"forward": 0.4, "backward": 0.4, "optimizer": 0.2},
    )


def test_padding_is_predicted_to_cost_its_part_of_forward_and_backward():
    profile = padded()
    (said,) = advice(profile)
    assert said.code == "batch.padding"
    assert said.text.startswith("40% of the tokens")
    step_s = choose(profile, Objective(), Budget()).measured.step_s
    without_ms = float(re.search(r"take ([\d.]+) ms", said.text)[1])
    assert without_ms == pytest.approx(1e3 * (1 - 0.4 * 0.8) * step_s, rel=0.02)
    assert "predicted" in said.text


def test_the_fixed_time_of_micro_batches_is_not_saved():
    assert advice(padded(padding=10, split_s=0.0))
    assert not advice(padded(padding=10, split_s=0.5))
    assert not advice(padded(padding=0))


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"fixed": 30}, "longest"),
        ({"library": "trl"}, "SFTConfig(packing=True)"),
        ({"library": "transformers", "device": GPU}, "DataCollatorWithFlattening"),
        ({"library": "transformers"}, "group_by_length"),
        ({}, "batch sampler"),
    ],
)
def test_the_call_that_removes_padding_is_of_the_loops_library(facts, named):
    (said,) = [each for each in advice(padded(**facts)) if each.code == "batch.padding"]
    assert named in said.text
