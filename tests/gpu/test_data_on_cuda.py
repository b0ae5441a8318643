"""Training data on CUDA: resident or copied ahead, batches and their augmentation are those of the host."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from sync import without_waiting

from benchmarks.paper.cifar10 import augment
from benchmarks.paper.tasks import load_task
from trimtab.losses import mean_of
from trimtab.tasks import DataSource, TaskData, placement
from trimtab.tasks.placement import place_data, prefetch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ROWS = 96


def data() -> TaskData:
    images = torch.randint(256, (ROWS, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return TaskData((images, torch.arange(ROWS)), ((images,),), DataSource("made", "here", "0"), augment)


@pytest.mark.parametrize("share", [placement.MOST, 0.0])
def test_batches_are_the_hosts_wherever_the_data_lies(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MOST", share)
    device = torch.device("cuda", 0)
    held, choice = place_data(data(), device)
    assert choice.value == ("device" if share else "host")
    taken = list(itertools.islice(prefetch(held.batches(3, 16), device), 13))
    expected = list(itertools.islice(data().batches(3, 16), 13))
    for ours, theirs in zip(taken, expected, strict=True):
        assert [column.device.type for column in ours] == ["cuda", "cuda"]
        assert torch.equal(ours[1].cpu(), theirs[1])
        torch.testing.assert_close(ours[0].cpu(), theirs[0], rtol=0, atol=1e-6)  # a kernel may fuse x * a - b


def test_a_batch_of_resident_data_waits_for_nothing() -> None:
    held, choice = place_data(data(), torch.device("cuda", 0))
    assert choice.value == "device"
    batches = held.batches(3, 16)
    next(batches)
    with without_waiting():
        for _ in range(4):
            next(batches)


def test_all_batches_of_a_loader_that_ends_are_yielded() -> None:
    device = torch.device("cuda", 0)
    given = [(torch.full((4,), i),) for i in range(5)]
    assert [int(batch[0][0]) for batch in prefetch(iter(given), device)] == [0, 1, 2, 3, 4]
    assert list(prefetch(iter([]), device)) == []


def test_a_step_of_each_task_at_the_papers_size() -> None:
    for name, rows in (("cifar10_resnet50", 16), ("cifar10_resnet50_7x7", 16), ("wikitext2_gpt2", 2)):
        task = load_task(name)
        model = task.make_model().cuda()
        batch = tuple(column.cuda() for column in task.example(rows))
        batch = tuple(c.normal_() if c.is_floating_point() else c.random_(10) for c in batch)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer, losses = task.make_optimizer(model), []
        for _ in range(3):
            optimizer.zero_grad()
            result = task.loss_fn(model, batch)
            losses.append(mean_of(result))
            losses[-1].backward()
            optimizer.step()
        assert losses[2] < losses[0] < 2 * math.log(50_257)
        assert not any(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
