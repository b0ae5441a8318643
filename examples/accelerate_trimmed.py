"""A small network for points on a spiral, in a loop with Accelerate and trimtab."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.integrations.accelerate import plan, start


def spiral(rows: int = 4_000) -> TensorDataset:
    """Return points on three arms with some noise, and the arm of each."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randint(0, 3, (rows,), generator=generator)
    radius = torch.rand(rows, generator=generator)
    angle = 5 * radius + 2 * torch.pi * arm / 3 + 0.1 * torch.randn(rows, generator=generator)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def main(epochs: int = 10) -> float:
    """Train, and return the last batch's loss."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(spiral(), batch_size=256)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    chosen = plan(accelerator, model, optimizer, loss_fn, loader, total_steps=epochs * len(loader))
    with start(accelerator, model, optimizer, chosen) as run:
        for _ in range(epochs):
            for window in run.windows(loader):
                loss = run.train_step(window, loss_fn)
    return float(loss.detach())


if __name__ == "__main__":
    print(f"loss {main():.4f}")
