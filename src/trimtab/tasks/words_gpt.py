"""Small GPT on word pieces of Python's bundled reference texts. Its vocabulary is large, as in language models of use.

A step of the baseline holds the logits of all tokens, which takes most of its memory and much of its time.
"""

from __future__ import annotations

import collections
import functools
import re
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from trimtab.tasks.embedded import python_topics
from trimtab.tasks.hand_tuned import FP32_REFERENCE, strong_gpt
from trimtab.tasks.language_modelling import NATS_PER_TOKEN, evenly_spaced, next_token_loss, windows
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.task import DataSource, Task, TaskData

VOCABULARY = 6144
CONTEXT = 64
BATCH_SIZE = 32
TRAIN_SHARE = 0.9
EVALUATED_SAMPLES = 32
# A word or number with the space before it, white space, or a run of other characters.
_PIECE = re.compile(r" ?[A-Za-z]+| ?[0-9]+|\s+| ?[^\sA-Za-z0-9]+")
_BYTES = 256


def load_data() -> TaskData:
    """Return samples (N, 65) int64 of word pieces. The last tenth of the text is held out."""
    tokens, source = _tokens()
    cut = int(TRAIN_SHARE * len(tokens))
    judged = evenly_spaced(windows(tokens[cut:], CONTEXT), EVALUATED_SAMPLES)
    return TaskData(columns=(windows(tokens[:cut], CONTEXT),), held_out=((judged,),), source=source)


@functools.cache
def _tokens() -> tuple[np.ndarray, DataSource]:
    """Return the text as indices of the most frequent pieces; other pieces are spelled in bytes (indices below 256)."""
    text, source = python_topics()
    pieces = _PIECE.findall(text.decode())
    frequent = collections.Counter(pieces).most_common(VOCABULARY - _BYTES)
    index = {piece: (_BYTES + rank,) for rank, (piece, _) in enumerate(frequent)}
    tokens = [token for piece in pieces for token in index.get(piece) or piece.encode()]
    return np.array(tokens, np.int64), source


def make_model() -> GPT:
    """Return a GPT with 2 layers of width 64 and 4 heads, without dropout (0.9M parameters)."""
    return GPT(GPTShape(vocab_size=VOCABULARY, context=CONTEXT, num_layers=2, num_heads=4, width=64))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return AdamW with a constant learning rate of 3e-3."""
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


TASK = Task(
    name="words_gpt",
    description="word pieces of Python's reference texts, GPT (2 layers, width 64, vocabulary 6,144)",
    make_model=make_model,
    make_optimizer=make_optimizer,
    loss_fn=next_token_loss,
    load_data=load_data,
    metric=NATS_PER_TOKEN,
    targets=(6.5, 6.0, 5.5, 5.0),
    batch_size=BATCH_SIZE,
    budget_samples=400 * BATCH_SIZE,
    eval_every_samples=20 * BATCH_SIZE,
    terms="tokens",
    terms_per_sample=CONTEXT,
    adapted_samples=200 * BATCH_SIZE,
    strong=replace(strong_gpt(200 * BATCH_SIZE, peak_rate=3e-3), rates="not swept for this task"),
    reference=FP32_REFERENCE,
)
