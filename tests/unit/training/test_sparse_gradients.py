"""Sparse gradients, as of nn.Embedding(sparse=True): their norm, clipping and skipping are those of dense ones."""

from __future__ import annotations

import math

import pytest
import torch
from raising import raises
from small_loops import sgd, train_plainly
from torch import nn

import trimtab
from trimtab.plans.plan import Plan
from trimtab.techniques import gradient_clipping

ROWS, WORDS, WINDOWS = 8, 11, 4


def batches():
    """Sentences of three words, of which a batch has most several times."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, WORDS, (ROWS, 3), generator=generator) for _ in range(WINDOWS)]


def loop(make, *, sparse):
    torch.manual_seed(0)
    model = nn.Embedding(WORDS, 4, sparse=sparse)
    return model, make(model.parameters(), lr=0.1)


def loss_fn(model, words):
    return model(words).sum(1).square().mean()


def trained(make, micro_batch=ROWS, *, sparse, **options):
    """Return the weights and the norms of all windows."""
    model, optimizer = loop(make, sparse=sparse)
    norms = []
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, micro_batch), **options) as run:
        for window in run.windows(batches()):
            run.train_step(window, loss_fn)
            assert model.weight.grad.is_sparse is sparse
            norms.append(run.grad_norm)
        assert run.applied_steps == WINDOWS
    return model.weight.detach(), torch.stack(norms)


def test_the_norm_is_that_of_the_dense_gradient_beside_others_too():
    norms = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(WORDS, 4, sparse=sparse), nn.Linear(4, 2))
        loss_fn(model, batches()[0]).backward()
        norms += [gradient_clipping.norm(sgd(part)) for part in (model, model[0])]
    of_all, of_table, *dense = norms
    assert of_all > of_table > 0
    torch.testing.assert_close([of_all, of_table], dense)


OPTIONS = {
    "skipping": {"nonfinite": "skip"},
    "clipping": {"clip_norm": 0.01},
    "both": {"nonfinite": "skip", "clip_norm": 0.01},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("micro_batch", [8, 3])
def test_a_run_trains_as_by_dense_gradients(micro_batch, options):
    ours = trained(torch.optim.SGD, micro_batch, sparse=True, **options)
    dense = trained(torch.optim.SGD, micro_batch, sparse=False, **options)
    torch.testing.assert_close(ours, dense)
    assert (dense[1] > 0.01).all()  # so that all are clipped, where any is


def test_sparse_adam_trains_where_windows_that_are_no_numbers_would_be_skipped():
    ours, _ = trained(torch.optim.SparseAdam, sparse=True, nonfinite="skip")
    model, optimizer = loop(torch.optim.SparseAdam, sparse=True)
    train_plainly(model, optimizer, batches(), loss_fn)
    assert torch.equal(ours, model.weight)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.SparseAdam])
def test_a_window_whose_sparse_gradient_is_no_number_is_skipped(make):
    model, optimizer = loop(make, sparse=True)
    with trimtab.start(model, optimizer, Plan.fixed(ROWS), nonfinite="skip") as run:
        for index, window in enumerate(run.windows(batches())):
            before = model.weight.detach().clone()
            run.train_step(window, lambda *given, factor=math.nan if index == 1 else 1.0: factor * loss_fn(*given))
            assert torch.equal(model.weight, before) is (index == 1)
        assert run.applied_steps == WINDOWS - 1


class Table(nn.Module):
    """An embedding written by hand, whose gradients are sparse in a way that shows in the backward alone."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, 4))

    def forward(self, words):
        return nn.functional.embedding(words, self.weight, sparse=True)


@pytest.mark.parametrize("kind", [nn.EmbeddingBag, nn.Embedding])
def test_a_fused_step_is_refused_before_anything_is_changed(kind):
    model = nn.Sequential(nn.Identity(), kind(WORDS, 4, sparse=True))
    optimizer = sgd(model)
    with raises(trimtab.errors.OptimizerError, code="optimizer.sparse_gradient", field="plan.fused_optimizer") as error:
        trimtab.start(model, optimizer, Plan.fixed(ROWS, fused_optimizer=True))
    assert error.value.code == "optimizer.sparse_gradient"
    assert not optimizer.param_groups[0]["fused"]


def test_a_fused_step_of_a_gradient_that_turns_out_sparse_is_refused_with_the_weights_as_they_were():
    model = Table()
    before = model.weight.detach().clone()
    with (
        trimtab.start(model, sgd(model), Plan.fixed(ROWS, fused_optimizer=True)) as run,
        raises(trimtab.errors.OptimizerError, code="optimizer.sparse_gradient"),
    ):
        run.train_step(run.window(batches()[0]), loss_fn)
    assert torch.equal(model.weight, before)


def test_a_fused_step_is_not_planned_and_only_refused_for_sparse_gradients():
    model = nn.Sequential(nn.Embedding(WORDS, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    trimtab.start(model, optimizer, Plan.fixed(ROWS, fused_optimizer=True)).close()
    model, optimizer = loop(torch.optim.SGD, sparse=True)
    assert not trimtab.profile(model, optimizer, loss_fn, batches()[0], num_blocks=3).loop.supports_fused
