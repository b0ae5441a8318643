"""A chain's bytes, traced stage by stage, make the peaks of steps by any schedule, as they are counted."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from raising import raises
from torch import nn

from trimtab.core.errors import ModelError
from trimtab.core.recompute_schedule import KeptBlock, RecomputedSegment
from trimtab.losses import Summed, mean_of
from trimtab.measure.block_memory import trace_stages
from trimtab.measure.blocks import BlockGraph, blocks_of
from trimtab.planner.recompute_cost import every_block, keep_all, predict, sqrt_segments
from trimtab.planner.recompute_solver import optimal
from trimtab.state import peak_memory
from trimtab.state.peak_memory import peak_growth, storage_bytes
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet
from trimtab.techniques.activation_checkpointing import use_schedule

pytestmark = pytest.mark.slow

NESTED = (
    RecomputedSegment((RecomputedSegment((KeptBlock(0), KeptBlock(1))), KeptBlock(2), KeptBlock(3))),
    KeptBlock(4),
    KeptBlock(5),
    KeptBlock(6),
)


def gpt():
    shape = GPTShape(vocab_size=256, context=64, num_layers=6, num_heads=4, width=128, dropout=0.1)
    tokens = torch.randint(0, 256, (8, 65))
    return (
        GPT(shape).train(),
        lambda model, batch: Summed(*model(*batch)),
        (tokens[:, :-1].clone(), tokens[:, 1:].clone()),
    )


def resnet():
    batch = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    model = ResNet(width=8, depths=(2, 2, 2), in_channels=3, num_classes=10).train()
    return model, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch


class UNet(nn.Module):
    """Halves and doubles, and joins what was before to what comes back: much of it between the blocks."""

    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList(self.block(*channels) for channels in ((3, 8), (8, 16), (16, 32)))
        self.ups = nn.ModuleList(self.block(*channels) for channels in ((48, 16), (24, 8)))
        self.head = nn.Conv2d(8, 2, 1)

    def block(self, before, after):
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.GELU())

    def forward(self, x):
        kept = []
        for index, down in enumerate(self.downs):
            x = down(x)
            if index < 2:
                kept.append(x)
                x = nn.functional.max_pool2d(x, 2)
        for up in self.ups:
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2), kept.pop()], 1))
        return self.head(x)


def unet():
    batch = torch.randn(8, 3, 32, 32), torch.randint(0, 2, (8, 32, 32))
    return UNet().train(), lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]), batch


def traced_chain(model, loss_fn, batch, **how):
    return trace_stages(model, loss_fn, batch, blocks_of(model, loss_fn, batch), **how)


@functools.cache
def chain_of(make):
    torch.manual_seed(0)
    model, loss_fn, batch = make()
    found = blocks_of(model, loss_fn, batch)
    traced = trace_stages(model, loss_fn, batch, found, counts_scratch=True).first
    chain = [replace(each, forward_s=1.0) for each in traced.stages]
    return model, loss_fn, batch, found, traced, chain


def schedules(chain, links):
    number = len(chain)
    whole = predict(chain, keep_all(number)).peak_bytes
    found = {"none": keep_all(number), "every_block": every_block(number), "nested": NESTED}
    found["sqrt"] = sqrt_segments(number, links)
    found |= {f"optimal {share}": optimal(chain, int(share * whole)) for share in (0.9, 0.8, 0.7)}
    return found


def counted(model, loss_fn, batch):
    """Return the most bytes of a forward and backward, with what was there before."""

    def step():
        result = loss_fn(model, batch)
        mean_of(result).backward()

    for _ in range(2):
        model.zero_grad(set_to_none=True)
        growth = peak_growth(step)
    return growth + storage_bytes([*model.parameters(), *model.buffers(), *batch])


@pytest.mark.parametrize("name", ["none", "every_block"])
def test_what_lies_between_blocks_is_in_it(name):
    """To 5%: what it takes while it goes backward is one block's or the next one's."""
    model, loss_fn, batch, found, traced, chain = chain_of(unet)
    assert not any(found.links)
    schedule = {"none": keep_all, "every_block": every_block}[name](len(chain))
    predicted = traced.held_bytes + predict(chain, schedule).peak_bytes
    undo = use_schedule(model, found.names, schedule)
    measured = counted(model, loss_fn, batch)
    undo()
    assert predicted == pytest.approx(measured, rel=0.05)


MIXED = (
    RecomputedSegment((KeptBlock(0),)),
    KeptBlock(1),
    RecomputedSegment((KeptBlock(2),)),
    KeptBlock(3),
    KeptBlock(4),
)


def predicted_to_measured(model, batch, autocast, name):
    """Return the predicted peak of a schedule divided by the measured one, for a model of four blocks."""

    def loss_fn(model, batch):
        with autocast():
            return model(batch[0])

    traced = traced_chain(model, lambda m, batch: m(batch[0]), (batch,), autocast=autocast, counts_scratch=True).first
    schedule = {"none": keep_all(5), "every_block": every_block(5), "mixed": MIXED}[name]
    undo = use_schedule(model, [f"blocks.{index}" for index in range(4)], schedule)
    measured = counted(model, loss_fn, (batch,))
    undo()
    return (traced.held_bytes + predict(traced.stages, schedule).peak_bytes) / measured


class Tied(nn.Module):
    """Its head's weight is its embedding's, whose gradient waits, whole, for what the embedding adds in the end."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4096, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)) for _ in range(4))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return (x[:, -1:] @ self.embedding.weight.T).square().mean()


