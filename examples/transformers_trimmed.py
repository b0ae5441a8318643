"""A small GPT-2 on the source of a module of Python, trained by the Transformers Trainer with trimtab."""

from __future__ import annotations

import argparse
import inspect

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from trimtab.integrations.transformers import TrimtabTrainer


def rows(num: int = 256, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Return rows of bytes, the same as inputs and labels."""
    text = inspect.getsource(argparse).encode()
    data = torch.tensor(list(text[: num * length])).reshape(num, length)
    return [{"input_ids": row, "labels": row} for row in data]


def main(steps: int = 20) -> float:
    """Train, and return the mean loss over all steps."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=64, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        "runs/transformers",
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=steps,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    trainer = TrimtabTrainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=rows())
    return trainer.train().training_loss


if __name__ == "__main__":
    print(f"loss {main():.4f}")
