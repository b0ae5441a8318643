"""What a user has beside a host's loop: averaged weights in Lightning's, an optimizer around another on Accelerate."""

from __future__ import annotations

import logging

import lightning.pytorch as pl
import pytest
import test_accelerate
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import StochasticWeightAveraging
from test_lightning import ROWS, data, difference, fitted
from torch import nn
from torch.utils.data import DataLoader

import trimtab
from trimtab.integrations.accelerate import start
from trimtab.integrations.lightning import TrimtabStrategy

BATCHES = 4
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def of_the_host(recwarn):
    """What the host warns of is its own, and each test's Accelerator is."""
    test_accelerate.reset()


class Normed(pl.LightningModule):
    """Has batch statistics, and notes what its training step is called for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, len(batch[0]), torch.is_grad_enabled()))
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Starts(pl.Callback):
    """Keeps the weights that each epoch begins with, before they are averaged."""

    def __init__(self) -> None:
        self.weights = []

    def on_train_epoch_start(self, trainer, module):
        self.weights.append([p.detach().clone() for p in module.parameters()])


def test_statistics_of_averaged_weights_are_taken_batch_by_batch_and_nothing_is_trained_by_that(tmp_path):
    """As the host does, after its last epoch, in one more; there each batch has a step of its own to be seen in."""
    ours, starts, loader = Normed(), Starts(), DataLoader(data(BATCHES * ROWS), ROWS)
    averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
    strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS))
    fitted(ours, strategy, tmp_path, loader, max_epochs=2, callbacks=[starts, averaging])
    assert [each for each in ours.seen if each[0] == 2] == [(2, index, ROWS, False) for index in range(BATCHES)]
    for found, first, second in zip(ours.parameters(), *starts.weights[:2], strict=True):
        torch.testing.assert_close(found.detach(), (first + second) / 2, rtol=1e-12, atol=1e-14)
    again = Normed()
    again.load_state_dict(ours.state_dict())
    again.net[1].reset_running_stats()
    again.net[1].momentum = None
    for inputs, _ in loader:
        again.net(inputs)
    for found, expected in zip(ours.buffers(), again.buffers(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


class HalfWay(torch.optim.Optimizer):
    """Goes half of each step that the optimizer inside does, as Lookahead does of every few."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        before = [p.clone() for p in parameters]
        self.optimizer.step()
        for parameter, each in zip(parameters, before, strict=True):
            parameter.lerp_(each, 0.5)


@pytest.mark.parametrize("prepared", [True, False])
def test_an_optimizer_around_another_is_the_one_that_steps(prepared):
    plain, inside, batches = test_accelerate.parts()
    around = HalfWay(inside)
    for batch in batches:
        around.zero_grad()
        test_accelerate.loss_fn(plain, batch).backward()
        around.step()
    accelerator = Accelerator(cpu=True)
    model, inside, loader = test_accelerate.parts()
    optimizer = accelerator.prepare(HalfWay(inside)) if prepared else HalfWay(inside)
    with start(accelerator, model, optimizer, trimtab.Plan.fixed(ROWS, 3)) as run:
        for window in run.windows(accelerator.prepare(loader)):
            run.train_step(window, test_accelerate.loss_fn)
    assert difference(model, plain) <= 1e-12
