"""A loss head in planning: found, tried in chunks, and left as it was."""

from __future__ import annotations

import copy
import os

import brief
import pytest
import torch

import trimtab
import trimtab.nn
from trimtab.profiling.smoke_test import can_fork
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

pytestmark = pytest.mark.usefixtures("brief_trials")
ROWS, CONTEXT, WORDS = 8, 32, 4096


def loop(words=WORDS):
    torch.manual_seed(0)
    model = GPT(GPTShape(words, CONTEXT, num_layers=1, num_heads=2, width=32)).train()
    batch = (torch.randint(0, words, (ROWS, CONTEXT + 1)),)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), next_token_loss, batch


def profiled(words=WORDS):
    return trimtab.profile(*loop(words), num_blocks=3)


@pytest.fixture(scope="module")
def profile():
    with pytest.MonkeyPatch.context() as patch:
        brief.shorten(patch.setattr)
        return profiled()


def test_chunks_are_tried_on_whole_steps(profile):
    assert (profile.loop.head_tokens, profile.loop.head_words) == (ROWS * CONTEXT, WORDS)
    stage = profile.stage("head")
    assert [trial.candidate.loss_chunk for trial in stage if not trial.control] == [None, 64]
    whole, chunked = stage
    assert chunked.error is None
    assert chunked.peak_bytes < 0.8 * whole.peak_bytes
    assert chunked.is_whole
    assert chunked.block_s


def test_a_small_vocabulary_is_not_tried():
    assert profiled(words=8).stage("head") == ()


def test_a_memory_budget_that_only_chunks_can_meet_is_met_by_them(profile):
    whole = next(trial for trial in profile.trials if trial.candidate.micro_batch == ROWS and trial.peak_bytes)
    model, *rest = loop()
    before = copy.deepcopy(model.state_dict())
    plan = trimtab.plan(model, *rest, num_blocks=3, budget=trimtab.Budget(memory=int(0.75 * whole.peak_bytes)))
    assert plan.loss_chunk.value is not None or plan.micro_batch.value < ROWS
    assert plan.measured.peak_bytes <= 0.75 * whole.peak_bytes
    assert model.head.chunk_rows is None
    assert "loss" not in vars(model.head)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.skipif(not can_fork(), reason="a process cannot be split off here")
def test_chunks_that_end_a_process_are_a_loser_with_its_reason(monkeypatch):
    monkeypatch.setattr(trimtab.nn, "chunked_cross_entropy", lambda *given: os.abort())
    chunked = [trial for trial in profiled().stage("head") if trial.candidate.loss_chunk]
    assert chunked
    assert all(trial.code == "trial.crashed" and "SIGABRT" in trial.error for trial in chunked)
