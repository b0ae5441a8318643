"""Looking at operators gives up nothing that is compiled: what ran compiled before runs compiled after it."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType

import pytest
import torch
from small_loops import sgd
from torch import nn

import trimtab
from trimtab.measure.fake_tensors import EagerDispatchMode, FakeTensors, run_compiled_eagerly
from trimtab.measure.flops import count_flops
from trimtab.measure.storage_tracker import StorageTracker
from trimtab.profiling.loop_facts import SoftmaxDetector


class Counting:
    """A compiler that compiles nothing, and counts the calls of what it was given."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        def run(*args: object) -> object:
            self.calls += 1
            return graph.forward(*args)

        return run


def compiled(kind: type[nn.Module]) -> tuple[nn.Module, Counting]:
    torch.manual_seed(0)
    model, counting = kind(), Counting()
    model.compile(backend=counting)
    return model, counting


def fresh() -> type[nn.Module]:
    """Return a class whose forward nobody has called: what is given up, is for all of a class."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu().softmax(-1)

    code = Model.forward.__code__.replace()
    Model.forward = FunctionType(code, globals())  # type: ignore[method-assign]
    return Model


def in_softmaxes(model: nn.Module, x: torch.Tensor) -> None:
    with SoftmaxDetector():
        model(x).sum().backward()


def in_storages(model: nn.Module, x: torch.Tensor) -> None:
    storages = StorageTracker()
    with storages, storages:  # as it enters itself for an operator's Python
        model(x).sum().backward()


def in_fakes(model: nn.Module, x: torch.Tensor) -> None:
    fakes = FakeTensors()
    copied, row = fakes.copy((model, x))
    with fakes:
        copied(row).sum().backward()


def in_flops(model: nn.Module, x: torch.Tensor) -> None:
    assert count_flops(lambda: model(x).sum().backward()) == 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("look", [in_softmaxes, in_storages, in_fakes, in_flops])
def test_what_is_compiled_stays_so(look):
    kind, x = fresh(), torch.randn(4, 8)
    model, counting = compiled(kind)
    model(x)
    look(model, x)
    model.zero_grad()
    model(x)
    assert counting.calls == 2
    other, counting = compiled(kind)
    other(x)
    assert counting.calls == 1


def test_a_mode_that_fails_lets_go():
    kind, x = fresh(), torch.randn(4, 8)
    model, counting = compiled(kind)
    with pytest.raises(ZeroDivisionError), EagerDispatchMode():
        raise ZeroDivisionError
    model(x)
    assert counting.calls == 1


def test_modes_that_overlap_or_are_entered_twice_end_with_the_last():
    kind, x = fresh(), torch.randn(4, 8)
    model, counting = compiled(kind)
    model(x)
    one, other = run_compiled_eagerly(), run_compiled_eagerly()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)  # not in the order of their entering, as threads may leave
    model(x)
    assert counting.calls == 1
    other.__exit__(None, None, None)
    model(x)
    assert counting.calls == 2
    kind, x = fresh(), torch.randn(4, 8)
    model, counting = compiled(kind)
    fakes = FakeTensors()
    copied = fakes.copy((model, x))
    with fakes:
        with fakes:
            pass
        copied[0](copied[1])
    model(x)
    assert counting.calls == 1


@pytest.mark.usefixtures("brief_trials")
def test_a_users_compiled_model_is_compiled_when_it_was_planned_for():
    kind, x = fresh(), torch.randn(8, 8)
    model, counting = compiled(kind)
    optimizer = sgd(model)
    model(x)
    trimtab.plan(model, optimizer, lambda model, batch: model(batch).square().mean(), x, num_blocks=3)
    before = counting.calls
    model(x)
    assert counting.calls == before + 1
