"""A training loop for trimtab: a Transformers Trainer with a small causal language model. Replace parts 1 to 3.

trimtab plan my_loop.py:setup               # recommended changes to the loop, with reasons
trimtab compare my_loop.py:setup --quick    # speed-up of the plan, in short paired runs

To train with a plan: trimtab.integrations.transformers.TrimtabTrainer takes the arguments of Trainer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LENGTH, VOCABULARY = 32, 128

# 1. Your data, equal in every process: rows as your tokenizer makes them. Here: random numbers that repeat.
torch.manual_seed(0)
starts = torch.randint(VOCABULARY, (512, 1))
tokens = (starts + 3 * torch.arange(LENGTH)) % VOCABULARY
rows: list[dict[str, Any]] = [{"input_ids": each, "labels": each} for each in tokens]


# 2. Your model: new on every call. For saved weights: AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config)
    model.config.use_cache = False  # saves memory in training, and allows activation checkpointing
    return model


# 3. Your arguments. bf16=True and gradient_checkpointing=True declare what you use today. Leave out torch_compile,
#    which a comparison does not include. setup is called for every training, with all generators seeded.
def setup(seed: int) -> Trainer:
    arguments = TrainingArguments(
        output_dir="runs/trainer",
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        max_steps=100,
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
    )
    return Trainer(model=make_model(), args=arguments, train_dataset=rows)
