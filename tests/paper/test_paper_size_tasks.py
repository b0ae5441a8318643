"""The tasks at the paper's size: what they share with the small ones, their recipes, their shapes."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from benchmarks.paper import cifar10
from benchmarks.paper.tasks import load_task
from trimtab.core.errors import ValueGivenError
from trimtab.tasks import DataSource, Metric, Task, TaskData
from trimtab.tasks.image_classification import mean_cross_entropy
from trimtab.tasks.models.resnet import ResNet

SIZES = {"cifar10_resnet": ("cifar10_resnet50", "cifar10_resnet50_7x7"), "wikitext2_gpt": ("wikitext2_gpt2",)}
PAPER_SIZE = [name for names in SIZES.values() for name in names]


@pytest.mark.parametrize(("small", "large"), [(small, name) for small, names in SIZES.items() for name in names])
def test_both_sizes_share_their_code(small, large):
    small, large = load_task(small), load_task(large)
    assert small.load_data.func is large.load_data.func
    assert small.loss_fn is large.loss_fn
    assert small.metric is large.metric
    assert small.make_optimizer is large.make_optimizer
    assert small.reference == large.reference


@pytest.mark.parametrize("name", PAPER_SIZE)
def test_p0_is_the_papers_baseline(name):
    task = load_task(name)
    with torch.device("meta"):
        optimizer = task.make_optimizer(task.make_model())
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-4, (0.9, 0.999), 0.01)
    assert (task.reference.precision, task.reference.clip_norm) == ("fp32", None)


@pytest.mark.parametrize("name", SIZES["cifar10_resnet"])
def test_p2_of_resnet_50(name):
    task = load_task(name)
    recipe = task.strong
    (group,) = recipe.make_optimizer(torch.nn.Linear(2, 2)).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.1, 0.9, 5e-4)
    assert group["nesterov"]
    assert group["fused"]
    assert (recipe.channels_last, recipe.decay, recipe.warmup_fraction) == (True, "cosine", 0.1)
    assert recipe.make_model is None
    torch.manual_seed(0)
    model = ResNet(width=2, depths=(1,)).eval()
    batch = (torch.randn(8, 3, 8, 8), torch.arange(8))
    chances = model(batch[0]).log_softmax(1)
    smoothed = -(0.9 * chances[torch.arange(8), batch[1]] + 0.1 * chances.mean(1)).mean()
    torch.testing.assert_close(recipe.loss_fn(model, batch), smoothed)
    assert not torch.equal(smoothed, mean_cross_entropy(model, batch))
    assert recipe.rates == "published rate, not swept"
    assert task.muon is None  # torch's Muon takes matrices, and a ResNet's weights are none


def test_p2_and_p3_of_gpt_2():
    task = load_task("wikitext2_gpt2")
    for recipe in (task.strong, task.muon):
        assert (recipe.decay, recipe.clip_norm, recipe.channels_last, recipe.loss_fn) == ("cosine", 1.0, False, None)
        with torch.device("meta"):
            assert recipe.make_model().shape.dropout == 0.2
    assert task.strong.rates == "published rate, not swept"
    stated = "Muon at 0.02, published rate, not swept, its weight decay 0.1; AdamW at 0.0006, published rate, not swept"
    assert task.muon.rates == stated
    (group,) = task.strong.make_optimizer(torch.nn.Linear(2, 2)).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"], group["fused"]) == (6e-4, (0.9, 0.95), 0.1, True)
    assert [load_task(name).batch_size for name in PAPER_SIZE] == [128, 128, 32]


@pytest.fixture(scope="module")
def read_once(tmp_path_factory):
    """Return where tokens are kept, and what reads images: seconds for each task that has them, and each test."""
    return tmp_path_factory.mktemp("cache"), functools.cache(cifar10.cifar10)


@pytest.fixture
def read_data(read_once, shared_data, monkeypatch):
    """Tasks have the shared data, read once for all tests here."""
    cache, images = read_once
    monkeypatch.setenv("TRIMTAB_DATA", str(shared_data))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(cifar10, "cifar10", images)


@pytest.mark.parametrize("name", ["cifar10_resnet", "wikitext2_gpt", *PAPER_SIZE])
@pytest.mark.usefixtures("read_data")
def test_an_example_has_the_shapes_of_the_data(name):
    task = load_task(name)
    data = task.load_data()
    real, example = next(data.batches(0, 4)), task.example(4)
    assert [(column.shape, column.dtype) for column in example] == [(column.shape, column.dtype) for column in real]
    assert data.source.origin == "TRIMTAB_DATA"
    judged = sum(len(batch[0]) for batch in data.held_out)
    assert judged == {"cifar10_resnet": 2_000, "wikitext2_gpt": 64, "wikitext2_gpt2": 252}.get(name, 10_000)


@pytest.mark.usefixtures("read_data")
def test_evaluations_fall_on_whole_epochs():
    """Of whole batches, of which an epoch drops its ragged tail."""
    for name, epochs in (("cifar10_resnet50", 2), ("wikitext2_gpt2", 3)):
        task = load_task(name)
        per_epoch = task.load_data().num_samples // task.batch_size * task.batch_size
        assert task.eval_every_samples == epochs * per_epoch


def counted_task() -> Task:
    column = torch.arange(32.0)[:, None]
    data = TaskData((column,), tuple((column[i : i + 4],) for i in range(0, 32, 4)), DataSource("made", "here", "0"))
    return Task(
        name="counted",
        description="",
        make_model=lambda: torch.nn.Linear(1, 1),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters()),
        loss_fn=lambda model, batch: model(batch[0]).mean(),
        load_data=lambda: data,
        metric=Metric("loss", False, lambda model, batches: math.nan),
        targets=(),
        batch_size=8,
        budget_samples=64,
        eval_every_samples=8,
    )


def test_a_shortened_task_takes_fewer_rows_and_is_judged_by_fewer_batches():
    task = counted_task()
    short = task.shortened(batch_size=2, judged_batches=3)
    assert (short.batch_size, len(short.load_data().held_out)) == (2, 3)
    assert (task.batch_size, len(task.load_data().held_out)) == (8, 8)
    assert len(task.shortened().load_data().held_out) == 8
    for wrong in ({"batch_size": 0}, {"judged_batches": 0}):
        with pytest.raises(ValueGivenError):
            task.shortened(**wrong)
