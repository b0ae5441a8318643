"""Weights in half precision on a CUDA device: kernels there depend on the number of samples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trimtab
from trimtab.profiling.gradient_equivalence import check_splitting
from trimtab.profiling.training_loop import TrainingLoop

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ROWS = 16
HALF = [torch.bfloat16, torch.float16]


def loop(dtype: torch.dtype, adapts: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a transformer layer with a head; `adapts`: only the head trains, in fp32, on a frozen base."""
    torch.manual_seed(0)
    base = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True).cuda().to(dtype)
    model = nn.ModuleDict({"base": base.requires_grad_(not adapts), "head": nn.Linear(64, 10).cuda()})
    model.forward = lambda x: model["head"](model["base"](x.to(dtype)).to(model["head"].weight.dtype))  # type: ignore[method-assign]
    if not adapts:
        model["head"].to(dtype)
    return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def batch() -> Tensor:
    return torch.randn(ROWS, 4, 64, generator=torch.Generator().manual_seed(1))


def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().logsumexp(-1).square().mean()


def coupled(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).float()
    return (out - 0.5 * out.mean(0)).logsumexp(-1).square().mean()


@pytest.mark.parametrize("adapts", [False, True])
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_rounding_is_accepted_and_a_coupling_is_not(dtype: torch.dtype, adapts: bool) -> None:
    model, optimizer = loop(dtype, adapts)
    check = check_splitting(TrainingLoop(model, optimizer, loss_fn, batch()))
    assert check.code == "split.proved", check.reason
    assert check_splitting(TrainingLoop(model, optimizer, coupled, batch())).code == "split.gradient_differs"


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_many_micro_batches_are_summed_in_fp32(dtype: torch.dtype) -> None:
    model, optimizer = loop(dtype)
    sums: dict[str, Tensor] = {}
    for row in batch().cuda().split(1):
        model.zero_grad()
        (loss_fn(model, row) / ROWS).backward()
        for name, p in model.named_parameters():
            sums[name] = sums.get(name, 0) + p.grad.float()
    found: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: found.update({n: p.grad.clone() for n, p in model.named_parameters()}))
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(ROWS, 1)) as run:
        run.train_step(run.window(batch()), loss_fn)
    for name, total in sums.items():
        assert found[name].dtype == dtype
        torch.testing.assert_close(found[name], total.to(dtype))
