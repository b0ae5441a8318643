"""A loop's chain as it is measured: its bytes are those counted, its seconds those of the blocks."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch
from torch import nn

from trimtab.calibrate.recomputation import measure_chain
from trimtab.core.recompute import Kept
from trimtab.decide.checkpoint_schedule import keep_all, optimal, predict
from trimtab.measure.memory import peak_growth, storage_bytes
from trimtab.runtime.activation_checkpoint import use_schedule

L = 5


class Block(nn.Module):
    def __init__(self, wait_s=0.0, inplace=False):
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.act, self.wait_s = nn.ReLU(inplace=inplace), wait_s

    def forward(self, x):
        time.sleep(self.wait_s)
        return x + self.two(self.act(self.one(self.norm(x))).square())


def measured(**block):
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(**block) for _ in range(L)), nn.Linear(32, 3)).train()
    batch = torch.randn(512, 32), torch.randint(0, 3, (512,))

    def loss_fn(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def step():
        model.zero_grad(set_to_none=True)
        loss_fn(model, batch).backward()

    return model, batch, step, measure_chain(model, loss_fn, batch, step, contextlib.nullcontext)


def test_peaks_are_those_that_are_counted():
    """But for 5 KB of each region, its random numbers' state."""
    model, batch, step, found = measured()
    assert found.blocks == tuple(str(index) for index in range(L))
    in_part = (*(Kept(index, in_part=True) for index in range(L)), Kept(L))
    whole = predict(found.chain, keep_all(L + 1)).peak_bytes
    limited = optimal(found.chain, int(0.8 * whole))
    assert limited is not None
    for schedule in (keep_all(L + 1), in_part, limited):
        undo = use_schedule(model, found.blocks, schedule)
        step()
        model.zero_grad(set_to_none=True)
        counted = peak_growth(step) + storage_bytes([*model.parameters(), *batch])
        undo()
        assert found.held_bytes + predict(found.chain, schedule).peak_bytes == pytest.approx(counted, rel=0.02)


def test_seconds_are_those_of_each_blocks_forward():
    *_, found = measured(wait_s=0.02)
    assert all(0.02 <= stage.forward_s < 0.2 for stage in found.chain[:-1])
    assert found.chain[-1].forward_s == 0.0


def test_keeping_the_dear_part_alone_holds_less_where_it_can_be():
    *_, found = measured()
    for stage in found.chain[:-1]:
        assert stage.part.saved_bytes < stage.saved_bytes
        assert stage.part.recompute_s >= 0
    assert found.chain[-1].part is None


def test_a_block_that_writes_over_what_is_kept_is_not_kept_in_part():
    *_, found = measured(inplace=True)
    assert all(stage.part is None for stage in found.chain)


def test_a_model_without_blocks_has_no_chain():
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    assert (
        measure_chain(model, lambda m, b: m(b).sum(), x, lambda: model(x).sum().backward(), contextlib.nullcontext)
        is None
    )
