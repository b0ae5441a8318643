"""Padding tokens counted in batches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trimtab.profiling.padding import PaddingCounter, text_library

MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])  # 4 of 8 positions; the last column has no token
TOKENS = torch.tensor([[5, 6, 7, 0], [5, 0, 0, 0]])
LABELS = torch.tensor([[6, 7, 8, -100], [6, -100, -100, -100]])
PROMPT = torch.tensor([[-100, -100, 8, 9], [-100, 7, 8, -100]])  # of other tokens, and of a shifted label at the end


def counted(*batches):
    counter = PaddingCounter()
    for batch in batches:
        counter.add(batch)
    return counter.result("")


@pytest.mark.parametrize(
    "batch",
    [
        {"input_ids": TOKENS, "attention_mask": MASK},
        {"input_ids": TOKENS, "attention_mask": MASK.bool()},
        ({"input_ids": TOKENS, "attention_mask": MASK.float()}, torch.zeros(2)),
        SimpleNamespace(input_ids=TOKENS, attention_mask=MASK),
    ],
)
def test_positions_outside_of_the_attention_mask_are_padding(batch):
    found = counted(batch)
    assert (found.tokens, found.padding, found.fixed, found.source) == (8, 4, 2, "attention_mask")
    assert found.fraction == 0.5


def of_length(mask):
    return {"input_ids": torch.ones(mask.shape, dtype=torch.int64), "attention_mask": mask}


def test_batches_of_several_lengths_are_added():
    found = counted(of_length(MASK), of_length(torch.ones(2, 8)), {"other": torch.ones(2)})
    assert (found.tokens, found.padding, found.num_batches) == (24, 4, 2)


@pytest.mark.parametrize("flips", [False, True])
def test_ignored_labels_over_a_repeated_token_are_padding(flips):
    pair = (TOKENS.flip(1), LABELS.flip(1)) if flips else (TOKENS, LABELS)
    found = counted(pair)
    assert (found.padding, found.source) == (3, "labels")  # a run of a single token is not counted


def test_ignored_labels_of_a_prompt_are_no_padding():
    assert counted((torch.arange(8).reshape(2, 4), PROMPT)).padding == 0


@pytest.mark.parametrize(
    "batch",
    [
        {"attention_mask": torch.zeros(2, 1, 4, 4)},
        of_length(torch.tensor([[0.0, -1e9]])),
        {"input_ids": TOKENS, "attention_mask": torch.ones(4, 4).tril().long()},  # causal
        {"input_ids": TOKENS, "attention_mask": torch.ones(4, 4).triu(1).bool()},
        {"attention_mask": None},
        {"x": TOKENS},
        (torch.randn(4, 3), torch.zeros(4)),
        LABELS,
        [],
        "text",
        torch.eye(3).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_other_batches_are_not_counted(batch):
    assert counted(batch) is None


def test_the_library_of_a_loop_is_found_in_its_modules_and_collate_function():
    def collate(rows):
        return rows

    kind = type("Model", (nn.Linear,), {"__module__": "transformers.models.x"})
    assert text_library(nn.Sequential(kind(1, 1)), None) == "transformers"
    assert text_library(nn.Linear(1, 1), SimpleNamespace(collate_fn=collate)) == ""
    collate.__module__ = "trl.trainer.utils"
    assert text_library(nn.Sequential(kind(1, 1)), SimpleNamespace(collate_fn=collate)) == "trl"
