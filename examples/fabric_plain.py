"""A small network for points on a spiral, in a loop with Fabric."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


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
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = fabric.setup_dataloaders(DataLoader(spiral(), batch_size=256))
    model, optimizer = fabric.setup(model, optimizer)
    for _ in range(epochs):
        for batch in loader:
            loss = loss_fn(model, batch)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
    return float(loss.detach())


if __name__ == "__main__":
    print(f"loss {main():.4f}")
