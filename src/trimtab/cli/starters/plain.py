"""A training loop for trimtab: tensors and a small network. Replace parts 1 to 3 with your own code.

python my_loop.py                           # plans, then trains
trimtab plan my_loop.py:setup               # recommended changes to the loop, with reasons
trimtab compare my_loop.py:setup --quick    # speed-up of the plan, in short paired runs
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab

Batch = tuple[Tensor, Tensor]

# 1. Your data, loaded once, equal in every process. Any dataset for a DataLoader will do.
torch.manual_seed(0)
inputs = torch.randn(4096, 32)
targets = (inputs[:, :4] + 0.5 * inputs[:, 4:8] ** 2).argmax(1)
data = TensorDataset(inputs, targets)


# 2. Your loss: the mean over the samples of a batch. No backward, no autocast, no division.
def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


# 3. Your loop. Called for every training, with torch, NumPy and Python seeded: return new objects on every call.
def setup(seed: int) -> trimtab.Loop:
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 4))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(data, batch_size=128, shuffle=True)
    return trimtab.Loop(model, optimizer, loss_fn, loader)


def main() -> None:
    """Train with a plan."""
    loop = setup(0)
    plan = trimtab.plan(loop.model, loop.optimizer, loss_fn, loop.loader)
    print(plan)
    with trimtab.start(loop.model, loop.optimizer, plan) as run:
        for epoch in range(3):
            for window in run.windows(loop.loader):  # one optimizer step each
                loss = run.train_step(window, loss_fn)
            print(f"epoch {epoch}: loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
