"""Template of a trimtab task. It runs unchanged. Replace the three numbered parts with your model, data and loss.

trimtab plan my_task.py:task              # recommended changes to the loop, with reasons
trimtab compare my_task.py:task --quick   # speed-up of the plan, in short paired runs
trimtab compare my_task.py:task --to-end  # full comparison, with training to the end
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trimtab.tasks import Metric, Task, TaskData, of_datasets

Batch = tuple[Tensor, Tensor]


# 1. Your model. Return a new instance on every call.
def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 4))


# 2. Your training and validation data. Any two map-style datasets with items (input, target).
def load_data() -> TaskData:
    inputs = torch.randn(20_000, 32, generator=torch.Generator().manual_seed(0))
    targets = (inputs[:, :4] + 0.5 * inputs[:, 4:8] ** 2).argmax(1)
    train = TensorDataset(inputs[:16_000], targets[:16_000])
    held_out = TensorDataset(inputs[16_000:], targets[16_000:])
    return of_datasets(train, held_out, name="four classes, made up")


# 3. Your loss. Return the mean over the samples of a batch, or trimtab.Summed(sum, count) if samples have unequal
# numbers of terms, such as tokens.
def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def accuracy(model: nn.Module, batches: tuple[Batch, ...]) -> float:
    """Return the accuracy on the validation batches as a fraction. Restores the training mode of the model."""
    was_training = model.training
    model.eval()
    right = sum(int((model(inputs).argmax(1) == targets).sum()) for inputs, targets in batches)
    model.train(was_training)
    return right / sum(len(targets) for _, targets in batches)


task = Task(
    name="my_task",
    description="a small network on four classes that are made up",
    make_model=make_model,
    make_optimizer=make_optimizer,
    loss_fn=loss_fn,
    load_data=load_data,
    metric=Metric("accuracy", higher_is_better=True, evaluate=accuracy),
    targets=(0.6, 0.7, 0.8),  # values of the metric, easiest first; the time to each is reported
    batch_size=256,  # samples per optimizer step
    budget_samples=400 * 256,  # samples that the baseline trains on
    eval_every_samples=20 * 256,  # samples between evaluations
)
