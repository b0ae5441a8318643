"""Everything that a forward, a loss or a step can change is found, named by kind and path, and restored."""

from __future__ import annotations

import copy
import functools
import random
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from trimtab.state.loop_state import ChangeKind, LoopState, StateChange

CALLS = 0
BAG = []
OTHER = nn.BatchNorm1d(3)


@dataclass
class Meter:
    total: float = 0.0
    parts: list = field(default_factory=lambda: [torch.zeros(1)])


@dataclass(frozen=True)
class Frozen:
    queue: torch.Tensor


class Slotted:
    __slots__ = ("__hidden", "count", "unset")

    def __init__(self):
        self.count = 0
        self.__hidden = [1]

    def hide(self):
        self.__hidden.append(2)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.queue = torch.zeros(4, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("lazy", None)


class Model(nn.Module):
    shared = []  # noqa: RUF012
    number = 0

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.teacher = nn.Sequential(nn.Linear(3, 3)).requires_grad_(False)
        self.memory = Memory()
        self.calls, self.cache = 0, None
        self.nest = {"deep": [deque([torch.zeros(2)]), {1}]}
        self.meter, self.frozen, self.slotted = Meter(), Frozen(torch.zeros(2)), Slotted()
        self.table = numpy.zeros(3)
        self.torch_generator = torch.Generator().manual_seed(0)
        self.generators = [random.Random(0), numpy.random.default_rng(0), numpy.random.RandomState(0)]

    def forward(self, x):
        return counted(self.norm(self.body(x)))


def counted(x):
    global CALLS
    CALLS += 1
    BAG.append(1)
    return x if BAG else None


counted.calls = 0


def loss_of():
    """Return a loss with a counter in a cell, and functions that change what the loss refers to."""
    count, rest = 0, {"sum": torch.zeros(1)}
    meter = Meter()

    def loss_fn(model, batch, others=(nn.Linear(2, 2), [0])):  # noqa: B008
        nonlocal count
        count += 1
        rest["sum"] += 1
        return OTHER(model(batch["x"])).sum() + meter.total + others[1][0]

    return loss_fn


def freevar(function, name):
    return function.__closure__[function.__code__.co_freevars.index(name)]


class Loop(SimpleNamespace):
    def state(self):
        return LoopState(self.model, self.optimizer, loss_fn=self.loss_fn, batch=self.batch)


@pytest.fixture
def loop():
    torch.manual_seed(0)
    random.seed(0)
    model = Model()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)
    owned = torch.optim.Adam([model.body.bias], lr=0.1)
    model.body.bias.register_post_accumulate_grad_hook(lambda p: owned.step())
    average = AveragedModel(model.body, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model.body))
    loss_fn, batch = loss_of(), {"x": torch.randn(5, 3), "labels": [1, 2]}
    made = Loop(model=model, optimizer=optimizer, owned=owned, average=average, loss_fn=loss_fn, batch=batch)
    for _ in range(2):
        step(made)
    return made


def step(loop):
    loop.optimizer.zero_grad()
    loop.loss_fn(loop.model, loop.batch).backward()
    loop.optimizer.step()


def set_global(name, value):
    globals()[name] = value


