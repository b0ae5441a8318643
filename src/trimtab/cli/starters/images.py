"""A training loop for trimtab: images and a small convolutional network. Replace parts 1 to 3 with your own code.

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

# 1. Your data, equal in every process. For a folder with a subfolder of images per class:
#    data = torchvision.datasets.ImageFolder("photos", transform)   # transform resizes and converts to a tensor
torch.manual_seed(0)
targets = torch.randint(0, 4, (512,))
images = torch.randn(512, 3, 32, 32) + targets[:, None, None, None] / 2
data = TensorDataset(images, targets)


def block(inputs: int, outputs: int) -> nn.Module:
    convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU())


# 2. Your loss: the mean over the samples of a batch. No backward, no autocast, no division.
def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    images, targets = batch
    return nn.functional.cross_entropy(model(images), targets)


# 3. Your loop. Called for every training, with torch, NumPy and Python seeded: return new objects on every call.
def setup(seed: int) -> trimtab.Loop:
    model = nn.Sequential(block(3, 16), block(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    loader = DataLoader(data, batch_size=64, shuffle=True)  # for images from files: num_workers=4
    return trimtab.Loop(model, optimizer, loss_fn, loader)


def main() -> None:
    """Train with a plan."""
    loop = setup(0)
    plan = trimtab.plan(loop.model, loop.optimizer, loss_fn, loop.loader)
    print(plan)
    with trimtab.start(loop.model, loop.optimizer, plan) as run:
        for window in run.windows(loop.loader):  # one optimizer step each
            loss = run.train_step(window, loss_fn)
        print(f"loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
