"""P0: the reference loop is the plain torch loop, to the last bit; or the user's own step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from recipe_tasks import CPU, ROWS, batches, fp32_modes, make_task, modes_of_a_loop, weights

from benchmarks.paper.recipes import command
from trimtab.core.objective import Reference
from trimtab.experiments.baselines.loop import autocast, move
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.losses import Summed, mean_of

TINY_TASK = Path(__file__).parents[1] / "experiments" / "tiny_task.py"


def by_hand(task, steps: int) -> torch.Tensor:
    """Train as anyone would write it."""
    torch.manual_seed(3)
    model = task.make_model()
    model.train()
    optimizer = task.make_optimizer(model)
    data = batches(task)
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=task.reference.precision == "bf16"):
            result = task.loss_fn(model, next(data))
            loss = mean_of(result)
        loss.backward()
        if task.reference.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.reference.clip_norm)
        optimizer.step()
    return weights(model)


def by_recipe(task, steps: int) -> torch.Tensor:
    torch.manual_seed(3)
    loop = ReferenceLoop(task, CPU)
    data = batches(task)
    for _ in range(steps):
        assert loop.step(data) == ROWS
    loop.close()
    return weights(loop.model)


@pytest.mark.parametrize("reference", [Reference("fp32"), Reference("bf16"), Reference("fp32", clip_norm=0.05)])
@pytest.mark.parametrize("kind", ["mlp", "gpt", "resnet"])
def test_the_reference_is_the_plain_loop(kind, reference):
    task = make_task(kind, reference=reference)
    assert torch.equal(by_recipe(task, 5), by_hand(task, 5))


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_fp16_is_trained_under_a_loss_scale(clip_norm):
    """As anyone trains it: without one small gradients are lost, and half of what is declared is not compared."""
    task = make_task(reference=Reference("fp16", clip_norm=clip_norm))
    torch.manual_seed(3)
    model = task.make_model().train()
    optimizer, scaler, data = task.make_optimizer(model), torch.amp.GradScaler("cpu"), batches(task)
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            result = task.loss_fn(model, next(data))
        scaler.scale(mean_of(result)).backward()
        if clip_norm is not None:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
    assert torch.equal(by_recipe(task, 5), weights(model))


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_a_reference_in_tf32_trains_in_tf32_and_puts_the_modes_back(precision):
    before, during, after = modes_of_a_loop(ReferenceLoop, reference=Reference(precision))
    assert during == (("tf32", "tf32") if precision == "tf32" else before)
    assert after == before == fp32_modes() != ("tf32", "tf32")


def test_what_the_reference_declares_makes_a_difference():
    plain, others = by_recipe(make_task(), 5), [Reference("bf16"), Reference("fp32", clip_norm=0.05)]
    for reference in others:
        assert not torch.equal(by_recipe(make_task(reference=reference), 5), plain)


def test_a_users_own_step_is_called_with_model_optimizer_and_batch():
    calls = []

    def never(model, batch):
        raise AssertionError("the loss function is not the step's business")

    task = make_task(loss_fn=never, step=lambda *given: calls.append(given))
    loop = ReferenceLoop(task, CPU)
    assert loop.step(batches(task)) == ROWS
    ((model, optimizer, batch),) = calls
    assert model is loop.model
    assert optimizer is loop.optimizer
    assert torch.equal(batch[0], next(batches(task))[0])


def test_a_mean_is_a_mean_and_a_batch_is_moved_whole():
    loss = torch.tensor(6.0)
    assert mean_of(loss) is loss
    assert mean_of(Summed(loss, 4)) == 1.5
    assert mean_of((Summed(loss, torch.tensor(3)), {})) == 2.0
    moved = move((torch.ones(2), torch.zeros(2)), torch.device("meta"))
    assert [tensor.device.type for tensor in moved] == ["meta", "meta"]


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_is_torchs(precision, dtype):
    with autocast(precision, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_a_recipe_runs_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["command", "reference", f"{TINY_TASK}:task", "--steps", "20", "--seed", "1"])
    command.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {step}" for step in range(2, 21, 2)]
    assert lines[-1].startswith("step 20  640 rows  ")
    assert float(lines[-1].rpartition("accuracy ")[2]) > float(lines[0].rpartition("accuracy ")[2])
    given = ["command", "reference", f"{TINY_TASK}:task", "--steps", "2", "--rows", "8", "--judged", "1"]
    monkeypatch.setattr(sys, "argv", given)
    command.main()
    said = capsys.readouterr()
    assert [line.split("  ")[:2] for line in said.out.splitlines()] == [["step 1", "8 rows"], ["step 2", "16 rows"]]
    assert said.err.startswith("data: random points (made here); on host: trained on the processor")