K = ChangeKind
# By the kind that is reported: a change, and the end of the path before " in ".
CHANGES = {
    K.PARAMETER: {
        "parameter": (lambda o: o.model.body.weight.data.add_(1), "body.weight"),
        "parameter under no_grad": (lambda o: nn.init.ones_(o.model.body.bias), "body.bias"),
        "parameter's storage": (lambda o: setattr(o.model.body.weight, "data", torch.ones(3, 4)), "body.weight"),
        "parameter frozen": (lambda o: o.model.body.weight.requires_grad_(False), "body.weight"),
        "parameter replaced": (
            lambda o: setattr(o.model.body, "weight", nn.Parameter(torch.ones(3, 3))),
            "body.weight",
        ),
        "module by default": (lambda o: o.loss_fn.__defaults__[0][0].weight.data.add_(2), "default argument[0].weight"),
        "average's weights": (lambda o: o.average.module.weight.data.add_(1), "average.module.weight"),
    },
    K.ATTRIBUTE: {
        "attribute of a parameter": (lambda o: setattr(o.model.body.weight, "extra", 1), "body.weight.extra"),
        "queue": (lambda o: o.model.memory.queue[1].fill_(2), "memory.queue"),
        "queue replaced": (lambda o: setattr(o.model.memory, "queue", torch.ones(4, 3)), "memory.queue"),
        "counter": (lambda o: setattr(o.model, "calls", 5), "calls"),
        "cache": (lambda o: setattr(o.model, "cache", torch.ones(1)), "cache"),
        "attribute more": (lambda o: setattr(o.model.memory, "late", 1), "memory.late"),
        "mode": (lambda o: o.model.norm.eval(), "norm.training"),
        "array": (lambda o: o.model.table.__setitem__(1, 2.0), "table"),
        "key": (lambda o: o.model.nest.update(more=1), "nest['more']"),
        "dataclass": (lambda o: setattr(o.model.meter, "total", 1.0), "meter.total"),
        "list of a dataclass": (lambda o: o.model.meter.parts.append(1), "meter.parts"),
        "frozen dataclass": (lambda o: o.model.frozen.queue.add_(1), "frozen.queue"),
        "frozen dataclass's field": (lambda o: object.__setattr__(o.model.frozen, "queue", 1), "frozen.queue"),
        "slot": (lambda o: setattr(o.model.slotted, "count", 1), "slotted.count"),
        "unset slot": (lambda o: setattr(o.model.slotted, "unset", 1), "slotted.unset"),
        "private slot": (lambda o: o.model.slotted.hide(), "slotted._Slotted__hidden"),
    },
    K.FROZEN_PARAMETER: {
        "teacher": (lambda o: o.model.teacher[0].weight.data.mul_(0.9), "teacher.0.weight"),
        "teacher's bias": (lambda o: o.model.teacher[0].bias.lerp_(torch.ones(3), 0.5), "teacher.0.bias"),
    },
    K.BUFFER: {
        "buffer": (lambda o: o.model.norm.running_mean.add_(1), "norm.running_mean"),
        "buffer through data": (lambda o: o.model.memory.mean.data.add_(1), "memory.mean"),
        "buffer resized": (lambda o: o.model.memory.mean.resize_(900).zero_(), "memory.mean"),
        "buffer emptied": (lambda o: o.model.memory.mean.untyped_storage().resize_(0), "memory.mean"),
        "buffer grown": (lambda o: setattr(o.model.memory, "mean", torch.ones(9)), "memory.mean"),
        "buffer set late": (lambda o: setattr(o.model.memory, "lazy", torch.ones(9)), "memory.lazy"),
        "buffer registered": (lambda o: o.model.memory.register_buffer("new", torch.ones(1)), "memory.new"),
        "module by a global": (lambda o: OTHER.running_mean.add_(1), "OTHER.running_mean"),
        "average in a hook": (lambda o: o.average.update_parameters(o.model.body), "average.n_averaged"),
    },
    K.CONTAINER: {
        "nested tensor": (lambda o: o.model.nest["deep"][0][0].add_(1), "nest['deep'][0][0]"),
        "nested deque": (lambda o: o.model.nest["deep"][0].append(1), "nest['deep'][0]"),
        "nested set": (lambda o: o.model.nest["deep"][1].add(2), "nest['deep'][1]"),
    },
    K.CLOSURE: {
        "class attribute": (lambda o: setattr(Model, "number", 2), "Model.number"),
        "list of a class": (lambda o: Model.shared.append(2), "Model.shared"),
        "global that a forward sets": (lambda o: set_global("CALLS", 99), "CALLS"),
        "list that a forward fills": (lambda o: BAG.append(2), "BAG"),
        "attribute of a function": (lambda o: setattr(counted, "calls", 7), "counted.calls"),
        "cell": (lambda o: setattr(freevar(o.loss_fn, "count"), "cell_contents", 9), "count"),
        "tensor in a closure": (lambda o: freevar(o.loss_fn, "rest").cell_contents["sum"].add_(1), "rest['sum']"),
        "object in a closure": (
            lambda o: setattr(freevar(o.loss_fn, "meter").cell_contents, "total", 2),
            "meter.total",
        ),
        "default argument": (lambda o: o.loss_fn.__defaults__[0][1].append(2), "default argument[1]"),
    },
    K.GRADIENT: {
        "its gradient": (lambda o: OTHER.zero_grad(), "OTHER.weight"),
        "gradient": (lambda o: o.model.body.weight.grad.add_(1), "body.weight"),
        "no gradient": (lambda o: o.optimizer.zero_grad(), "body.weight"),
    },
    K.GENERATOR: {
        "torch": (lambda o: torch.rand(1), "torch's generator"),
        "Python": (lambda o: random.random(), "Python's random"),
        "NumPy": (lambda o: numpy.random.rand(), "numpy.random"),
        "own of torch": (lambda o: torch.rand(1, generator=o.model.torch_generator), "torch_generator"),
        "own of Python": (lambda o: o.model.generators[0].random(), "generators[0]"),
        "own of NumPy": (lambda o: o.model.generators[1].random(), "generators[1]"),
        "older of NumPy": (lambda o: o.model.generators[2].rand(), "generators[2]"),
    },
    K.OPTIMIZER: {
        "group": (lambda o: o.optimizer.param_groups[0].update(lr=1.0), "optimizer.param_groups[0]['lr']"),
        "momentum": (lambda o: o.optimizer.state[o.model.body.weight]["momentum_buffer"].add_(1), "momentum_buffer']"),
        "optimizer in a hook": (lambda o: next(iter(o.owned.state.values()))["step"].add_(1), "['step']"),
        "its group": (lambda o: o.owned.param_groups[0].update(lr=2.0), "owned.param_groups[0]['lr']"),
    },
    K.BATCH: {
        "batch": (lambda o: o.batch["x"].div_(2), "batch['x']"),
        "key of the batch": (lambda o: o.batch.pop("labels"), "batch['labels']"),
        "list of the batch": (lambda o: o.batch["labels"].clear(), "batch['labels']"),
    },
}
ROWS = {name: (*row, kind) for kind, rows in CHANGES.items() for name, row in rows.items()}


