"""Accelerate: the weights that its own loop trains, on what it prepared."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from plain_loop import train_plain
from raising import raises
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from training_cases import headed_case

import trimtab
from trimtab.core.errors import ValueGivenError
from trimtab.integrations.accelerate import plan, start

pytestmark = pytest.mark.usefixtures("brief_trials")
ROWS = 8


@pytest.fixture(autouse=True)
def anew():
    """Each test's Accelerator is its own."""
    reset()


def reset() -> None:
    """Forget the Accelerator that there is: the host keeps one state for a process."""
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
    assert found.batch_size == ROWS
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def trained(run, batches, schedule=None) -> None:
    for window in run.windows(batches):
        run.train_step(window, loss_fn)
        if schedule is not None:
            schedule.step()


@pytest.mark.parametrize("is_registered", [True, False])
def test_the_hosts_checkpoints_hold_what_trains_and_it_goes_on_as_if_never_cut(tmp_path, is_registered):
    """Weights and moments; of a run that is registered its progress too, which a plan's schedule goes by."""
    how = {"plan": trimtab.Plan.fixed(ROWS, 3)}
    if is_registered:
        how = {"plan": trimtab.Plan.fixed(ROWS, 3, schedule="warmup_cosine"), "total_samples": 160}
    whole = Accelerator(cpu=True)
    model, optimizer, loader = whole.prepare(*parts())
    with start(whole, model, optimizer, **how) as run:
        if is_registered:
            whole.register_for_checkpointing(run)
        for window in run.windows(loader):
            run.train_step(window, loss_fn)
            if run.applied_steps == 11:
                whole.save_state(tmp_path)
    reset()
    again = Accelerator(cpu=True)
    other, stepped, rest = again.prepare(*parts())
    with torch.no_grad():
        other[0].weight.zero_()
    if not is_registered:  # and so is loaded before there is a run
        again.load_state(tmp_path)
        assert len(stepped.state) == 4
    with start(again, other, stepped, **how) as run:
        if is_registered:
            again.register_for_checkpointing(run)
            again.load_state(tmp_path)
            assert run.applied_steps == 11
        trained(run, again.skip_first_batches(rest, 11))
    assert difference(other, model) == 0


def example_main(path) -> None:
    spec = importlib.util.spec_from_file_location("example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(epochs=1)


def test_the_example_prepares_what_the_host_saves(monkeypatch):
    made, before = [], Accelerator.__init__

    def noting(self, *args, **kwargs):
        made.append(self)
        before(self, *args, **kwargs)

    monkeypatch.setattr(Accelerator, "__init__", noting)
    example_main(Path(__file__).parents[2] / "examples" / "accelerate_trimmed.py")
    assert len(made[0]._models) == len(made[0]._optimizers) == 1


def test_its_loaders_are_gone_on_with_from_our_checkpoints(tmp_path):
    """On ranks the host's checkpoints do not hold the model: there these do."""
    plan, kept = trimtab.Plan.fixed(ROWS, 3), trimtab.Checkpoints(tmp_path, every_steps=4)
    whole = Accelerator(cpu=True)
    model, optimizer, loader = parts()
    with start(whole, model, optimizer, plan) as run:
        trained(run, whole.prepare(loader))
    for num_windows in (11, 20):
        reset()
        again = Accelerator(cpu=True)
        other, stepped, loader = parts()
        with start(again, other, stepped, plan, checkpoints=kept) as run:
            for window in run.windows(again.prepare(loader)):
                run.train_step(window, loss_fn)
                if run.applied_steps == num_windows:
                    break
    assert difference(other, model) == 0


def by_its_accumulation(steps: int, rows: int) -> nn.Module:
    """Return what the host's loop trains, whose schedule goes on once a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(*parts(rows))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9))
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model, batch))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    return accelerator.unwrap_model(model)


def by_our_windows(steps: int, rows: int, micro: int) -> nn.Module:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    model, optimizer, loader = accelerator.prepare(*parts(rows))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer.optimizer, 0.9))
    with start(accelerator, model, optimizer, trimtab.Plan.fixed(ROWS, micro)) as run:
        for _ in range(2):
            trained(run, loader, schedule)
        assert run.num_batches == steps
        assert run.applied_steps == 2 * -(-rows // (ROWS * steps))
    return accelerator.unwrap_model(model)


def by_hand(window: int, rows: int) -> nn.Module:
    """Return what a plain loop trains, a step for each so many rows."""
    model, optimizer, loader = parts(rows)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    inputs, targets = loader.dataset.tensors
    for _ in range(2):
        for batch in zip(inputs.split(window), targets.split(window), strict=True):
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            optimizer.step()
            schedule.step()
    return model


@pytest.mark.parametrize("micro", [1, 3, 8])
@pytest.mark.parametrize("steps", [2, 4])
def test_its_windows_are_of_as_many_batches_as_it_accumulates(micro, steps):
    plain = by_its_accumulation(steps, 160)
    reset()
    assert difference(by_our_windows(steps, 160, micro), plain) <= 1e-12


def test_a_short_last_window_is_the_plain_loops_where_the_host_divides_it_by_all_steps():
    rows = 5 * ROWS + 4  # of two and a half windows; its last batch is a half
    plain = by_its_accumulation(2, rows)
    reset()
    ours, by_rows = by_our_windows(2, rows, 3), by_hand(2 * ROWS, rows)
    assert difference(ours, by_rows) <= 1e-12
    assert difference(plain, by_rows) > 1e-9


def test_a_batch_that_the_plan_freed_is_not_accumulated_by_the_host():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, _ = parts()
    plan = trimtab.Plan.fixed(ROWS, batch_rule=trimtab.BatchRule("fixed", k=2))
    with raises(ValueGivenError, code="trainer.decided_by_plan", field="gradient_accumulation_steps"):
        start(accelerator, model, optimizer, plan)


def test_windows_end_with_the_loader():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    model, optimizer, _ = parts()
    with raises(ValueGivenError, code="trainer.step_spans_epochs", field="sync_with_dataloader"):
        start(Accelerator(cpu=True, gradient_accumulation_plugin=plugin), model, optimizer, trimtab.Plan.fixed(ROWS))


def test_what_decides_as_a_plan_does_is_refused():
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model, optimizer, _ = parts()
    with raises(ValueGivenError, code="trainer.decided_by_plan", field="Accelerator(dynamo_backend=...)"):
        start(accelerator, model, optimizer, trimtab.Plan.fixed(ROWS))


def test_a_loss_head_is_planned_as_without_it():
    case = headed_case()
    model, optimizer = case.build()
    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model, optimizer)
    seen = []
    with start(accelerator, *prepared, trimtab.Plan.fixed(4, 3, loss_chunk=5)) as run:
        for window in run.windows(case.batches):
            run.train_step(window, case.loss_fn)
            seen.append(model.head.chunk_rows)
    assert difference(model, train_plain(case).model) <= 1e-12
    assert (set(seen), model.head.chunk_rows) == ({5}, None)
