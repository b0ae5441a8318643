"""Low-bit optimizer state on a GPU: less memory, nearly the same training, and identical losses after a resume."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import trimtab
from trimtab.plans.plan import Plan
from trimtab.settings.optimizer_state import STORAGES
from trimtab.state.peak_memory import state_tensors, storage_bytes
from trimtab.techniques.low_bit_state import bytes_saved
from trimtab.techniques.low_bit_storage import QuantizedBlocks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
every_kind = pytest.mark.parametrize("kind", STORAGES[1:])


def loop(dtype: torch.dtype = torch.float32, **options) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda().to(dtype)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) - batch.roll(1, 1)).square().mean()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, first: int, last: int, states=()) -> tuple:
    """Return the losses, the bytes of the state, and the states of model, optimizer and run."""
    dtype, losses = next(model.parameters()).dtype, []
    with trimtab.start(model, optimizer, plan) as run:
        for each, state in zip((model, optimizer, run), states, strict=False):
            each.load_state_dict(state)
        for seed in range(first, last):
            batch = torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)).cuda().to(dtype)
            losses.append(float(run.train_step(run.window(batch), loss_fn)))
        size = storage_bytes(state_tensors(optimizer))
        return losses, size, copy.deepcopy((model.state_dict(), optimizer.state_dict(), run.state_dict()))


@every_kind
@pytest.mark.parametrize("fused", [False, True])
def test_it_trains_nearly_as_fp32_state_in_the_announced_bytes(kind, fused):
    model, optimizer = loop(fused=fused)
    saved = bytes_saved(optimizer, kind)
    losses, size, _ = trained(model, optimizer, Plan.fixed(64, optimizer_state=kind), 0, 30)
    plain, plain_size, _ = trained(*loop(fused=fused), Plan.fixed(64), 0, 30)
    assert abs(plain_size - saved - size) < 64  # scalars: a fused optimizer has its step counters on the GPU
    assert losses[-1] < 0.9 * losses[0]
    assert losses[-1] == pytest.approx(plain[-1], rel=0.1 if kind == "4bit" else 0.01)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_identical_losses(kind, dtype):
    plan = Plan.fixed(64, optimizer_state=kind)
    whole, _, _ = trained(*loop(dtype), plan, 0, 6)
    begun, _, states = trained(*loop(dtype), plan, 0, 3)
    resumed, _, _ = trained(*loop(dtype), plan, 3, 6, states)
    assert begun + resumed == whole


def test_a_step_takes_no_fp32_state_at_once():
    peaks = {}
    for kind in ("user", "8bit"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        with trimtab.start(model, optimizer, Plan.fixed(8, optimizer_state=kind)) as run:
            batch = torch.randn(8, 4096).cuda()
            for _ in range(2):
                run.train_step(run.window(batch), lambda model, batch: model(batch).square().mean())
                torch.cuda.reset_peak_memory_stats()
            run.train_step(run.window(batch), lambda model, batch: model(batch).square().mean())
            peaks[kind] = torch.cuda.max_memory_allocated()
        del model, optimizer, run, batch
        torch.cuda.empty_cache()
    # 134M parameters: 1.07 GB of fp32 state, 0.27 GB in 8 bits, and about 0.2 GB for the chunks of a step.
    assert peaks["user"] - peaks["8bit"] > 0.5 * 2**30


def test_state_that_does_not_fit_is_kept_in_host_memory(monkeypatch):
    model, optimizer = loop()
    run = trimtab.start(model, optimizer, Plan.fixed(64, optimizer_state="8bit"))
    batch = torch.randn(64, 512).cuda()
    run.train_step(run.window(batch), loss_fn)
    read, faults = QuantizedBlocks.read, [torch.OutOfMemoryError("the plain state")]

    def fail(*args):
        if faults:
            raise faults.pop()
        return read(*args)

    monkeypatch.setattr(QuantizedBlocks, "read", fail)
    with pytest.warns(RuntimeWarning, match="host memory"):
        run.close()
    devices = {value.device.type for state in optimizer.state.values() for value in state.values() if value.dim()}
    assert devices == {"cpu", "cuda"}
    optimizer.load_state_dict(optimizer.state_dict())  # As the warning advises.
    loss_fn(model, batch).backward()
    optimizer.step()
