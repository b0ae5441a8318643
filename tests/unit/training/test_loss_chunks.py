"""A plan that chunks the loss head: applied to every head, undone at close, refused where there is none."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.errors import ModelError
from trimtab.losses import Summed
from trimtab.nn import LossHead
from trimtab.settings.loss_chunk import count_head_tokens, loss_heads


class TwoHeads(nn.Module):
    """Shares its body; one head has chunks of its own already."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.first = LossHead(8, 16)
        self.second = LossHead(8, 32, chunk_rows=3)

    def forward(self, x, targets):
        features = self.body(x)
        first, second = self.first.loss(features, targets), self.second.loss(features, targets)
        return first[0] + second[0], first[1]


def loop():
    torch.manual_seed(0)
    model = TwoHeads()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), (torch.randn(8, 4), torch.randint(16, (8,)))


def loss_fn(model, batch):
    return Summed(*model(*batch))


def test_every_head_is_chunked_until_the_run_is_closed():
    model, optimizer, batch = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8, loss_chunk=2)) as run:
        assert [head.chunk_rows for head in loss_heads(model)] == [2, 2]
        run.train_step(run.window(batch), loss_fn)
    assert (model.first.chunk_rows, model.second.chunk_rows) == (None, 3)


def test_a_plan_without_chunks_leaves_a_head_s_own():
    model, optimizer, _ = loop()
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8)):
        assert (model.first.chunk_rows, model.second.chunk_rows) == (None, 3)


def test_a_start_that_fails_puts_chunks_back():
    model, optimizer, _ = loop()
    plan = trimtab.Plan.fixed(8, loss_chunk=2, memory_layout="channels_last", precision="tf32")
    with pytest.raises(trimtab.errors.TrimtabError):
        trimtab.start(model, optimizer, plan)  # tf32 on a CPU
    assert (model.first.chunk_rows, model.second.chunk_rows) == (None, 3)


def test_a_model_without_a_head_is_refused():
    model = nn.Linear(4, 2)
    with raises(ModelError, code="loss_chunk.no_head", field="plan.loss_chunk") as caught:
        trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), trimtab.Plan.fixed(8, loss_chunk=2))
    assert caught.value.field == "plan.loss_chunk"


def test_a_shared_head_is_one():
    model, _, _ = loop()
    model.again = model.first
    assert loss_heads(model) == (model.first, model.second)


def test_what_heads_are_given_is_noted_and_nothing_stays():
    model, _, batch = loop()
    with count_head_tokens(model) as seen:
        watched_loss = loss_fn(model, batch)
        loss_fn(model, batch)
    assert seen == {model.first: 16, model.second: 16}
    assert "loss" not in vars(model.first)
    assert torch.equal(watched_loss.loss_sum, loss_fn(model, batch).loss_sum)


def test_a_failing_loss_leaves_nothing_either():
    model, _, _ = loop()
    with pytest.raises(RuntimeError, match="mine"), count_head_tokens(model):
        raise RuntimeError("mine")
    assert "loss" not in vars(model.first)
