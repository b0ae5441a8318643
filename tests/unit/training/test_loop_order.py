"""The loop's verbs follow one order; a breach raises before anything changes, and the loop can go on."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from raising import raises
from small_loops import linear_loop
from small_loops import square_loss as loss_fn
from state_digest import fingerprint

import trimtab
from trimtab.core.errors import LoopError, LossError
from trimtab.losses import Summed
from trimtab.plans.plan import Plan

ROWS, MICRO = 5, 2  # three micro-batches


class Verbs(RuleBasedStateMachine):
    """Any sequence of verbs: what the order allows works, what it forbids raises and leaves every bit as it was."""

    def __init__(self):
        super().__init__()
        self.model, self.optimizer = linear_loop(3, 2, momentum=0.9)
        self.run = trimtab.start(self.model, self.optimizer, Plan.fixed(ROWS, MICRO))
        self.batch = torch.randn(ROWS, 3)
        self.window = None
        self.steps = 0
        self.idle()

    def idle(self):
        self.micros = self.micro = None
        self.got = self.seen = self.done = 0  # micro-batches handed out, with a forward, with a backward
        self.unscaled = False

    def forbid(self, verb, *args):
        before = fingerprint(self.model, self.optimizer), self.run.state_dict()
        with pytest.raises(LoopError):
            verb(*args)
        assert (fingerprint(self.model, self.optimizer), self.run.state_dict()) == before

    @rule()
    def open_window(self):
        window = iter(self.run.window(self.batch))
        if self.micros is not None:
            self.forbid(next, window)
            return
        self.micros, self.micro, self.got = window, next(window), 1

    @precondition(lambda self: self.micros is not None)
    @rule()
    def next_micro_batch(self):
        if self.done < self.got:
            code = "loop.backward_missing" if self.seen == self.got else "loop.window_as_batch"
            with raises(LoopError, code=code, field="window"):
                next(self.micros)
            assert all(p.grad is None for p in self.model.parameters()), "the window is given up whole"
            self.idle()
            return
        self.micro = next(self.micros, None)
        self.got += self.micro is not None

    @precondition(lambda self: self.micro is not None)
    @rule()
    def forward(self):
        self.loss = loss_fn(self.run.model, self.micro)
        self.seen = self.got

    @precondition(lambda self: self.micro is not None and self.done < self.got)
    @rule()
    def forward_of_a_copy(self):
        self.loss = loss_fn(copy.deepcopy(self.run.model), self.micro)

    @rule()
    def backward(self):
        if self.done < self.got == self.seen:
            loss = loss_fn(self.run.model, self.micro)
            self.run.backward(loss)
            self.done += 1
        else:
            self.forbid(self.run.backward, self.model.weight.sum())

    @rule()
    def unscale(self):
        if self.done == 3 and not self.unscaled:
            self.run.unscale()
            self.unscaled = True
        else:
            self.forbid(self.run.unscale)

    @rule()
    def loss_share(self):
        if self.done == 3:
            assert self.run.loss_share == 1.0
        else:
            self.forbid(lambda: self.run.loss_share)

    @rule()
    def discard(self):
        weights = [p.clone() for p in self.model.parameters()]
        self.run.discard()
        assert all(p.grad is None for p in self.model.parameters())
        assert all(torch.equal(p, old) for p, old in zip(self.model.parameters(), weights, strict=True))
        if self.micros is not None and 0 < self.got < 3:
            self.forbid(next, self.micros)
        self.idle()

    @rule()
    def step(self):
        if self.done == 3:
            assert self.run.step() is True
            self.steps += 1
            self.idle()
        else:
            self.forbid(self.run.step)
        assert (self.run.applied_steps, self.run.consumed_samples) == (self.steps, ROWS * self.steps)

    def teardown(self):
        self.run.close()
        assert all(p.grad is None for p in self.model.parameters())


TestVerbs = Verbs.TestCase
TestVerbs.settings = settings(max_examples=25, stateful_step_count=30)


@pytest.fixture
def run():
    model, optimizer = linear_loop(3, 2, momentum=0.9)
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, MICRO)) as run:
        yield run


def test_a_window_is_passed_once_and_only_after_the_window_before_it(run):
    first, second = run.window(torch.randn(ROWS, 3)), run.window(torch.randn(ROWS, 3))
    for micro in first:
        with pytest.raises(LoopError):
            next(iter(second))
        run.backward(loss_fn(run.model, micro))
    run.step()
    run.train_step(second, loss_fn)
    assert run.applied_steps == 2
    window = run.window(torch.randn(ROWS, 3))
    run.train_step(window, loss_fn)
    with raises(LoopError, code="loop.window_used", field="window"):
        run.train_step(window, loss_fn)
    run.train_step(run.window(torch.randn(ROWS, 3)), loss_fn)


def test_an_error_in_train_step_gives_the_window_up_and_the_loop_can_go_on(run):
    calls = []

    def failing(model, batch):
        calls.append(batch)
        if len(calls) == 2:
            raise FloatingPointError("bad row")
        return loss_fn(model, batch)

    before = [p.clone() for p in run.model.parameters()]
    with pytest.raises(FloatingPointError):
        run.train_step(run.window(torch.randn(ROWS, 3)), failing)
    assert all(p.grad is None for p in run.model.parameters()), "half a window would go into the next"
    assert all(torch.equal(p, old) for p, old in zip(run.model.parameters(), before, strict=True))
    assert (run.consumed_samples, run.applied_steps) == (0, 0)
    run.train_step(run.window(torch.randn(ROWS, 3)), loss_fn)
    assert run.applied_steps == 1


def test_a_body_that_raised_and_was_caught_can_go_on_with_the_next_window(run):
    other, plain = linear_loop(3, 2, momentum=0.9)
    good = torch.randn(ROWS, 3)
    with trimtab.start(other, plain, Plan.fixed(ROWS, MICRO)) as fresh:
        fresh.train_step(fresh.window(good), loss_fn)
    failed = 0
    for index, window in enumerate(run.windows([torch.randn(ROWS, 3), good])):
        try:
            for micro in window:
                run.backward(loss_fn(run.model, micro))
                if index == 0:
                    raise FloatingPointError("the user's own")
        except FloatingPointError:
            failed += 1
            with raises(LoopError, code="loop.window_incomplete", field="run.step"):
                run.step()
            with raises(LoopError, code="loop.window_open", field="window"):
                next(iter(run.window(good)))
            run.discard()
            continue
        run.step()
    assert (failed, run.consumed_samples, run.applied_steps) == (1, ROWS, 1)
    assert all(torch.equal(a, b) for a, b in zip(run.model.parameters(), other.parameters(), strict=True))


def test_the_rest_of_a_discarded_window_is_not_handed_out_even_while_another_is_open(run):
    stale = iter(run.window(torch.randn(ROWS, 3)))
    run.backward(loss_fn(run.model, next(stale)))
    run.discard()
    for index, micro in enumerate(run.window(torch.randn(ROWS, 3))):
        if index == 1:
            with raises(LoopError, code="loop.window_ended", field="window"):
                next(stale)
        run.backward(loss_fn(run.model, micro))
    assert run.step()


@pytest.mark.parametrize("number", [1, 2])
def test_a_last_window_left_without_a_step_does_not_end_silently(run, number):
    windows = run.windows([torch.randn(ROWS, 3)] * number)
    for micro in next(windows):
        run.backward(loss_fn(run.model, micro))
    with raises(LoopError, code="loop.window_open", field="run.windows"):
        next(windows)
    assert run.applied_steps == 0
    run.discard()
    run.train_step(run.window(torch.randn(ROWS, 3)), loss_fn)


@pytest.mark.parametrize(
    "count", [-1, float("nan"), float("inf"), 10**400, True, "2", torch.tensor(True), torch.ones(2)]
)
def test_a_count_that_is_none_is_refused_on_a_later_micro_batch_too(run, count):
    calls = []

    def late(model, batch):
        calls.append(batch)
        return Summed(model(batch).sum(), 2 if len(calls) < 3 else count)

    with raises(LossError, code="loss.count_invalid", field="loss count"):
        run.train_step(run.window(torch.randn(ROWS, 3)), late)
    assert len(calls) == 3
    assert all(p.grad is None for p in run.model.parameters())


def test_a_loss_from_a_copy_of_the_model_is_refused_even_if_the_copy_was_made_in_the_run(run):
    ema = copy.deepcopy(run.model)
    for micro in run.window(torch.randn(ROWS, 3)):
        with raises(LoopError, code="loop.forward_missing", field="run.backward"):
            run.backward(loss_fn(ema, micro))
        break
    run.discard()
    ema.requires_grad_(False)  # a teacher is allowed if the model of the run takes part too
    run.train_step(run.window(torch.randn(ROWS, 3)), lambda model, x: (model(x) - ema(x)).square().mean())
    assert run.applied_steps == 1


def test_a_window_that_is_accumulated_is_stepped_by_the_caller():
    (one, its), (other, others) = linear_loop(3, 2, momentum=0.9), linear_loop(3, 2, momentum=0.9)
    batch = torch.randn(ROWS, 3)
    with trimtab.start(one, its, Plan.fixed(ROWS, MICRO)) as run:
        loss = run.train_step(run.window(batch), loss_fn)
    with trimtab.start(other, others, Plan.fixed(ROWS, MICRO)) as run:
        before = other.weight.detach().clone()
        assert torch.equal(run.accumulate(run.window(batch), loss_fn), loss)
        assert torch.equal(other.weight, before)
        with raises(LoopError, code="loop.window_open", field="window"):
            run.train_step(run.window(batch), loss_fn)
        run.step()
        assert run.applied_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("verb", ["step", "unscale"])
def test_after_a_window_that_stepped_by_itself_the_error_says_so(run, verb):
    run.train_step(run.window(torch.randn(ROWS, 3)), loss_fn)
    with raises(LoopError, code="loop.no_window"):
        getattr(run, verb)()
    assert run.applied_steps == 1
    run.accumulate(run.window(torch.randn(ROWS, 3)), loss_fn)
    getattr(run, verb)()
