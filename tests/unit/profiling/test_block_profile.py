"""A loop's chain as it is measured: its bytes are those counted, its seconds those of the blocks."""

from __future__ import annotations

import functools
import math
import time
from types import SimpleNamespace

import pytest
import torch
from raising import raises
from small_loops import sgd, square_loss
from state_digest import fingerprint
from torch import nn

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.core.recompute_schedule import KeptBlock, to_notation
from trimtab.core.serialization import from_json, to_json
from trimtab.planner import search
from trimtab.planner.plan_choice import choose
from trimtab.planner.recompute_cost import keep_all, predict
from trimtab.planner.recompute_solver import optimal
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate
from trimtab.profiling import block_profile, profiler
from trimtab.profiling.block_profile import line_through, measure_recomputable, measure_seconds, num_steps
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.loop_state import LoopState
from trimtab.state.peak_memory import peak_bytes
from trimtab.tasks.models.resnet import ResNet

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("brief_trials")]
MEASURING_S = block_profile._MEASURING_S  # where trials are not brief


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x, _ = block(x)
        return x


def test_recurrent_layers_whose_memory_no_tensor_shows_recompute_nothing():
    """A chain of them was told 30% too little."""
    model = Recurrent()
    subject = TrainingLoop(model, sgd(model), square_loss, torch.randn(8, 4, 8))
    found = measure_recomputable(subject, Candidate(8))
    assert found.code == "recompute.recurrent"
    assert "LSTM" in found.refusal
    assert found.whole is None


L = 5


class Block(nn.Module):
    def __init__(self, wait_s=0.0, inplace=False):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act, self.wait_s = nn.ReLU(inplace=inplace), wait_s

    def forward(self, x):
        time.sleep(self.wait_s)
        return x + self.two(self.act(self.one(self.norm(x))).square())


def subject_of(rows=512, blocks=L, **block):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(**block) for _ in range(blocks)), nn.Linear(32, 3)).train()
    batch = torch.randn(rows, 32), torch.randint(0, 3, (rows,))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    return TrainingLoop(model, torch.optim.AdamW(model.parameters()), loss_fn, batch)


@functools.cache
def measured():
    """Return a loop and its blocks as measured, which leaves the loop as it was."""
    subject = subject_of()
    before = fingerprint(subject.model, subject.optimizer)
    with LoopState(subject.model, subject.optimizer):
        found = measure_recomputable(subject, Candidate(512))
    assert fingerprint(subject.model, subject.optimizer) == before
    return subject, found


@pytest.mark.parametrize("micro_batch", [512, 256, 100])
def test_peaks_are_those_that_are_counted(micro_batch):
    """But for 5 KB of each region, its random numbers' state; the optimizer's step is lighter here. Of sizes that were
    not traced too: 100 rows were not, and 512 leave 12 for the last."""
    subject, found = measured()
    assert found.blocks == tuple(str(index) for index in range(L))
    for model in (found.whole, found.sliced):  # Keeping the expensive part alone holds less.
        assert all(stage.parts[0].saved_bytes < stage.saved_bytes for stage in model.many.stages[:-1])
        assert model.many.stages[-1].parts == ()
    model = found.whole if micro_batch == 512 else found.sliced
    chain = model.at(micro_batch)
    in_part = (*(KeptBlock(index, in_part=True) for index in range(L)), KeptBlock(L))
    whole = predict(chain.stages, keep_all(L + 1)).peak_bytes
    limited = optimal(chain.stages, int(0.8 * whole))
    assert limited is not None

    def count_step(run):
        subject.optimizer.zero_grad(set_to_none=True)
        step = functools.partial(run.train_step, run.window(subject.batch), subject.loss_fn)
        return peak_bytes(step, torch.device("cpu"), subject.live_tensors)

    for schedule in (keep_all(L + 1), in_part, limited):
        candidate = Candidate(micro_batch, recompute=to_notation(schedule[:-1]))
        with subject.start(candidate) as run:
            # Some early forwards of a block are compared with their recomputation, which takes up to 80 KB. Which
            # steps those are depends on the schedules that ran before, so the lowest of several steps counts. The first
            # step creates the optimizer's state.
            counted = min([count_step(run) for _ in range(6)][1:])
        predicted = chain.held_bytes + predict(chain.stages, schedule).peak_bytes
        # The prediction counts the output of a recomputed block, before which a block kept in part stops.
        output = micro_batch * 32 * 4 if schedule == in_part else 0
        assert predicted == pytest.approx(counted + output, rel=0.03)