@pytest.mark.parametrize(("change", "path", "kind"), ROWS.values(), ids=ROWS)
def test_a_change_is_named_and_undone_again_and_again(loop, change, path, kind):
    state = loop.state()
    assert state.changes() == []
    for _ in range(2):
        change(loop)
        found = state.changes()
        assert (path, kind) in [(ends(each.path, path), each.kind) for each in found], [*map(str, found)]
        state.restore()
        assert state.changes() == []
        assert loop.state().changes() == []


def ends(path, wanted):
    start = path.partition(" in ")[0]
    return wanted if start.endswith(wanted) else start


def test_a_whole_step_is_undone_on_the_same_objects(loop):
    before = copy.deepcopy([loop.model.state_dict(), loop.owned.state_dict(), loop.average.state_dict()])
    state, held = loop.state(), [loop.model.memory.queue, loop.model.memory.mean, loop.optimizer.param_groups[0]]
    step(loop)
    kinds = {each.kind for each in state.changes()}
    assert {K.PARAMETER, K.BUFFER, K.OPTIMIZER, K.GRADIENT, K.CLOSURE} <= kinds
    state.restore()
    after = [loop.model.state_dict(), loop.owned.state_dict(), loop.average.state_dict()]
    assert repr(before) == repr(after)
    assert all(a is b for a, b in zip(held, [loop.model.memory.queue, loop.model.memory.mean,
                                             loop.optimizer.param_groups[0]], strict=True))  # fmt: skip


def test_equal_values_and_nan_are_no_change(loop):
    cached = loop.model.cache = torch.ones(2)
    state = loop.state()
    loop.model.cache = torch.ones(2)
    loop.model.meter.total = float("0.0")
    loop.model.shape = None
    del loop.model.shape
    assert state.changes() == []
    state.restore()
    assert loop.model.cache is cached
    model = nn.Linear(2, 2)
    model.scale, model.weight.data[0, 0] = float("nan"), float("nan")
    state = LoopState(model)
    assert state.changes() == []
    model.weight.data[0, 0] = 1.0
    assert [each.path for each in state.changes()] == ["weight"]


