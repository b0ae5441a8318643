"""Whole messages of a run, as a reader who has not seen the library meets them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.errors import LoopError, LossError, OptimizerError


def loop() -> tuple[nn.Module, torch.optim.Optimizer, torch.Tensor]:
    model = nn.Linear(4, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 4)


def test_a_step_before_the_last_micro_batch():
    model, optimizer, batch = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8, 4)) as run:
        for micro in run.window(batch):
            run.backward(run.model(micro).mean())
            break
        with pytest.raises(LoopError) as caught:
            run.step()
    assert str(caught.value) == (
        "run.step() was called before run.backward(loss) for the last micro-batch of the window. Complete the loop "
        "over the window, or drop the window with run.discard()."
    )


def test_a_loss_with_a_number_that_could_be_a_count_or_a_metric():
    model, optimizer, batch = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8)) as run, pytest.raises(LossError) as caught:
        run.train_step(run.window(batch), lambda model, batch: (model(batch).mean(), 0.5))
    assert str(caught.value) == (
        "The second element of the pair that the loss function returned is a number (a float), which could be a count "
        "or a metric. Return trimtab.Summed(loss_sum, count) if the number counts terms. Return a dict, such as (loss, "
        '{"accuracy": accuracy}), if it is a metric: run.auxiliary contains the dict.'
    )


def test_an_optimizer_of_another_model():
    model, _, _ = loop()
    other = torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1)
    with pytest.raises(OptimizerError) as caught:
        trimtab.start(model, other, trimtab.Plan.fixed(8))
    assert str(caught.value) == (
        "The optimizer has 2 parameters that the model does not have, with shapes (3, 3), (3,). Pass "
        "modules=[criterion] if the criterion has parameters. Otherwise create the optimizer after the last change of "
        "the model: optimizer = AdamW(model.parameters(), ...). To train two networks, start one run per network, each "
        "with its own optimizer (docs/own_loop.md)."
    )
