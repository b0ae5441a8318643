"""A training loop for trimtab: a small GPT on text, with a get_batch function. Replace parts 1 to 4 with your own code.

trimtab plan my_loop.py:setup               # recommended changes to the loop, with reasons
trimtab compare my_loop.py:setup --quick    # speed-up of the plan, in short paired runs
trimtab train my_loop.py:setup --steps 200  # training with a plan
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trimtab

LENGTH, BATCH_SIZE, STEPS = 64, 16, 100  # tokens per sample, samples per step, steps per epoch
Batch = tuple[Tensor, Tensor]

# 1. Your text as one tensor of token numbers, equal in every process. Here: bytes of torch's documentation.
tokens = torch.tensor(list((nn.Module.__doc__ or "").encode()))


# 2. Your batches, drawn from torch's random generator.
def get_batch() -> Batch:
    starts = torch.randint(len(tokens) - LENGTH, (BATCH_SIZE, 1))
    window = tokens[starts + torch.arange(LENGTH + 1)]
    return window[:, :-1], window[:, 1:]


class Batches:
    def __iter__(self) -> Iterator[Batch]:
        return (get_batch() for _ in range(STEPS))


# 3. Your model.
class GPT(nn.Module):
    def __init__(self, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks, self.head = nn.TransformerEncoder(layer, depth, nn.LayerNorm(width), False), nn.Linear(width, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(inputs.shape[1], inputs.device)
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        logits: Tensor = self.head(self.blocks(x, mask, is_causal=True))
        return logits


# 4. Your loss and loop. setup is called for every training, with all generators seeded: return new objects.
def loss_fn(model: nn.Module, batch: Batch) -> Tensor:  # for padded text, return trimtab.Summed(loss_sum, num_tokens)
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def setup(seed: int) -> trimtab.Loop:
    model = GPT().to("cuda" if torch.cuda.is_available() else "cpu")
    return trimtab.Loop(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loss_fn, Batches())
