"""A start that fails anywhere on its way leaves layout, optimizer state, classes and hooks as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.recompute_schedule import schedule_of
from trimtab.plans.plan import Plan
from trimtab.techniques import memory_format, optimizers
from trimtab.techniques.activation_checkpointing import use_schedule

ROWS = 4
MOST = 40  # more conversions than there are


class Fails:
    """Stands in for a function: its n-th call raises, all others go through."""

    def __init__(self, function, n, error):
        self.function, self.n, self.error, self.calls = function, n, error, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        if self.calls == self.n:
            raise self.error("the n-th conversion")
        return self.function(*args, **kwargs)


def loop():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3), nn.Flatten())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(ROWS, 3, 7, 7)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def look(model, optimizer):
    state = [(name, t) for held in optimizer.state.values() for name, t in held.items()]
    return (
        [(t.stride(), t.detach().flatten().tolist()) for t in [*model.parameters(), *model.buffers()]],
        [None if p.grad is None else (p.grad.stride(), p.grad.flatten().tolist()) for p in model.parameters()],
        [(name, t.stride(), t.dtype, t.flatten().tolist()) for name, t in state],
        [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        {k: len(v) for k, v in vars(optimizer).items() if k.endswith("hooks")},
        [{k: len(v) for k, v in vars(m).items() if k.endswith("hooks")} for m in model.modules()],
    )


PLACES = {
    "a tensor laid out": (memory_format, "_align_grad", {"memory_layout": "channels_last"}),
    "a state tensor": (memory_format, "_with_strides", {"memory_layout": "channels_last"}),
    "a step counter moved": (optimizers, "_move_steps", {"fused_optimizer": True}),
    "state aligned for the fused step": (optimizers, "align_state", {"fused_optimizer": True}),
    "the last alignment": (memory_format, "align_state", {"memory_layout": "channels_last", "fused_optimizer": True}),
}


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(("module", "name", "changes"), PLACES.values(), ids=PLACES)
def test_a_conversion_that_raises_half_way_is_undone(monkeypatch, module, name, changes, error):
    raised = 0
    for n in range(1, MOST):
        model, optimizer = loop()
        before = look(model, optimizer)
        failing = Fails(getattr(module, name), n, error)
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            try:
                run = trimtab.start(model, optimizer, Plan.fixed(ROWS, **changes))
            except error:
                raised += 1
                assert look(model, optimizer) == before, f"call {n}"
                continue
        run.close()
        break
    assert raised
    assert n < MOST - 1


def classes_and_hooks(model):
    return [
        (name, type(module), sorted(vars(module)), {k: len(v) for k, v in vars(module).items() if k.endswith("hooks")})
        for name, module in model.named_modules()
    ]


class Kept(nn.Sequential):
    """A block that refuses another class, as Ctrl-C would between two blocks."""

    error = None

    def __setattr__(self, name, value):
        if name == "__class__" and Kept.error is not None:
            raise Kept.error("another class")
        super().__setattr__(name, value)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_blocks_that_are_made_to_recompute_half_way_are_put_back(monkeypatch, n, error):
    """The first n - 1 blocks have another class when the n-th refuses one."""
    kinds = [Kept if index == n - 1 else nn.Sequential for index in range(4)]
    model = nn.ModuleList(kind(nn.Linear(4, 4), nn.Tanh()) for kind in kinds)
    before = classes_and_hooks(model)
    with monkeypatch.context() as patch:
        patch.setattr(Kept, "error", error)
        with pytest.raises(error, match="another class"):
            use_schedule(model, ["0", "1", "2", "3"], schedule_of("(0-2) (3)", 4))
    assert classes_and_hooks(model) == before
    use_schedule(model, ["0", "1", "2", "3"], schedule_of("(0-2) (3)", 4))()
    assert classes_and_hooks(model) == before


class Sealed(nn.Linear):
    """A block whose class refuses subclasses; a replaced class is none of the user's."""

    def __init_subclass__(cls, **options):
        raise TypeError("a class that is sealed")


def test_a_block_of_a_sealed_class_recomputes_and_is_put_back():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), Sealed(4, 4), nn.Linear(4, 4)])
    before = classes_and_hooks(model)
    undo = use_schedule(model, ["0", "1", "2", "3"], schedule_of("(0-1) (2) (3)", 4))
    assert isinstance(model[2], Sealed)
    assert classes_and_hooks(model) != before
    undo()
    assert classes_and_hooks(model) == before
