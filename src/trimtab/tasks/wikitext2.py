"""WikiText-2 in GPT-2's encoding as its tasks share it; they differ in model, context, ladder and length."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from trimtab.tasks.bpe import wikitext2_tokens
from trimtab.tasks.datasets import BpeFiles, Texts, gpt2_bpe, wikitext2
from trimtab.tasks.language_modelling import evenly_spaced, windows
from trimtab.tasks.task import DataSource, TaskData


def load_wikitext2(context: int, judged_rows: int | None, judged_batch: int) -> TaskData:
    """Return rows (N, context+1) int64 of the train split, as GPT-2 tokens; judged by rows of the valid split.

    Args:
        judged_rows: spread over all of the split; None for all that fill a row.
    """
    texts, files = wikitext2(), gpt2_bpe()
    train = wikitext2_tokens("train", texts.train, files)
    valid = windows(wikitext2_tokens("valid", texts.valid, files), context)
    judged = valid if judged_rows is None else evenly_spaced(valid, judged_rows)
    return TaskData(
        columns=(windows(train, context),),
        held_out=tuple((rows,) for rows in judged.split(judged_batch)),
        source=_source(texts, files),
    )


def example(context: int, rows: int) -> tuple[Tensor]:
    """Return a batch of the shapes of the train split's."""
    return (torch.zeros(rows, context + 1, dtype=torch.int64),)


def _source(texts: Texts, files: BpeFiles) -> DataSource:
    """Return one source for both: their origins, and the sha256 of their two sha256 in hexadecimal."""
    origins = dict.fromkeys((texts.source.origin, files.source.origin))
    both = hashlib.sha256((texts.source.sha256 + files.source.sha256).encode()).hexdigest()
    return DataSource("WikiText-2 (word-level version), GPT-2 BPE", " and ".join(origins), both)
