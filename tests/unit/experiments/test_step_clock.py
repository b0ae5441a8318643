"""The clock of phases on real models: phases add up to the step, and what takes long is found where it is."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from call_counts import OutOfReach
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from trimtab.core.recompute_schedule import read_schedule
from trimtab.experiments import phases
from trimtab.experiments.phases import StepClock
from trimtab.losses import Summed, mean_of
from trimtab.measure.blocks import find_blocks, find_parts
from trimtab.measure.memory_trace import trace_work
from trimtab.tasks.models.gpt import GPT, GPTShape
from trimtab.tasks.models.resnet import ResNet
from trimtab.techniques.activation_checkpointing import use_schedule

CPU = torch.device("cpu")
STEPS = 3


def gpt():
    torch.manual_seed(0)
    model = GPT(GPTShape(vocab_size=64, context=32, num_layers=3, num_heads=2, width=32, dropout=0.1))
    return model, (torch.randint(0, 64, (8, 32)), torch.randint(0, 64, (8, 32)))


def cnn():
    torch.manual_seed(0)
    return ResNet(width=8, depths=(1, 1), in_channels=1, num_classes=4), (torch.randn(8, 1, 8, 8), torch.arange(8) % 4)


def loss_of(model, batch):
    return Summed(*model(*batch)) if isinstance(model, GPT) else F.cross_entropy(model(batch[0]), batch[1])


class Loop:
    """A plain loop, clocked."""

    def __init__(self, model, batch, loss_fn=loss_of, **how) -> None:
        self.model, self.batch, self.loss_fn = model, batch, loss_fn
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.clock = StepClock(how.pop("device", CPU), **how)

    def step(self) -> None:
        with self.clock.phase("data"):
            batch = self.batch() if callable(self.batch) else self.batch
        self.optimizer.zero_grad()
        result = self.clock.forward(self.loss_fn, self.model, batch)
        mean_of(result).backward()
        self.optimizer.step()

    def clocked(self, *, parts=True, steps=STEPS) -> tuple[dict, float]:
        """Return seconds by label of some steps, and those that they took by another clock."""
        self.step()
        with self.clock.on(self.model, parts=parts):
            start = time.perf_counter()
            for _ in range(steps):
                self.step()
            whole_s = time.perf_counter() - start
        return self.clock.seconds(), whole_s


def by_phase(seconds) -> dict[str, float]:
    found = Counter()
    for (phase, _), each in seconds.items():
        found[phase] += each
    return dict(found)


@pytest.mark.parametrize("make", [gpt, cnn])
def test_phases_add_up_to_the_step(make):
    """To a hundredth: what is not clocked is nothing but the two readings themselves."""
    seconds, whole_s = Loop(*make()).clocked()
    assert set(by_phase(seconds)) == {"data", "forward", "backward", "optimizer", "rest"}
    assert all(each >= 0 for each in seconds.values())
    assert math.fsum(seconds.values()) == pytest.approx(whole_s, rel=0.01, abs=2e-3)


def test_the_clock_changes_no_number_and_nothing_stays_on_what_was_clocked():
    model, batch = gpt()
    loop = Loop(model, batch)
    loop.clocked()
    hooks = [each for m in model.modules() for each in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]
    assert hooks == []
    before = loop.clock.seconds()
    loop.step()
    assert loop.clock.seconds() == before
    losses = []
    for is_clocked in (False, True):
        loop = Loop(*gpt())
        torch.manual_seed(1)
        loop.clocked() if is_clocked else [loop.step() for _ in range(1 + STEPS)]
        losses.append([p.detach().clone() for p in loop.model.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*losses, strict=True))


def test_forward_and_backward_are_told_apart_by_class_of_module():
    for make, expected in ((gpt, {"Attention", "Linear", "LayerNorm", "Embedding"}), (cnn, {"Conv2d", "BatchNorm2d"})):
        seconds, _ = Loop(*make()).clocked()
        for phase in ("forward", "backward"):
            assert expected <= {part for name, part in seconds if name == phase}
    model = nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Tanh(), nn.Linear(4, 1))
    seconds, _ = Loop(model, torch.randn(8, 4), lambda m, x: m(x).mean()).clocked()
    assert ("forward", "Identity") in seconds
    assert {part for name, part in seconds if name == "backward"} == {"", "Linear", "Tanh"}


class Slow(nn.Module):
    """Passes on, slowly: forward, or backward."""

    def __init__(self, wait) -> None:
        super().__init__()
        self.linear, self.wait = nn.Linear(4, 4), wait

    def forward(self, x):
        return Waits.apply(self.linear(x), self.wait)


class Waits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        ctx.save_for_backward(x)  # a forward that is run again ends with the last tensor that is needed
        wait("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _ = ctx.saved_tensors
        ctx.wait("backward")
        return gradient, None


class Time:
    """A clock that only those who wait move on; recomputation does not reach it."""

    def __init__(self, monkeypatch) -> None:
        self._kept = OutOfReach(now=0.0)
        self.now = 0.0
        monkeypatch.setattr(phases, "time", SimpleNamespace(perf_counter=lambda: self.now))

    @property
    def now(self) -> float:
        return self._kept.held.now

    @now.setter
    def now(self, seconds: float) -> None:
        self._kept.held.now = seconds

    def waits(self, name: str, wanted: str, seconds: float) -> None:
        self.now += seconds if name == wanted else 0.0


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_seconds_are_where_they_were_spent(monkeypatch, phase):
    """By a planted clock: all seconds are those of one module's forward or backward."""
    clock = Time(monkeypatch)
    model = nn.Sequential(nn.Linear(4, 4), Slow(lambda name: clock.waits(name, phase, 0.5)), nn.Linear(4, 1))
    seconds, _ = Loop(model, torch.randn(8, 4), lambda m, x: m(x).mean()).clocked()
    assert {label: each for label, each in seconds.items() if each} == {(phase, "Slow"): pytest.approx(0.5 * STEPS)}


