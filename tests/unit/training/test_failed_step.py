"""An optimizer that raises: the window is counted once, scaled once, and can be tried again or given up."""

from __future__ import annotations

import copy

import pytest
import torch
from raising import raises
from small_loops import linear_loop

import trimtab
from trimtab.core.errors import LoopError
from trimtab.losses import Summed
from trimtab.plans.plan import Plan
from trimtab.training.run import Run

ROWS = 6
PLANS = {
    "means": Plan.fixed(ROWS, 4),
    "fp16": Plan.fixed(ROWS, 4, precision="fp16"),
    "schedule": Plan.fixed(ROWS, 4, schedule="warmup_cosine"),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)


def token_loss(model, batch):
    return Summed(0.01 * model(batch).float().square().sum(), batch.shape[0] * 3)


class OutOfSpace(RuntimeError):
    """What the optimizer raises."""


def fail_once(optimizer):
    """Make the optimizer's next step raise before it changes anything."""

    def hook(*_):
        handle.remove()
        raise OutOfSpace

    handle = optimizer.register_step_pre_hook(hook)


def trained(plan, fail):
    """Return (weights, counters) after three windows in the open form, the second tried twice where it shall fail."""
    model, optimizer = linear_loop(3, 3)
    with trimtab.start(model, optimizer, plan, total_samples=20 * ROWS) as run:
        for index in range(3):
            for micro in run.window(torch.full((ROWS, 3), 0.5 + index)):
                with run.autocast():
                    result = token_loss(run.model, micro)
                run.backward(result)
            if fail and index == 1:
                fail_once(optimizer)
                with pytest.raises(OutOfSpace):
                    run.step()
                assert (run.consumed_samples, run.applied_steps) == (ROWS, 1)
            run.step()
        return copy.deepcopy(list(model.parameters())), run.state_dict()


@every_plan
def test_a_step_tried_again_counts_and_scales_once(plan):
    (weights, state), (expected, counted) = trained(plan, fail=True), trained(plan, fail=False)
    assert state == counted
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


@every_plan
@pytest.mark.parametrize("way", ["train_step", "discard"])
def test_a_failed_step_given_up_is_not_counted_and_the_next_window_trains(plan, way):
    model, optimizer = linear_loop(3, 3)
    batch = torch.ones(ROWS, 3)
    with trimtab.start(model, optimizer, plan, total_samples=20 * ROWS) as run:
        fail_once(optimizer)
        if way == "train_step":
            with pytest.raises(OutOfSpace):
                run.train_step(run.window(batch), token_loss)
        else:
            for micro in run.window(batch):
                run.backward(token_loss(run.model, micro))
            with pytest.raises(OutOfSpace):
                run.step()
            run.discard()
        assert (run.consumed_samples, run.applied_steps) == (0, 0)
        scale = run.loss_scale
        run.train_step(run.window(batch), token_loss)
        assert (run.consumed_samples, run.applied_steps, run.loss_scale) == (ROWS, 1, scale)


def test_a_record_that_cannot_be_written_leaves_the_window_stepped_and_counted():
    class Full:
        def step(self, *_, **__):
            """Held, as long as it goes."""

        def stepped(self):
            raise OSError("no space left on device")

        def event(self, *_):
            """Lost, as all is."""

        def close(self, *_):
            """Nothing is pending."""

    model, optimizer = linear_loop(3, 3)
    with Run(model, optimizer, Plan.fixed(ROWS), recorder=Full()) as run:
        for number in (1, 2):
            with pytest.raises(OSError, match="no space"):
                run.train_step(run.window(torch.ones(ROWS, 3)), token_loss)
            assert (run.consumed_samples, run.applied_steps) == (number * ROWS, number)
            with raises(LoopError, code="loop.no_window", field="run.step"):
                run.step()
