"""WikiText-2 as GPT-2 tokens with a compact GPT (paper section IV, reduced to two CPU cores). Trains in ten minutes."""

from __future__ import annotations

import functools

from benchmarks.paper.bpe import VOCAB_SIZE
from benchmarks.paper.hand_tuned import muon_gpt
from benchmarks.paper.recipes.paper import paper
from benchmarks.paper.wikitext2 import PERPLEXITY, example, load_wikitext2
from trimtab.tasks.hand_tuned import FP32_REFERENCE, plain_adamw, strong_gpt
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.task import Task

CONTEXT = 128
BATCH_SIZE = 8
# 8,192 tokens, spread over the validation split. The logits of a single sample (26 MB) stay below the size from which
# malloc maps fresh pages for each tensor, which makes a batch of 8 samples slower by a third per token.
EVALUATED_SAMPLES = 64
EVALUATION_BATCH = 1
# About 1.2 s per step (0.85 to 1.7; AdamW, fp32, two idle AVX2 cores): 512 steps take 610 s.
EVAL_EVERY_SAMPLES = 32 * BATCH_SIZE
BUDGET_SAMPLES = 16 * EVAL_EVERY_SAMPLES
ADAPTED_SAMPLES = 4 * EVAL_EVERY_SAMPLES
PEAK_RATE = 3e-3


def make_model() -> GPT:
    """Return a GPT with 4 layers of width 128, 4 heads and a tied head: 7.2M parameters, 6.4M in the embedding."""
    return GPT(GPTShape(VOCAB_SIZE, CONTEXT, num_layers=4, num_heads=4, width=128, dropout=0.1, tied_head=True))


STRONG = strong_gpt(ADAPTED_SAMPLES, peak_rate=PEAK_RATE)

task = Task(
    name="wikitext2_gpt",
    description="WikiText-2 (word-level version) in GPT-2 BPE, GPT (4 layers, width 128, context 128)",
    make_model=make_model,
    make_optimizer=plain_adamw,
    loss_fn=next_token_loss,
    load_data=functools.partial(load_wikitext2, CONTEXT, EVALUATED_SAMPLES, EVALUATION_BATCH),
    metric=PERPLEXITY,
    targets=(2000.0, 1000.0, 700.0, 500.0),
    batch_size=BATCH_SIZE,
    budget_samples=BUDGET_SAMPLES,
    eval_every_samples=EVAL_EVERY_SAMPLES,
    terms="tokens",
    terms_per_sample=CONTEXT,
    adapted_samples=ADAPTED_SAMPLES,
    strong=STRONG,
    muon=muon_gpt(STRONG, rate=PEAK_RATE),
    baselines={"paper": paper},
    reference=FP32_REFERENCE,
    example=functools.partial(example, CONTEXT),
)
