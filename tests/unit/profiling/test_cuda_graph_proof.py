"""Graphs are proved on the user's own model: the gradient that they compute is that of the model as it is."""

from __future__ import annotations

import random

import pytest
import torch
from small_loops import sgd
from torch import nn

from trimtab.plans.profile import Candidate
from trimtab.profiling.cuda_graph_proof import replay_refusal
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.techniques.compiled_call import CompiledCall

CANDIDATE = Candidate(4, compiled="cuda_graphs")


def squared(found):
    return (found - 1).square().mean()


def refusal(
    launch, scale=1.0, refused="", at_first=lambda model: None, rows=None, loss=squared, of_model=lambda *given: 0.0
):
    """Return what is said of a model whose graphs compute `launch(model, rows)`; None: nothing is launched."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Tanh(), nn.Linear(16, 1))
    at_first(model)
    call, sizes = CompiledCall(model, lambda: None, "cuda_graphs"), []

    def launched(rows):
        sizes.append(len(rows))
        if launch is None or not call.recorder.is_on:
            return model._call_impl(rows)
        call.recorder.launches += 1
        return launch(model, rows)

    call._called, call.recorder.refusal = launched, refused
    subject = TrainingLoop(
        model,
        sgd(model),
        lambda model, rows: scale * loss(model(rows)) + of_model(model),
        torch.randn(8, 6) if rows is None else rows,
    )
    state, host = torch.get_rng_state(), random.getstate()
    weights, buffers = ([each.clone() for each in every] for every in (model.parameters(), model.buffers()))
    try:
        return replay_refusal(subject, CANDIDATE)
    finally:
        assert torch.equal(torch.get_rng_state(), state)
        torch.testing.assert_close(list(model.parameters()), weights, rtol=0, atol=0)
        torch.testing.assert_close(list(model.buffers()), buffers, rtol=0, atol=0)
        assert random.getstate() == host
        assert call.is_on
        assert call.recorder.is_on
        assert all(p.grad is None for p in model.parameters())
        assert set(sizes) == {CANDIDATE.micro_batch}  # which were recorded


def test_the_same_gradient_is_taken():
    assert refusal(lambda model, rows: model._call_impl(rows)) is None


def other_masks(model, rows):
    torch.rand(3)
    return model._call_impl(rows)


def frozen_draw(model, rows):
    """What was drawn when it was recorded, whatever is drawn now."""
    torch.manual_seed(1)
    return model._call_impl(rows)


RECORDED = torch.randn(4, 6, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize(
    "launch",
    [
        other_masks,
        frozen_draw,
        lambda model, rows: model._call_impl(rows.flip(1)),
        lambda model, rows: model._call_impl(RECORDED),  # the rows that it was recorded with
    ],
)
def test_another_gradient_is_refused(launch):
    assert "the gradient differs by" in refusal(launch)


def with_bias(factor, beside=0.0):
    """Return a launch whose gradient of the first bias is so many times as large, and so much beside."""

    def launch(model, rows):
        bias = model[0].bias
        known = factor * bias + (1 - factor) * bias.detach()
        found = model[3](model[2](model[1](nn.functional.linear(rows, model[0].weight, known))))
        return found + beside * (bias - bias.detach()).sum()

    return launch


def thin(model):
    """A layer whose gradients are small beside others'."""
    torch.manual_seed(3)
    model[1].p = 0.0
    with torch.no_grad():
        model[3].weight.mul_(0.1)


def test_the_gradient_of_a_small_layer_alone_is_looked_at_too():
    assert "the gradient of 0.bias differs by 1.5" in refusal(with_bias(2.5), at_first=thin)
    assert refusal(with_bias(1.2), at_first=thin) is None

    def scaled(by):
        def at_first(model):
            thin(model)
            with torch.no_grad():
                model[3].weight.mul_(by)

        return at_first

    for by in (1e-5, 0.0):
        assert refusal(with_bias(1.0), at_first=scaled(by)) is None
    assert "the gradient of 0.bias differs by" in refusal(with_bias(3.0), at_first=scaled(1e-5))
    assert "the gradient of 0.bias differs from zero" in refusal(with_bias(1.0, beside=1e-3), at_first=scaled(0.0))


def test_what_two_passes_are_apart_is_no_difference():
    drawn = random.Random(0)

    def noise(model):
        bias = model[0].bias
        return 0.2 * drawn.uniform(-1, 1) * (bias - bias.detach()).sum()

    assert refusal(lambda model, rows: model._call_impl(rows), at_first=thin, of_model=noise) is None


def test_a_gradient_that_is_zero_but_for_rounding_may_differ():
    def centred(model):
        model[1].p = 0.0
        model[1] = nn.BatchNorm1d(16)

    assert refusal(with_bias(1.0, beside=1e-4), at_first=centred) is None
    assert "the gradient of 0.bias differs by" in refusal(with_bias(1.0, beside=0.03), at_first=centred)


def test_weights_that_it_was_recorded_with_are_refused():
    kept: dict[str, torch.Tensor] = {}

    def at_first(model):
        model[1].p = 0.0
        kept.update((name, p.detach().clone()) for name, p in model.named_parameters())

    def launch(model, rows):
        frozen = {name: p + (kept[name] - p).detach() for name, p in model.named_parameters()}
        hidden = torch.tanh(nn.functional.linear(rows, frozen["0.weight"], frozen["0.bias"]))
        return nn.functional.linear(hidden, frozen["3.weight"], frozen["3.bias"])

    assert "the gradient differs by" in refusal(launch, at_first=at_first)
    assert refusal(lambda model, rows: model._call_impl(rows), at_first=at_first) is None


def test_nothing_is_proved_by_a_gradient_that_is_zero_or_does_not_move():
    rows = torch.ones(8, 6)

    def linear(model):
        for part in (1, 2):
            model[part] = nn.Identity()
        model[0], model[3] = nn.Identity(), nn.Linear(6, 1)

    said = refusal(lambda model, rows: model._call_impl(rows), at_first=linear, rows=rows, loss=torch.mean)
    assert "could not be checked" in said
    assert "could not be checked" in refusal(lambda model, rows: model._call_impl(rows), scale=0.0)


def test_models_that_are_never_replayed_or_compiled_before_are_refused():
    assert "no part of the forward was replayed" in refusal(None)
    assert refusal(None, refused="it draws") == "it draws"
    model = nn.Linear(6, 1)
    subject = TrainingLoop(model, sgd(model), lambda m, x: m(x).mean(), torch.randn(8, 6))
    assert "compiled before" in replay_refusal(subject, CANDIDATE)
