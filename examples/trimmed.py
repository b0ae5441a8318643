"""`plain.py` through trimtab: the plan is printed, applied, and undone at the end."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab


def loss_fn(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def main(epochs=3):
    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    loader = DataLoader(data, batch_size=128, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = trimtab.plan(model, optimizer, loss_fn, loader)
    print(plan)
    run = trimtab.start(model, optimizer, plan)
    for epoch in range(epochs):
        for window in run.windows(loader):
            loss = run.train_step(window, loss_fn)
        print(f"epoch {epoch}: loss {loss.item():.4f}")
    run.close()
    return loss.item()


if __name__ == "__main__":
    main()
