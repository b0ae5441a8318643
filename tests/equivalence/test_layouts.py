"""Changing the memory layout mid-run, on resuming and on closing is the loop that never changed it.

A fused optimizer on CPU walks parameter, gradient and state in memory order; with strides that differ it computes
wrong weights without a word. So every path on which strides can part is walked here, against a plain loop on
contiguous tensors with the foreach optimizer. Fused and foreach steps round differently: by less than the tolerance.
"""

from __future__ import annotations

import copy
import io

import pytest
import torch
from plain_loop import Trained, assert_same_training, train_plain
from torch import nn
from training_cases import class_batches, class_mean, image_case

import trimtab
from trimtab.plans.plan import Plan

# A bias of a convolution sums its gradient over batch and positions, and the terms cancel to a tenth of their size:
# in float32 its own rounding is several times 1e-6 of what is left. float64 shows that nothing else is lost.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6}
ROWS = 4
PART = 2  # steps in each part of a run
# Who asked for the fused step: nobody, the user's own optimizer, or the plan.
FUSED = {
    "foreach": ({"foreach": True}, False),
    "fused by the user": ({"fused": True}, False),
    "fused by the plan": ({"foreach": True}, True),
}
matrix = [
    pytest.param(dtype, optimizer, *options, id=f"{str(dtype)[6:]}, {optimizer}, {name}")
    for dtype in TOLERANCE
    for optimizer in ("adamw", "sgd")
    for name, options in FUSED.items()
]
every = pytest.mark.parametrize(("dtype", "optimizer", "options", "fused"), matrix)


def plain(dtype, optimizer, parts):
    case = image_case(dtype, optimizer, foreach=True)
    return train_plain(case.having(batches=data(dtype, parts)))


def data(dtype, parts):
    return class_batches((ROWS,) * (PART * parts), dtype, (3, 7, 7))


def plan(fused, micro_batch=ROWS):
    return Plan.fixed(ROWS, micro_batch, memory_layout="channels_last", fused_optimizer=fused)


def keep(fused):
    return Plan.fixed(ROWS, fused_optimizer=fused)


def by_hand(done: Trained, batches):
    for batch in batches:
        done.optimizer.zero_grad()
        loss = class_mean(done.model, batch)
        loss.backward()
        done.optimizer.step()
        done.losses.append(loss.detach())


def by_run(done: Trained, run, batches):
    for window in run.windows(batches):
        done.losses.append(run.train_step(window, class_mean))


def build(dtype, optimizer, options):
    return Trained(*image_case(dtype, optimizer, **options).build())


def through_a_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)


def is_channels_last(model: nn.Module) -> bool:
    return model[0].weight.is_contiguous(memory_format=torch.channels_last)


@every
@pytest.mark.parametrize("micro_batch", [4, 3])
def test_a_layout_taken_mid_training_and_given_back(dtype, optimizer, options, fused, micro_batch):
    batches = data(dtype, 3)
    done = build(dtype, optimizer, options)
    by_hand(done, batches[:PART])
    strides = [p.stride() for p in done.model.parameters()]
    with trimtab.start(done.model, done.optimizer, plan(fused, micro_batch)) as run:
        assert is_channels_last(done.model)
        by_run(done, run, batches[PART : 2 * PART])
    assert [p.stride() for p in done.model.parameters()] == strides
    by_hand(done, batches[2 * PART :])
    assert_same_training(done, plain(dtype, optimizer, 3), TOLERANCE[dtype])


@every
def test_a_run_started_before_any_state_exists_and_closed(dtype, optimizer, options, fused):
    batches = data(dtype, 2)
    done = build(dtype, optimizer, options)
    with trimtab.start(done.model, done.optimizer, plan(fused)) as run:
        by_run(done, run, batches[:PART])
    by_hand(done, batches[PART:])
    assert_same_training(done, plain(dtype, optimizer, 2), TOLERANCE[dtype])


