"""Accelerate: the weights that its own loop trains, on what it prepared."""

from __future__ import annotations

import accelerate
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.integrations.accelerate import plan, start

ROWS = 8


@pytest.fixture(autouse=True)
def anew():
    """Each test's Accelerator is its own: the host keeps one state for a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def parts(rows: int = 160):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 6, generator=generator).double()
    targets = torch.randint(0, 3, (rows,), generator=generator)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), DataLoader(TensorDataset(inputs, targets), ROWS)


def by_the_host() -> nn.Module:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    for batch in loader:
        accelerator.backward(loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.unwrap_model(model)


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("prepared", [True, False])
def test_its_windows_train_as_the_hosts_loop_does(micro, prepared):
    plain = by_the_host()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts()
    inner = optimizer
    loader = accelerator.prepare(loader)
    if prepared:
        model, optimizer = accelerator.prepare(model, optimizer)
    with start(accelerator, model, optimizer, trimtab.Plan.fixed(ROWS, micro), total_samples=160) as run:
        for window in run.windows(loader):
            run.train_step(window, loss_fn)
        assert run.applied_steps == 20
    for a, b in zip(accelerator.unwrap_model(model).parameters(), plain.parameters(), strict=True):
        assert float((a - b).detach().abs().max() / b.detach().abs().max()) <= 1e-12
    assert len(inner.state) == 4  # of the user's own object


def test_it_plans_what_was_prepared():
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(*parts())
    before = [p.detach().clone() for p in model.parameters()]
    found = plan(accelerator, model, optimizer, loss_fn, next(iter(loader)), num_blocks=3)
    assert found.batch_rows == ROWS
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"mixed_precision": "bf16"}, "the precision is the plan's"), ({"gradient_accumulation_steps": 4}, "a window is")],
)
def test_what_decides_as_a_plan_does_is_refused(given, said):
    accelerator = Accelerator(cpu=True, **given)
    model, optimizer, _ = parts()
    with pytest.raises(ValueGivenError, match=said):
        start(accelerator, model, optimizer, trimtab.Plan.fixed(ROWS))