def test_a_slow_loader_is_found_as_data(monkeypatch):
    clock, (model, batch) = Time(monkeypatch), cnn()

    def draw():
        clock.now += 0.25
        return batch

    seconds, _ = Loop(model, draw).clocked()
    assert {label: each for label, each in seconds.items() if each} == {("data", ""): pytest.approx(0.25 * STEPS)}


def slow_stack(clock):
    return nn.Sequential(*(Slow(lambda name: clock.waits(name, "forward", 0.5)) for _ in range(3)))


@pytest.mark.parametrize(
    ("schedule", "forwards"), [("0-2", 0), ("(0) 1-2", 1), ("(0) (1) 2", 2), ("(0-1) 2", 2), ("((0) 1) 2", 3)]
)
def test_what_is_computed_again_is_found(monkeypatch, schedule, forwards):
    """Half a second for every forward that a backward runs again; a nested one is run twice."""
    clock = Time(monkeypatch)
    model = slow_stack(clock)
    loop = Loop(model, torch.randn(8, 4), lambda m, x: m(x).mean())
    undo = use_schedule(model, find_blocks(model), read_schedule(schedule))
    found = by_phase(loop.clocked()[0])
    undo()
    assert found["forward"] == pytest.approx(1.5 * STEPS)
    assert found.get("recompute", 0.0) == pytest.approx(0.5 * forwards * STEPS)
    assert found["backward"] == pytest.approx(0.0)


def test_a_models_own_checkpointing_is_found_by_its_modules(monkeypatch):
    clock = Time(monkeypatch)
    model = slow_stack(clock)
    seconds, _ = Loop(
        model,
        torch.randn(8, 4, requires_grad=True),
        lambda m, x: m[2](checkpoint(m[1], m[0](x), use_reentrant=False)).mean(),
    ).clocked()
    assert by_phase(seconds)["recompute"] == pytest.approx(0.5 * STEPS)