@pytest.mark.parametrize(("micro_batch", "splits"), [(256, True), (512, False)])
def test_seconds_are_those_of_a_micro_batch_whatever_its_rows(monkeypatch, micro_batch, splits):
    blocks = 3
    # Of two turns, as brief trials have, a median is a mean: here as many as L blocks get.
    monkeypatch.setattr(block_profile, "_MEASURING_S", MEASURING_S * blocks / L)
    subject = subject_of(blocks=blocks, wait_s=0.02)
    found = measure_recomputable(subject, Candidate(micro_batch), splits=splits)
    for rows in (512, 256, 64):
        chain, waited_s = found.whole.at(rows), 0.02 if splits else 0.02 * rows / 512
        for stage in chain.stages[:-1]:
            assert 0.9 * waited_s <= stage.forward_s < 2 * waited_s + 0.01
            assert stage.parts[0].recompute_s < waited_s  # The block's Python code does not run again.
        assert chain.stages[-1].forward_s == 0.0
    assert found.step_s >= blocks * 0.02 * (512 // micro_batch)


def third_peak(subject, run):
    """Return the peak of a run's third step: blocks kept in part compare recomputed tensors in their first two."""

    def step():
        subject.optimizer.zero_grad(set_to_none=True)
        run.train_step(run.window(subject.batch), subject.loss_fn)

    step()
    step()
    subject.optimizer.zero_grad(set_to_none=True)
    return peak_bytes(step, torch.device("cpu"), subject.live_tensors)


def test_blocks_with_batch_statistics_may_be_kept_in_part():
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())

    model = nn.Sequential(*(block() for _ in range(L)), nn.Linear(32, 3)).train()
    batch = (torch.randn(512, 32),)
    subject = TrainingLoop(model, sgd(model), lambda m, b: m(b[0]).square().mean(), batch)
    found = measure_recomputable(subject, Candidate(512), splits=False)
    chain = found.whole.at(512)
    assert all(stage.parts for stage in chain.stages[:-1])
    schedule = (*(KeptBlock(index, in_part=True) for index in range(L)), KeptBlock(L))
    with subject.start(Candidate(512, recompute=to_notation(schedule[:-1]))) as run:
        counted = third_peak(subject, run)
    assert chain.held_bytes + predict(chain.stages, schedule).peak_bytes == pytest.approx(counted, rel=0.05)
    assert counted < chain.held_bytes + predict(chain.stages, keep_all(L + 1)).peak_bytes


def test_a_block_that_writes_over_what_is_kept_is_not_kept_in_part():
    """The first activation needs the result of a product, which the second one overwrites."""

    class Overwriting(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(32, 32)

        def forward(self, x):
            y = self.one(x)
            return torch.sigmoid(y).square() + y.relu_()

    model = nn.Sequential(*(nn.Sequential(Overwriting()) for _ in range(3)))
    subject = TrainingLoop(model, sgd(model), lambda m, b: m(b).square().mean(), torch.randn(512, 32))
    found = measure_recomputable(subject, Candidate(512))
    assert all(not stage.parts for stage in found.whole.many.stages)


def products():
    """Return a model of blocks with two products, one of a large result and one of a small one, and its batch."""
    layers = [[nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 8), nn.Tanh()] for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(*each) for each in layers), nn.Linear(8, 3)), torch.randn(2048, 8)


def convolutions():
    """Return a model with batch statistics, residual connections and blocks of different sizes, and its batch."""
    return ResNet(width=8, depths=(2, 2)), torch.randn(16, 3, 16, 16)


