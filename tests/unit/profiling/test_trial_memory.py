"""Peak bytes of a trial on CPU are the bytes that can be counted by hand, also of windows of two batches."""

from __future__ import annotations

import pytest
import torch
from small_loops import sgd, square_loss
from torch import nn

import trimtab
from trimtab.planner.search import SearchPhase
from trimtab.plans.profile import Candidate
from trimtab.profiling import trials
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.peak_memory import peak_bytes
from trimtab.training.window_snapshot import bytes_to_begin_anew

pytestmark = pytest.mark.usefixtures("brief_trials")
FLOAT = 4  # bytes


def mean_loss(model, x):
    return model(x).mean()


def peak(model, optimizer, batch, micro_batch=None, adapts_batch_size=False, **settings):
    """Return the peak bytes that `run_stage` reports for one candidate."""
    settings = {"precision": "fp32", "memory_layout": "keep", "fused_optimizer": False} | settings
    candidate = Candidate(micro_batch=micro_batch or len(batch), **settings)
    subject = TrainingLoop(model, optimizer, mean_loss, batch, adapts_batch_size=adapts_batch_size)
    (trial,) = trials.run_stage(subject, SearchPhase("final", (candidate,), accepts=True), 1, lambda text: None)
    assert trial.error is None
    return trial.peak_bytes


def wide(rows, inputs=32, width=1024):
    model = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, 1))
    return model, sgd(model, momentum=0.9), torch.randn(rows, inputs)


def numel(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("micro_batch", "adapts_batch_size"), [(2048, False), (2048, True), (1024, False), (1024, True), (512, False)]
)
def test_a_wide_mlp_peaks_in_the_backward_of_its_relu(micro_batch, adapts_batch_size):
    """There are alive at the peak, in floats:

    - parameters and momentum: 2 x 35,841, and the batch: 2048 x 32;
    - three (micro_batch, 1024) activations: the ReLU's output, which it saved, the gradient that comes in for it, and
      the one that goes out. The first layer's output was dropped when the ReLU had run, in the forward;
    - from the second micro-batch on, which a batch that is free always has, the gradients of the ones before: 35,841;
      in the first, only the last layer's 1,025, which the backward has already reached.
    """
    model, optimizer, batch = wide(2048)
    activations = 3 * micro_batch * 1024
    gradients = numel(model) + 1025 if micro_batch < 2048 or adapts_batch_size else 1025
    expected = FLOAT * (2 * numel(model) + batch.numel() + activations + gradients)
    assert peak(model, optimizer, batch, micro_batch, adapts_batch_size) == pytest.approx(expected, rel=0.01)


class Masked(nn.Module):
    """With a mask that is saved with its weights."""

    def __init__(self, rows):
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.register_buffer("mask", torch.ones(rows, 1024))

    def forward(self, x):
        return self.linear(x) * self.mask[0, :256]


@pytest.mark.parametrize(("rows", "is_copied"), [(255, True), (1024, False)])
def test_a_trial_holds_what_a_run_keeps_to_begin_a_window_anew(rows, is_copied):
    """A copy of a buffer below 1 MiB; a larger one is copied only after a window moved it."""
    torch.manual_seed(0)
    model, batch = Masked(rows), torch.randn(64, 256)
    subject = TrainingLoop(model, sgd(model), mean_loss, batch)
    profile = trimtab.profile(model, subject.optimizer, mean_loss, batch, num_blocks=3, traces=True)
    whole = profile.trials[0]
    with trimtab.start(model, subject.optimizer, trimtab.Plan.fixed(64, 32)) as run:
        live = [*subject.live_tensors()]
        taken = peak_bytes(lambda: run.train_step(run.window(batch), mean_loss), subject.device, lambda: live)
    kept = torch.get_rng_state().nbytes
    assert bytes_to_begin_anew(model) == kept + model.mask.nbytes * is_copied
    assert (whole.peak_bytes > kept + 2 * model.mask.nbytes) is is_copied
    half = next(traced for traced in profile.traces if traced.candidate.alike(whole.candidate))
    assert half.sliced.peak_bytes(32) == pytest.approx(taken, rel=0.01)
    assert half.whole.peak_bytes(64) == pytest.approx(whole.peak_bytes, rel=0.01)


