"""A user's own step function is held against the maths that its task declares."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from raising import raises
from tiny_task import BATCH_SIZE, load_data
from tiny_task import task as tiny
from torch import nn
from torch.nn import functional as F

from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.core.objective import Reference
from trimtab.experiments import step_check
from trimtab.experiments.loop_setup import PLANNING_SEED
from trimtab.experiments.task_loops import TaskLoops
from trimtab.tasks import DataSource, TaskData

LIMIT = step_check._LIMIT["fp32"]


def stepping(*, factor: float = 1.0, clip: float | None = None, precision: str = "fp32"):
    """Return a step function that scales the loss, clips the gradient, or computes in another precision."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = factor * tiny.loss_fn(model, batch)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check(step, reference: Reference | None = None, **changes) -> None:
    check_task(
        replace(tiny, step=step, reference=reference or Reference("fp32"), **({"make_optimizer": sgd} | changes))
    )


def check_task(task) -> None:
    step_check.check_step(TaskLoops(task).setup, task.reference, task.name)


@pytest.mark.parametrize("make_optimizer", [sgd, tiny.make_optimizer])
def test_a_step_of_the_declared_maths_passes(make_optimizer):
    check(stepping(), make_optimizer=make_optimizer)
    check(stepping(clip=0.1), Reference("fp32", 0.1), make_optimizer=make_optimizer)
    check(stepping(precision="bf16"), Reference("bf16"), make_optimizer=make_optimizer)


def refused(step, code: str, reference: Reference | None = None, **changes) -> ValueGivenError:
    with raises(ValueGivenError, code=code, field="step") as caught:
        check(step, reference, **changes)
    return caught.value


both_optimizers = pytest.mark.parametrize("make_optimizer", [sgd, tiny.make_optimizer], ids=["sgd", "adamw"])


@both_optimizers
@pytest.mark.parametrize("other", [{"factor": 1.01}, {"factor": 4.0}, {"clip": 0.1}, {"precision": "bf16"}], ids=str)
def test_a_step_of_other_maths_is_refused(other, make_optimizer):
    error = refused(stepping(**other), "step.gradient_differs", make_optimizer=make_optimizer)
    assert "clip_norm" in error.hint


def smoothed(model, optimizer, batch):
    optimizer.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.01).backward()
    optimizer.step()


def half_of_the_rows(model, optimizer, batch):
    stepping()(model, optimizer, [column[: BATCH_SIZE // 2] for column in batch])


def never_zeroed(model, optimizer, batch):
    tiny.loss_fn(model, batch).backward()
    optimizer.step()


def one_layer_left_out(model, optimizer, batch):
    optimizer.zero_grad()
    tiny.loss_fn(model, batch).backward()
    model[0].bias.grad = None
    optimizer.step()


def noisy(model, optimizer, batch):
    """Noise of 1% of the gradient, which is the same whenever the step is tried: it does not stray from itself."""
    optimizer.zero_grad()
    tiny.loss_fn(model, batch).backward()
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p), alpha=0.01 * float(p.grad.norm()) / p.numel() ** 0.5)
    optimizer.step()


OTHER_GRADIENTS = [smoothed, half_of_the_rows, never_zeroed, one_layer_left_out, noisy]


@both_optimizers
@pytest.mark.parametrize("step", OTHER_GRADIENTS)
def test_a_gradient_of_another_loss_is_refused(step, make_optimizer):
    refused(step, "step.gradient_differs", make_optimizer=make_optimizer)


class Quiet(nn.Sequential):
    """Two layers, of which the first says a thousandth of what the second does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 8), nn.Linear(8, 4))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 4) of points (B, 16)."""
        return self[1](1 + 1e-3 * self[0](points))


def test_a_small_parameters_gradient_is_held_too():
    """It is nothing beside the whole gradient, and yet Adam would move it by all of its rate."""

    def left_out(model, optimizer, batch):
        optimizer.zero_grad()
        tiny.loss_fn(model, batch).backward()
        grads = [float(p.grad.norm()) for p in model.parameters()]
        assert step_check._SMALL * LIMIT < grads[1] / max(grads) < LIMIT
        model[0].bias.grad = None
        optimizer.step()

    changes = {"make_model": Quiet, "make_optimizer": tiny.make_optimizer}
    check(stepping(), **changes)
    refused(left_out, "step.gradient_differs", **changes)


def twice_as_fast(model, optimizer, batch):
    for group in optimizer.param_groups:
        group["lr"] = 2 * optimizer.defaults["lr"]
    stepping()(model, optimizer, batch)


def by_a_schedule(model, optimizer, batch):
    stepping()(model, optimizer, batch)
    for group in optimizer.param_groups:
        group["lr"] *= 0.99


def one_group_faster(model, optimizer, batch):
    if len(optimizer.param_groups) == 1:
        (group,) = optimizer.param_groups
        group["params"], last = group["params"][:-1], group["params"][-1]
        optimizer.add_param_group({"params": [last], "lr": 3 * group["lr"]})
    stepping()(model, optimizer, batch)


def decaying_by_hand(model, optimizer, batch):
    stepping()(model, optimizer, batch)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.999)