@pytest.mark.parametrize("make", [products, convolutions])
def test_less_is_held_the_more_results_are_given_up(make):
    torch.manual_seed(0)
    model, batch = make()
    subject = TrainingLoop(model, sgd(model), lambda m, b: m(b[0]).square().mean(), (batch,))
    found = measure_recomputable(subject, Candidate(len(batch)), splits=False)
    chain = found.whole.at(len(batch))
    for stage in chain.stages[:-1]:
        sizes = [part.saved_bytes for part in stage.parts]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[-1] < stage.saved_bytes / 2
        seconds = [part.recompute_s for part in stage.parts]
        assert seconds == sorted(seconds)
    number = len(found.blocks)
    for place in range(max(len(stage.parts) for stage in chain.stages)):
        results = (stage.parts[min(place, len(stage.parts) - 1)].results for stage in chain.stages[:-1])
        kept = (KeptBlock(index, in_part=True, results=each) for index, each in enumerate(results))
        schedule = (*kept, KeptBlock(number))
        with subject.start(Candidate(len(batch), recompute=to_notation(schedule[:-1]))) as run:
            counted = third_peak(subject, run)
        assert chain.held_bytes + predict(chain.stages, schedule).peak_bytes == pytest.approx(counted, rel=0.03)


def test_what_cannot_be_recomputed_says_why():
    def refusal(model, rows=8, loss=lambda m, b: m(b).sum()):
        subject = TrainingLoop(model, sgd(model), loss, torch.randn(rows, 4))
        return measure_recomputable(subject, Candidate(rows)).refusal

    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    assert "no blocks" in refusal(nn.Linear(4, 2))
    assert "two micro-batch sizes" in refusal(blocks, rows=2)
    assert "cannot be traced" in refusal(blocks, loss=lambda m, b: m(b).sum() if b.sum() < 1e9 else b.sum())
    assert refusal(blocks) == ""
    over = nn.Sequential(nn.Linear(4, 4), *(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4)) for _ in range(3)))
    assert "changes an argument in place" in refusal(over)


