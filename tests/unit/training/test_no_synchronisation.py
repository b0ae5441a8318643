"""The hot path reads no scalar back from the device: each read would be a synchronisation on an accelerator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_loops import class_loss as mean_loss
from small_loops import sgd
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import trimtab
from trimtab.core.batch_rule import BatchRule
from trimtab.losses import Summed
from trimtab.measure.timing import AsyncScalar
from trimtab.plans.plan import Plan
from trimtab.training import nonfinite
from trimtab.training.noise_monitor import NoiseMonitor

READS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default, torch.ops.aten.is_nonzero.default}


class CountReads(TorchDispatchMode):
    """Counts operators that copy a scalar to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self._is_late = False

    def counted(self, method: Any) -> Any:
        """Return a method of a tensor that copies it to the host, unseen by its operators where that is where it is."""

        def count(*args: Any, **kwargs: Any) -> Any:
            self.reads += not self._is_late
            return method(*args, **kwargs)

        return count

    def uncounted(self, method: Any) -> Any:
        """Return a method that may read."""

        def read(*args: Any) -> Any:
            self._is_late = True
            try:
                return method(*args)
            finally:
                self._is_late = False

        return read

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func in READS
        return func(*args, **(kwargs or {}))


def token_loss(model: nn.Module, batch: Any) -> Any:
    losses = nn.functional.cross_entropy(model(batch[0]), batch[1], ignore_index=-100, reduction="sum")
    return Summed(losses, (batch[1] != -100).sum())


def reads_per_step(loss_fn: Any, micro_batch: int, rule: BatchRule | None = None, **start: Any) -> int:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = sgd(model)
    batch = torch.randn(8, 6), torch.randint(0, 3, (8,))
    with trimtab.start(model, optimizer, Plan.fixed(8, micro_batch=micro_batch, batch_rule=rule), **start) as run:
        for _ in range(2):  # a run's first two windows find the size of its counts
            run.train_step(run.window(batch), loss_fn)
        with CountReads() as counter, pytest.MonkeyPatch.context() as patch:
            for name in ("tolist", "cpu", "numpy"):
                patch.setattr(torch.Tensor, name, counter.counted(getattr(torch.Tensor, name)))
            patch.setattr(
                AsyncScalar, "read", counter.uncounted(AsyncScalar.read)
            )  # which waits for what was copied long before
            # A loss on an accelerator is an `AsyncScalar` instead, read a step later.
            patch.setattr(nonfinite, "host_value", counter.uncounted(nonfinite.host_value))
            run.train_step(run.window(batch), loss_fn)
    return counter.reads


@pytest.mark.parametrize("loss_fn", [mean_loss, token_loss])
@pytest.mark.parametrize("micro_batch", [8, 3, 1])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_a_step_reads_no_scalar_from_the_device(loss_fn: Any, micro_batch: int, clip_norm: float | None) -> None:
    assert reads_per_step(loss_fn, micro_batch, clip_norm=clip_norm) == 0


@pytest.mark.parametrize("loss_fn", [mean_loss, token_loss])
def test_a_measured_step_reads_nothing_either(loss_fn: Any, each_measured: Any) -> None:
    rule = BatchRule("fixed", k=4, k_max=4, learning_rate="none", min_windows=100)
    assert reads_per_step(loss_fn, 2, rule, stop=trimtab.Stop(grad_norm=1e-9)) == 0
    assert each_measured.closed == 3  # the counted one too


def test_a_read_of_the_monitors_would_be_seen(each_measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sums = NoiseMonitor._sums
    monkeypatch.setattr(NoiseMonitor, "_sums", lambda *given: sums(*given) * sums(*given)[0].item() ** 0)
    rule = BatchRule("fixed", k=4, k_max=4, learning_rate="none", min_windows=100)
    assert reads_per_step(mean_loss, 2, rule) == 1


@pytest.mark.parametrize("read", ["item", "tolist", "cpu", "numpy"])
def test_the_counter_sees_a_read(read: str) -> None:
    def reading_loss(model: nn.Module, batch: Any) -> Any:
        loss = mean_loss(model, batch)
        getattr(loss.detach(), read)()
        return loss

    assert reads_per_step(reading_loss, 2) == 4
