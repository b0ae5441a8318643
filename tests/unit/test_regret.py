"""What a regret is counted by: when a curve met a loss, by a table of times, and what two ranks are made of."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

import trimtab
from benchmarks.paper.datasets import Images
from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate, StepTimes
from trimtab.adaptive_batch.noise_probes import OverheadBudget
from trimtab.adaptive_batch.step_time_model import WindowTimes
from trimtab.tasks.task import DataSource

ROOT = Path(__file__).parents[2]


@pytest.fixture
def regret(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.micro import regret

    return regret


@pytest.fixture
def cases(regret):
    from benchmarks.micro import regret_cases

    return regret_cases


def test_a_curve_meets_a_loss_between_two_points_of_the_mean_of_three(cases):
    points = [(0, 0, 0, 4.0), (100, 50, 100, 3.0), (200, 100, 200, 1.0)]  # means 4, 3.5, 8/3
    share = (3.5 - 3.0) / (3.5 - 8 / 3)
    samples, seconds = cases.Course(points).arrival([3.0], StepTimes(0.1, 0.05), ranks=2)
    assert samples == pytest.approx(100 + share * 100)
    micro, windows = 100 + share * 100, 50 + share * 50
    assert seconds == pytest.approx(micro / 2 * 0.1 + windows * 0.05)
    dearer = cases.Course(points, price=0.02).arrival([3.0], StepTimes(0.1, 0.05), ranks=2)
    assert dearer == (samples, pytest.approx(1.02 * seconds))
    first = cases.Course(points).arrival([3.5], StepTimes(0.1, 0.05), ranks=2)
    both = cases.Course(points).arrival([3.5, 3.0], StepTimes(0.1, 0.05), ranks=2)
    assert both == pytest.approx([(a * b) ** 0.5 for a, b in zip(first, (samples, seconds), strict=True)])
    assert cases.Course([(0, 0, 0, 4.0)]).arrival([5.0, 3.0], StepTimes(0.1, 0.05), 1) == (float("inf"), float("inf"))
    told, measured = cases.Told(StepTimes(0.1, 0.3)), WindowTimes()
    for _ in range(10):
        assert told.times(8) == (StepTimes(0.1, 0.3) if measured.is_known else None)
        told.add(1.0, 1.0)
        measured.add(1.0, 1.0)
    assert told.is_known


@pytest.fixture
def trained(monkeypatch, cases):
    """Note what an arm would be trained with."""
    seen = {}

    def train(case, seed, plan, rate, rows, next_window, told=None, most=None):
        seen.update(plan=plan, rate=rate, rows=rows, told=told)
        return cases.Course()

    monkeypatch.setattr(cases, "_train", train)
    return seen


def test_two_ranks_are_one_process_of_twice_the_micro_batches(cases, trained):
    case = cases.CASES[0]
    rule = trimtab.BatchRule(k=2, k_max=32)
    cases.train(case, 0, rule, 2, StepTimes(0.2, 0.3))
    assert (trained["plan"].batch_size, trained["rows"]) == (2 * case.rows, 2 * case.rows)
    assert trained["plan"].num_micro_batches == 2
    assert trained["told"] == StepTimes(0.1, 0.3)  # 2 of them are one rank's
    assert trained["rate"] == 2 * case.rate  # of SGD


def test_a_fixed_arm_has_its_rate_from_the_start_and_measures_nothing(cases, trained):
    resnet, gpt = cases.CASES
    for case, factor in ((resnet, 4.0), (gpt, 2.0)):
        cases.train_fixed(case, 0, 4)
        assert trained["rate"] == pytest.approx(factor * case.rate)
        assert trained["plan"].num_micro_batches == 4
        assert trained["plan"].batch_rule is None


@pytest.mark.parametrize("policy", ["fixed", "goodput"])
def test_only_what_decides_by_what_it_measures_pays_for_it(cases, monkeypatch, policy):
    """A fixed arm with a ramped rate is measured in every window, which a user of it would not be."""
    monkeypatch.setattr(OverheadBudget, "share", 0.07)
    monkeypatch.setattr(cases, "cifar10", little_cifar10)
    case = dataclasses.replace(cases.CASES[0], most_samples=40, eval_every=16)
    course = cases.train(case, 0, trimtab.BatchRule(policy))
    assert course.price == (0.07 if policy == "goodput" else 0.0)
    assert course.points[-1][0] >= 32


def little_cifar10():
    images, labels = np.zeros((1000, 3, 32, 32), np.uint8), np.arange(1000, dtype=np.uint8) % 10
    return Images(images, labels, images, labels, DataSource("zeros", "made here", ""))


def test_a_course_is_trained_once_by_the_same_sources(cases, tmp_path, monkeypatch):
    trained = []

    def run(seed):
        trained.append(seed)
        return cases.Course([(0, 1, 2, 3.5), (8, 2, 4, 3.25)], price=0.25)

    path = tmp_path / "course.json"
    first, second = (cases.kept(path, run, 7) for _ in range(2))
    assert trained == [7]
    assert (first.points, first.price) == (second.points, second.price) == ([(0, 1, 2, 3.5), (8, 2, 4, 3.25)], 0.25)
    monkeypatch.setattr(cases, "sources", lambda: "changed since")
    assert cases.kept(path, run, 7).price == 0.25
    assert trained == [7, 7]


def test_nor_is_a_course_of_other_arguments_taken_for_it(cases, tmp_path):
    trained = []

    def run(case, k_max):
        trained.append(k_max)
        return cases.Course([(0, 1, 2, 3.5)])

    for k_max in (16, 16, 32):
        cases.kept(tmp_path / "course.json", run, "a case", k_max)
    assert trained == [16, 32]


def test_the_papers_target_is_a_quarter_of_a_micro_batchs_variance(regret, monkeypatch):
    case = regret.CASES[0]
    monkeypatch.setattr(regret, "train", lambda *_, **__: regret.Course(noise=NoiseEstimate(64.0, 1.0, 0.1, 12)))
    rule = regret.rule_of("paper", case, 2)
    assert rule.sigma2_target == pytest.approx(64.0 / case.rows / 4 / 2)
    assert (rule.k, rule.k_max, rule.allowed) == (8, 32, (8, 16))


def test_a_k_that_is_far_behind_is_trained_from_few_seeds(regret, cases, monkeypatch, tmp_path):
    trained = []

    def submit(self, name, run, seed, total):
        trained.append((total, seed - regret.FIRST_SEED))
        done = Future()
        micro = {1: 100, 2: 108, 4: 120, 8: 200, 16: 300}[total]  # until the loss is met
        done.set_result(cases.Course([(0, 0, 0, 2.0), (micro, 1, micro, 1.0), (micro, 1, micro, 0.0)]))
        return done

    monkeypatch.setattr(regret.Trained, "_submit", submit)
    case = dataclasses.replace(cases.CASES[0], targets=(1.0,))
    arms = regret.Trained(case, 15, None, tmp_path)
    near = regret._near(case, arms, StepTimes(1.0, 0.0), 1, 15)
    assert {name: len(found) for name, found in near.items()} == {"k=1": 15, "k=2": 15}
    assert [total for total, _ in trained].count(8) == 5
    assert len(set(trained)) == len(trained)  # each once
