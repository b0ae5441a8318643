"""Against a plain loop that makes the same split, with the same seed: equal bit for bit, whatever is random or low."""

from __future__ import annotations

import math

import pytest
import torch
from plain_loop import Trained, assert_same_training, train_ours, train_plain_split
from training_cases import ROWS, class_batches, class_case, class_mean, dropout_mlp

import trimtab
from trimtab.losses import Summed
from trimtab.plans.plan import Plan

SHORT = 2  # steps; this CPU emulates the half precisions


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("micro_batch", [12, 6, 5, 1])
def test_dropout_draws_the_masks_of_a_plain_loop(micro_batch, dtype):
    case = class_case(dtype, model=dropout_mlp)
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch))
    assert_same_training(ours, train_plain_split(case, micro_batch), 0)


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_bf16_is_plain_autocast_bit_for_bit(micro_batch):
    case = class_case(torch.float32, "adamw", batches=class_batches((ROWS,) * SHORT, torch.float32))
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch, precision="bf16"))
    plain = train_plain_split(case, micro_batch, torch.bfloat16)
    assert_same_training(ours, plain, 0)
    full = train_ours(case, Plan.fixed(ROWS, micro_batch))
    assert not torch.equal(ours.gradients[0]["0.weight"], full.gradients[0]["0.weight"]), "autocast was not on"


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_fp16_is_a_plain_grad_scaler_loop_bit_for_bit(micro_batch):
    case = class_case(torch.float32, batches=class_batches((ROWS,) * SHORT, torch.float32))
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch, precision="fp16"))
    plain = train_plain_split(case, micro_batch, torch.float16, torch.amp.GradScaler("cpu"))
    assert_same_training(ours, plain, 0)


def exploding_mean(model, batch):
    """A mean loss that overflows fp16 in the backward where a label of 3 marks the row."""
    loss = class_mean(model, batch)
    return loss * (1e30 if bool((batch[1] == 3).any()) else 1.0)


def overflowing_case():
    """Batches whose second has one exploding row, in its last micro-batch."""
    batches = [(x, y.clamp(max=2)) for x, y in class_batches((ROWS,) * 3, torch.float32)]
    batches[1][1][-1] = 3
    return class_case(torch.float32, loss_fn=exploding_mean, batches=batches)


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_an_overflow_voids_its_window_once(micro_batch):
    case = overflowing_case()
    model, optimizer = case.build()
    stepped, scales = [], []
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, micro_batch, precision="fp16")) as run:
        for window in run.windows(case.batches):
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            momentum = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
            for index, micro in enumerate(window):
                if index == 0:
                    assert all(p.grad is None for p in model.parameters()), "it would start from the window before"
                with run.autocast():
                    loss = exploding_mean(run.model, micro)
                run.backward(loss)
            stepped.append(run.step())
            scales.append(run.loss_scale)
            if not stepped[-1]:
                assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
                kept = [state["momentum_buffer"] for state in optimizer.state.values()]
                assert all(torch.equal(a, b) for a, b in zip(kept, momentum, strict=True))
        assert (run.consumed_samples, run.applied_steps) == (3 * ROWS, 2)
    assert stepped == [True, False, True]
    assert scales == [65536.0, 32768.0, 32768.0]
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


@pytest.mark.parametrize("micro_batch", [12, 5])
def test_an_overflow_is_handled_as_a_plain_grad_scaler_loop_does(micro_batch):
    case = overflowing_case()
    ours = train_ours(case, Plan.fixed(ROWS, micro_batch, precision="fp16"))
    plain = train_plain_split(case, micro_batch, torch.float16, torch.amp.GradScaler("cpu"))
    assert len(ours.gradients) == 2, "the optimizer's step is not even called for a voided window"
    assert_same_training(ours, plain, 0)


@pytest.mark.parametrize("fused", ["by the user", "by the plan"])
def test_a_fused_step_is_voided_too(fused):
    """Torch's scaler hands the overflow to a fused kernel, which skips itself; ours must say so and count no step."""
    options = {"fused": True} if fused == "by the user" else {}
    case = overflowing_case().having(optimizer=lambda p: torch.optim.AdamW(p, lr=0.01, **options))
    model, optimizer = case.build()
    plan = Plan.fixed(ROWS, 5, precision="fp16", fused_optimizer=fused == "by the plan")
    applied = []
    with trimtab.start(model, optimizer, plan) as run:
        for window in run.windows(case.batches):
            before = [p.detach().clone() for p in model.parameters()]
            run.train_step(window, case.loss_fn)
            applied.append(any(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)))
        assert run.applied_steps == 2
    assert applied == [True, False, True]
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}


def test_fp16_token_sums_keep_the_loss_scale_meaningful():
    """A sum over 600 tokens, undivided, would overflow at the first scale; divided by a constant it does not."""

    def sums(model, batch):
        losses = torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return Summed(50 * losses.sum(), 50 * len(batch[1]))

    case = class_case(torch.float32, loss_fn=sums, batches=class_batches((ROWS,) * SHORT, torch.float32))
    means = case.having(loss_fn=class_mean)
    plan = Plan.fixed(ROWS, 5, precision="fp16")
    ours, mean = train_ours(case, plan), train_ours(means, plan)
    # fp16 keeps 11 bits; the two differ in the power of two each micro-batch's loss is scaled by, so only in what
    # underflows, and in the order of the roundings.
    assert_same_training(ours, mean, 2**-9)


def test_a_run_resumed_from_its_state_goes_on_bit_for_bit():
    """Model, optimizer and run state (counters and loss scale) saved after a void, loaded into fresh objects."""
    case = overflowing_case()
    plan = Plan.fixed(ROWS, 5, precision="fp16", schedule="warmup_cosine")
    straight = train_ours(case, plan, total_samples=5 * ROWS)
    model, optimizer = case.build()
    with trimtab.start(model, optimizer, plan, total_samples=5 * ROWS) as run:
        for window in run.windows(case.batches[:2]):
            run.train_step(window, case.loss_fn)
        saved = model.state_dict(), optimizer.state_dict(), run.state_dict()
    assert saved[2]["precision"]["scaler"]["scale"] == 32768.0
    model, optimizer = case.build()
    resumed = Trained(model, optimizer)
    with trimtab.start(model, optimizer, plan, total_samples=5 * ROWS) as run:
        for part, state in zip((model, optimizer, run), saved, strict=True):
            part.load_state_dict(state)
        assert run.consumed_samples == 2 * ROWS
        for window in run.windows(case.batches[2:]):
            loss = run.train_step(window, case.loss_fn)
        assert math.isfinite(float(loss))
        assert (run.consumed_samples, run.applied_steps, run.loss_scale) == (3 * ROWS, 2, 32768.0)
    assert all(torch.equal(value, straight.weights[name]) for name, value in resumed.weights.items())
