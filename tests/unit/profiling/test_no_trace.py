"""plan() and profile() leave every bit as they found it: after success, a candidate's failure, or an error."""

from __future__ import annotations

import contextlib
import random

import brief
import numpy
import pytest
import torch
from call_counts import OutOfReach
from state_digest import fingerprint
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import trimtab
from trimtab.core.errors import InfeasibleError
from trimtab.measure import machine
from trimtab.profiling import trials
from trimtab.state.loop_state import LoopState

pytestmark = pytest.mark.slow

ROWS = 6


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Blocks of one step, and a machine on which bf16 is worth a try: every candidate runs."""
    brief.shorten(monkeypatch.setattr)
    monkeypatch.setattr(trials, "BLOCK_S", 1e-6)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 2e9, "fp16": 1e6})
    yield
    torch.set_grad_enabled(True)


class Dense(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.body(x)


class Normalised(nn.Module):
    """Convolutions, batch statistics, and a buffer whose rows share memory."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1)
        self.register_buffer("shared", torch.ones(1, 3).expand(5, 3))

    def forward(self, x):
        return self.second(torch.tanh(self.norm(self.first(x.reshape(-1, 1, 2, 2))))).flatten(1)


class Spectral(Dense):
    def __init__(self):
        super().__init__()
        spectral_norm(self.body[0])


class Remembering(Dense):
    """What modules do to themselves in a forward: count, cache, switch on, and put a new tensor in a buffer's place."""

    def __init__(self):
        super().__init__()
        self.calls = 0
        self.cached = None
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("lazy", None)

    def forward(self, x):
        self.calls += 1
        self.cached = self.late = x.shape
        out = self.body(x)
        self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        self.lazy = torch.ones(2)
        return out


def random_loss(model, batch):
    """Draws from every random generator there is."""
    noise = random.random() + numpy.random.rand() + float(torch.rand(()))
    return nn.functional.cross_entropy(model(batch[0]) * (1 + noise), batch[1])


OPTIMIZERS = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}
MODELS = [Dense, Normalised, Spectral, Remembering]