def forgetting(model, optimizer, batch):
    optimizer.state.clear()
    stepping()(model, optimizer, batch)


def averaging(model, optimizer, batch):
    before = [p.detach().clone() for p in model.parameters()]
    stepping()(model, optimizer, batch)
    with torch.no_grad():
        for p, old in zip(model.parameters(), before, strict=True):
            p.lerp_(old, 0.1)


OTHER_STEPS = [twice_as_fast, by_a_schedule, one_group_faster, decaying_by_hand, forgetting, averaging]


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("make_optimizer", [momentum, tiny.make_optimizer], ids=["momentum", "adamw"])
@pytest.mark.parametrize("step", OTHER_STEPS)
def test_an_optimizer_that_moves_the_weights_otherwise_is_refused(step, make_optimizer):
    refused(step, "step.weights_differ", make_optimizer=make_optimizer)


def stepping_twice(model, optimizer, batch):
    stepping()(model, optimizer, batch)
    optimizer.step()


def a_step_per_half(model, optimizer, batch):
    for half in zip(*(column.chunk(2) for column in batch), strict=True):
        stepping()(model, optimizer, half)


@both_optimizers
@pytest.mark.parametrize("step", [stepping_twice, a_step_per_half])
def test_another_number_of_steps_is_refused(step, make_optimizer):
    error = refused(step, "step.count_differs", make_optimizer=make_optimizer)
    assert "4 optimizer steps in 2 windows" in error.problem


@both_optimizers
def test_steps_taken_every_other_batch_are_refused(make_optimizer):
    calls = []

    def step(model, optimizer, batch):
        calls.append(batch)
        (tiny.loss_fn(model, batch) / 2).backward()
        if len(calls) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()

    error = refused(step, "step.count_differs", make_optimizer=make_optimizer)
    assert "1 optimizer steps in 2 windows" in error.problem


class Reader(nn.Module):
    """An attention, whose key bias has no gradient but rounding: it adds one number to all that a softmax compares."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (B, T, 16) of tokens (B, T)."""
        x = self.embedding(tokens)
        return self.head(4 * self.attention(x, x, x, need_weights=False)[0])


