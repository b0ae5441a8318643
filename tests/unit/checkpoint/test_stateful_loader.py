"""A run kept over torchdata's StatefulDataLoader: gone on with to the bit, and nothing is loaded a second time."""

from __future__ import annotations

import weakref

import pytest
import torch
from raising import raises
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import trimtab
from trimtab.core.errors import LoopError

NUM_ROWS, BATCH_SIZE = 22, 4  # six windows a pass
WINDOWS = 13


class Rows(Dataset):
    """Rows that were read are noted, where they are read in this process."""

    def __init__(self) -> None:
        self.read = []

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        self.read.append(index)
        return torch.full((4,), index / NUM_ROWS)


class Places:
    """Where a pass over a stream is."""

    def __init__(self, read: list[int]) -> None:
        self._read, self._at = read, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._at == NUM_ROWS:
            raise StopIteration
        self._at += 1
        self._read.append(self._at)
        return torch.full((4,), self._at / NUM_ROWS)

    def state_dict(self):
        return {"at": self._at}

    def load_state_dict(self, state):
        self._at = state["at"]


class Stream(IterableDataset):
    """Rows without a length; what goes over them knows its place, as over files on disk."""

    def __init__(self) -> None:
        self.read = []

    def __iter__(self):
        return Places(self.read)


def shuffled(workers=0):
    return StatefulDataLoader(Rows(), BATCH_SIZE, shuffle=True, num_workers=workers)


LOADERS = {
    "shuffled": shuffled,
    "with workers": lambda: shuffled(2),
    "a stream": lambda: StatefulDataLoader(Stream(), BATCH_SIZE),
    "a stream, from a worker": lambda: StatefulDataLoader(Stream(), BATCH_SIZE, num_workers=1),
}


def train(folder, loader, windows, seed):
    """Return losses and weights of a run that ends after so many windows, in the middle of a pass or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(seed)
    keep, losses = trimtab.Checkpoints(folder, every_steps=1, every_s=None), []
    with trimtab.start(model, optimizer, trimtab.Plan.fixed(BATCH_SIZE, 3), checkpoints=keep) as run:
        while run.num_windows < windows:
            for window in run.windows(loader):
                losses.append(run.train_step(window, lambda model, rows: (model(rows) - 1).square().mean()).item())
                if run.num_windows == windows:
                    run.checkpoint()
                    break
    return losses, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", LOADERS)
def test_it_goes_on_to_the_bit(tmp_path, name):
    """From within the first epoch, from its end, and from within the second."""
    make = LOADERS[name]
    torch.manual_seed(3)
    whole, weights = train(tmp_path / "whole", make(), WINDOWS, 4)
    for cut in (1, 6, 8) if name == "shuffled" else (6, 8):
        torch.manual_seed(3)
        before, _ = train(tmp_path / f"{cut}", make(), cut, 4)
        torch.manual_seed(77)
        after, found = train(tmp_path / f"{cut}", make(), WINDOWS, 78)
        assert before + after == whole, cut
        assert all(map(torch.equal, found, weights)), cut


@pytest.mark.parametrize("make", [shuffled, LOADERS["a stream"]])
def test_what_was_trained_on_is_not_loaded_again(tmp_path, make):
    train(tmp_path / "run", make(), 4, 4)
    loader = make()
    train(tmp_path / "run", loader, 6, 5)
    assert len(loader.dataset.read) == NUM_ROWS - 4 * BATCH_SIZE


LEFT = {
    "within a pass": ("break", {}),
    "at the end of a pass": ("end", {}),
    "by an error": ("error", {}),
    "by a stop condition": ("end", {"stop": trimtab.Stop(grad_norm=1e9)}),
}


@pytest.mark.parametrize("how", LEFT)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_run_that_is_over_holds_no_loader(tmp_path, kind, kept, how):
    """Without waiting for a collection of garbage, in which each of its workers is waited for, for five seconds."""
    leaves, more = LEFT[how]
    keep = {"checkpoints": trimtab.Checkpoints(tmp_path / "run", every_steps=1)} if kept else {}

    def run_over(loader):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with trimtab.start(model, optimizer, trimtab.Plan.fixed(BATCH_SIZE), **keep, **more) as run:
            for window in run.windows(loader):
                run.train_step(window, lambda model, rows: model(rows).square().mean())
                if leaves == "error":
                    raise ValueError("of the loop")
                if leaves == "break":
                    break
        return run

    def over(loader):
        try:
            raise KeyError("that is handled while the run goes on")
        except KeyError:
            try:
                return run_over(loader)
            except ValueError:
                return None

    loader = kind(Rows(), BATCH_SIZE, shuffle=True, num_workers=1)
    held = weakref.ref(loader)
    run = over(loader)
    del loader
    assert held() is None
    if run is not None and kept:
        with raises(LoopError, code="run.closed", field="run.position.state_dict"):
            run.position.state_dict()
