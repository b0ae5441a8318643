"""Augmented data under a plan: split, dealt to ranks, or gone on with, every row is what it was."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.paper.cifar10 import augment
from trimtab.distributed.sharded_loader import shard
from trimtab.experiments import loop_setup
from trimtab.experiments.loops import plain_steps, planned_steps
from trimtab.experiments.task_loops import TaskLoops
from trimtab.experiments.train import TrainingOptions, train_whole
from trimtab.plans.plan import Plan
from trimtab.tasks import DataSource, Metric, Task, TaskData
from trimtab.tasks.hand_tuned import FP32_REFERENCE
from trimtab.tasks.image_classification import mean_cross_entropy

ROWS, BATCH_SIZE = 48, 12


def load_data() -> TaskData:
    images = torch.randint(256, (ROWS, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(ROWS) % 10
    return TaskData((images, labels), ((images[:4].float(), labels[:4]),), DataSource("made", "here", "0"), augment)


def make_model() -> nn.Module:
    """Without batch statistics: of a micro-batch they would be its own."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 15 * 15, 10)).double()


def loss_fn(model, batch):
    return mean_cross_entropy(model, (batch[0].double(), batch[1]))


TASK = Task(
    name="augmented",
    description="",
    make_model=make_model,
    make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    loss_fn=loss_fn,
    load_data=load_data,
    metric=Metric("loss", False, lambda model, batches: float(loss_fn(model, batches[0]).detach())),
    targets=(),
    batch_size=BATCH_SIZE,
    budget_samples=8 * BATCH_SIZE,
    eval_every_samples=BATCH_SIZE,
    reference=FP32_REFERENCE,
)


def trained(plan: Plan | None = None, task: Task = TASK, steps: int = 8) -> torch.Tensor:
    """Return the weights after two epochs."""
    loop = loop_setup.build(TaskLoops(task).setup, 1)
    batches = load_data().batches(3, task.batch_size)
    running = plain_steps(loop, batches) if plan is None else planned_steps(loop, batches, plan)
    for _ in range(steps):
        next(running)
    running.close()
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


@pytest.mark.parametrize("micro_batch", [12, 6, 5, 1])
def test_a_split_batch_trains_as_the_whole_one_does(micro_batch):
    ours = trained(Plan.fixed(BATCH_SIZE, micro_batch=micro_batch))
    torch.testing.assert_close(ours, trained(), rtol=0, atol=1e-6)  # losses are taken in fp32


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_ranks_see_the_rows_of_the_whole_batch(num_ranks):
    whole = list(itertools.islice(load_data().batches(3, BATCH_SIZE), 8))
    shares = [
        list(itertools.islice(shard(load_data().batches(3, BATCH_SIZE), rank, num_ranks), 8))
        for rank in range(num_ranks)
    ]
    for batch, *parts in zip(whole, *shares, strict=True):
        for column, *its_parts in zip(batch, *parts, strict=True):
            assert torch.equal(column, torch.cat(its_parts))


def test_batches_are_drawn_from_the_seed_alone():
    whole = list(itertools.islice(load_data().batches(3, BATCH_SIZE), 8))
    torch.rand(5)  # what else was drawn in between is no matter
    rest = list(itertools.islice(load_data().batches(3, BATCH_SIZE), 5, 8))
    for one, other in zip(whole[5:], rest, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    other = replace(TASK, batch_size=6)
    assert not torch.allclose(trained(), trained(None, other, 16), rtol=0, atol=1e-3)
    found = train_whole(TrainingOptions(TASK, Plan.fixed(BATCH_SIZE), 2), lambda *_: None)
    assert found["data_on"] == "host: trained on the processor: 144 KiB are where they are used"
