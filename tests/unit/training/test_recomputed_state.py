"""A recomputed block sees the state of its first forward, and changes nothing twice; else it is refused by name."""

from __future__ import annotations

import array
import collections
import contextvars
import itertools
import multiprocessing
import random
import threading

import numpy
import pytest
import torch
from raising import raises
from small_loops import sgd, train_plainly
from small_loops import trained as train_by_plan
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call

import trimtab
from trimtab.core.errors import ModelError
from trimtab.core.recompute_schedule import schedule_of
from trimtab.techniques.activation_checkpointing import use_schedule

L = 3
BAG, NOTES = [], {}
CALLS = 0


class Block(nn.Module):
    """What a block does with its input besides a layer is `extra`."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        return torch.tanh(self.linear(x * self.factor(x)))

    def factor(self, x):
        return 1.0


def kind(name, factor=Block.factor, forward=Block.forward, **state):
    """A class of blocks with attributes made by functions, and with its own factor or forward."""

    def __init__(self):
        Block.__init__(self)
        for attribute, make in state.items():
            setattr(self, attribute, make())

    return type(name, (Block,), {"__init__": __init__, "factor": factor, "forward": forward})


SHARED = numpy.random.default_rng(3)
OwnRandom = kind("OwnRandom", lambda self, x: 1 + self.random.random(), random=lambda: random.Random(1))


def drops_itself_at_random(self, x):
    """Not seen in the first two forwards, which are compared."""
    self.calls += 1
    return x if self.calls > 2 and random.random() < 0.5 else Block.forward(self, x)


StochasticDepth = kind("StochasticDepth", forward=drops_itself_at_random, calls=int)


def counts(self, x):
    self.calls += 1
    return 1 / self.calls


Counting = kind("Counting", counts, calls=int)


def counts_globally(self, x):
    global CALLS
    CALLS += 1
    return 1 / CALLS


def counts_in_an_object(self, x):
    self.stats.calls += 1
    return 1 / self.stats.calls


class CountingInTheClass(Block):
    number = 0

    def factor(self, x):
        CountingInTheClass.number += 1
        return 1 / CountingInTheClass.number


def counts_in_arrays(self, x):
    self.numbers[0] += 1
    self.shared.value += 1
    return 1 / (self.numbers[0] + self.shared.value)


def thread_local():
    place = threading.local()
    place.calls = 0
    return place


def sets_an_attribute(self, x):
    y = Block.forward(self, x)
    self.aux_loss = y.square().mean()
    return y


def fills_a_list(self, x):
    y = self.linear(x)
    BAG.append(y.square().mean())
    return torch.tanh(y)


def fills_a_dict(self, x):
    y = Block.forward(self, x)
    NOTES[len(NOTES)] = y.square().mean()
    return y


def reads_past_values(self, x):
    self.past.append(x.detach().mean())
    self.past = self.past[-3:]
    return 1 + torch.stack(self.past).mean()


def replaces_its_bank(self, x):
    self.bank = 0.9 * self.bank + x.detach().mean(0)
    return 1 + self.bank


def counts_in_a_table(self, x):
    self.table[1] += 1
    return 1 + self.table[1]


def in_some_calls(change):
    """A factor that changes something in calls 3, 6, 9, ... only: calls that are not watched."""

    def factor(self, x):
        self.calls += 1
        return 1.0 if self.calls % 3 else change(self, x)

    return factor


def appends(self, x):
    self.past.append(self.calls)
    return 1 + sum(self.past) / 100


class StatisticsInSomeCalls(Block):
    """Batch statistics move without a new version of their tensors."""

    def __init__(self):
        super().__init__()
        self.calls, self.norm = 0, nn.BatchNorm1d(6)
        self.bank = self.norm.running_mean

    factor = in_some_calls(lambda self, x: 1 + self.norm(x))


Filling, Auxiliary = kind("Filling", forward=fills_a_list), kind("Auxiliary", forward=sets_an_attribute)
TensorInSomeCalls = kind(
    *("TensorInSomeCalls", in_some_calls(lambda self, x: 1 + self.held[0].add_(1))),
    calls=int,
    held=lambda: [torch.zeros(6)],
)
PythonRandom = kind("PythonRandom", lambda self, x: 1 + random.random())


def loss_fn(model, x):
    loss = model(x).square().mean()
    loss = loss + sum(block.aux_loss for block in model if hasattr(block, "aux_loss"))
    loss = loss + sum(BAG) + sum(NOTES.values())
    BAG.clear()
    NOTES.clear()
    return loss


def begin():
    global CALLS
    CALLS = CountingInTheClass.number = 0
    random.seed(5)
    numpy.random.seed(5)
    torch.manual_seed(5)
    SHARED.bit_generator.state = numpy.random.default_rng(3).bit_generator.state
    BAG.clear()
    NOTES.clear()


def batches(number=5):
    return [torch.randn(8, 6, generator=torch.Generator().manual_seed(index)) for index in range(number)]


def trained(kind, schedule, micro_batch=8, loss=loss_fn):
    """Return weights after a few steps, the numbers that generators draw next, and what the blocks hold."""
    begin()
    model = nn.Sequential(*(kind() for _ in range(L)))
    optimizer = sgd(model)
    plan = trimtab.Plan.fixed(8, micro_batch, recompute="every_block" if schedule else None)
    if schedule == "(0-2)":
        plan = plan.recomputing(schedule, ("0", "1", "2"), "by hand")
    train_by_plan(model, optimizer, plan, batches(), loss)
    drawn = [random.random(), numpy.random.rand(), float(torch.rand(())), SHARED.random()]
    held = [getattr(block, name, None) for block in model for name in ("calls", "bank", "past", "table")]
    drawn += [block.random.random() for block in model if hasattr(block, "random")]
    return [p.detach().clone() for p in model.parameters()], drawn, repr(held)


REPLAYED = [
    *(
        PythonRandom,
        OwnRandom,
        StochasticDepth,
        Counting,
        CountingInTheClass,
        Filling,
        Auxiliary,
        StatisticsInSomeCalls,
    ),
    kind("NumpyRandom", lambda self, x: 1 + numpy.random.rand()),
    kind(
        *("OwnTorchRandom", lambda self, x: torch.rand(x.shape, generator=self.generator)),
        generator=lambda: torch.Generator().manual_seed(1),
    ),
    kind("OwnNumpyRandom", lambda self, x: 1 + float(SHARED.normal())),
    kind("CountingGlobally", counts_globally),
    kind("CountingInAnObject", counts_in_an_object, stats=lambda: type("Stats", (), {"calls": 0})()),
    kind(
        *("CountingInAnArray", counts_in_arrays),
        numbers=lambda: array.array("d", [0.0]),
        shared=lambda: multiprocessing.Value("i", 0),
    ),
    kind("CountingInAThread", lambda self, x: counts(self.place, x), place=thread_local),
    kind("FillingADict", forward=fills_a_dict),
    kind("Caching", reads_past_values, past=list),
    kind("Rolling", replaces_its_bank, bank=lambda: torch.zeros(6)),
    kind("Table", counts_in_a_table, table=lambda: numpy.zeros(3)),
    kind(
        *("RandomInSomeCalls", in_some_calls(lambda self, x: 1 + self.random.random())),
        calls=int,
        random=lambda: random.Random(1),
    ),
    kind("FillingInSomeCalls", in_some_calls(appends), calls=int, past=list),
]


@pytest.mark.parametrize("schedule", ["every_block", "(0-2)"])
@pytest.mark.parametrize("kind", REPLAYED)
def test_training_is_the_same_as_without_recomputation(kind, schedule):
    if kind is Auxiliary and schedule != "every_block":
        pytest.skip("of a segment the loss reads an attribute before all of its blocks are called")
    (ours, drawn, held), (theirs, *others) = trained(kind, schedule), trained(kind, None)
    for left, right in zip(ours, theirs, strict=True):
        assert torch.equal(left, right)
    assert [drawn, held] == others


@pytest.mark.parametrize("kind", [PythonRandom, Counting, Filling])
def test_it_is_so_of_windows_of_several_micro_batches(kind):
    (ours, *rest), (theirs, *others) = trained(kind, "every_block", 4), trained(kind, None, 4)
    assert all(map(torch.equal, ours, theirs))
    assert rest == others


class Teacher(Block):
    """Moves a slow copy of its weight in place."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Linear(6, 6).requires_grad_(False)

    def factor(self, x):
        self.slow.weight.lerp_(self.linear.weight.detach(), 0.1)
        return 1 + self.slow(x.detach())


