"""Paired runs: equal batches for all arms, blocks in turn, evaluations at equal samples, limits, energy, failures."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from raising import raises
from torch import nn

from trimtab.core.energy_reading import MeterFacts, Provenance
from trimtab.core.errors import LoopError
from trimtab.distributed.coordinator import ALONE
from trimtab.distributed.rank_energy import RankMeter
from trimtab.energy.energy_meter import GivenWatts
from trimtab.experiments import result_table
from trimtab.experiments.loops import Loop, plain_steps
from trimtab.experiments.paired_run import Arm, BlockMeter, PairedRun, RunLength, measure_step
from trimtab.experiments.result_table import (
    CONTROL,
    CPU_SECONDS,
    ENERGY,
    FLOPS,
    LOSS,
    PEAK,
    SAMPLES,
    SECONDS,
    ResultTable,
)

ROWS = 8


class Batches:
    def __init__(self, seed):
        self.seed = seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randn(ROWS, 4, generator=generator)


def setup(seed, *, seen=None, wait_s=0.0, fails_after=None, **changes):
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    calls = itertools.count(1)

    def loss_fn(model, batch):
        time.sleep(wait_s)
        if seen is not None:
            seen.append(batch)
        if next(calls) == fails_after:
            raise ZeroDivisionError
        return model(batch).square().mean()

    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, Batches(seed), **changes)


def run(arms, length, seed=0, **how):
    failures = {}
    rows = PairedRun(arms, seed, length, failures=failures, **how).run()
    return ResultTable.of(rows), failures


def arm(name, **how):
    return Arm(name, partial(setup, **how), plain_steps)


def test_all_arms_train_on_the_same_batches_and_samples():
    seen = [], []
    arms = [arm("a", seen=seen[0]), arm("b", seen=seen[1])]
    table, failures = run(arms, RunLength(30))
    assert not failures
    assert len(seen[0]) == len(seen[1]) == 32  # Two steps come before the timed ones.
    assert all(map(torch.equal, *seen))
    for name in ("a", "b"):
        timed = table.select(SAMPLES, name)
        assert sum(row.value for row in timed) == 32 * ROWS
        assert [row.round for row in table.select(SECONDS, name)] == [row.round for row in timed][1:]
        assert len(table.select(CPU_SECONDS, name)) == len(table.select(LOSS, name)) - 1 == len(timed) - 1
    assert 10 <= len(table.select(SECONDS, "a")) <= 30


def test_every_round_has_every_arm_and_their_order_changes():
    order = []

    def noting(name, loop, batches):
        for found in plain_steps(loop, batches):
            order.append(name)
            yield found

    arms = [Arm(name, setup, partial(noting, name)) for name in "abc"]
    run(arms, RunLength(20))
    blocks = [name for name, _ in itertools.groupby(order)]
    assert len({tuple(blocks[at : at + 3]) for at in range(3, len(blocks) - 2, 3)}) > 2
    assert {blocks.count(name) for name in "abc"} <= {len(blocks) // 3, len(blocks) // 3 + 1, len(blocks) // 3 - 1}


def test_evaluations_are_made_at_equal_samples_and_all_time_counts():
    values = itertools.count()

    def evaluate(model):
        model.eval()
        return {"accuracy": float(next(values))}

    arms = [arm("a", evaluate=evaluate), arm("b", evaluate=evaluate)]
    table, _ = run(arms, RunLength(40, evaluate_every=10))
    for name in ("a", "b"):
        found = result_table.evaluations(table, name, "accuracy", 0)
        assert [point.samples for point in found] == [80.0, 160.0, 240.0, 320.0]
        assert sum(row.value for row in table.select(SAMPLES, name)) == 320
        assert len(table.select(SECONDS, name)) == len(table.select(SAMPLES, name))
        assert found[-1].seconds == pytest.approx(sum(row.value for row in table.select(SECONDS, name)))


def test_an_evaluation_at_the_end_leaves_the_training_modes():
    made = []

    def evaluated(seed):
        loop = setup(seed, evaluate=lambda model: model.eval() and 1.5)
        loop.model[0].eval()
        made.append(loop)
        return loop

    table, _ = run([Arm("a", evaluated, plain_steps), arm("b")], RunLength(6))
    assert result_table.final_values(table, "a") == {"evaluation": {0: 1.5}}
    assert [module.training for module in made[0].model] == [False, True, True]


def test_an_arm_ends_with_its_own_samples_or_at_the_cap():
    short = replace(arm("short"), samples=10 * ROWS)
    table, _ = run([arm("long"), short], RunLength(40, evaluate_every=10))
    assert sum(row.value for row in table.select(SAMPLES, "short")) == 10 * ROWS
    assert sum(row.value for row in table.select(SAMPLES, "long")) == 40 * ROWS
    slow = [arm("slow", wait_s=0.01), arm("other", wait_s=0.01)]
    table, _ = run(slow, RunLength(1000, evaluate_every=500, cap_s=0.2, baseline_cap_s=0.5))
    trained = [sum(row.value for row in table.select(SECONDS, name)) for name in ("slow", "other")]
    assert 0.5 <= trained[0] < 3
    assert 0.2 <= trained[1] < trained[0]


def test_given_watts_become_joules_of_every_block():
    facts = MeterFacts(Provenance.ESTIMATED, ("given watts",))
    meter = BlockMeter(RankMeter(GivenWatts(50.0), facts, facts, True), ALONE)
    table, _ = run([arm("a"), arm("b", wait_s=0.003)], RunLength(20), meter=meter)
    for name in ("a", "b"):
        joules, seconds = (table.select(metric, name) for metric in (ENERGY, SECONDS))
        assert len(joules) == len(seconds)
        assert all(row.value > 0 for row in joules)
        # Not block by block: another process may run between the two readings of the clock.
        assert sum(row.value for row in joules) == pytest.approx(50 * sum(row.value for row in seconds), rel=0.5)
    assert result_table.speed_of_pair(table, "b", "a", 0, metric=ENERGY).mean < 1


def test_an_arm_that_fails_drops_out_and_the_baseline_ends_all():
    table, failures = run([arm("a"), arm("b", fails_after=9)], RunLength(20))
    assert list(failures) == ["b"]
    assert "ZeroDivisionError" in failures["b"]
    assert sum(row.value for row in table.select(SAMPLES, "a")) == 22 * ROWS
    with raises(LoopError, code="baseline.failed"):
        run([arm("a", fails_after=9), arm("b")], RunLength(20))
    with raises(LoopError, code="baseline.failed"):
        run([arm("a"), arm("a", fails_after=9).again(), arm("b")], RunLength(20))


@pytest.mark.parametrize("evaluate_every", [None, 5])
def test_what_is_not_finite_drops_out(evaluate_every):
    def diverging(seed):
        loop = setup(seed)

        def step(model, optimizer, batch):
            with torch.no_grad():
                model[0].weight.fill_(float("nan"))

        return replace(loop, step=step)

    length = RunLength(10, evaluate_every=evaluate_every)
    _, failures = run([arm("a"), Arm("b", diverging, plain_steps)], length)
    assert "parameter 0.weight" in failures["b"]
    _, failures = run([arm("a"), arm("b", evaluate=lambda model: float("inf"))], length)
    assert "evaluation" in failures["b"]


def test_peak_and_flop_of_a_step_are_measured_apart():
    failures = {}
    rows = measure_step(arm("a"), is_baseline=True, failures=failures)
    found = {row.metric: row.value for row in rows}
    assert found[FLOPS] == pytest.approx(2 * 3 * (4 * 16 + 16 * 2) - 2 * 4 * 16)  # No gradient of the input.
    assert found[PEAK] > 4 * (4 * 16 + 16 + 16 * 2 + 2)
    assert not measure_step(arm("b", fails_after=1), is_baseline=False, failures=failures)
    assert list(failures) == ["b"]
    with raises(LoopError, code="baseline.failed"):
        measure_step(arm("a", fails_after=1), is_baseline=True, failures={})
    assert [
        row.metric for row in measure_step(replace(arm("c"), hides_memory=True), is_baseline=False, failures={})
    ] == [FLOPS]


def test_the_control_is_the_baseline_under_another_name():
    assert arm("a").again().name == CONTROL
