"""The suite can fail: each fault that trainers have had, put in on purpose, is caught by the check that guards it."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
import torch
from plain_loop import Trained, assert_same_training, train_ours, train_plain, train_plain_split
from test_layouts import PART, by_hand, by_run, data
from test_layouts import plain as plain_layout
from test_layouts import plan as layout_plan
from test_rates_and_gradients import SCHEDULERS, SIZES, TOTAL, ByHand, sgd_twice_as_fast
from test_same_split import overflowing_case
from test_splits import normalised
from test_token_losses import weighted_sum
from training_cases import ROWS, class_batches, class_case, dropout_mlp, image_case, token_case

import trimtab
from trimtab.plans.plan import Plan
from trimtab.techniques import gradient_clipping, memory_format, mixed_precision, optimizers
from trimtab.training import run as run_module
from trimtab.training import window
from trimtab.training.accumulation import WindowWeights
from trimtab.training.batch import BatchSplitting
from trimtab.training.training_progress import TrainingProgress
from trimtab.training.window import OpenWindow

# The checks, as the suite makes them.


def unequal_split():
    case = class_case()
    assert_same_training(train_ours(case, Plan.fixed(ROWS, 5)), train_plain(case), 1e-12)


def short_last_batch():
    case = class_case(batches=class_batches((12, 12, 5)))
    assert_same_training(train_ours(case, Plan.fixed(ROWS, 4)), train_plain(case), 1e-12)


def unequal_counts():
    case = token_case()
    assert_same_training(train_ours(case, Plan.fixed(ROWS, 5)), train_plain(case), 1e-12)


def ignored_window():
    case = token_case(kept=(0, 0, 0, 0))
    assert_same_training(train_ours(case, Plan.fixed(4, 2)), train_plain(case), 1e-12)


def clipped_counts():
    case = token_case()
    assert_same_training(train_ours(case, Plan.fixed(ROWS, 5), clip_norm=0.5), train_plain(case, 0.5), 1e-12)


def unscaled_counts():
    case = token_case()
    model, optimizer = case.build()
    own = Trained(model, optimizer)
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, 5)) as run:
        for item in run.windows(case.batches):
            for micro in item:
                run.backward(case.loss_fn(run.model, micro))
            run.unscale()
            run.step()
            own.losses.append(run.loss)
    assert_same_training(own, train_plain(case), 1e-12)


def scheduler_of_the_user():
    for scheduler in SCHEDULERS.values():
        case = class_case()
        ours = train_ours(case, Plan.fixed(ROWS, 5, learning_rate_scale=2.0), scheduler)
        plain = train_plain(case.having(optimizer=sgd_twice_as_fast), scheduler=scheduler)
        assert_same_training(ours, plain, 1e-12)


def schedule_by_progress():
    case = class_case(batches=class_batches(SIZES))
    ours = train_ours(case, Plan.fixed(ROWS, 5, schedule="warmup_cosine"), total_samples=TOTAL)
    assert_same_training(ours, train_plain(case, scheduler=ByHand), 1e-12)


def fractional_counts():
    case = token_case(kept=(1, 0, 2, 1), loss_fn=weighted_sum)
    assert_same_training(train_ours(case, Plan.fixed(4, 3)), train_plain(case), 1e-12)


def larger_batch():
    case = class_case(model=normalised, batches=class_batches((12, 20)))
    assert_same_training(train_ours(case, Plan.fixed(ROWS)), train_plain(case), 0)


def dropout():
    case = class_case(model=dropout_mlp)
    assert_same_training(train_ours(case, Plan.fixed(ROWS, 5)), train_plain_split(case, 5), 0)


def bf16():
    case = class_case(torch.float32, batches=class_batches((ROWS,) * 2, torch.float32))
    ours = train_ours(case, Plan.fixed(ROWS, 5, precision="bf16"))
    assert_same_training(ours, train_plain_split(case, 5, torch.bfloat16), 0)


def overflow():
    case = overflowing_case()
    ours = train_ours(case, Plan.fixed(ROWS, 5, precision="fp16"))
    plain = train_plain_split(case, 5, torch.float16, torch.amp.GradScaler("cpu"))
    assert_same_training(ours, plain, 0)


def fused_layout(options=None, fused=True, dtype=torch.float64):
    batches = data(dtype, 3)
    done = Trained(*image_case(dtype, "adamw", **(options or {"foreach": True})).build())
    by_hand(done, batches[:PART])
    with trimtab.start(done.model, done.optimizer, layout_plan(fused)) as run:
        by_run(done, run, batches[PART : 2 * PART])
    by_hand(done, batches[2 * PART :])
    assert_same_training(done, plain_layout(dtype, "adamw", 3), 1e-12)


def closed_layout():
    fused_layout({"fused": True}, False)


def loaded_layout():
    """State of contiguous tensors, loaded during a run in channels_last."""
    batches = data(torch.float64, 2)
    done = Trained(*image_case(torch.float64, "adamw", fused=True).build())
    by_hand(done, batches[:PART])
    saved = done.optimizer.state_dict()
    with trimtab.start(done.model, done.optimizer, layout_plan(False)) as run:
        done.optimizer.load_state_dict(saved)
        by_run(done, run, batches[PART:])
    assert_same_training(done, plain_layout(torch.float64, "adamw", 2), 1e-12)


# The faults.


def by_number_of_micro_batches(patch):
    """Average the micro-batches' means whatever their size: the classic."""

    def mean(self, loss, rows):
        weighted = loss / self._num_micro_batches
        self._add(weighted.detach())
        return weighted

    patch.setattr(WindowWeights, "_weigh_mean", mean)


