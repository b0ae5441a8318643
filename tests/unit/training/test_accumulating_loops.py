"""Plans for loops that accumulate gradients, and loops that still scale their own loss."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from raising import raises
from small_loops import class_loss as loss_fn
from small_loops import sgd, train
from torch import nn

import trimtab
from trimtab.core.errors import LossError

K, ROWS = 4, 8
pytestmark = pytest.mark.usefixtures("brief_trials")


def batches():
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(48, 6, generator=generator), torch.randint(0, 3, (48,), generator=generator)
    return list(zip(inputs.split(ROWS), targets.split(ROWS), strict=True))


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    return model, sgd(model)


def plan():
    model, optimizer = loop()
    whole = tuple(torch.cat(columns) for columns in zip(*batches()[:K], strict=True))
    reference = trimtab.Reference(accumulate=K)
    return trimtab.plan(model, optimizer, loss_fn, whole, reference=reference, num_blocks=3)


def trained(made, *, num_batches=None, data=None):
    model, optimizer = loop()
    with trimtab.start(model, optimizer, made) as run:
        if num_batches is not None:
            run.of_batches(num_batches)
        train(run, batches() if data is None else data, loss_fn)
    return model


def test_the_loops_own_split_is_kept_and_trains_as_the_loop_without_a_warning():
    made = plan()
    assert (made.micro_batch.value, made.plan_kind, made.proof.code) == (ROWS, "equivalent", "proof.holds")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = trained(made, num_batches=K)
    model, optimizer = loop()
    for window in (batches()[:K], batches()[K:]):
        optimizer.zero_grad()
        for batch in window:
            (loss_fn(model, batch) / len(window)).backward()
        optimizer.step()
    for one, other in zip(ours.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other)


def test_batches_of_another_size_than_planned_are_warned_of():
    with pytest.warns(RuntimeWarning, match="of_batches"):
        trained(plan())
    whole = [tuple(torch.cat(columns) for columns in zip(*batches()[:K], strict=True))]
    trained(plan(), data=whole)  # of the planned size: no warning
    larger = replace(trimtab.Plan.fixed(K * ROWS), reference=trimtab.Reference(accumulate=K))
    with pytest.warns(RuntimeWarning, match="micro-batch"):
        trained(larger, num_batches=K)


# Loops that scale their loss ----------------------------------------------------------------------------------------

SCALED = {
    "scaled": lambda scaler, loss: scaler.scale(loss),
    "divided, then scaled": lambda scaler, loss: scaler.scale(loss / 4),
    "scaled, then divided": lambda scaler, loss: scaler.scale(loss) / 4,
    "a scaled sum": lambda scaler, loss: trimtab.Summed(scaler.scale(loss * 8), 8),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_loss_with_a_scalers_scale_is_refused(name):
    scaler = torch.amp.GradScaler("cpu")

    def scaled(model, batch):
        return SCALED[name](scaler, loss_fn(model, batch))

    model, optimizer = loop()
    with raises(LossError, code="loss.scaled"):
        trimtab.plan(model, optimizer, scaled, batches()[0], num_blocks=3)
    before = [p.detach().clone() for p in model.parameters()]
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(ROWS)) as run, raises(LossError, code="loss.scaled"):
        run.train_step(run.window(batches()[0]), scaled)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_loss_times_a_number_of_the_users_is_trained():
    weight = torch.tensor(65536.0)
    model, optimizer = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(ROWS)) as run:
        run.train_step(run.window(batches()[0]), lambda model, batch: loss_fn(model, batch) * weight)
        assert run.applied_steps == 1