class Owner:
    def __init__(self, other):
        self.parts = {"other": [other]}

    def loss(self, model, batch):
        return self.parts["other"][0](model(batch)).mean()

    __call__ = loss


class Called:
    def __call__(self, model, batch):
        return OTHER(model(batch)).mean()


def called(model, batch):
    return OTHER(model(batch)).mean()


def loss_with(model, batch, other):
    return other(model(batch)).mean()


def closure(other):
    return lambda model, batch: loss_with(model, batch, other)


def by_keyword(model, batch, *, other=OTHER):
    return loss_with(model, batch, other)


@torch.no_grad()
def decorated(model, batch):
    return called(model, batch).requires_grad_()


LOSSES = {
    "a global": called,
    "a global of a function that is called": lambda model, batch: called(model, batch),
    "a closure": closure(OTHER),
    "a default of a keyword": by_keyword,
    "a partial": functools.partial(loss_with, other=OTHER),
    "a method": Owner(OTHER).loss,
    "an object that is called": Owner(OTHER),
    "the code of an object": Called(),
    "a decorated function": decorated,
}


@pytest.mark.parametrize("loss_fn", LOSSES.values(), ids=LOSSES)
def test_what_a_loss_refers_to_is_found(loss_fn):
    model, batch = nn.Linear(3, 3), torch.randn(5, 3)
    before = copy.deepcopy(OTHER.state_dict())
    with LoopState(model, loss_fn=loss_fn) as state:
        loss_fn(model, batch).backward()
        paths = [each.path.partition(" in ")[0] for each in state.changes()]
        assert any(path.endswith(".running_mean") for path in paths), paths
    assert repr(OTHER.state_dict()) == repr(before)


def test_a_variable_that_is_not_bound_yet_is_found_once_it_is():
    def loss_fn(model, batch):
        return later(model(batch))

    state = LoopState(nn.Linear(1, 1), loss_fn=loss_fn)
    later = nn.Identity()
    assert [(each.path.partition(" in ")[0], each.kind) for each in state.changes()] == [("later", K.CLOSURE)]
    state.restore()
    with pytest.raises(NameError):
        loss_fn(nn.Linear(1, 1), torch.ones(1))
    later = nn.Identity()


def test_trained_modules_beside_the_model_are_held_by_name():
    criterion = nn.Linear(2, 2)
    state = LoopState(nn.Linear(1, 1), modules={"criterion": criterion})
    criterion.weight.data.add_(1)
    assert state.changes() == [StateChange("criterion.weight", K.PARAMETER)]
    state.restore()
    assert state.changes() == []


def test_containers_that_are_only_filled_are_state_if_they_are_read():
    seen, totals, read = [], {}, []

    def loss_fn(model, batch):
        seen.append(1)
        totals.update(last=2)
        read.append(3)
        return len(read)

    state = LoopState(nn.Linear(2, 2), loss_fn=loss_fn)
    loss_fn(None, None)
    assert [each.path.partition(" in ")[0] for each in state.changes()] == ["read"]
    state.restore()
    assert (seen, totals, read) == ([], {}, [])
    bag = []
    model = Filling(bag)
    for how in ({"loss_fn": lambda model, batch: sum(bag)}, {"logs": True}):
        state = LoopState(model, **how)
        model(1)
        assert [each.path.partition(" in ")[0] for each in state.changes()] == ["bag"]
        state.restore()
        assert bag == []


class Filling(nn.Module):
    def __init__(self, bag):
        super().__init__()
        self.fills = lambda x: bag.append(x) or x

    def forward(self, x):
        return self.fills(x)