def by_the_planned_batch(patch):
    """Weigh by the rows planned, not by those the window has."""

    def mean(self, loss, rows):
        weighted = loss * (rows / ROWS)
        self._add(weighted.detach())
        return weighted

    patch.setattr(WindowWeights, "_weigh_mean", mean)


def mean_of_token_means(patch):
    """Average per-micro-batch token means: the bug of several trainers in 2024."""

    def mean(self, loss, count):
        weighted = loss / count.clamp(min=1) / self._num_micro_batches
        self._add(weighted.detach())
        return weighted

    patch.setattr(WindowWeights, "_weigh_sum", mean)
    patch.setattr(WindowWeights, "correction", 1.0)


def no_correction(patch):
    patch.setattr(WindowWeights, "correction", 1.0)


def no_floor_of_one(patch):
    """Divide by a count of zero."""
    patch.setattr("trimtab.training.accumulation.or_one", lambda count: count)


def floor_of_one(patch):
    """Divide by one where weights sum to less."""
    patch.setattr("trimtab.training.accumulation.or_one", lambda count: count.clamp(min=1))


def correction_in_float32(patch):
    exact = WindowWeights.correction.fget
    patch.setattr(WindowWeights, "correction", property(lambda self: torch.as_tensor(exact(self)).float()))


def clip_before_correction(patch):
    def finish(optimizer, factor, clip_norm, **options):
        norm = gradients_finish(optimizer, 1.0, clip_norm, **options)
        gradient_clipping.multiply(optimizer, factor)
        return norm

    gradients_finish = gradient_clipping.scale_and_clip
    patch.setattr(gradient_clipping, "scale_and_clip", finish)


def correction_twice(patch):
    """Unscale does not remember that it corrected."""
    patch.setattr(OpenWindow, "unscaled", property(lambda self: False, lambda self, value: None), raising=False)


def leaking_rates(patch):
    @contextlib.contextmanager
    def leak(optimizer, factor):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
        yield

    patch.setattr(run_module, "scaled_rates", leak)


def progress_counted_before_the_window(patch):
    def before(self, rows, tokens, num_batches, batch_size):
        self._next = rows
        return None if self._total_samples is None else self.rows / self._total_samples

    patch.setattr(TrainingProgress, "progress_after", before)


def whole_batch_cut(patch):
    """Cut a larger batch at the planned rows, though the plan does not split."""
    patch.setattr(Plan, "micro_batch_of", lambda plan, rows: plan.micro_batch.value)


def last_slice_dropped(patch):
    """Drop what does not fill a micro-batch, as a loader with drop_last does."""

    def whole(batching, batch, rows, micro_batch, **how):
        return iter([piece for piece in slices(batching, batch, rows, micro_batch, **how) if piece[1] == micro_batch])

    class Shorter(window.Window):
        def _count(self):
            return sum(rows // micro for rows, micro in zip(self._batch_size, self._micro_batches, strict=True))

    slices = BatchSplitting.slices
    patch.setattr(BatchSplitting, "slices", whole)
    patch.setattr(window, "Window", Shorter)


def slices_in_reverse(patch):
    slices = BatchSplitting.slices

    def backwards(*args, **how):
        return reversed(list(slices(*args, **how)))

    patch.setattr(BatchSplitting, "slices", backwards)


def no_autocast(patch):
    patch.setattr(mixed_precision, "autocast", lambda precision, device: contextlib.nullcontext())


def gradients_kept_as_a_window_opens(patch):
    opened = run_module.Run.open_window

    def keep(self, window):
        kept = [(parameter, parameter.grad) for parameter in self.model.parameters()]
        opened(self, window)
        for parameter, grad in kept:
            parameter.grad = grad

    patch.setattr(run_module.Run, "open_window", keep)


def window_not_voided(patch):
    """Step on an overflow all the same."""
    patch.setattr(torch.amp.GradScaler, "step", lambda self, optimizer: optimizer.step())


def state_not_aligned(patch):
    for module in (memory_format, optimizers):
        patch.setattr(module, "align_state", lambda optimizer: None)


def one_pass(patch):
    """One micro-batch whatever the plan says."""
    fixed = Plan.fixed
    patch.setattr(Plan, "fixed", lambda rows, *_, **values: dataclasses.replace(fixed(rows, **values), batch_size=rows))


FAULTS = [
    (by_number_of_micro_batches, unequal_split),
    (by_the_planned_batch, short_last_batch),
    (mean_of_token_means, unequal_counts),
    (no_correction, unequal_counts),
    (no_floor_of_one, ignored_window),
    (floor_of_one, fractional_counts),
    (correction_in_float32, unequal_counts),
    (clip_before_correction, clipped_counts),
    (correction_twice, unscaled_counts),
    (leaking_rates, scheduler_of_the_user),
    (leaking_rates, schedule_by_progress),
    (progress_counted_before_the_window, schedule_by_progress),
    (whole_batch_cut, larger_batch),
    (last_slice_dropped, unequal_split),
    (slices_in_reverse, dropout),
    (one_pass, dropout),
    (no_autocast, bf16),
    (gradients_kept_as_a_window_opens, unequal_split),
    (window_not_voided, overflow),
    (state_not_aligned, fused_layout),
    (state_not_aligned, closed_layout),
    (state_not_aligned, loaded_layout),
]
named = [pytest.param(fault, check, id=f"{fault.__name__}, {check.__name__}") for fault, check in FAULTS]


@pytest.mark.filterwarnings("ignore:Training became non-finite:RuntimeWarning")  # a fault may divide by 0
@pytest.mark.parametrize(("fault", "check"), named)
def test_the_fault_is_caught(fault, check, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in FAULTS), ids=lambda check: check.__name__)
def test_without_a_fault_the_check_passes(check):
    check()