def next_token(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def accumulating(weights: tuple[float, ...], rows: tuple[int, ...] = (8, 8, 8, 8)):
    """Return a step over micro-batches of so many rows, their mean losses weighted."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        for weight, piece in zip(weights, zip(*(column.split(rows) for column in batch), strict=True), strict=True):
            (weight * next_token(model, piece)).backward()
        optimizer.step()

    return step


def text() -> TaskData:
    tokens = torch.randint(0, 16, (128, 17), generator=torch.Generator().manual_seed(0))
    columns = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    return TaskData(columns, (columns,), DataSource("random tokens", "made here", "0" * 64))


reader = replace(tiny, make_model=Reader, loss_fn=next_token, batch_size=32)


def test_accumulation_is_no_other_maths():
    # Adam moves the key bias by its whole rate, in whichever direction rounding says: the weights do part.
    def adamw(model):  # its eps below any rounding: at 1e-8 how far they part would depend on the machine
        return torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-15)

    its = replace(reader, step=accumulating((0.25,) * 4), make_optimizer=adamw, load_data=text)
    own = TaskLoops(its)
    ours, theirs = (
        step_check._trained(own.setup, "task", lambda loop, step=step: replace(loop, step=step), (), is_quiet=False)
        for step in (None, own.setup(0).step)
    )
    assert step_check._difference(ours, theirs).weights > 10 * LIMIT, "nothing is shown"
    check_task(its)
    check_task(replace(its, step=accumulating((0.5, 0.375, 0.125), (16, 12, 4)), make_optimizer=reader.make_optimizer))


@both_optimizers
@pytest.mark.parametrize(
    "step",
    [accumulating((1.0,) * 4), accumulating((1 / 3,) * 3, (16, 12, 4)), accumulating((0.25,) * 3 + (0.26,))],
    ids=["undivided", "a mean of unequal means", "one weight wrong"],
)
def test_accumulation_weighted_wrongly_is_refused(step, make_optimizer):
    with raises(ValueGivenError, code="step.gradient_differs", field="step"):
        check_task(replace(reader, step=step, make_optimizer=make_optimizer, load_data=text))


def by_closure(factor):
    def step(model, optimizer, batch):
        def closure():
            optimizer.zero_grad()
            loss = factor * tiny.loss_fn(model, batch)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step


def by_hand(factor):
    def step(model, optimizer, batch):
        model.zero_grad()
        tiny.loss_fn(model, batch).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(factor * 0.1 * p.grad)

    return step


@pytest.mark.parametrize("make_step", [by_closure, by_hand])
def test_a_step_whose_gradients_are_not_seen_is_held_by_its_weights(make_step):
    check(make_step(1.0))
    refused(make_step(1.01), "step.weights_differ")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
def test_a_loss_scalers_step_is_held_by_its_true_gradient(overflows, fused):
    """A fused step sees its gradients scaled, and is called for those that overflowed too: here the first batch's."""
    first = next(load_data().batches(PLANNING_SEED, BATCH_SIZE))[0]

    def loss_fn(model, batch):
        return tiny.loss_fn(model, batch) * (1e30 if overflows and torch.equal(batch[0], first) else 1.0)

    def scaling(factor):
        scaler = torch.amp.GradScaler("cpu")

        def step(model, optimizer, batch):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = factor * loss_fn(model, batch)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        return step

    def adamw(model):
        return torch.optim.AdamW(model.parameters(), fused=fused)

    changes = {"reference": Reference("fp16"), "make_optimizer": adamw, "loss_fn": loss_fn}
    check(scaling(1.0), **changes)
    refused(scaling(1.01), "step.gradient_differs", **changes)


class Branches(nn.Module):
    """Two layers of which a batch takes one, by its first label: the other has no gradient, and is not to move."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
        self.calls = 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Return logits (B, 4) of points (B, 16)."""
        self.calls += 1
        return self.layers[self.calls % 2](points)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_parameter_without_a_gradient_does_not_move(to_none):
    """Zeroed in place of dropped, its gradient would have its moments go on."""

    def step(model, optimizer, batch):
        optimizer.zero_grad(set_to_none=to_none)
        tiny.loss_fn(model, batch).backward()
        optimizer.step()

    changes = {"make_model": Branches, "make_optimizer": tiny.make_optimizer}
    if to_none:
        check(step, **changes)
    else:
        refused(step, "step.weights_differ", **changes)


def test_a_step_that_strays_by_itself_is_not_blamed():
    # Noise of its own, as of atomic additions, is what it is held against then.
    def step(model, optimizer, batch):
        stepping()(model, optimizer, batch)
        with torch.no_grad():
            model[0].weight.add_(0.001 * torch.randn(model[0].weight.shape, generator=noise))

    noise = torch.Generator().manual_seed(5)
    check(step)

    # Gradients in double precision, weights as they were.
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        (tiny.loss_fn(model, batch) / 3).backward()
        for parameter in model.parameters():
            parameter.grad.mul_(3)
        optimizer.step()

    check(step)


def test_a_gradient_that_strays_by_itself_is_not_blamed_and_excuses_nothing_else():
    def step(model, optimizer, batch):
        optimizer.zero_grad()
        tiny.loss_fn(model, batch).backward()
        for p in model.parameters():
            p.grad.mul_(1 + 0.01 * torch.randn((), generator=noise))
        optimizer.step()

    def by_another_rate(model, optimizer, batch):
        for group in optimizer.param_groups:
            group["lr"] = 1.01 * optimizer.defaults["lr"]
        step(model, optimizer, batch)

    noise = torch.Generator().manual_seed(5)
    check(step)
    refused(by_another_rate, "step.weights_differ")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_on_the_optimizers(fails):
    def step(model, optimizer, batch):
        if fails:
            raise ZeroDivisionError
        stepping()(model, optimizer, batch)

    def noted(model):
        made.append(sgd(model))
        return made[-1]

    made = []
    try:
        check(step, make_optimizer=noted)
    except LoopError:
        assert fails
    assert made
    assert not any(optimizer._optimizer_step_pre_hooks for optimizer in made)


def test_the_process_is_left_as_it_was_and_an_error_is_named():
    before = torch.get_rng_state()
    check(stepping())
    assert torch.equal(torch.get_rng_state(), before)

    def step(model, optimizer, batch):
        raise ZeroDivisionError("by nothing")

    with raises(LoopError, code="baseline.failed", field="tiny"):
        check(step)
    with raises(ValueGivenError, code="step.weights_differ", field="step"):
        check(lambda model, optimizer, batch: None)


def test_a_step_that_draws_other_masks_of_dropout_is_held_without_them():
    def halves(model, optimizer, batch):
        optimizer.zero_grad()
        for half in zip(*(column.chunk(2) for column in batch), strict=True):
            (tiny.loss_fn(model, half) / 2).backward()
        optimizer.step()

    check(halves)
