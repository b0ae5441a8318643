"""A small network for points on a spiral, trained by Lightning's Trainer with trimtab."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from trimtab.integrations.lightning import TrimtabStrategy


def spiral(rows: int = 4_000) -> TensorDataset:
    """Return points on three arms with some noise, and the arm of each."""
    generator = torch.Generator().manual_seed(0)
    arm = torch.randint(0, 3, (rows,), generator=generator)
    radius = torch.rand(rows, generator=generator)
    angle = 5 * radius + 2 * torch.pi * arm / 3 + 0.1 * torch.randn(rows, generator=generator)
    return TensorDataset(torch.stack((radius * angle.cos(), radius * angle.sin()), dim=1), arm)


class Spiral(pl.LightningModule):
    """Tells the arm of a point."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 3))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(steps: int = 200) -> float:
    """Train, and return the last window's loss."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=TrimtabStrategy("cpu"),
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Spiral(), DataLoader(spiral(), batch_size=256))
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    print(f"loss {main():.4f}")
