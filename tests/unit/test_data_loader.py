"""plan(data=loader) and profile(data=loader) leave a loader as they found it: its order to come, and its workers."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from refusals import mean_loss, new_loop
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from trimtab.core.errors import TrimtabError

NUM_ROWS, BATCH_ROWS = 60, 6
loop = pytest.fixture(new_loop)


class Rows(Dataset):
    """Rows that say which they are."""

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return {"x": torch.full((4,), float(index)), "y": index % 3}


def seeded():
    return torch.Generator().manual_seed(3)


def of_batches(sampler):
    return DataLoader(Rows(), batch_sampler=BatchSampler(sampler, BATCH_ROWS, drop_last=False))


def shuffled(**more):
    return DataLoader(Rows(), BATCH_ROWS, shuffle=True, generator=seeded(), **more)


class OwnBatches(BatchSampler):
    """A batch sampler that shuffles by itself."""

    def __init__(self):
        super().__init__(range(NUM_ROWS), BATCH_ROWS, drop_last=False)
        self.generator = seeded()

    def __iter__(self):
        return iter(torch.randperm(NUM_ROWS, generator=self.generator).reshape(-1, BATCH_ROWS).tolist())


class OwnLoader:
    """A loader of the user's own, with a generator."""

    def __init__(self):
        self.generator = seeded()

    def __iter__(self):
        indices = torch.randperm(NUM_ROWS, generator=self.generator)
        return ({"x": rows.float()[:, None].repeat(1, 4), "y": rows % 3} for rows in indices.reshape(-1, BATCH_ROWS))


class OwnPlace:
    """A loader of the user's own that goes on where it was."""

    def __init__(self, at=0):
        self.at = at

    def __iter__(self):
        while self.at < NUM_ROWS:
            rows = torch.arange(self.at, self.at + BATCH_ROWS)
            self.at += BATCH_ROWS
            yield {"x": rows.float()[:, None].repeat(1, 4), "y": rows % 3}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(**options):
    return StatefulDataLoader(Rows(), BATCH_ROWS, shuffle=True, generator=seeded(), **options)


def told_where_to_go_on():
    before, loader = stateful(), stateful()
    next(iter(before))
    loader.load_state_dict(before.state_dict())
    return loader


def of_whole_batches():
    made = list(DataLoader(Rows(), BATCH_ROWS))
    return DataLoader(made, batch_size=None, sampler=RandomSampler(made, generator=seeded()))


LOADERS = {
    "the loader's generator": shuffled,
    "torch's own": lambda: DataLoader(Rows(), BATCH_ROWS, shuffle=True),
    "a sampler's": lambda: DataLoader(Rows(), BATCH_ROWS, sampler=RandomSampler(Rows(), generator=seeded())),
    "a batch sampler's": lambda: DataLoader(Rows(), batch_sampler=OwnBatches()),
    "one below a batch sampler": lambda: of_batches(SubsetRandomSampler(range(NUM_ROWS), generator=seeded())),
    "a sampler's of whole batches": of_whole_batches,
    "a loader of one's own": OwnLoader,
    "one of one's own with a place": lambda: OwnPlace(2 * BATCH_ROWS),
    "torchdata's": stateful,
    "torchdata's, told where to go on": told_where_to_go_on,
    "no randomness": lambda: DataLoader(Rows(), BATCH_ROWS),
}


def order(loader):
    """The rows of two epochs, in order."""
    return [batch["x"][:, 0].tolist() for _ in range(2) for batch in loader]


DOORS = {
    "profile": lambda loop, data: loop.profile(data=data, num_blocks=3),
    "plan": lambda loop, data: loop.plan(data=data, num_blocks=3),
    "adapt": lambda loop, data: loop.plan(data=data, num_blocks=3, adapt="learning_rate"),
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_the_epochs_after_planning_are_those_without_it(loop, make, door):
    torch.manual_seed(1)
    expected = order(make())
    torch.manual_seed(1)
    loader = make()
    door(loop, loader)
    assert order(loader) == expected


def test_an_epoch_drawn_before_planning_changes_nothing(loop):
    loader, other = shuffled(), shuffled()
    assert order(loader) == order(other)
    loop.plan(data=loader, num_blocks=3)
    assert order(loader) == order(other)


@pytest.mark.parametrize("fails_at", [1, 3])
def test_an_order_is_put_back_after_a_range_test_that_failed(loop, monkeypatch, fails_at):
    """The loss fails on the loader's batches alone: they are not the example."""
    calls = []

    def fails(model, batch):
        calls.extend([1] if batch["x"].abs().max() > 4 else [])
        if len(calls) >= fails_at:
            raise OSError("the loss's own")
        return mean_loss(model, batch)

    loader = shuffled()
    with pytest.raises((OSError, TrimtabError)):
        loop.plan(loss_fn=fails, data=loader, adapt="learning_rate", num_blocks=3)
    assert len(calls) == fails_at
    assert order(loader) == order(shuffled())


def test_an_iterator_is_further_on_afterwards(loop):
    """And so is what it draws from: put back, it would yield the same rows twice."""

    class Endless:
        def __init__(self):
            self.generator = seeded()

        def __iter__(self):
            return self

        def __next__(self):
            return {"x": torch.randn(BATCH_ROWS, 4, generator=self.generator), "y": torch.zeros(BATCH_ROWS).long()}

    drawn, planned = Endless(), Endless()
    for _ in range(9):
        next(drawn)
    loop.profile(data=planned, num_blocks=3)
    assert torch.equal(next(planned)["x"], next(drawn)["x"])


def with_workers(persistent):
    return shuffled(num_workers=2, persistent_workers=persistent)


@pytest.mark.parametrize("door", ["profile", "adapt"])
@pytest.mark.parametrize("persistent", [True, False])
def test_workers_started_for_planning_end_with_it(loop, persistent, door):
    before = set(multiprocessing.active_children())
    loader = with_workers(persistent)
    DOORS[door](loop, loader)
    assert set(multiprocessing.active_children()) <= before
    assert order(loader) == order(with_workers(persistent))


def test_workers_that_were_there_before_planning_stay(loop):
    loader, other = with_workers(True), with_workers(True)
    assert order(loader) == order(other)
    before = set(multiprocessing.active_children())
    loop.profile(data=loader, num_blocks=3)
    assert set(multiprocessing.active_children()) == before
    assert order(loader) == order(other)


def test_the_wait_for_workers_that_do_not_stay_is_known(loop):
    assert "data" in loop.profile(data=with_workers(True), num_blocks=3).phases_s
