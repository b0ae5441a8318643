"""Low-bit optimizer state on replicas: all ranks take the same steps, and nearly those of one process."""

from __future__ import annotations

import pytest
import torch
from ranks import run_cases
from torch import nn

import trimtab

LOOP = """
def loop_of():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_fn(model, batch):
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def batches(rows):
    for step in range(6):
        yield torch.randn(4, 8, generator=torch.Generator().manual_seed(step))[rows]


def weights_of(model, optimizer, plan, rows):
    with trimtab.start(model, optimizer, plan) as run:
        for window in run.windows(batches(rows)):
            run.train_step(window, loss_fn)
    return [float(each) for p in model.parameters() for each in p.detach().flatten()]
"""
RANK = (
    LOOP
    + """
from torch.nn.parallel import DistributedDataParallel

model, optimizer = loop_of()
kind, who = case.split("/")
stage = {"num_ranks": 2, "zero_stage": 0} if who == "plan" else {}
called = DistributedDataParallel(model) if who == "loop" else model
plan = trimtab.Plan.fixed(2, optimizer_state=kind, **stage)
found = weights_of(called, optimizer, plan, slice(2 * rank, 2 * rank + 2))
"""
)
CASES = ("bf16/plan", "8bit/plan", "8bit/loop")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return dict(zip(CASES, run_cases(RANK, tmp_path_factory.mktemp("low-bit"), *CASES), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_replicas_take_one_step_which_is_nearly_that_of_one_process(found, case):
    first, second = found[case]
    assert first == second
    names = {"__name__": "loop", "torch": torch, "nn": nn, "trimtab": trimtab}
    exec(LOOP, names)
    plan = trimtab.Plan.fixed(4, optimizer_state=case.split("/")[0])
    whole = torch.tensor(names["weights_of"](*names["loop_of"](), plan, slice(None)))
    # Gradients differ by rounding, which quantization can turn into the next value of its map.
    assert float((torch.tensor(first) - whole).norm() / whole.norm()) < 1e-3
