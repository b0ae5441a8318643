"""A plan that compiles, in each host's loop: the weights of the loop as it is, and a model that is compiled once."""

from __future__ import annotations

import shutil

import lightning.pytorch as pl
import pytest
import test_accelerate
import test_lightning
import test_transformers
import torch
from accelerate import Accelerator
from test_hosts_of_unlike_lengths import InOrder
from test_lightning import difference
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback

import trimtab
from trimtab.integrations.accelerate import start
from trimtab.integrations.lightning import TrimtabStrategy
from trimtab.integrations.transformers import TrimtabTrainer

STEPS, ROWS = 6, 8
COMPILED = trimtab.Plan.fixed(ROWS, 4, compiled=True)
NEAR = 1e-8  # of a tensor's largest weight, in double precision: kernels of their own sum in another order
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    # Of torch itself, where a graph breaks at what is not a leaf.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def graphs():
    """Of each step, how many graphs were compiled by its end."""
    torch._dynamo.reset()
    counters.clear()
    yield []
    torch._dynamo.reset()


def compiled_by_now() -> int:
    return counters["stats"]["unique_graphs"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


class Net(nn.Module):
    """With a forward of its own: torch compiles nothing of a bare nn.Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)


def loader() -> DataLoader:
    return DataLoader(test_lightning.data(STEPS * ROWS), ROWS)


def by_the_accelerator() -> nn.Module:
    """Return what the host's loop trains."""
    test_accelerate.reset()
    accelerator, held = Accelerator(cpu=True), Net()
    model, optimizer, batches = accelerator.prepare(held, torch.optim.AdamW(held.parameters(), lr=1e-2), loader())
    for batch in batches:
        accelerator.backward(test_accelerate.loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return held


def test_a_model_on_an_accelerator_is_compiled_once_and_trains_as_in_its_loop(graphs):
    plain = by_the_accelerator()
    test_accelerate.reset()
    accelerator, held = Accelerator(cpu=True), Net()
    model, optimizer, batches = accelerator.prepare(held, torch.optim.AdamW(held.parameters(), lr=1e-2), loader())
    with start(accelerator, model, optimizer, COMPILED) as run:
        for window in run.windows(batches):
            run.train_step(window, test_accelerate.loss_fn)
            graphs.append(compiled_by_now())
    assert difference(held, plain) <= NEAR
    assert graphs[0] > 0
    assert graphs == graphs[:1] * STEPS


class Module(pl.LightningModule):
    """May log in its training step: there torch breaks its graph, into as many parts in each."""

    def __init__(self, *, logs: bool) -> None:
        super().__init__()
        self.net, self.logs = net(), logs

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        if self.logs:
            self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@pytest.mark.parametrize("logs", [False, True])
def test_lightnings_module_is_compiled_once_and_trains_as_in_the_host(tmp_path, graphs, logs):
    class Noted(pl.Callback):
        def on_train_batch_end(self, *given):
            graphs.append(compiled_by_now())

    plain, ours = Module(logs=logs), Module(logs=logs)
    test_lightning.fitted(plain, "auto", tmp_path, loader())
    trainer = test_lightning.fitted(ours, TrimtabStrategy(plan=COMPILED), tmp_path, loader(), callbacks=[Noted()])
    assert trainer.global_step == STEPS
    assert difference(ours, plain) <= NEAR
    assert graphs[0] > 0
    assert graphs == graphs[:1] * STEPS


def test_the_trainers_model_is_compiled_once_and_trains_as_in_the_host(tmp_path, graphs):
    class Noted(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            graphs.append(compiled_by_now())

    given = test_transformers.arguments(tmp_path, max_steps=STEPS)
    how = {"train_dataset": test_transformers.rows(STEPS * ROWS), "compute_loss_func": test_transformers.in_double}
    plain, ours = test_transformers.model(), test_transformers.model()
    type("Plain", (InOrder, Trainer), {})(model=plain, args=given, **how).train()
    kind = type("Ours", (InOrder, TrimtabTrainer), {})
    kind(model=ours, args=given, plan=COMPILED, callbacks=[Noted()], **how).train()
    assert difference(ours, plain) <= NEAR
    assert graphs[0] > 0
    assert graphs == graphs[:1] * STEPS