class MovingMean(nn.Module):
    """A block that changes a buffer which its backward needs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        scaled = (x - self.mean).exp()
        self.mean.lerp_(x.detach().mean(0), 1e-4)
        return self.linear(scaled * self.mean)


def test_blocks_that_are_only_recomputed_whole_say_why():
    model, notes = nn.Sequential(MovingMean(), MovingMean()), Notes()
    subject = TrainingLoop(model, sgd(model), lambda m, b: m(b).square().mean(), torch.randn(8, 4))
    found = measure_recomputable(subject, Candidate(8), notes=notes)
    assert not found.refusal
    assert [note.code for note in notes.found] == ["recompute.whole_blocks"]


def test_a_plan_meets_a_limit_by_recomputing_where_the_batch_cannot_be_split():
    """Batch statistics see the whole batch; in double precision no autocast saves any of it."""
    torch.manual_seed(0)

    def block():
        return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())

    model = nn.Sequential(*(block() for _ in range(6)), nn.Linear(64, 3)).double().train()
    optimizer = sgd(model)
    batch = torch.randn(2048, 64).double(), torch.randint(0, 3, (2048,))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    free = trimtab.plan(model, optimizer, loss_fn, batch)
    assert not free.recompute.changed
    budget = trimtab.Budget(memory=int(0.6 * free.measured.peak_bytes))
    plan = trimtab.plan(model, optimizer, loss_fn, batch, budget=budget)
    assert plan.micro_batch.value == 2048
    assert plan.recompute.changed
    assert plan.measured.peak_bytes <= budget.memory_bytes
    assert plan.measured.peak_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.05)
    with trimtab.start(model, optimizer, from_json(Plan, to_json(plan))) as run:
        run.train_step(run.window(batch), loss_fn)
        assert run.applied_steps == 1


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.ends = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.middle, self.unused = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 8)

    def forward(self, x):
        return self.ends[1](self.middle(self.middle(self.ends[0](x))))


def profile_of(blocks, **others):
    torch.manual_seed(0)
    model = Twice()
    given = {"objective": trimtab.Objective(time=1, memory=1), "blocks": blocks, "num_blocks": 3}
    return trimtab.profile(model, sgd(model), square_loss, torch.randn(16, 8), **given, **others)


def test_where_there_is_no_time_left_blocks_are_not_measured(monkeypatch):
    monkeypatch.setattr(profiler, "num_steps", lambda step_s: 10**12)
    monkeypatch.setattr(profiler, "time", SimpleNamespace(perf_counter=lambda: 0.0))  # however busy this machine is
    monkeypatch.setattr(search, "MOST_OF_A_RUN", math.inf)  # however short its steps
    found = profile_of((), total_steps=1000)
    assert not found.over_time_budget
    assert {each.code for each in found.recomputables} == {"recompute.no_time"}
    plan = choose(found, found.objective, found.budget)
    assert profiler._NO_TIME in plan.recompute.reason
    assert not profile_of(()).recomputables[0].refusal


def test_blocks_may_be_named():
    assert {each.blocks for each in profile_of(()).recomputables} == {("ends.0", "ends.1")}
    assert {each.blocks for each in profile_of(["ends.1"]).recomputables} == {("ends.1",)}
    assert {each.blocks for each in profile_of(["ends.1", "ends.0.0"]).recomputables} == {("ends.0.0", "ends.1")}


@pytest.mark.parametrize(
    ("blocks", "code", "named"),
    [
        (["ends.7"], "blocks.unknown_module", "ends.7"),
        (["ends.0", "ends.0.1"], "blocks.overlap", "ends.0.1"),
        (["middle"], "blocks.not_run_once", "middle"),
        (["unused", "ends.1"], "blocks.not_run_once", "unused"),
        ("ends.0", "value.invalid", "ends.0"),
    ],
)
def test_named_blocks_that_cannot_be_are_refused_at_the_door(blocks, code, named):
    with raises(ValueGivenError, code=code, field="blocks") as caught:
        profile_of(blocks)
    assert named in str(caught.value)


# Seconds of recomputation, as a line in the samples of a micro-batch.


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(16, 0.9), (4, 0.3)], {16: 0.9, 8: 0.5, 4: 0.3, 0: 0.1}),
        ([(16, 0.8)], {4: 0.2, 0: 0.0}),  # of one size, seconds go by samples
        ([(16, 0.02), (4, 0.04)], {16: 0.03, 1: 0.03}),  # noise: more samples never take less
        # Where it grows faster than its samples, as beyond a cache, fewer take their fraction of the larger size's.
        ([(16, 1.6), (4, 0.1)], {16: 1.6, 4: 0.4, 0: 0.0}),
        ([(16, -0.01), (4, -0.03)], {16: 0.0, 1: 0.0}),
        ([(16, -0.01)], {16: 0.0}),
    ],
)
def test_a_line_goes_through_what_was_measured(points, expected):
    line = line_through(points)
    assert {rows: line.at(rows) for rows in expected} == pytest.approx(expected)


@pytest.mark.parametrize("splits", [True, False])
def test_noise_makes_nothing_free(monkeypatch, splits):
    """Half of a forward is taken for steps that seem to recompute for nothing."""
    monkeypatch.setattr(block_profile, "_longer", lambda *_: (1.0, -0.1))
    model = nn.Linear(4, 4)
    subject = TrainingLoop(model, sgd(model), lambda m, b: m(b).sum(), torch.randn(16, 4))
    given = {"splits": splits, "forward_s": 0.4}
    step_s, whole = measure_seconds(subject, Candidate(8), **given)
    assert step_s == 1.0
    for rows in (8, 4, 1):
        assert whole.at(rows) == pytest.approx(0.5 * 0.4 * rows / 8)


def test_steps_are_counted_before_they_are_taken(monkeypatch):
    monkeypatch.setattr(block_profile, "_MEASURING_S", MEASURING_S)
    assert num_steps(1.0) == 5 * 3 + 14
    assert num_steps(0.2) == 5 * 6 + 14
    assert num_steps(0.01) == num_steps(0.0) == 5 * 11 + 14
