"""WikiText-2 as GPT-2 tokens, shared by the WikiText-2 tasks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.paper.bpe import wikitext2_tokens
from benchmarks.paper.datasets import BpeFiles, Texts, gpt2_bpe, wikitext2
from trimtab.tasks.language_modelling import evenly_spaced, mean_loss, windows
from trimtab.tasks.task import Batch, DataSource, Metric, TaskData


def load_wikitext2(context: int, judged_samples: int | None, judged_batch: int) -> TaskData:
    """Return samples (N, context+1) int64 of the training split and validation batches of the validation split.

    Args:
        context: Tokens per sample that the loss counts.
        judged_samples: Number of validation samples, evenly spaced; None for all complete samples.
        judged_batch: Samples per validation batch.
    """
    texts, files = wikitext2(), gpt2_bpe()
    train = wikitext2_tokens("train", texts.train, files)
    valid = windows(wikitext2_tokens("valid", texts.valid, files), context)
    judged = valid if judged_samples is None else evenly_spaced(valid, judged_samples)
    return TaskData(
        columns=(windows(train, context),),
        held_out=tuple((rows,) for rows in judged.split(judged_batch)),
        source=_source(texts, files),
    )


def example(context: int, rows: int) -> tuple[Tensor]:
    """Return a batch of zeros with the shape and dtype of a training batch."""
    return (torch.zeros(rows, context + 1, dtype=torch.int64),)


def _source(texts: Texts, files: BpeFiles) -> DataSource:
    """Return the combined source of text and encoding. Its sha256 is computed from both hexadecimal sha256 values."""
    origins = dict.fromkeys((texts.source.origin, files.source.origin))
    both = hashlib.sha256((texts.source.sha256 + files.source.sha256).encode()).hexdigest()
    return DataSource("WikiText-2 (word-level version), GPT-2 BPE", " and ".join(origins), both)


def perplexity(model: nn.Module, batches: Sequence[Batch]) -> float:
    """Return `exp(loss in nats per token)`, infinity on overflow."""
    loss = mean_loss(model, batches)
    return math.inf if loss > 700 else math.exp(loss)


PERPLEXITY = Metric("perplexity", higher_is_better=False, evaluate=perplexity)
