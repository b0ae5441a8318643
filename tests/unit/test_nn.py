"""A head whose logits come a chunk at a time has the loss and gradients of one that has them all."""

from __future__ import annotations

import contextlib

import pytest
import torch
from raising import raises
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.core.errors import BatchError, ValueGivenError
from trimtab.losses import Summed
from trimtab.nn import IGNORED, LossHead, chunked_cross_entropy
from trimtab.state.peak_memory import peak_growth


class Model(nn.Module):
    """A model whose forward ends in its loss, as one that adopts the head does."""

    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, features, targets):
        return self.head.loss(features, targets)


def half():
    return torch.autocast("cpu", torch.bfloat16)


def gradients(head, features, targets, *, plain, autocast=contextlib.nullcontext):
    features = features.clone().requires_grad_()
    head.zero_grad()
    with autocast():
        if plain:
            logits = F.linear(features, head.weight, head.bias).flatten(0, -2)
            total = F.cross_entropy(logits, targets.flatten(), reduction="sum", ignore_index=IGNORED)
        else:
            total, _ = head.loss(features, targets)
    (3.0 * total).backward()
    return [total.detach(), features.grad, *(p.grad.clone() for p in head.parameters())]


@pytest.fixture(autouse=True, params=["torch's", "ours"])
def implementation(request, monkeypatch):
    if request.param == "ours":
        monkeypatch.setattr("trimtab.nn._OF_TORCH", None)
    elif not hasattr(F, "linear_cross_entropy"):
        pytest.skip("this torch has none")


@pytest.fixture
def problem():
    torch.manual_seed(0)
    targets = torch.randint(0, 50, (3, 7))
    targets[0, 2:5] = IGNORED
    return torch.randn(3, 7, 8, dtype=torch.float64), targets


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_rows", [1, 4, 7, 21, 100, None])
def test_loss_and_gradients_are_those_of_all_logits(problem, chunk_rows, bias):
    features, targets = problem
    head = LossHead(8, 50, bias, chunk_rows=chunk_rows).double()
    ours, theirs = (gradients(head, features, targets, plain=plain) for plain in (False, True))
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("autocast", [contextlib.nullcontext, half])
def test_in_lower_precision_they_are_as_near_to_the_truth(problem, autocast):
    """Against all logits at once in the same precision, and both against float64."""
    features, targets = problem
    head = LossHead(8, 50, chunk_rows=4).double()
    truth = gradients(head, features, targets, plain=True)
    head.float()
    ours, theirs = (gradients(head, features.float(), targets, plain=p, autocast=autocast) for p in (False, True))
    for our, their, true in zip(ours, theirs, truth, strict=True):
        assert (our - true).norm() <= 2 * (their - true).norm() + 1e-6 * true.norm()
        assert our.dtype == their.dtype


def test_rows_that_are_all_ignored_have_no_loss_and_no_gradient(problem):
    features, targets = problem
    head = LossHead(8, 50, chunk_rows=4).double()
    total, count = head.loss(features, torch.full_like(targets, IGNORED))
    total.backward()
    assert (float(total.detach()), int(count)) == (0.0, 0)
    assert float(head.weight.grad.abs().max()) == 0.0
    assert int(head.loss(*problem)[1]) == 18
    head = LossHead(8, 50, chunk_rows=4).double().requires_grad_(False)
    features = features.clone().requires_grad_()
    head.loss(features, targets)[0].backward()
    assert head.weight.grad is None
    assert features.grad is not None
    features, targets = problem
    head = LossHead(8, 50, chunk_rows=4).double()
    with torch.no_grad():
        total, _ = head.loss(features, targets)
    torch.testing.assert_close(total, head.loss(features, targets)[0].detach())