def resumed(dtype, optimizer, options, first, then):
    """Train in `first`, save inside it, load into fresh objects inside `then`, train on; both may be plain (None)."""
    batches = data(dtype, 2)
    before = build(dtype, optimizer, options)
    if first is None:
        by_hand(before, batches[:PART])
        saved = through_a_file([before.model.state_dict(), before.optimizer.state_dict()])
    else:
        with trimtab.start(before.model, before.optimizer, first) as run:
            by_run(before, run, batches[:PART])
            saved = through_a_file([before.model.state_dict(), before.optimizer.state_dict()])
    after = build(dtype, optimizer, options)
    after.gradients, after.losses = before.gradients, before.losses
    if then is None:
        load(after, saved)
        by_hand(after, batches[PART:])
    else:
        with trimtab.start(after.model, after.optimizer, then) as run:
            load(after, saved)
            by_run(after, run, batches[PART:])
    return after


def load(done: Trained, saved):
    done.model.load_state_dict(saved[0])
    done.optimizer.load_state_dict(saved[1])


@every
@pytest.mark.parametrize("way", ["plain to run", "run to plain", "run to run", "run to kept", "kept to run"])
def test_state_saved_under_one_layout_resumes_under_another(dtype, optimizer, options, fused, way):
    loops = {"plain": None, "run": plan(fused), "kept": keep(fused)}
    first, _, then = way.partition(" to ")
    done = resumed(dtype, optimizer, options, loops[first], loops[then])
    assert_same_training(done, plain(dtype, optimizer, 2), TOLERANCE[dtype])


@every
def test_state_loaded_before_the_start_follows_the_layout(dtype, optimizer, options, fused):
    batches = data(dtype, 2)
    before = build(dtype, optimizer, options)
    with trimtab.start(before.model, before.optimizer, plan(fused)) as run:
        by_run(before, run, batches[:PART])
        saved = through_a_file([before.model.state_dict(), before.optimizer.state_dict()])
    after = build(dtype, optimizer, options)
    after.gradients, after.losses = before.gradients, before.losses
    load(after, saved)
    with trimtab.start(after.model, after.optimizer, plan(fused)) as run:
        by_run(after, run, batches[PART:])
    assert_same_training(after, plain(dtype, optimizer, 2), TOLERANCE[dtype])


@every
def test_a_step_taken_back_during_a_run(dtype, optimizer, options, fused):
    """Save, train on, load back: the second try is the first one again."""
    batches = data(dtype, 2)
    done = build(dtype, optimizer, options)
    with trimtab.start(done.model, done.optimizer, plan(fused)) as run:
        by_run(done, run, batches[:PART])
        saved = copy.deepcopy([done.model.state_dict(), done.optimizer.state_dict()])
        by_run(done, run, batches[PART:])
        load(done, saved)
        del done.gradients[PART:], done.losses[PART:]
        by_run(done, run, batches[PART:])
    by_hand_again = plain(dtype, optimizer, 2)
    assert_same_training(done, by_hand_again, TOLERANCE[dtype])


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_plan_still_holds_after_a_load(optimizer):
    """`load_state_dict` brings its own flags; the plan's fused step stays until the run closes."""
    plain_state = build(torch.float32, optimizer, {"foreach": True})
    by_hand(plain_state, data(torch.float32, 1))
    done = build(torch.float32, optimizer, {"foreach": True})
    with trimtab.start(done.model, done.optimizer, plan(True)):
        done.optimizer.load_state_dict(plain_state.optimizer.state_dict())
        assert [(g["fused"], g["foreach"]) for g in done.optimizer.param_groups] == [(True, False)]
    assert [(g["fused"], g["foreach"]) for g in done.optimizer.param_groups] == [(None, True)]


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_state_saved_in_a_run_holds_the_users_own_settings(optimizer):
    """A checkpoint outlives its run: loaded into a plain loop, it must not switch on what only the plan chose."""
    done = build(torch.float32, optimizer, {"foreach": True})
    by_hand(done, data(torch.float32, 1))
    strides = [v.stride() for s in done.optimizer.state_dict()["state"].values() for v in tensors(s)]
    with trimtab.start(done.model, done.optimizer, plan(True)) as run:
        by_run(done, run, data(torch.float32, 1))
        saved = done.optimizer.state_dict()
        assert all(group["fused"] is True for group in done.optimizer.param_groups)
    assert [(g["fused"], g["foreach"]) for g in saved["param_groups"]] == [(None, True)]
    assert [v.stride() for s in saved["state"].values() for v in tensors(s)] == strides


def tensors(state):
    return [value for value in state.values() if isinstance(value, torch.Tensor)]
