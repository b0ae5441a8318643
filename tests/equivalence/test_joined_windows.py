"""Batches of a window are trained on as one where that keeps the maths: no batch statistics, no loss over a batch."""

from __future__ import annotations

import pytest
import test_lightning
import test_transformers
import torch
from torch import nn
from torch.utils.data import SequentialSampler
from transformers import Trainer

import trimtab
from trimtab.integrations.lightning import TrimtabStrategy
from trimtab.integrations.transformers import TrimtabTrainer

STEPS, ROWS, K = 20, 8, 2
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("brief_trials"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PLANNED = {"planning": {"num_blocks": 3}}
OF_A_WINDOW, OF_A_BATCH = ({"plan": trimtab.Plan.fixed(rows)} for rows in (K * ROWS, ROWS))


def net(*, has_statistics: bool) -> nn.Sequential:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if has_statistics else nn.Identity()
    return nn.Sequential(nn.Linear(6, 16), norm, nn.Tanh(), nn.Linear(16, 3)).double()


def loss_of(logits, targets):
    return nn.functional.cross_entropy(logits, targets)


def between_rows(logits, targets):
    """Return a loss that has each row told from the others of its batch."""
    near = torch.cdist(logits, logits) + 0.1 * nn.functional.one_hot(targets, 3).double() @ logits.T
    return nn.functional.cross_entropy(-near, torch.arange(len(logits)).roll(1))


def assert_as(ours: nn.Module, plain: nn.Module) -> None:
    """Raise unless weights and running statistics agree."""
    for (name, one), other in zip(ours.state_dict().items(), plain.state_dict().values(), strict=True):
        assert torch.allclose(one.double(), other.double(), rtol=1e-6, atol=1e-8), name


class Lit(test_lightning.Module):
    keeps_sizes = False  # a step that fills a list of its module is not split

    def __init__(self, loss_fn, *, has_statistics: bool) -> None:
        super().__init__()
        self.net, self.loss_fn = net(has_statistics=has_statistics), loss_fn

    def training_step(self, batch, batch_idx):
        if self.keeps_sizes:
            self.seen.append(len(batch[0]))
        return self.loss_fn(self.net(batch[0]), batch[1])


CASES = {
    "batch statistics, planned": (loss_of, True, PLANNED),
    "batch statistics, a plan for a window": (loss_of, True, OF_A_WINDOW),
    "batch statistics, a plan for a batch": (loss_of, True, OF_A_BATCH),
    "between rows, planned": (between_rows, False, PLANNED),
    "between rows, a plan for a batch": (between_rows, False, OF_A_BATCH),
    "rows alone, planned": (loss_of, False, PLANNED),
}


@pytest.mark.parametrize("name", CASES)
def test_lightnings_batches_are_what_they_are(tmp_path, name):
    loss_fn, has_statistics, how = CASES[name]
    plain, ours = (Lit(loss_fn, has_statistics=has_statistics) for _ in range(2))
    changes = {"rows": STEPS * ROWS, "batch": ROWS, "accumulate_grad_batches": K}
    test_lightning.trained(plain, "auto", tmp_path, **changes)
    strategy = TrimtabStrategy(**how)
    test_lightning.trained(ours, strategy, tmp_path, **changes)
    assert_as(ours.net, plain.net)
    is_joined = name.startswith("rows alone")
    assert strategy.plan.batch_size == (K * ROWS if is_joined or how is OF_A_WINDOW else ROWS)


def test_what_a_batch_fits_in_is_planned_where_a_window_that_cannot_be_split_does_not(tmp_path):
    """A limit is why batches are small."""
    wide = Lit(between_rows, has_statistics=False)
    wide.keeps_sizes = True
    wide.net = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)).double()
    changes = {"rows": 4 * 512, "batch": 512, "accumulate_grad_batches": 4}
    strategy = TrimtabStrategy(planning={"num_blocks": 3, "budget": trimtab.Budget(memory="16MiB")})
    test_lightning.trained(wide, strategy, tmp_path, **changes)
    assert strategy.plan.batch_size == 512
    assert wide.seen[-4:] == [512] * 4


class Scored(nn.Module):
    """A model as the Trainer takes one."""

    def __init__(self, loss_fn, *, has_statistics: bool) -> None:
        super().__init__()
        self.net, self.loss_fn = net(has_statistics=has_statistics), loss_fn

    def forward(self, x, labels):
        logits = self.net(x)
        return {"loss": self.loss_fn(logits, labels), "logits": logits}


class InOrder:
    def _get_train_sampler(self, train_dataset=None):
        return SequentialSampler(self.train_dataset)


def scored(kind, folder, name, **own):
    loss_fn, has_statistics, _ = CASES[name]
    inputs, targets = test_lightning.data(STEPS * ROWS).tensors
    data = [{"x": x, "labels": y} for x, y in zip(inputs, targets, strict=True)]
    changes = {"gradient_accumulation_steps": K, "per_device_train_batch_size": ROWS, "max_steps": STEPS // K}
    given = test_transformers.arguments(folder, **changes)
    model = Scored(loss_fn, has_statistics=has_statistics)
    trainer = type(kind.__name__, (InOrder, kind), {})(model=model, args=given, train_dataset=data, **own)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", CASES)
def test_the_trainers_batches_are_what_they_are(tmp_path, name):
    how = CASES[name][2]
    plain, ours = scored(Trainer, tmp_path / "plain", name), scored(TrimtabTrainer, tmp_path / "ours", name, **how)
    assert_as(ours.model, plain.model)
    is_joined = name.startswith("rows alone")
    assert ours.plan.batch_size == (K * ROWS if is_joined or how is OF_A_WINDOW else ROWS)