class QuietTeacher(Teacher):
    """As above, without a trace in the version."""

    def factor(self, x):
        self.slow.weight.data.mul_(0.9)
        return 1 + self.slow(x.detach())


class Memory(Block):
    def __init__(self):
        super().__init__()
        self.bank = torch.zeros(6)

    def factor(self, x):
        self.bank.mul_(0.9).add_(x.detach().mean(0))
        return 1 + self.bank


OUTSIDE = torch.zeros(6)


class MemoryOutside(Block):
    def factor(self, x):
        OUTSIDE.mul_(0.9).add_(x.detach().mean(0))
        return 1 + OUTSIDE


class OwnGradient(Block):
    def factor(self, x):
        self.linear.bias.square().sum().backward()
        return 1.0


REFUSED = {
    Teacher: "slow.weight", QuietTeacher: "slow.weight", Memory: "bank", MemoryOutside: "OUTSIDE",
    OwnGradient: "linear.bias",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "what"), REFUSED.items())
def test_a_change_that_would_be_made_twice_is_refused_and_undone(kind, what):
    begin()
    model = nn.Sequential(*(kind() for _ in range(L)))
    optimizer = sgd(model)
    before = repr(list(model.state_dict().items())), repr([vars(block).get("bank") for block in model]), repr(OUTSIDE)
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(8, recompute="every_block")) as run:
        with raises(ModelError, code="recompute.side_effects") as caught:
            run.train_step(run.window(batches()[0]), loss_fn)
        assert what in caught.value.got
        assert "0" in caught.value.problem
        assert run.applied_steps == 0
    after = repr(list(model.state_dict().items())), repr([vars(block).get("bank") for block in model]), repr(OUTSIDE)
    assert before == after


