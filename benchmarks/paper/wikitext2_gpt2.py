"""WikiText-2 as GPT-2 tokens with GPT-2 Small from scratch, at the size of the paper (section IV).

Forward and backward of a token take 0.85 GFLOP (two FLOP per multiply-add, attention counted without the causal mask).
Meant for a GPU: a step of 32 x 1,024 tokens takes 28 TFLOP. The targets were chosen, not measured.
"""

from __future__ import annotations

import functools

from benchmarks.paper.bpe import VOCAB_SIZE
from benchmarks.paper.hand_tuned import muon_gpt, strong_gpt2
from benchmarks.paper.recipes.paper import paper
from benchmarks.paper.wikitext2 import PERPLEXITY, example, load_wikitext2
from trimtab.tasks.hand_tuned import FP32_REFERENCE, plain_adamw
from trimtab.tasks.language_modelling import next_token_loss
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.task import Task

CONTEXT = 1024
BATCH_SIZE = 32
EVALUATION_BATCH = 1
STEPS_PER_EPOCH = 2_390 // BATCH_SIZE  # samples in the training split
# 16 evaluations, each after 3 epochs: 116M tokens.
EVAL_EVERY_SAMPLES = 3 * STEPS_PER_EPOCH * BATCH_SIZE
BUDGET_SAMPLES = 16 * EVAL_EVERY_SAMPLES
ADAPTED_SAMPLES = 4 * EVAL_EVERY_SAMPLES
REFERENCE_DROPOUT = 0.1  # as in GPT-2
STRONG_DROPOUT = 0.2  # 124M parameters overfit twelve epochs of 2.4M tokens


def make_model(dropout: float = REFERENCE_DROPOUT) -> GPT:
    """Return GPT-2 Small: 12 layers of width 768, 12 heads, tied head; 124,439,808 parameters."""
    return GPT(GPTShape(VOCAB_SIZE, CONTEXT, num_layers=12, num_heads=12, width=768, dropout=dropout, tied_head=True))


STRONG = strong_gpt2(ADAPTED_SAMPLES, functools.partial(make_model, STRONG_DROPOUT))

task = Task(
    name="wikitext2_gpt2",
    description="WikiText-2 (word-level version) in GPT-2 BPE, GPT-2 Small (12 layers, width 768, context 1,024)",
    make_model=make_model,
    make_optimizer=plain_adamw,
    loss_fn=next_token_loss,
    load_data=functools.partial(load_wikitext2, CONTEXT, None, EVALUATION_BATCH),
    metric=PERPLEXITY,
    targets=(200.0, 120.0, 80.0, 60.0, 45.0),
    batch_size=BATCH_SIZE,
    budget_samples=BUDGET_SAMPLES,
    eval_every_samples=EVAL_EVERY_SAMPLES,
    terms="tokens",
    terms_per_sample=CONTEXT,
    adapted_samples=ADAPTED_SAMPLES,
    strong=STRONG,
    muon=muon_gpt(STRONG, rate=6e-4),
    baselines={"paper": paper},
    reference=FP32_REFERENCE,
    example=functools.partial(example, CONTEXT),
)