def loop(model=Dense, optimizer="sgd with momentum", steps=2, leftover=True):
    """A loop in the middle of training, or before its first step, with a gradient left over."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    made = model()
    chosen = OPTIMIZERS[optimizer](made.parameters())
    batch = torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))
    for _ in range(steps):
        chosen.zero_grad()
        random_loss(made, batch).backward()
        chosen.step()
    if leftover:
        random_loss(made, batch).backward()
    return made, chosen, batch


def members(model):
    """What hangs on each module, by identity where it is a tensor."""
    return [
        (name, {k: id(v) for k, v in [*m._parameters.items(), *m._buffers.items()]}, sorted(vars(m)))
        for name, m in model.named_modules()
    ]


@pytest.mark.parametrize(
    ("model", "optimizer"), [*((model, "adamw") for model in MODELS), *((Dense, name) for name in OPTIMIZERS)]
)
def test_a_loop_in_the_middle_of_training_is_left_as_found(model, optimizer):
    made, chosen, batch = loop(model, optimizer)
    before, there = fingerprint(made, chosen), members(made)
    trimtab.plan(made, chosen, random_loss, batch, num_blocks=3)
    assert fingerprint(made, chosen) == before
    assert members(made) == there


@pytest.mark.parametrize("model", [Normalised, Remembering])
@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_loop_before_its_first_step_is_left_as_found(model, is_evaluated):
    made, chosen, batch = loop(model, steps=0, leftover=False)
    made.train(not is_evaluated)
    before, there = fingerprint(made, chosen), members(made)
    with pytest.warns(UserWarning, match=r"Call model\.train\(\)") if is_evaluated else contextlib.nullcontext():
        trimtab.profile(made, chosen, random_loss, batch, num_blocks=3)
    assert fingerprint(made, chosen) == before
    assert members(made) == there
    assert not chosen.state
    assert made.training is not is_evaluated


def test_training_goes_on_as_if_there_had_been_no_plan():
    weights = []
    for planned in (False, True):
        made, chosen, batch = loop(Normalised, "adamw", leftover=False)
        if planned:
            trimtab.plan(made, chosen, random_loss, batch, num_blocks=3)
        for _ in range(3):
            chosen.zero_grad()
            random_loss(made, batch).backward()
            chosen.step()
        weights.append([value.clone() for value in made.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


class Failing:
    """A loss that raises on its n-th call, counted over all trials, where planning reaches and restores nothing."""

    def __init__(self, n, error=FloatingPointError):
        self.n, self.error, self.calls = n, error, OutOfReach(number=0)

    def __call__(self, model, batch):
        self.calls.held.number += 1
        number = self.calls.held.number
        loss = random_loss(model, batch)
        if number == self.n:
            raise self.error("the n-th call")
        return loss


def test_a_loss_that_fails_on_any_call_leaves_no_trace():
    made, chosen, batch = loop(Normalised)
    before, there = fingerprint(made, chosen), members(made)
    counting = Failing(-1)
    trimtab.plan(made, chosen, counting, batch, num_blocks=3)
    total, outcomes = counting.calls.held.number, set()
    for n in (*range(1, 10, 2), *range(10, total, total // 5), total):
        try:
            trimtab.plan(made, chosen, Failing(n), batch, num_blocks=3)
            outcomes.add("planned")
        except InfeasibleError:  # it was the reference's own warm-up in the last stage
            outcomes.add("no plan")
        assert fingerprint(made, chosen) == before, f"call {n}"
        assert members(made) == there, f"call {n}"
    assert "planned" in outcomes


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
@pytest.mark.parametrize("n", [1, 12])
def test_an_interruption_leaves_no_trace_and_is_passed_on(error, n):
    made, chosen, batch = loop(Normalised)
    before = fingerprint(made, chosen)
    try:
        trimtab.plan(made, chosen, Failing(n, error), batch, num_blocks=3)
    except error:
        passed_on = True
    except InfeasibleError as infeasible:
        passed_on = error is MemoryError and "failed in a trial" in str(infeasible)  # the reference's own
    else:
        passed_on = error is MemoryError  # in a trial, a candidate's own failure
    assert passed_on
    assert fingerprint(made, chosen) == before


def no_kernel(loss):
    raise RuntimeError("no kernel for BFloat16")


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (no_kernel, "RuntimeError: no kernel for BFloat16"),
        (lambda loss: loss * float("nan"), "the loss is NaN or infinite"),
    ],
)
def test_a_candidate_that_cannot_train_is_a_loser_with_its_reason_and_leaves_no_trace(spoiled, reason):
    def in_fp32_alone(model, batch):
        loss = random_loss(model, batch)
        return spoiled(loss) if torch.is_autocast_enabled("cpu") else loss

    made, chosen, batch = loop()
    before = fingerprint(made, chosen)
    plan = trimtab.plan(made, chosen, in_fp32_alone, batch, num_blocks=3)
    assert fingerprint(made, chosen) == before
    assert plan.precision.value == "fp32"
    assert {r.value: r.reason for r in plan.precision.rejected}["bf16"] == reason


@pytest.mark.parametrize("fails_at", [None, 3, 20])
def test_the_range_test_leaves_no_trace(fails_at):
    made, chosen, batch = loop(Normalised, "adamw")
    before = fingerprint(made, chosen)
    seen = []

    def data():
        for index in range(30):
            if index == fails_at:
                raise OSError("the loader's own")
            seen.append(index)
            yield batch

    try:
        plan = trimtab.plan(made, chosen, random_loss, batch, num_blocks=3, adapt="learning_rate", data=data())
        assert plan.plan_kind == "tuned"
    except OSError:
        assert len(seen) == fails_at
    assert seen
    assert fingerprint(made, chosen) == before


# The snapshot itself.


def wreck(made, chosen):
    """Change all a trial may change."""
    for p in made.parameters():
        p.data = torch.randn(p.shape[::-1]).permute(*reversed(range(p.dim())))
        p.grad = torch.ones_like(p)
    for module in made.modules():
        module.train(not module.training)
    chosen.state.clear()
    for group in chosen.param_groups:
        group.update(lr=3.0, fused=True, extra=1)
    torch.rand(3), random.random(), numpy.random.rand()
    torch.set_grad_enabled(False)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", MODELS)
def test_a_snapshot_puts_back_what_was_wrecked_again_and_again(model, optimizer):
    made, chosen, batch = loop(model, optimizer)
    before, there = fingerprint(made, chosen), members(made)
    snapshot = LoopState(made, chosen)
    for _ in range(2):
        random_loss(made, batch)
        wreck(made, chosen)
        assert fingerprint(made, chosen) != before
        snapshot.restore()
        assert fingerprint(made, chosen) == before
        assert members(made) == there
    assert torch.is_grad_enabled()


CHANGES = {
    "a weight": lambda m, o: m.body[0].weight.data.view(-1)[3].add_(1e-6),
    "a gradient": lambda m, o: m.body[0].weight.grad.view(-1)[3].add_(1e-6),
    "no gradient": lambda m, o: o.zero_grad(),
    "a layout": lambda m, o: setattr(m.body[0].weight, "data", m.body[0].weight.data.t().contiguous().t()),
    "frozen": lambda m, o: m.body[0].requires_grad_(False),
    "a momentum": lambda m, o: next(iter(o.state.values()))["momentum_buffer"].add_(1e-6),
    "a rate": lambda m, o: o.param_groups[0].update(lr=0.2),
    "a mode": lambda m, o: m.body[1].eval(),
    "torch's generator": lambda m, o: torch.rand(1),
    "python's generator": lambda m, o: random.random(),
    "numpy's generator": lambda m, o: numpy.random.rand(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fingerprint_sees_any_change(change):
    made, chosen, _ = loop()
    before = fingerprint(made, chosen)
    assert fingerprint(made, chosen) == before
    change(made, chosen)
    assert fingerprint(made, chosen) != before


class Carrying:
    """A loss that carries a state from one batch to the next, in the type that the last forward had."""

    def __init__(self):
        self.state = None

    def __call__(self, model, batch):
        output = model(batch)
        before = output.detach().mean(0) if self.state is None else self.state
        assert before.dtype == output.dtype, "the state of another precision's trial"
        self.state = output.detach().mean(0)
        return (output - before + 1).float().square().mean()


def test_a_trial_does_not_begin_with_what_another_left_in_the_loss(monkeypatch):
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 2e9, "fp16": 2e9})
    model, loss_fn = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)), Carrying()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    reference = trimtab.Reference("bf16")
    found = trimtab.profile(model, optimizer, loss_fn, torch.randn(8, 6), reference=reference, num_blocks=3)
    tried = [trial for trial in found.trials if trial.candidate == found.reference_candidate]
    assert tried
    assert {trial.error for trial in tried} == {None}
    assert loss_fn.state is None
