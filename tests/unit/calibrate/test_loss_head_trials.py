"""A loss head in planning: found, timed alone, tried in chunks, and left as it was."""

from __future__ import annotations

import copy

import pytest
import torch

import trimtab
from trimtab.calibrate import trials
from trimtab.calibrate.loss_head import time_head
from trimtab.calibrate.subject import Subject
from trimtab.core.profile import Candidate
from trimtab.decide.search import Stage
from trimtab.nn import LossHead
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape

ROWS, CONTEXT, WORDS = 8, 32, 4096
WHOLE = Candidate("fp32", "keep", False, ROWS)


def loop(words=WORDS):
    torch.manual_seed(0)
    model = GPT(GPTShape(words, CONTEXT, num_layers=1, num_heads=2, width=32)).train()
    batch = (torch.randint(0, words, (ROWS, CONTEXT + 1)),)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), next_token_loss, batch


def profiled(words=WORDS, **others):
    return trimtab.profile(*loop(words), num_blocks=3, **others)


def test_the_profile_knows_the_head_s_logits():
    profile = profiled()
    assert (profile.loop.head_tokens, profile.loop.head_words) == (ROWS * CONTEXT, WORDS)


def test_chunks_are_tried_alone_and_their_peaks_are_whole_steps():
    stage = profiled().stage("head")
    assert [trial.candidate.loss_chunk for trial in stage if not trial.control] == [None, 64]
    whole, chunked = stage
    assert chunked.error is None
    assert chunked.peak_bytes < 0.8 * whole.peak_bytes
    assert not chunked.is_whole


def test_a_small_vocabulary_is_not_tried():
    assert profiled(words=8).stage("head") == ()


def test_planning_leaves_the_head_as_it_was():
    model, *rest = loop()
    before = copy.deepcopy(model.state_dict())
    trimtab.plan(model, *rest, num_blocks=3)
    assert model.head.chunk_rows is None
    assert "loss" not in vars(model.head)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_memory_budget_that_only_chunks_can_meet_is_met_by_them():
    free = profiled()
    whole = next(trial for trial in free.trials if trial.candidate.micro_batch == ROWS and trial.peak_bytes)
    plan = trimtab.plan(*loop(), num_blocks=5, budget=trimtab.Budget(memory=int(0.75 * whole.peak_bytes)))
    assert plan.loss_chunk.value is not None or plan.micro_batch.value < ROWS
    assert plan.measured.peak_bytes <= 0.75 * whole.peak_bytes


def test_a_head_is_timed_at_its_tokens_and_keeps_no_gradient(monkeypatch):
    model, optimizer, loss_fn, batch = loop()
    subject = Subject(model, optimizer, loss_fn, batch)
    seen = []
    loss = LossHead.loss
    monkeypatch.setattr(LossHead, "loss", lambda head, f, t: seen.append(tuple(f.shape)) or loss(head, f, t))
    with subject.start(WHOLE) as run:
        assert time_head(run, 96, 2) > 0
    assert seen == [(96, 32)] * 3
    assert all(p.grad is None for p in model.parameters())


def test_a_frozen_head_is_timed_too():
    model, optimizer, loss_fn, batch = loop()
    model.head.weight.requires_grad_(False)
    with Subject(model, optimizer, loss_fn, batch).start(WHOLE) as run:
        assert time_head(run, 16, 1) > 0


def test_a_step_of_several_micro_batches_has_the_head_as_often(monkeypatch):
    monkeypatch.setattr(trials, "time_head", lambda run, tokens, calls, retains: tokens * 1e-3)
    model, optimizer, loss_fn, batch = loop()
    subject = Subject(model, optimizer, loss_fn, batch)
    stage = Stage("head", (Candidate("fp32", "keep", False, 3),), head_tokens=100, accepts=True)
    (trial,) = trials.run_stage(subject, stage, 3, lambda text: None)
    assert trial.step_s == pytest.approx(3 * 0.1)  # of 3, 3 and 2 rows
