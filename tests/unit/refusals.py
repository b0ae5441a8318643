"""A loop to give bad input to, and the proof that it was refused: typed, named, and nothing half-applied."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from state_digest import fingerprint
from torch import nn

import trimtab
from trimtab.core.errors import TrimtabError
from trimtab.measure import machine
from trimtab.plans.plan import Plan
from trimtab.profiling import trials

ROWS = 6
NAN, INF = math.nan, math.inf
NO_COUNT = [0, -1, 2.0, NAN, INF, "8", None, True, 2**63, [8], 8j]
NO_POSITIVE = [0, -1, NAN, INF, -INF, "1", True, [1], 10**400]


@dataclass
class Loop:
    """A loop in the middle of training, and what its plan() and start() are called with."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any

    def plan(self, **changes: Any) -> Plan:
        given = {"model": self.model, "optimizer": self.optimizer, "loss_fn": mean_loss, "loader_or_batch": self.batch}
        named = {"loader_or_batch" if name == "example_batch" else name: value for name, value in changes.items()}
        return trimtab.plan(**given | named)

    def profile(self, **changes: Any) -> Any:
        given = {"model": self.model, "optimizer": self.optimizer, "loss_fn": mean_loss, "example_batch": self.batch}
        return trimtab.profile(**given | changes)

    def start(self, model: Any = None, optimizer: Any = None, plan: Any = None, **more: Any) -> Any:
        return trimtab.start(model or self.model, optimizer or self.optimizer, plan or Plan.fixed(ROWS, 2), **more)


def mean_loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def sum_loss(model: nn.Module, batch: Any) -> Any:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def new_loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    """Return a loop whose trials take no time and in which only fp32 is worth one; a fixture in each test file."""
    monkeypatch.setattr(trials, "BLOCK_S", 1e-4)
    monkeypatch.setattr(machine, "measured_cpu_peaks", lambda threads: {"fp32": 1e9, "bf16": 1e6, "fp16": 1e6})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = {"x": torch.randn(ROWS, 4), "y": torch.randint(0, 3, (ROWS,))}
    mean_loss(model, batch).backward()
    optimizer.step()
    return Loop(model, optimizer, batch)


@contextmanager
def refused(
    loop: Loop, error: type[TrimtabError], field: str, given: str = "", run: Any = None, *, code: str = ""
) -> Any:
    """Expect an error, and an unchanged loop.

    Args:
        field: `TrimtabError.field` of the error.
        given: text within the error's `reason`, such as the value found.
        run: run whose state is compared too.
        code: `TrimtabError.code` of the error; "" accepts every code.
    """
    before = fingerprint(loop.model, loop.optimizer), run and run.state_dict()
    with pytest.raises(TrimtabError) as caught:
        yield
    assert type(caught.value) is error, caught.value
    assert caught.value.field == field, caught.value
    assert not code or caught.value.code == code, caught.value
    assert given in str(caught.value), caught.value
    assert caught.value.problem or caught.value.expected
    assert str(caught.value).startswith(caught.value.problem or f"{field}: got ")
    assert (fingerprint(loop.model, loop.optimizer), run and run.state_dict()) == before
