"""Losses as `(sum, count)`, metrics that leave no trace, rows, augmentation and the batches of a `TaskData`."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from raising import raises
from torch import nn
from torch.nn import functional as F

from benchmarks.paper.cifar10 import augment, flip_and_crop, normalise
from benchmarks.paper.wikitext2 import PERPLEXITY
from trimtab.core.errors import ValueGivenError
from trimtab.losses import parts_of
from trimtab.nn import IGNORED
from trimtab.tasks import hand_tuned, image_classification
from trimtab.tasks.image_classification import ACCURACY, mean_cross_entropy
from trimtab.tasks.language_modelling import (
    BITS_PER_BYTE,
    evenly_spaced,
    mean_loss,
    next_token_loss,
    windows,
)
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet
from trimtab.tasks.task import DataSource, SampleDraws, TaskData

SOURCE = DataSource("made", "here", "0")


@pytest.fixture
def gpt():
    torch.manual_seed(0)
    return GPT(GPTShape(vocab_size=30, context=8, num_layers=1, num_heads=2, width=8))


@pytest.fixture
def tokens():
    return torch.randint(30, (5, 9), generator=torch.Generator().manual_seed(1))


def test_sum_over_count_is_the_mean_cross_entropy_over_labels_that_count(gpt, tokens):
    loss, count, _ = parts_of(next_token_loss(gpt, (tokens,)))
    assert type(count) is int
    assert count == 40
    mean = F.cross_entropy(gpt(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    torch.testing.assert_close(loss / count, mean)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0] = IGNORED
    labels[2, 3:] = IGNORED
    loss, count, _ = parts_of(next_token_loss(gpt, (inputs, labels)))
    assert isinstance(count, torch.Tensor)
    assert count == 40 - 8 - 5
    mean = F.cross_entropy(gpt(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    torch.testing.assert_close(loss / count, mean)
    loss, count, _ = parts_of(next_token_loss(gpt, (tokens[:, :-1], torch.full((5, 8), IGNORED))))
    loss.backward()
    assert loss == 0
    assert count == 0
    assert not gpt.head.weight.grad.any()


def test_metrics_weigh_tokens_not_batches(gpt, tokens):
    whole = mean_loss(gpt, [(tokens,)])
    assert mean_loss(gpt, [(tokens[:4],), (tokens[4:],)]) == pytest.approx(whole)
    assert PERPLEXITY.evaluate(gpt, [(tokens,)]) == pytest.approx(math.exp(whole))
    assert BITS_PER_BYTE.evaluate(gpt, [(tokens,)]) == pytest.approx(whole / math.log(2))
    with torch.no_grad():
        gpt.head.weight.mul_(1e6)
    assert PERPLEXITY.evaluate(gpt, [(tokens,)]) == math.inf
    with torch.no_grad():
        gpt.head.weight.fill_(math.nan)
    assert math.isnan(PERPLEXITY.evaluate(gpt, [(tokens,)]))


def test_images_are_counted_normalised_and_their_loss_is_a_mean():
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(2))
    images = torch.tensor([[2.0, 1], [1, 2], [3, 0]]).view(3, 1, 1, 2)
    batches = [(images[:2], torch.tensor([0, 0])), (images[2:], torch.tensor([0]))]
    assert ACCURACY.evaluate(model, batches) == pytest.approx(2 / 3)
    model = ResNet(width=2, depths=(1,), in_channels=1).eval()
    images, labels = torch.randn(6, 1, 4, 4), torch.arange(6)
    parts = [mean_cross_entropy(model, (images[rows], labels[rows])) for rows in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(mean_cross_entropy(model, (images, labels)), sum(parts) / 2)
    pixels = torch.tensor([0, 255], dtype=torch.uint8).view(1, 1, 1, 2).expand(1, 3, 1, 2)
    expected = [
        [-0.4914 / 0.2470, 0.5086 / 0.2470],
        [-0.4822 / 0.2435, 0.5178 / 0.2435],
        [-0.4465 / 0.2616, 0.5535 / 0.2616],
    ]
    torch.testing.assert_close(normalise(pixels)[0, :, 0], torch.tensor(expected))
    assert image_classification.normaliser((0.5,), (0.5,))(pixels[:, :1]).flatten().tolist() == [-1, 1]


class Failing(nn.Module):
    def forward(self, x):
        raise RuntimeError("evaluation failed")


@pytest.mark.parametrize("top_training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_evaluation_leaves_no_trace(top_training, fails):
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.Flatten(), Failing() if fails else nn.Linear(8, 10))
    model.train(top_training)
    model[1].eval()  # a frozen layer inside a training model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batches = [(torch.randn(4, 1, 2, 2), torch.zeros(4, dtype=torch.long))]
    if fails:
        with pytest.raises(RuntimeError, match="evaluation failed"):
            ACCURACY.evaluate(model, batches)
    else:
        ACCURACY.evaluate(model, batches)
    assert [module.training for module in model] == [top_training, False, top_training, top_training]
    assert model.training == top_training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.is_grad_enabled()
    assert all(parameter.grad is None for parameter in model.parameters())


@given(length=st.integers(10, 400), context=st.integers(1, 9))
def test_windows_hold_every_target_once(length, context):
    rows = windows(np.arange(length, dtype=np.uint16), context)
    assert rows.dtype == torch.int64
    assert rows[:, 1:].flatten().tolist() == list(range(1, 1 + rows.shape[0] * context))
    assert length - 1 - rows.shape[0] * context < context


@given(total=st.integers(1, 500), data=st.data())
def test_evenly_spaced_rows_are_distinct_and_spread(total, data):
    wanted = data.draw(st.integers(1, total))
    chosen = evenly_spaced(torch.arange(total), wanted)
    assert len(set(chosen.tolist())) == wanted
    assert chosen[0] == 0
    assert chosen[-1] >= total - math.ceil(total / wanted)


def test_flip_and_crop_is_what_a_loop_would_do():
    images, rows = torch.randint(256, (64, 3, 8, 8), dtype=torch.uint8), torch.arange(64)
    result = flip_and_crop(images, SampleDraws(5, 0, rows), padding=2)
    again = SampleDraws(5, 0, rows)
    down, right = again.integers(5).tolist(), again.integers(5).tolist()
    flips = again.chance(0.5).tolist()
    for i, image in enumerate(F.pad(images, (2, 2, 2, 2))):
        cropped = image[:, down[i] : down[i] + 8, right[i] : right[i] + 8]
        assert torch.equal(result[i], cropped.flip(2) if flips[i] else cropped)
    assert len(set(down)) == len(set(right)) == 5
    assert 10 < sum(flips) < 54


def test_augmentation_draws_from_its_rows_only():
    images, labels = torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8), torch.arange(4)
    rows, state = torch.tensor([7, 1, 30_000, 4]), torch.get_rng_state()
    first = augment((images, labels), SampleDraws(1, 0, rows))
    torch.rand(1)
    second = augment((images, labels), SampleDraws(1, 0, rows))
    others = [augment((images, labels), SampleDraws(seed, epoch, rows)) for seed, epoch in ((2, 0), (1, 1))]
    torch.set_rng_state(state)
    assert torch.equal(first[0], second[0])
    assert not any(torch.equal(first[0], other[0]) for other in others)
    assert first[0].dtype == torch.float32
    assert torch.equal(first[1], labels)


@given(rows=st.integers(1, 40), seed=st.integers(0, 2**32), data=st.data())
def test_batches_are_a_function_of_the_seed_and_repeat_no_row_in_an_epoch(rows, seed, data):
    batch_size = data.draw(st.integers(1, rows))
    column = torch.arange(rows)
    task_data = TaskData((column, column * 10), ((column,),), SOURCE)
    per_epoch = rows // batch_size
    taken = list(itertools.islice(task_data.batches(seed, batch_size), 3 * per_epoch))
    again = list(itertools.islice(task_data.batches(seed, batch_size), 3 * per_epoch))
    for epoch in range(3):
        seen = torch.cat([batch[0] for batch in taken[epoch * per_epoch : (epoch + 1) * per_epoch]])
        assert len(set(seen.tolist())) == len(seen) == per_epoch * batch_size
    for (left, ten), (right, _) in zip(taken, again, strict=True):
        assert torch.equal(left, right)
        assert torch.equal(left * 10, ten)
    begin = data.draw(st.integers(0, 3 * per_epoch - 1))
    for (left, _), (right, _) in zip(taken[begin:], task_data.batches(seed, batch_size, begin=begin), strict=False):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    ("gpus", "capabilities", "expected"),
    [
        (1, {}, "bf16"),
        (0, {"avx512_bf16": True, "avx2": True}, "bf16"),
        (0, {"amx_bf16": True}, "bf16"),
        (0, {"avx512_bf16": False, "avx2": True}, "fp32"),
        (0, {}, "fp32"),
    ],
)
def test_the_strong_peer_uses_bf16_only_where_it_is_native(monkeypatch, gpus, capabilities, expected):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    assert hand_tuned.tuned_precision() == expected


def test_the_strong_peer_without_a_way_to_ask(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert hand_tuned.tuned_precision() == "fp32"


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.full((1,), 0.5), np.float32(0.5), 0.5])
def test_a_metrics_value_becomes_a_float(value):
    """A record is written of it, at the end of a race."""
    found = ACCURACY.check(value)
    assert type(found) is float
    assert found == 0.5


@pytest.mark.parametrize("value", [torch.ones(2), "0.5", None, True])
def test_what_is_no_number_is_no_metric(value):
    with raises(ValueGivenError, code="value.invalid", field="metric accuracy"):
        ACCURACY.check(value)
