"""Byte-level GPT on Python's bundled reference texts. Trains in six minutes."""

from __future__ import annotations

import numpy as np

from trimtab.tasks.embedded import python_topics
from trimtab.tasks.hand_tuned import FP32_REFERENCE, plain_adamw, strong_gpt
from trimtab.tasks.language_modelling import BITS_PER_BYTE, evenly_spaced, next_token_loss, windows
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.task import Task, TaskData

CONTEXT = 256
BATCH_SIZE = 16
TRAIN_SHARE = 0.9
# Validation samples, spread over the held-out tenth. An evaluation (3 batches) takes as long as a training step.
EVALUATED_SAMPLES = 48
# 0.79 to 0.9 s per step (AdamW, fp32, two AVX2 cores): 414 steps take 330 to 370 s.
EVAL_EVERY_SAMPLES = 23 * BATCH_SIZE
BUDGET_SAMPLES = 18 * EVAL_EVERY_SAMPLES


def load_data() -> TaskData:
    """Return samples (N, 257) int64 of bytes. The last tenth of the text is held out."""
    text, source = python_topics()
    stream = np.frombuffer(text, np.uint8)
    cut = int(TRAIN_SHARE * len(stream))
    judged = evenly_spaced(windows(stream[cut:], CONTEXT), EVALUATED_SAMPLES)
    return TaskData(
        columns=(windows(stream[:cut], CONTEXT),),
        held_out=tuple((rows,) for rows in judged.split(BATCH_SIZE)),
        source=source,
    )


def make_model() -> GPT:
    """Return a GPT with 4 layers of width 256 and 4 heads, without dropout (3.4M parameters)."""
    return GPT(GPTShape(vocab_size=256, context=CONTEXT, num_layers=4, num_heads=4, width=256, dropout=0.0))


TASK = Task(
    name="source_gpt",
    description="bytes of Python's reference texts, GPT (4 layers, width 256, context 256)",
    make_model=make_model,
    make_optimizer=plain_adamw,
    loss_fn=next_token_loss,
    load_data=load_data,
    metric=BITS_PER_BYTE,
    targets=(3.6, 3.4, 3.3, 3.22),
    batch_size=BATCH_SIZE,
    budget_samples=BUDGET_SAMPLES,
    eval_every_samples=EVAL_EVERY_SAMPLES,
    terms="tokens",
    terms_per_sample=CONTEXT,
    adapted_samples=8 * EVAL_EVERY_SAMPLES,
    strong=strong_gpt(8 * EVAL_EVERY_SAMPLES, peak_rate=1.5e-3),
    reference=FP32_REFERENCE,
)