@pytest.mark.parametrize("schedule", ["(0) (1) 2", "~0-2", "(0-1) 2"])
def test_phases_add_up_where_blocks_of_a_gpt_are_computed_again(schedule):
    model, batch = gpt()
    loop = Loop(model, batch)
    undo = use_schedule(model, find_blocks(model), read_schedule(schedule))
    seconds, whole_s = loop.clocked()
    undo()
    assert by_phase(seconds)["recompute"] > 0
    assert math.fsum(seconds.values()) == pytest.approx(whole_s, rel=0.01, abs=2e-3)


def test_a_forward_that_raises_leaves_the_clock_in_order():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 1))
    loop = Loop(model, torch.randn(8, 4), lambda m, x: m(x).mean())
    with pytest.raises(RuntimeError, match="shapes"), loop.clock.on(model):
        loop.step()
    model[1] = nn.Linear(4, 1)
    seconds, whole_s = loop.clocked()
    assert math.fsum(seconds.values()) == pytest.approx(whole_s, rel=0.01, abs=2e-3)
    assert all(not m._forward_hooks for m in model.modules())


def test_what_a_reduction_waits_for_after_the_backward_is_communication(monkeypatch):
    """As DDP does it: a callback of its own, queued amid the backward, waits for what was sent."""
    clock = Time(monkeypatch)
    model = nn.Linear(4, 1)

    def reduces(_):
        phases._queue_callback(lambda: clock.waits("wait", "wait", 0.5))

    model.weight.register_post_accumulate_grad_hook(reduces)
    for waits, expected in ((True, "communication"), (False, "rest")):
        seconds, _ = Loop(model, torch.randn(8, 4), lambda m, x: m(x).mean(), waits=waits).clocked()
        found = {name: each for name, each in by_phase(seconds).items() if each}
        assert found == {expected: pytest.approx(0.5 * STEPS)}


class Passed(torch.cuda.Event):
    """An event of a stream that is ten milliseconds further on at each."""

    recorded = itertools.count()
    waited = 0

    def __new__(cls):
        return object.__new__(cls)

    def __init__(self) -> None:
        self.at = next(self.recorded)

    def elapsed_time(self, other) -> float:
        return 10.0 * (other.at - self.at)

    def synchronize(self) -> None:
        type(self).waited += 1


def test_on_cuda_events_are_read_once_they_have_passed(monkeypatch):
    monkeypatch.setattr(phases, "stamp", lambda device: Passed())
    told = "the host's clock is that of enqueueing"
    monkeypatch.setattr(phases.time, "perf_counter", lambda: pytest.fail(told))
    loop = Loop(*cnn(), device=torch.device("cuda"))
    with loop.clock.on(loop.model):
        loop.step()
    assert Passed.waited == 0
    seconds = loop.clock.seconds()
    assert Passed.waited == 1
    count = len(loop.clock._readings)
    assert math.fsum(seconds.values()) == pytest.approx(0.01 * (count - 1))


def test_parts_and_work_are_what_the_shapes_say():
    model, _ = gpt()
    kinds = Counter(type(part).__name__ for part in find_parts(model))
    assert kinds["Block"] == kinds["Attention"] == 3
    assert (kinds["Linear"], kinds["LayerNorm"], kinds["Embedding"], kinds["LossHead"]) == (6, 7, 2, 1)
    assert not {"ModuleList", "GPT"} & set(kinds)
    # Of a linear layer of 4 to 3 on 8 rows: 2*8*4*3 FLOP forward, as many for its weight's gradient.
    model = nn.Linear(4, 3, bias=False)
    work = trace_work(model, torch.optim.SGD(model.parameters()), lambda m, x: m(x).sum(), torch.randn(8, 4))
    flops = {phase: sum(each[1] for each in seen) for phase, seen in work.items()}
    assert flops == {"forward": 192.0, "backward": 192.0, "optimizer": 0.0}
    assert sum(moved for *_, moved in work["optimizer"]) >= 2 * 4 * 12