class LateMemory(Memory):
    """Moves its memory from the second call on."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def factor(self, x):
        self.calls += 1
        return super().factor(x) if self.calls > 1 else 1.0


def test_changes_of_tensors_that_begin_later_are_refused_when_they_begin():
    begin()
    model = nn.Sequential(*(LateMemory() for _ in range(L)))
    with trimtab.start(model, sgd(model), trimtab.Plan.fixed(8, recompute="every_block")) as run:
        run.train_step(run.window(batches()[0]), loss_fn)
        with pytest.raises(ModelError):
            run.train_step(run.window(batches()[1]), loss_fn)
    with raises(ModelError, code="recompute.side_effects"):
        trained(TensorInSomeCalls, "every_block")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's decompositions
@pytest.mark.parametrize("kind", [Block, StochasticDepth])
def test_forward_mode_differentiation_keeps_activations(kind):
    def tangents(model, x):
        with forward_ad.dual_level():
            y, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return y.square().mean() + (0.0 if tangent is None else tangent.square().mean())

    (ours, *_), (theirs, *_) = (trained(kind, schedule, loss=tangents) for schedule in ("every_block", None))
    assert all(map(torch.equal, ours, theirs))


def test_tensors_swapped_in_by_functional_call_are_recomputed_with():
    def adapted(model, x):
        """An inner step on a copy of the weights, as meta-learning takes."""
        weights = {name: p * 1.0 for name, p in model.named_parameters()}
        inner = functional_call(model, weights, (x,)).square().mean()
        gradients = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.5 * g for (name, w), g in zip(weights.items(), gradients, strict=True)}
        return (functional_call(model, moved, (x,)) - 1).square().mean()

    (ours, *_), (theirs, *_) = trained(Block, "every_block", loss=adapted), trained(Block, None, loss=adapted)
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


class Switched(Block):
    scale = 1.0

    def factor(self, x):
        return self.scale


@pytest.mark.parametrize("name", ["scale", "training"])
def test_attributes_set_between_forward_and_backward_do_not_reach_it(name):
    def loss(model, x):
        first = model(x)
        for block in model:
            setattr(block, name, 0.5 if name == "scale" else False)
        found = (first * model(x)).mean()
        for block in model:
            setattr(block, name, 1.0 if name == "scale" else True)
        return found

    class Dropping(Switched):
        def forward(self, x):
            return super().forward(nn.functional.dropout(x, 0.5, self.training))

    (ours, *_), (theirs, *_) = trained(Dropping, "every_block", loss=loss), trained(Dropping, None, loss=loss)
    assert all(map(torch.equal, ours, theirs))


def test_parameters_changed_in_place_before_the_backward_are_refused():
    begin()
    model = nn.Sequential(*(Block() for _ in range(L)))
    undo = use_schedule(model, ["0", "1", "2"], schedule_of("every_block", L))
    loss = model(batches()[0]).square().mean()
    with torch.no_grad():
        model[1].linear.bias.add_(1)  # which no backward needs, but the forward does
    with raises(ModelError, code="recompute.side_effects"):
        loss.backward()
    undo()


def test_what_was_seen_is_remembered_and_nothing_is_watched_again(monkeypatch):
    begin()
    model = nn.Sequential(*(OwnRandom() for _ in range(L)))
    names, schedule = ["0", "1", "2"], schedule_of("every_block", L)
    undo = use_schedule(model, names, schedule)
    model(batches()[0]).sum().backward()
    undo()
    model(batches()[0]).sum().backward()
    monkeypatch.setattr("trimtab.state.forward_state.is_traced", lambda modules: True)
    for block in model:
        block.random.seed(0)
    model.zero_grad()
    model(batches()[0]).sum().backward()
    theirs = [p.grad.clone() for p in model.parameters()]
    undo = use_schedule(model, names, schedule)
    for block in model:
        block.random.seed(0)
    model.zero_grad()
    model(batches()[0]).sum().backward()
    undo()
    assert all(torch.equal(p.grad, other) for p, other in zip(model.parameters(), theirs, strict=True))


@pytest.mark.parametrize("kind", [Memory, Teacher])
def test_planning_drops_recomputation_of_such_blocks_with_the_reason(kind, monkeypatch):
    begin()
    model = nn.Sequential(*(kind() for _ in range(L)))
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    plan = trimtab.plan(model, optimizer, loss_fn, batches()[0], num_blocks=3)
    assert plan.recompute.value is None


def _append(linear, x, out):
    y = torch.tanh(linear(x))
    out.append(y.square().mean())
    return y


def _set_item(linear, x, out):
    y = torch.tanh(linear(x * (1 + 0.1 * len(out))))
    out[len(out)] = y.square().mean()
    return y


def _pop(linear, x, scales):
    return torch.tanh(linear(x * scales.pop()))


class Chain(nn.Module):
    """Blocks of a forward function, all of which are given the same argument if there is one."""

    def __init__(self, forward, make_argument=None):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(OfFunction(forward) for _ in range(3))
        self.make_argument = make_argument

    def forward(self, x):
        arguments = [self.make_argument()] if self.make_argument else []
        for block in self.blocks:
            x = block(x, *arguments)
        values = [value for held in arguments for value in (held.values() if isinstance(held, dict) else held)]
        return x.square().mean() + sum(values)


class OfFunction(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x, *arguments):
        return self.function(self.linear, x, *arguments)


def whole(model, x):
    return model(x)


def rows_of_eight():
    return [torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]


def sgd_of(model):
    return sgd(model)


@pytest.mark.parametrize(
    ("forward", "make_argument"),
    [(_append, list), (_set_item, dict), (_pop, lambda: [1.0, 2.0, 3.0]), (_append, collections.deque)],
    ids=["list", "dict", "list emptied", "deque"],
)
def test_blocks_that_change_a_container_argument_train_as_without_recomputation(forward, make_argument):
    plain, ours = Chain(forward, make_argument), Chain(forward, make_argument)
    train_plainly(plain, sgd_of(plain), rows_of_eight(), whole)
    train_by_plan(ours, sgd_of(ours), trimtab.Plan.fixed(8, recompute="every_block"), rows_of_eight(), whole)
    for expected, found in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found, expected)


def _reads_an_iterator():
    numbers = itertools.count()
    return lambda linear, x: torch.tanh(linear(x * (1 + 0.1 * next(numbers))))


def _reads_a_context_variable():
    calls = contextvars.ContextVar("calls", default=0)

    def forward(linear, x):
        calls.set(calls.get() + 1)
        return torch.tanh(linear(x)) * (1 + 0.1 * calls.get())

    return forward


def _draws_from_the_system():
    source = random.SystemRandom()
    return lambda linear, x: torch.tanh(linear(x)) * (1 + source.random())


def _writes_its_argument():
    return lambda linear, x: torch.tanh(linear(x.clone())) + 0 * x.detach().mul_(1.5)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (_reads_an_iterator, "recompute.differs"),
        (_reads_a_context_variable, "recompute.differs"),
        (_draws_from_the_system, "recompute.differs"),
        (_writes_its_argument, "recompute.side_effects"),
    ],
)
def test_a_recomputation_that_cannot_be_equal_is_refused(make, code):
    model = Chain(make())
    with raises(ModelError, code=code):
        train_by_plan(model, sgd_of(model), trimtab.Plan.fixed(8, recompute="every_block"), rows_of_eight(), whole)
