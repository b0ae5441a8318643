"""Where training data lies: the rule, what it says, and batches copied ahead."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.paper.cifar10 import augment
from trimtab.core.choice import Effect
from trimtab.tasks import DataSource, TaskData
from trimtab.tasks import placement as placement_module
from trimtab.tasks.placement import place_data, placement, prefetch

CPU = torch.device("cpu")


def data(device: str = "cpu") -> TaskData:
    images, labels = torch.arange(16 * 3 * 32 * 32).view(16, 3, 32, 32).to(torch.uint8), torch.arange(16)
    columns = (images.to(device), labels.to(device))
    return TaskData(columns, (columns,), DataSource("made here", "here", "0" * 64), augment)


@pytest.mark.parametrize(
    ("num_bytes", "free", "value", "said"),
    [
        (154_000_000, 80 * 2**30, "device", "147 MiB against 80 GiB free on the GPU, beside what a step takes"),
        (2**30, 10 * 2**30, "device", "beside what a step takes"),
        (2**30 + 1, 10 * 2**30, "host", "more than a tenth: batches are copied from pinned memory, one ahead"),
        (154_000_000, None, "host", "where they are used"),
    ],
)
def test_data_lies_on_the_device_where_it_takes_a_tenth_at_the_most(num_bytes, free, value, said):
    choice = placement(num_bytes, "cuda", free)
    assert choice.value == value
    assert said in choice.reason
    assert choice.effect is Effect.BITWISE
    assert choice.changed == (value == "device")
    assert bool(choice.rejected) == (free is not None)


def test_rows_augmented_on_the_device_are_the_hosts_to_rounding():
    for free, augments, mark in (
        (2**34, True, Effect.ROUNDING),
        (2**34, False, Effect.BITWISE),
        (2**10, True, Effect.BITWISE),
    ):
        assert placement(2**20, "cuda", free, augments=augments).effect is mark
    given = data()
    kept, choice = place_data(given, CPU)
    assert kept is given
    assert choice.value == "host"
    # On a device without values: an index or a constant that lay on the host would be refused there.
    images, labels = next(data("meta").batches(0, 4))
    assert (images.device.type, labels.device.type) == ("meta", "meta")
    assert images.shape == (4, 3, 32, 32)
    assert images.dtype == torch.float32


class HostTensors(TorchDispatchMode):
    """What operators are given or make on the host."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        on_host = [leaf for leaf in tree_leaves((args, kwargs, made)) if getattr(leaf, "device", None) == CPU]
        self.seen += [func] if on_host else []
        return made


def test_a_batch_takes_nothing_from_the_host():
    """A copy from there, however small, waits for the device; an epoch's order and constants are sent once."""
    batches = data("meta").batches(0, 4)
    next(batches)
    with HostTensors() as host:
        for _ in range(3):
            next(batches)
    assert host.seen == []
    with host:
        next(batches)
    assert host.seen  # of the next epoch's order: the watch sees what is on the host


def test_on_a_processor_batches_are_drawn_as_they_are_asked_for():
    drawn = []

    def noted():
        for batch in data().batches(0, 4):
            drawn.append(batch)
            yield batch

    taken = list(itertools.islice(prefetch(noted(), CPU), 3))
    assert len(drawn) == 3
    assert all(one is other for one, other in zip(taken, drawn, strict=True))


def test_on_a_gpu_the_next_batch_is_sent_before_one_is_trained_on(monkeypatch):
    """The order alone, which needs no GPU: copies, streams and events are in tests/gpu."""
    log = []

    def sent(batch, device, stream):
        log.append(f"sent {batch}")
        return None if batch is None else (batch, None)

    monkeypatch.setattr(placement_module, "_sent", sent)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    for batch in prefetch(iter("abc"), torch.device("cuda")):
        log.append(f"trained {batch}")
    assert log == ["sent a", "sent b", "trained a", "sent c", "trained b", "sent None", "trained c"]
