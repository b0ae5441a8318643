"""A vocabulary that is no multiple of 64: advised where padding it was timed to be faster."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from trimtab.planner.recommendations import padded_vocabulary
from trimtab.profiling import profiler
from trimtab.profiling.profiler import padding_saves_s

WORDS = 5_000
MODEL = nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


@pytest.fixture
def timed(monkeypatch):
    """Let a product take as many seconds as a test says of its words."""
    seconds = {}

    def time_call(function, device):
        function()
        return seconds[len(function.args[1])]

    monkeypatch.setattr(profiler, "time_call", time_call)
    return seconds


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_saved_is_of_all_tokens_of_a_step(timed, precision):
    timed.update({WORDS: 1.5, 5_056: 1.25})
    assert padding_saves_s(MODEL, WORDS, 5_120, precision) == pytest.approx(10 * 0.25)
    assert padding_saves_s(MODEL, WORDS, 16, precision) == pytest.approx(0.25)


def test_what_is_slower_saves_nothing(timed):
    timed.update({WORDS: 1.0, 5_056: 1.25})
    assert padding_saves_s(MODEL, WORDS, 512, "fp32") == 0.0


def test_noise_saves_nothing(monkeypatch):
    seconds = iter([9.0, 9.0, *(1.3, 1.0, 1.3, 1.0) * 3])  # pairs turn their order: 1.3 is ours as often as the other's
    monkeypatch.setattr(profiler, "time_call", lambda *_: next(seconds))
    assert padding_saves_s(MODEL, WORDS, 512, "fp32") == 0.0


@pytest.mark.parametrize(("model", "words"), [(MODEL, 5_056), (MODEL, 4_999), (nn.Linear(8, 100), 100)])
def test_where_there_is_nothing_to_pad_nothing_is_timed(timed, model, words):
    assert padding_saves_s(model, words, 512, "fp32") is None


def test_no_memory_is_no_advice(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(profiler, "time_call", fail)
    assert padding_saves_s(MODEL, WORDS, 512, "fp32") is None


def test_rounding_up():
    assert [padded_vocabulary(n) for n in (50_257, 50_304, 1)] == [50_304, 50_304, 64]
