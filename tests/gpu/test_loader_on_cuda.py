"""DataLoader settings compared on CUDA, where pinned memory is one of them."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from trimtab.measure.timing import synchronize
from trimtab.profiling.loader_trials import LoaderComparison
from trimtab.profiling.measurement_notes import Notes

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Slow(Dataset):
    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.full((1000,), float(index))


def test_pinned_memory_is_tried_and_workers_run_beside_an_initialized_device() -> None:
    device = torch.device("cuda", 0)
    weight = torch.ones(1000, device=device)
    synchronize(device)
    sums: list[torch.Tensor] = []

    def step(batch: torch.Tensor) -> None:
        sums.append((batch.to(device, non_blocking=True) * weight).sum())

    notes = Notes()
    found = LoaderComparison(step, DataLoader(Slow(), 4), device, 4, time.perf_counter() + 60).compare(0.02, notes)
    assert notes.found == ()
    assert found.own.step_s > found.alone_s
    assert any(each.num_workers for each in found.others)
    assert found.others[-1].pin_memory
    assert float(sums[0]) == 1000 * (0 + 1 + 2 + 3)
