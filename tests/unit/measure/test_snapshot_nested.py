"""What modules and optimizers hold in containers and plain tensors is put back in place, at any depth."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque

import pytest
import torch
from small_loops import class_loss as loss_fn
from state_digest import fingerprint
from torch import nn

import trimtab
from trimtab.measure import machine
from trimtab.profiling import trials
from trimtab.state.loop_state import LoopState

ROWS = 6


class Factored(torch.optim.Optimizer):
    """An optimizer in the manner of Shampoo: lists and dicts of tensors, updated in place, and a counter of its own."""

    def __init__(self, parameters):
        self.calls = 0
        self.scratch = [torch.zeros(2)]
        super().__init__(parameters, {"lr": 0.1, "window": [0, 0]})

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        self.scratch[0].add_(1)
        for group in self.param_groups:
            group["window"][0] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factors"] = [torch.eye(n, dtype=p.dtype) for n in p.shape]
                    state["rest"] = {"deep": (torch.zeros_like(p), [0])}
                for dim, factor in enumerate(state["factors"]):
                    rows = p.grad.transpose(0, dim).flatten(1) if p.dim() > 1 else p.grad[:, None]
                    factor.add_(rows @ rows.T)
                state["rest"]["deep"][0].add_(p.grad)
                state["rest"]["deep"][1].append(len(state["factors"]))
                p.sub_(group["lr"] * p.grad)


class Noting(nn.Module):
    """A model that keeps a history, an average that is no buffer, and a nest of every container."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 3)
        self.history = []
        self.running = torch.zeros(3)
        self.nest = {"recent": deque([1], maxlen=3), "seen": {1, "a"}, "by": defaultdict(list), "n": Counter("a")}
        self.nest["order"] = OrderedDict(b=(torch.zeros(1), [torch.zeros(2)]), a=1)
        self.nest["itself"] = self.nest

    def forward(self, x):
        out = self.body(x)
        self.history.append(float(out.detach().sum()))
        self.running.mul_(0.9).add_(out.detach().mean(0))
        self.nest["recent"].append(len(self.history))
        self.nest["seen"].add(len(self.history))
        self.nest["by"][len(self.history)].append(1)
        self.nest["n"]["a"] += 1
        tensor, tensors = self.nest["order"]["b"]
        tensor.add_(1)
        tensors[0].add_(1)
        tensors.append(torch.ones(1))
        self.nest["order"].move_to_end("b")
        return out


def loop(optimizer=Factored, steps=2):
    torch.manual_seed(0)
    model = Noting()
    made = optimizer(model.parameters())
    batch = torch.randn(ROWS, 4), torch.randint(0, 3, (ROWS,))
    for _ in range(steps):
        train(model, made, batch)
    return model, made, batch


def train(model, optimizer, batch):
    optimizer.zero_grad()
    loss_fn(model, batch).backward()
    optimizer.step()


def look(model, optimizer):
    """What is held, by value and by identity, written out by hand."""
    held = [model.history, model.running, model.nest, *model.nest.values(), *model.nest["order"]["b"]]
    held += [optimizer.scratch[0], optimizer.param_groups[0]["window"]]
    for state in optimizer.state.values():
        held += [state, state["factors"], *state["factors"], *state["rest"]["deep"]]
    nest = {k: v for k, v in model.nest.items() if k != "itself"}
    nest["seen"] = sorted(map(repr, nest["seen"]))  # a set has no order to be put back
    values = (model.history, model.running, nest)
    values += (optimizer.calls, optimizer.scratch, optimizer.param_groups[0]["window"], list(optimizer.state.values()))
    return [id(each) for each in held], repr(values)


def test_what_is_nested_is_put_back_on_the_same_objects_again_and_again():
    model, optimizer, batch = loop()
    before, print_before = look(model, optimizer), fingerprint(model, optimizer)
    snapshot = LoopState(model, optimizer)
    for _ in range(2):
        train(model, optimizer, batch)
        assert look(model, optimizer) != before
        assert fingerprint(model, optimizer) != print_before
        snapshot.restore()
        assert look(model, optimizer) == before
        assert fingerprint(model, optimizer) == print_before


@pytest.mark.parametrize("steps", [0, 2])
def test_planning_leaves_no_trace_in_them(monkeypatch, steps):
    monkeypatch.setattr(trials, "BLOCK_S", 1e-6)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})
    model, optimizer, batch = loop(steps=steps)
    before, values = fingerprint(model, optimizer), look(model, optimizer)
    trimtab.plan(model, optimizer, loss_fn, batch, num_blocks=3)
    assert look(model, optimizer) == values
    assert fingerprint(model, optimizer) == before


CHANGES = {
    "a history": lambda m, o: m.history.append(1.0),
    "a tensor that is no buffer": lambda m, o: m.running.add_(1e-6),
    "a set": lambda m, o: m.nest["seen"].add(99),
    "a tensor in a tuple in a dict": lambda m, o: m.nest["order"]["b"][0].add_(1e-6),
    "another order": lambda m, o: m.nest["order"].move_to_end("a"),
    "another list alike": lambda m, o: setattr(m, "history", list(m.history)),
    "a factor": lambda m, o: next(iter(o.state.values()))["factors"][0].add_(1e-6),
    "a list in a group": lambda m, o: o.param_groups[0]["window"].append(1),
    "the optimizer's counter": lambda m, o: setattr(o, "calls", 9),
    "a group more": lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "a tensor's storage": lambda m, o: m.running.set_(torch.ones(2, 2)),
    "a hook": lambda m, o: m.body.register_forward_hook(print),
    "an optimizer's hook": lambda m, o: o.register_step_post_hook(print),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_fingerprint_sees_each_and_a_snapshot_undoes_it(change):
    model, optimizer, _ = loop()
    before, values = fingerprint(model, optimizer), look(model, optimizer)
    with LoopState(model, optimizer):
        change(model, optimizer)
        assert fingerprint(model, optimizer) != before
    assert fingerprint(model, optimizer) == before
    assert look(model, optimizer) == values


class Refuses(dict):
    """A mapping that may not be changed once made, as model outputs are."""

    def clear(self):
        raise TypeError("not this one")

    update = clear


def test_other_objects_are_entered_and_never_copied():
    class Opaque:
        def __init__(self):
            self.values = [1]

        def __deepcopy__(self, memo):
            raise AssertionError("copied")

        __copy__ = __deepcopy__

    model, optimizer, _ = loop()
    model.opaque, model.output = Opaque(), Refuses(a=torch.zeros(1))
    with torch.inference_mode():
        model.cached = torch.zeros(2)
    model.shared, model.sparse = torch.ones(1).expand(5), torch.eye(2).to_sparse()
    model.graph = (model.body.weight * 2).sum()  # not a leaf, and its backward is still to come
    held = model.opaque, model.output, model.cached, model.shared, model.sparse, model.graph
    with LoopState(model, optimizer):
        model.opaque.values.append(2)
        model.opaque = model.output = model.cached = model.shared = model.sparse = model.graph = None
    found = model.opaque, model.output, model.cached, model.shared, model.sparse, model.graph
    assert all(a is b for a, b in zip(found, held, strict=True))
    assert model.opaque.values == [1]
    model.graph.backward()


def test_a_copy_made_while_held_is_a_copy():
    model, optimizer, batch = loop()
    with LoopState(model, optimizer):
        train(model, optimizer, batch)
        ema = copy.deepcopy(model)
        assert ema.history == model.history
    assert len(ema.history) == len(model.history) + 1
