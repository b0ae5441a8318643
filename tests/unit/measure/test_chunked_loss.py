"""What torch's chunked loss holds and computes inside is in traces and counts."""

from __future__ import annotations

import pytest
import torch
from small_loops import sgd
from torch import nn

from trimtab.losses import Summed, mean_of
from trimtab.measure import flops
from trimtab.measure.flops import count_flops
from trimtab.measure.memory_trace import trace_peaks, trace_step
from trimtab.nn import LossHead
from trimtab.state.peak_memory import peak_growth, storage_bytes

WORDS, WIDTH, TOKENS = 4096, 64, 512

pytestmark = pytest.mark.skipif(flops.CHUNKED_LOSS is None, reason="this torch has no chunked loss")


class Model(nn.Module):
    def __init__(self, chunk_rows=None):
        super().__init__()
        self.embed, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = LossHead(WIDTH, WORDS, chunk_rows=chunk_rows)

    def forward(self, words, targets):
        return self.head.loss(torch.tanh(self.inner(self.embed(words))), targets)


def loss_fn(model, batch):
    return Summed(*model(*batch))


def batch_of(tokens):
    return torch.randint(0, WORDS, (tokens,)), torch.randint(0, WORDS, (tokens,))


def backward(model, batch):
    result = loss_fn(model, batch)
    mean_of(result).backward()


@pytest.mark.parametrize("chunk_rows", [None, 64, 128, 200])
def test_the_logits_of_a_chunk_are_in_the_traced_peak(chunk_rows):
    torch.manual_seed(0)
    model, batch = Model(chunk_rows), batch_of(TOKENS)
    optimizer = sgd(model)

    def step():
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    counted = peak_growth(step) + storage_bytes([*model.parameters(), *batch])
    assert trace_step(model, optimizer, loss_fn, batch) == counted


@pytest.mark.parametrize("chunk_rows", [64, 200])
def test_a_loss_in_chunks_computes_what_a_whole_one_does(chunk_rows):
    batch, frozen = batch_of(TOKENS), Model(chunk_rows)
    frozen.head.requires_grad_(False)
    whole = count_flops(lambda: backward(Model(), batch))
    assert count_flops(lambda: backward(Model(chunk_rows), batch)) == whole
    assert whole == 2 * TOKENS * WIDTH * (3 * WORDS + 3 * WIDTH)
    assert count_flops(lambda: backward(frozen, batch)) == 2 * TOKENS * WIDTH * (2 * WORDS + 3 * WIDTH)


def test_the_traced_work_of_a_loss_in_chunks_is_that_of_a_whole_one():
    def flop(chunk_rows):
        model = Model(chunk_rows)
        optimizer = sgd(model)
        batches = batch_of(TOKENS // 2), batch_of(TOKENS)
        (found,) = trace_peaks(model, optimizer, loss_fn, batches, (TOKENS // 2, TOKENS))
        return sum(each.count * (each.flops[0] + TOKENS * each.flops[1]) for each in found.work.micro_batch)

    assert flop(64) == pytest.approx(flop(None))