def test_it_is_a_linear_layer_whose_weights_can_be_an_embeddings(problem):
    torch.manual_seed(1)
    head = LossHead(8, 50, chunk_rows=4)
    plain = nn.Linear(8, 50, bias=False)
    plain.load_state_dict(head.state_dict())
    features = problem[0].float()
    assert torch.equal(head(features), plain(features))
    assert "chunk_rows=4" in repr(head)
    targets = problem[1]
    embedding, head = nn.Embedding(50, 8), LossHead(8, 50, chunk_rows=4)
    head.weight = embedding.weight
    head.loss(embedding(targets.clamp_min(0)), targets)[0].backward()
    ours = embedding.weight.grad.clone()
    embedding.weight.grad = None
    head.chunk_rows = None
    head.loss(embedding(targets.clamp_min(0)), targets)[0].backward()
    torch.testing.assert_close(ours, embedding.weight.grad)


def test_it_holds_a_chunk_of_logits_in_place_of_all():
    torch.manual_seed(0)
    head, features = LossHead(32, 4000), torch.randn(512, 32)
    targets = torch.randint(0, 4000, (512,))
    peaks = {}
    for chunk_rows in (None, 64):
        head.chunk_rows = chunk_rows
        peaks[chunk_rows] = peak_growth(lambda: head.loss(features, targets)[0].backward())
        head.zero_grad()
    logits = 512 * 4000 * 4
    assert peaks[None] > 2 * logits
    assert peaks[64] < 0.6 * logits
    head, features = LossHead(32, 4000, chunk_rows=64), torch.randn(512, 32)
    with torch.no_grad():
        assert peak_growth(lambda: head.loss(features, targets)) < 0.5 * 512 * 4000 * 4


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_several_chunks_hold_no_more_than_one(dtype, label_smoothing):
    torch.manual_seed(0)
    weight = torch.randn(4000, 32, dtype=dtype, requires_grad=True)
    peaks = []
    for rows in (128, 512):
        features, targets = torch.randn(rows, 32, dtype=dtype, requires_grad=True), torch.randint(0, 4000, (rows,))
        given = features, weight, None, targets, 128
        peaks.append(peak_growth(lambda given=given: chunked_cross_entropy(*given, label_smoothing=label_smoothing)))
    assert peaks[1] - peaks[0] < 0.1 * 128 * 4000 * 4


def test_small_gradients_survive_fp16(problem):
    """They are multiplied by the loss scale before they are rounded."""
    features, targets = problem[0].half(), problem[1]
    head = LossHead(8, 50, chunk_rows=4).half()
    total, _ = head.loss(features, targets)
    (total * (1e-6 * 2.0**16)).backward()
    ours = head.weight.grad.double()
    truth = gradients(head.double(), features.double(), targets, plain=True)[2] / 3.0
    torch.testing.assert_close(ours, truth * (1e-6 * 2.0**16), rtol=0.005, atol=1e-6)


def test_a_run_trains_with_it_as_with_all_logits(problem):
    """Two micro-batches of a window, token counts unequal."""
    features, targets = problem

    def trained(chunk_rows):
        torch.manual_seed(2)
        model = Model(LossHead(8, 50, chunk_rows=chunk_rows)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trimtab.start(model, optimizer, trimtab.Plan.fixed(3, micro_batch=2)) as run:
            for _ in range(4):
                run.train_step(run.window((features, targets)), lambda model, batch: Summed(*model(*batch)))
        return model.head.weight.detach()

    torch.testing.assert_close(trained(4), trained(None))


def test_what_does_not_fit_and_a_second_backward_are_refused(problem):
    features, targets = problem
    with raises(BatchError, code="loss_head.targets_shape", field="targets"):
        LossHead(8, 50, chunk_rows=4).loss(features, targets[:, 1:])
    for wrong in (0, -1, 1.5, True):
        with raises(ValueGivenError, code="value.invalid", field="chunk_rows"):
            LossHead(8, 50, chunk_rows=wrong)
    total, _ = LossHead(8, 50, chunk_rows=4).double().loss(features.requires_grad_(), targets)
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"second (backward|time)|retain"):
        total.backward()


def test_a_head_in_double_precision_stays_so_under_autocast():
    head = LossHead(8, 16, chunk_rows=3).double()
    features, targets = torch.randn(7, 8, dtype=torch.float64), torch.arange(7)
    expected, _ = head.loss(features, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = head.loss(features, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
