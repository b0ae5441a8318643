"""Activation offload on a GPU: bitwise gradients, a lower peak, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from sync import without_waiting
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.measure.timing import least_seconds
from trimtab.plans.plan import Plan
from trimtab.techniques.activation_offload import use_offload
from trimtab.techniques.host_transfers import CudaTransfers, measure_host_link

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEPTH = 8


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (-1, 64)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        # Fused attention adds in any order in its backward, and two equal runs would differ.
        mixed = ((q @ k.mT / 8).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.out(mixed), 0.1, self.training)
        return x + self.mlp(x)


def make(width: int = 256) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(width) for _ in range(DEPTH)), nn.Linear(width, 8)).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def trained(plan: Plan) -> tuple[list[torch.Tensor], int]:
    """Return the parameters after four steps, and the peak of the last step in bytes."""
    model, optimizer = make()
    with trimtab.start(model, optimizer, plan) as run:
        for seed in range(4):
            batch = torch.randn(16, 256, 256, generator=torch.Generator().manual_seed(seed)).cuda()
            torch.cuda.reset_peak_memory_stats()
            run.train_step(run.window(batch), loss_fn)
        peak = torch.cuda.max_memory_allocated()
    return [p.detach().clone() for p in model.parameters()], peak


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("micro_batch", [16, 8])
def test_it_trains_bitwise_the_same_with_a_lower_peak(precision, micro_batch):
    values = {"micro_batch": micro_batch, "precision": precision}
    plain, plain_peak = trained(Plan.fixed(16, **values))
    found, peak = trained(Plan.fixed(16, offload=DEPTH - 1, **values))
    assert all(map(torch.equal, found, plain))
    # Two of eight blocks are on the device at a time.
    assert peak < 0.7 * plain_peak


def test_gradients_are_right_while_the_device_is_behind():
    model, _ = make(width=512)
    batch = torch.randn(8, 512, 512, device="cuda")
    model.eval()  # without dropout
    loss_fn(model, batch).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    undo = use_offload(model, DEPTH - 1)
    for step in range(4):
        model.zero_grad()
        torch.cuda._sleep(50_000_000)  # The host queues the whole step before the first kernel runs.
        loss_fn(model, batch).backward()
        assert all(torch.equal(p.grad, each) for p, each in zip(model.parameters(), expected, strict=True)), step
    undo()


def test_no_step_after_the_first_waits_for_the_device_or_allocates_host_memory():
    model, _ = make()
    batch = torch.randn(16, 256, 256, device="cuda")
    use_offload(model, DEPTH - 1)
    loss_fn(model, batch).backward()
    torch.cuda.synchronize()
    before = torch.cuda.host_memory_stats()["allocations.allocated"]
    for _ in range(2):
        with without_waiting():
            loss_fn(model, batch).backward()
    assert torch.cuda.host_memory_stats()["allocations.allocated"] == before


def test_a_graph_without_a_backward_does_no_harm():
    model, _ = make()
    model.eval()
    batch = torch.randn(16, 256, 256, device="cuda")
    loss_fn(model, batch).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    use_offload(model, DEPTH - 1)
    model.zero_grad()
    torch.cuda._sleep(50_000_000)
    for _ in range(3):
        model[0](batch)  # freed while its copies are queued
        junk = torch.full_like(batch, float("nan"))
        del junk
    loss_fn(model, batch).backward()
    assert all(torch.equal(p.grad, each) for p, each in zip(model.parameters(), expected, strict=True))


def test_the_measured_bandwidth_is_that_of_large_copies():
    device = torch.device("cuda", torch.cuda.current_device())
    found = measure_host_link(CudaTransfers(device), lambda copy: least_seconds(copy, device))
    source, host = (
        torch.empty(2**28, dtype=torch.uint8, device=device),
        torch.empty(2**28, dtype=torch.uint8).pin_memory(),
    )
    seconds = least_seconds(lambda: host.copy_(source, non_blocking=True), device)
    assert found.to_host_bytes_s == pytest.approx(2**28 / seconds, rel=0.3)
    assert 0.2 < found.to_device_bytes_s / found.to_host_bytes_s < 5


def test_planning_under_a_limit_measures_the_bandwidth_and_offload_lowers_the_peak():
    model, optimizer = make()
    batch = torch.randn(16, 256, 256, device="cuda")
    own = trimtab.profile(model.train(), optimizer, loss_fn, batch, num_blocks=3)
    budget = trimtab.Budget(memory=int(0.75 * own.own_peak_bytes))
    profile = trimtab.profile(model, optimizer, loss_fn, batch, num_blocks=3, budget=budget)
    assert profile.host_link is not None
    tried = [trial for trial in profile.trials if trial.candidate.offload is not None and trial.peak_bytes]
    for trial in tried:
        assert trial.peak_bytes < own.own_peak_bytes