class Wide(nn.Module):
    """Its weights are far larger than what passes between them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(4)
        )
        self.head = nn.Linear(512, 4096)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return torch.sigmoid(self.head(x)).square().mean()


@pytest.mark.parametrize(
    ("make", "batch", "autocast"),
    [
        (Tied, torch.randint(0, 4096, (4, 256)), False),
        (Wide, torch.randn(256, 512), True),
        (Wide, torch.randn(256, 512), False),
    ],
)
@pytest.mark.parametrize("name", ["none", "every_block", "mixed"])
def test_what_waits_for_another_stage_is_in_it(make, batch, autocast, name):
    """A tied weight's gradient for the other one, and weights that autocast has cached for the forward's end."""
    torch.manual_seed(0)
    context = functools.partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)
    assert predicted_to_measured(make(), batch, context, name) == pytest.approx(1, rel=0.02)


class Named(nn.Module):
    """What its blocks are given no backward needs, and it has a name for as long as the model runs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(4))
        self.head = nn.Linear(256, 1024)

    def forward(self, x):
        given = [2 * x]
        for block in self.blocks:
            given.append(block(given[-1]))
        last = given.pop()
        given.clear()
        return self.head(last).square().mean()


@pytest.mark.parametrize(("name", "most"), [("none", 1.1), ("every_block", 1.02), ("mixed", 1.05)])
def test_what_a_block_was_given_is_held_until_it_is_run_again(name, most):
    torch.manual_seed(0)
    autocast = functools.partial(torch.autocast, "cpu", torch.bfloat16)
    assert 0.98 <= predicted_to_measured(Named(), torch.randn(2048, 256), autocast, name) <= most


@pytest.mark.parametrize("make", [gpt, resnet])
@pytest.mark.parametrize("name", ["none", "every_block", "nested", "sqrt", "optimal 0.9", "optimal 0.8", "optimal 0.7"])
def test_the_peak_of_any_schedule_is_told_from_one_trace(make, name):
    """To 2%, with what convolutions take for themselves on a CPU."""
    model, loss_fn, batch, found, traced, chain = chain_of(make)
    schedule = schedules(chain, [*found.links, False])[name]
    assert schedule is not None
    predicted = traced.held_bytes + predict(chain, schedule).peak_bytes
    undo = use_schedule(model, found.names, schedule)
    measured = counted(model, loss_fn, batch)
    undo()
    assert predicted == pytest.approx(measured, rel=0.02)


def test_what_is_kept_is_what_a_forward_leaves():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Tanh()) for _ in range(3)))
    traced = traced_chain(model, lambda m, x: m(x).sum(), torch.randn(4, 8)).first
    row = 4 * 8 * 4
    assert [stage.output_bytes for stage in traced.stages] == [row, row, row, 0]
    assert [stage.saved_bytes for stage in traced.stages[:3]] == [row, row, row]  # a tanh needs its result alone
    assert [stage.forward_bytes for stage in traced.stages[:3]] == [2 * row] * 3
    assert [stage.gradient_bytes for stage in traced.stages[:3]] == [8 * 8 * 4] * 3
    assert traced.held_bytes == 3 * 8 * 8 * 4 + row


def test_a_step_that_looks_at_values_is_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    with raises(ModelError, code="model.not_traceable", field="model"):
        trace_stages(
            model, lambda m, x: m(x).sum() if x.sum() > 0 else x.sum(), torch.randn(4, 8), BlockGraph(("0",), ())
        )


def test_blocks_that_are_frozen_have_no_backward():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    model[0].requires_grad_(False)
    traced = traced_chain(model, lambda m, x: m(x).sum(), torch.randn(4, 8)).first
    assert [stage.gradient_bytes for stage in traced.stages] == [0, 8 * 8 * 4 + 32, 8 * 8 * 4 + 32, 0]
    assert traced.stages[0].backward_bytes == 0


@pytest.mark.parametrize("make", [gpt, resnet])
@pytest.mark.parametrize("name", ["none", "every_block", "optimal 0.8"])
def test_a_later_micro_batch_has_the_gradients_of_the_one_before_beside_it(make, name):
    model, loss_fn, batch, found, _, chain = chain_of(make)
    later = traced_chain(model, loss_fn, batch, counts_scratch=True).later
    assert all(stage.gradient_bytes == 0 for stage in later.stages)
    schedule = schedules(chain, [*found.links, False])[name]
    undo = use_schedule(model, found.names, schedule)

    def step():
        result = loss_fn(model, batch)
        mean_of(result).backward()

    step()
    growth = peak_growth(step)
    gradients = [p.grad for p in model.parameters()]
    measured = growth + storage_bytes([*model.parameters(), *model.buffers(), *batch, *gradients])
    model.zero_grad(set_to_none=True)
    undo()
    assert later.held_bytes + predict(later.stages, schedule).peak_bytes == pytest.approx(measured, rel=0.02)


def test_what_is_freed_and_was_there_before_the_count_is_no_part_of_it(monkeypatch):
    events = [(0, -1_000), (1, 300), (2, 500), (3, -800), (4, 100)]
    monkeypatch.setattr(peak_memory, "_allocations", lambda recorded: events)
    assert peak_growth(lambda: None) == 800