def deep(optimizer):
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    return model, optimizer(model.parameters()), torch.randn(2, 512)


STEPS = {
    # Parameters, momentum and gradients; SGD works in place, one tensor after the other, and adds nothing.
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False), False, 3, 0),
    # Parameters, two moments and gradients; one tensor's square root and its quotient by the bias correction.
    "adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), False, 4, 2 * 512 * 512),
    "fused adamw": (lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False), True, 4, 0),
}


@pytest.mark.parametrize(("make", "is_fused", "copies", "rest"), STEPS.values(), ids=STEPS)
def test_a_deep_mlp_on_few_rows_peaks_in_the_optimizer_step(make, is_fused, copies, rest):
    model, optimizer, batch = deep(make)
    expected = FLOAT * (copies * numel(model) + rest)
    assert peak(model, optimizer, batch, fused_optimizer=is_fused) == pytest.approx(expected, rel=0.01)


def test_a_batch_nested_in_any_way_is_counted_once():
    """A tensor of 4 MiB that the loss reads, given twice in a mapping that is no dict."""
    from collections import UserDict

    model, optimizer, _ = deep(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False))
    x = torch.randn(2, 512, 1024)
    subject = TrainingLoop(model, optimizer, lambda model, b: model(b["x"][:, :, 0]).mean(), UserDict(x=x, again=x))
    candidate = Candidate(2)
    (trial,) = trials.run_stage(subject, SearchPhase("final", (candidate,), accepts=True), 1, lambda text: None)
    assert trial.peak_bytes == pytest.approx(FLOAT * (3 * numel(model) + x.numel()), rel=0.01)


def accumulated_peak(model, optimizer, batches):
    """Return the peak bytes of a plain loop that steps once in several batches; its batches are not counted."""

    def step():
        for batch in batches:
            (mean_loss(model, batch) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    live = [*model.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    return peak_bytes(step, torch.device("cpu"), lambda: live)


@pytest.mark.parametrize(("memory", "stays"), [(None, True), ("1GiB", False)])
def test_the_plan_of_a_loop_that_accumulates_needs_no_more_memory_unless_a_limit_allows_it(memory, stays):
    model, optimizer, batch = wide(2048)
    own = accumulated_peak(model, optimizer, batch.split(512)) + batch.nbytes
    reference, budget = trimtab.Reference(accumulate=4), trimtab.Budget(memory=memory)
    plan = trimtab.plan(model, optimizer, mean_loss, batch, reference=reference, budget=budget, num_blocks=3)
    assert plan.baseline.peak_bytes == pytest.approx(own, rel=0.02)
    assert (plan.measured.peak_bytes <= 1.03 * own) or not stays
    assert any(note.code == "memory.own_peak" for note in plan.notes) is stays
    assert "accumulating 4 batches" in plan.explain()


def tanh_loop():
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh())))
    return model, torch.optim.SGD(model.parameters(), lr=0.0), square_loss, torch.randn(512, 512)


def peak_of_windows(plan, num_batches):
    """Return the peak bytes of a run's window of so many batches."""
    model, optimizer, loss_fn, batch = tanh_loop()
    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(batch), loss_fn)
        return peak_bytes(
            lambda: run.train_step(run.window(*[batch] * num_batches), loss_fn),
            torch.device("cpu"),
            lambda: [*model.parameters(), batch],
        )


def test_a_limit_is_held_by_windows_of_two_batches():
    as_it_is = trimtab.Plan.fixed(512)
    one, two = (peak_of_windows(as_it_is, num_batches) for num_batches in (1, 2))
    assert two > 1.1 * one
    limit = trimtab.Budget(memory=(one + two) // 2)
    plan = trimtab.plan(*tanh_loop(), budget=limit, num_blocks=3, adapt="batch")
    assert plan.micro_batch.changed or plan.precision.changed
    assert plan.measured.peak_bytes <= limit.memory_bytes
    assert peak_of_windows(plan, 2) <= limit.memory_bytes
