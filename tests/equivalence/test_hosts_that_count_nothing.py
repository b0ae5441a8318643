"""Lightning's batches that add nothing: none of whose terms count, or that the module leaves out by returning None."""

from __future__ import annotations

import logging

import pytest
import torch
from raising import raises
from test_lightning import ROWS, STEPS, Module, data, difference, fitted, trained
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.core.errors import LossError
from trimtab.integrations.lightning import TrimtabStrategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
LEFT_OUT = (3, 8, 12, 13)  # batches: of windows of two the last, the first, and both


@pytest.fixture(autouse=True)
def of_the_host(recwarn):
    """What the host warns of is its own: few workers, a step that returns None."""


class Means(Module):
    """Divides by the weights of its rows, which count as what they add up to, be it nothing."""

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        weights = (targets >= 0) * 0.25
        losses = nn.functional.cross_entropy(self.net(inputs), targets.clamp(min=0), reduction="none")
        return {"loss": (losses * weights).sum() / weights.sum(), "num": weights.sum()}


class Silent(Means):
    """Returns None where nothing counts."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) if bool((batch[1] >= 0).any()) else None


def sparse() -> TensorDataset:
    """Return rows most of which do not count, and of each window the last does."""
    inputs, targets = data(dropped=True).tensors
    targets[ROWS - 1 :: ROWS] = 1
    return TensorDataset(inputs, targets)


def by_hand(rows: TensorDataset) -> nn.Module:
    """Return what a plain loop trains on what counts."""
    module = Module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for x, y in zip(*(part.split(ROWS) for part in rows.tensors), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(module.net(x), y, ignore_index=-1).backward()
        optimizer.step()
        schedule.step()
    return module


@pytest.mark.parametrize("kind", [Means, Silent])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_micro_batch_of_which_nothing_counts_adds_nothing(tmp_path, kind, micro):
    ours, plan = kind(), trimtab.Plan.fixed(ROWS, micro)
    fitted(ours, TrimtabStrategy(plan=plan, count="num"), tmp_path, DataLoader(sparse(), ROWS))
    assert all(bool(torch.isfinite(p).all()) for p in ours.parameters())
    assert difference(ours, by_hand(sparse())) <= 1e-12


def test_a_count_that_is_no_single_number_is_refused(tmp_path):
    class Many(Module):
        def training_step(self, batch, batch_idx):
            return {"loss": nn.functional.cross_entropy(self.net(batch[0]), batch[1]), "num": torch.ones(2)}

    strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, 4), count="num")
    with raises(LossError, code="loss.invalid", field="loss"):
        trained(Many(), strategy, tmp_path, rows=ROWS)


class Skips(Module):
    """Leaves out what is marked in all rows."""

    def training_step(self, batch, batch_idx):
        return None if bool((batch[1] < 0).all()) else super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        """Of a batch that is left out the host has no outputs."""


def marked(rows: int) -> DataLoader:
    """Return batches of so many rows, some of which are marked."""
    inputs, targets = data(STEPS * ROWS).tensors
    for batch in LEFT_OUT:
        targets[batch * rows : (batch + 1) * rows] = -1
    return DataLoader(TensorDataset(inputs, targets), rows)


@pytest.mark.parametrize("micro", [2, 4])
@pytest.mark.parametrize("k", [1, 2])
def test_a_batch_that_the_module_leaves_out_is_left_out_as_in_the_host(tmp_path, micro, k):
    """Where a window has no other the optimizer does not step; else its rows add nothing to the mean over all."""
    plain, ours = Skips(), Skips()
    changes = {"accumulate_grad_batches": k, "gradient_clip_val": 0.3}
    fitted(plain, "auto", tmp_path, marked(ROWS // k), **changes)
    strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, micro))
    trainer = fitted(ours, strategy, tmp_path, marked(ROWS // k), **changes)
    assert trainer.global_step == STEPS
    assert difference(ours, plain) <= 1e-12


def test_a_window_that_is_left_out_is_none_of_the_runs(tmp_path):
    path = tmp_path / "run.jsonl"
    with trimtab.RecordWriter(path, trimtab.Header("skips")) as record:
        strategy = TrimtabStrategy(plan=trimtab.Plan.fixed(ROWS, 4), running={"record": record})
        fitted(Skips(), strategy, tmp_path, marked(ROWS))
    assert len(trimtab.read_record(path).steps) == STEPS - len(LEFT_OUT)
