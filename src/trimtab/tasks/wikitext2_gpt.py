"""WikiText-2 in GPT-2's encoding with a compact GPT (paper section IV at a size for two cores): ten minutes."""

from __future__ import annotations

import hashlib

from trimtab.tasks.bpe import VOCAB_SIZE, wikitext2_tokens
from trimtab.tasks.datasets import BpeFiles, Texts, gpt2_bpe, wikitext2
from trimtab.tasks.language_modelling import PERPLEXITY, evenly_spaced, next_token_loss, windows
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.peers import PAPER_REFERENCE, paper_adamw, strong_gpt
from trimtab.tasks.task import DataSource, Task, TaskData

CONTEXT = 128
BATCH_ROWS = 8
# 8,192 tokens from all of the valid split. One row at a time: its logits (26 MB) stay below the size from which
# malloc maps fresh pages for each tensor, which makes a batch of 8 rows slower by a third a token.
EVALUATED_ROWS = 64
EVALUATION_BATCH = 1
# About 1.2 s a step (0.85 to 1.7; AdamW, fp32, two idle AVX2 cores): 512 steps are 610 s.
EVAL_EVERY_ROWS = 32 * BATCH_ROWS
BUDGET_ROWS = 16 * EVAL_EVERY_ROWS


def load_data() -> TaskData:
    """Return rows (19127, 129) int64 of the train split, as GPT-2 tokens; judged by rows of the valid split."""
    texts, files = wikitext2(), gpt2_bpe()
    train = wikitext2_tokens("train", texts.train, files)
    valid = wikitext2_tokens("valid", texts.valid, files)
    judged = evenly_spaced(windows(valid, CONTEXT), EVALUATED_ROWS)
    return TaskData(
        columns=(windows(train, CONTEXT),),
        held_out=tuple((rows,) for rows in judged.split(EVALUATION_BATCH)),
        source=_source(texts, files),
    )


def make_model() -> GPT:
    """Return 4 layers of width 128 with 4 heads, the head tied: 7.2M parameters, 6.4M of them the embedding."""
    return GPT(GPTShape(VOCAB_SIZE, CONTEXT, num_layers=4, num_heads=4, width=128, dropout=0.1, tied_head=True))


def _source(texts: Texts, files: BpeFiles) -> DataSource:
    """Return one source for both: their origins, and the sha256 of their two sha256 in hexadecimal."""
    origins = dict.fromkeys((texts.source.origin, files.source.origin))
    both = hashlib.sha256((texts.source.sha256 + files.source.sha256).encode()).hexdigest()
    return DataSource("WikiText-2 (word-level version), GPT-2 BPE", " and ".join(origins), both)


TASK = Task(
    name="wikitext2_gpt",
    description="WikiText-2 (word-level version) in GPT-2 BPE, GPT (4 layers, width 128, context 128)",
    make_model=make_model,
    make_optimizer=paper_adamw,
    loss_fn=next_token_loss,
    load_data=load_data,
    metric=PERPLEXITY,
    targets=(2000.0, 1000.0, 700.0, 500.0),
    batch_rows=BATCH_ROWS,
    budget_rows=BUDGET_ROWS,
    eval_every_rows=EVAL_EVERY_ROWS,
    terms="tokens",
    terms_per_row=CONTEXT,
    adapted_rows=4 * EVAL_EVERY_ROWS,
    strong=strong_gpt(4 * EVAL_EVERY_ROWS, peak_rate=3e-3),
    reference=PAPER_REFERENCE,
)