def test_data_are_not_entered():
    model = nn.Linear(2, 2)
    data, many = TensorDataset(torch.zeros(4)), [[0] for _ in range(2000)]

    def loss_fn(model, batch):
        return len(data), many

    state = LoopState(model, loss_fn=loss_fn)
    data.tensors[0].add_(1)
    many[0].append(1)
    assert state.changes() == []
    many.append([1])  # how long it is shows
    assert [each.kind for each in state.changes()] == [K.CLOSURE]
    state.restore()
    assert (len(many), many[0]) == (2000, [0, 1])


def test_large_tensors_are_compared_by_sum_or_version(monkeypatch):
    monkeypatch.setattr("trimtab.state.loop_state._MOST_BESIDE", 100)
    teacher = nn.Linear(8, 8).requires_grad_(False)
    state = LoopState(nn.Linear(1, 1), loss_fn=closure(teacher))
    assert state.changes() == []
    teacher.weight.data[3, 2] += 1
    assert [each.kind for each in state.changes()] == [K.FROZEN_PARAMETER]
    with pytest.warns(RuntimeWarning, match="too large"):
        state.restore()
    model = nn.Linear(8, 8)
    state = LoopState(model, most_bytes_copied=64)
    with torch.no_grad():
        model.weight.add_(1)
    model.bias.data.add_(1)
    assert [each.path for each in state.changes()] == ["weight", "bias"]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_buffers_of_any_size_and_layout_can_be_held(size):
    dtype = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.complex64}[size]
    model = nn.Linear(2, 2)
    model.register_buffer("dense", torch.ones(3, dtype=dtype))
    model.register_buffer("shared", torch.ones(1, dtype=dtype).expand(4))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    model.register_buffer("empty", torch.zeros(0, dtype=dtype))
    model.register_buffer("meta", torch.zeros(2, device="meta"))
    with torch.inference_mode():
        model.cached = torch.zeros(2)
    state = LoopState(model)
    assert state.changes() == []
    model.dense[1] = 0
    assert [each.path for each in state.changes()] == ["dense"]
    state.restore()
    assert state.changes() == []


def test_a_model_of_some_hundred_modules_is_walked_in_milliseconds():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(100)))
    optimizer = torch.optim.AdamW(model.parameters())
    LoopState(model, optimizer)
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        LoopState(model, optimizer)
        taken.append(time.perf_counter() - start)
    assert min(taken) < 0.2, f"{min(taken) * 1e3:.1f} ms for {len(list(model.modules()))} modules"


class Tracker:
    total, bag, teacher = 0.0, [], None


class HoldsTracker:
    tracker = Tracker


def add_to_the_class(model, batch):
    Tracker.total += 1


def add_to_its_list(model, batch):
    Tracker.bag.append(1)


def move_its_teacher(model, batch):
    Tracker.teacher.weight.data.mul_(2)


def add_through_another_class(model, batch):
    HoldsTracker.tracker.total += 1


@pytest.mark.parametrize("change", [add_to_the_class, add_to_its_list, move_its_teacher, add_through_another_class])
def test_attributes_of_a_class_that_a_function_names_are_held(change):
    Tracker.total, Tracker.bag, Tracker.teacher = 0.0, [], nn.Linear(2, 2).requires_grad_(False)
    weight = Tracker.teacher.weight.clone()
    state = LoopState(nn.Linear(2, 2), loss_fn=change, logs=True)
    assert state.changes() == []
    change(None, None)
    assert len(state.changes()) == 1
    state.restore()
    assert (Tracker.total, Tracker.bag) == (0.0, [])
    assert torch.equal(Tracker.teacher.weight, weight)


class Namesakes(nn.Module):
    """A module with an attribute and a method of the names of globals that its forward does not use."""

    def __init__(self):
        super().__init__()
        self.OTHER = 1.0

    def forward(self, x):
        return x * self.OTHER + x.BAG if hasattr(x, "BAG") else x * self.OTHER


def test_an_attribute_that_is_named_like_a_global_is_no_global():
    paths = [path for _, path in LoopState(Namesakes()).held()]
    assert not [path for path in paths if path.startswith(("OTHER", "BAG"))]
    paths = [path for _, path in LoopState(None, loss_fn=lambda model, batch: OTHER(batch)).held()]
    assert [path for path in paths if path.startswith("OTHER")]
