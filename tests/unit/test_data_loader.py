"""plan(data=loader) and profile(data=loader) leave a loader as they found it: its order to come, and its workers."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import queue
import random

import numpy
import pytest
import torch
from call_counts import OutOfReach
from refusals import mean_loss, new_loop
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from trimtab.core.errors import TrimtabError, ValueGivenError

pytestmark = pytest.mark.slow

NUM_ROWS, BATCH_SIZE = 60, 6
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
    return DataLoader(Rows(), batch_sampler=BatchSampler(sampler, BATCH_SIZE, drop_last=False))


def shuffled(**more):
    return DataLoader(Rows(), BATCH_SIZE, shuffle=True, generator=seeded(), **more)


class OwnBatches(BatchSampler):
    """A batch sampler that shuffles by itself."""

    def __init__(self):
        super().__init__(range(NUM_ROWS), BATCH_SIZE, drop_last=False)
        self.generator = seeded()

    def __iter__(self):
        return iter(torch.randperm(NUM_ROWS, generator=self.generator).reshape(-1, BATCH_SIZE).tolist())


class OwnLoader:
    """A loader of the user's own, with a generator."""

    def __init__(self):
        self.generator = seeded()

    def __iter__(self):
        indices = torch.randperm(NUM_ROWS, generator=self.generator)
        return ({"x": rows.float()[:, None].repeat(1, 4), "y": rows % 3} for rows in indices.reshape(-1, BATCH_SIZE))


class OwnPlace:
    """A loader of the user's own that goes on where it was."""

    def __init__(self, at=0):
        self.at = at

    def __iter__(self):
        while self.at < NUM_ROWS:
            rows = torch.arange(self.at, self.at + BATCH_SIZE)
            self.at += BATCH_SIZE
            yield {"x": rows.float()[:, None].repeat(1, 4), "y": rows % 3}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def stateful(**options):
    return StatefulDataLoader(Rows(), BATCH_SIZE, shuffle=True, generator=seeded(), **options)


def told_where_to_go_on():
    before, loader = stateful(), stateful()
    next(iter(before))
    loader.load_state_dict(before.state_dict())
    return loader


def of_whole_batches():
    made = list(DataLoader(Rows(), BATCH_SIZE))
    return DataLoader(made, batch_size=None, sampler=RandomSampler(made, generator=seeded()))


LOADERS = {
    "the loader's generator": shuffled,
    "torch's own": lambda: DataLoader(Rows(), BATCH_SIZE, shuffle=True),
    "a sampler's": lambda: DataLoader(Rows(), BATCH_SIZE, sampler=RandomSampler(Rows(), generator=seeded())),
    "a batch sampler's": lambda: DataLoader(Rows(), batch_sampler=OwnBatches()),
    "one below a batch sampler": lambda: of_batches(SubsetRandomSampler(range(NUM_ROWS), generator=seeded())),
    "a sampler's of whole batches": of_whole_batches,
    "a loader of one's own": OwnLoader,
    "one of one's own with a place": lambda: OwnPlace(2 * BATCH_SIZE),
    "torchdata's": stateful,
    "torchdata's, told where to go on": told_where_to_go_on,
    "no randomness": lambda: DataLoader(Rows(), BATCH_SIZE),
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
    """The loss fails on the loader's batches alone: they are not the example.

    Its calls are counted where no reference leads: what planning finds in the loss's closure, it restores.
    """
    calls = OutOfReach(number=0)

    def fails(model, batch):
        calls.held.number += int(batch["x"].abs().max() > 4)
        if batch["x"].abs().max() > 4 and calls.held.number >= fails_at:
            raise OSError("the loss's own")
        return mean_loss(model, batch)

    loader = shuffled()
    with pytest.raises((OSError, TrimtabError)):
        loop.plan(loss_fn=fails, data=loader, adapt="learning_rate", num_blocks=3)
    assert calls.held.number >= fails_at  # the proofs take a batch of the loader too
    assert order(loader) == order(shuffled())


class Endless:
    """An iterator that draws from a generator of its own."""

    def __init__(self):
        self.generator = seeded()

    def __iter__(self):
        return self

    def __next__(self):
        return {"x": torch.randn(BATCH_SIZE, 4, generator=self.generator), "y": torch.zeros(BATCH_SIZE).long()}


def batches():
    return [{"x": torch.full((BATCH_SIZE, 4), float(index)), "y": torch.zeros(BATCH_SIZE).long()} for index in range(9)]


class Once(IterableDataset):
    """A stream that cannot begin again."""

    def __init__(self):
        self.items = iter(torch.arange(4.0 * NUM_ROWS).reshape(NUM_ROWS, 4))

    def __iter__(self):
        return ({"x": row, "y": 0} for row in self.items)


class Lines:
    """What reads on where a generator of its own is."""

    def __init__(self):
        self.lines = (each for each in batches())

    def __iter__(self):
        return iter(self.lines)


class Prefetched:
    """A loader with a queue that a producer fills."""

    def __init__(self):
        self.queue = queue.Queue()
        for each in batches():
            self.queue.put(each)

    def __iter__(self):
        while not self.queue.empty():
            yield self.queue.get()


def shared_generator():
    feed = iter(batches())

    class Feeding:
        def __iter__(self):
            return (each for each in feed)

    return Feeding()


ONE_SHOT = {
    "an iterator": Endless,
    "a generator": lambda: (each for each in batches()),
    "itertools.cycle": lambda: itertools.cycle(batches()),
    "a dataset with an iterator": lambda: DataLoader(Once(), BATCH_SIZE),
    "a loader with a generator": Lines,
    "a loader with a queue": Prefetched,
    "a generator in a closure": shared_generator,
    "an iterator of a loader": lambda: iter(DataLoader(Rows(), BATCH_SIZE)),
}
ITERATORS = {"an iterator", "a generator", "itertools.cycle", "an iterator of a loader"}


@pytest.mark.parametrize("door", ["profile", "plan"])
@pytest.mark.parametrize("make", ONE_SHOT.values(), ids=ONE_SHOT)
def test_nothing_is_drawn_from_one_shot_data(loop, make, door):
    data, other = make(), make()
    found = DOORS[door](loop, data)
    assert [note.code for note in found.notes] == ["data.not_drawn"]
    assert torch.equal(next(iter(data))["x"], next(iter(other))["x"])


@pytest.mark.parametrize("name", sorted(ONE_SHOT.keys() - ITERATORS))
def test_one_shot_data_that_are_no_iterator_are_not_trained_on(loop, name):
    data, other = ONE_SHOT[name](), ONE_SHOT[name]()
    with pytest.raises(ValueGivenError) as caught:
        DOORS["adapt"](loop, data)
    assert caught.value.code == "data.one_shot"
    assert torch.equal(next(iter(data))["x"], next(iter(other))["x"])


def from_file(path):
    class Handle(IterableDataset):
        """A stream over an open file, read from where it is."""

        def __init__(self):
            self.file = path.open()

        def __del__(self):
            self.file.close()

        def __iter__(self):
            while line := self.file.readline():
                yield {"x": torch.full((4,), float(line)), "y": 0}

    path.write_text("".join(f"{index}\n" for index in range(NUM_ROWS)))
    return DataLoader(Handle(), BATCH_SIZE)


class Augmented(Rows):
    """Rows with noise of a generator of NumPy's, and a count of what was read."""

    total = 0

    def __init__(self):
        self.random, self.count, self.seen = numpy.random.default_rng(0), 0, []
        self.by_python = random.Random(0)

    def __getitem__(self, index):
        self.count += 1
        Augmented.total += 1
        self.seen.append(index)
        noise = self.random.random() + self.by_python.random() + self.count + self.total
        return {"x": torch.full((4,), index + noise), "y": index % 3}


class OfEpochs(Sampler):
    """A sampler that counts its epochs, and shuffles an array in place."""

    def __init__(self):
        self.epoch, self.order = 0, numpy.arange(NUM_ROWS)

    def __iter__(self):
        self.epoch += 1
        numpy.random.default_rng(self.epoch).shuffle(self.order)
        return iter(self.order.tolist())

    def __len__(self):
        return NUM_ROWS


def counting_in_a_closure():
    epoch = 0

    def collate(rows):
        nonlocal epoch
        epoch += 1
        return {"x": torch.stack([row["x"] for row in rows]) + epoch, "y": torch.tensor([row["y"] for row in rows])}

    return DataLoader(Rows(), BATCH_SIZE, collate_fn=collate)


SAID = 0


class OfGlobal:
    """A loader that counts in a variable of its module."""

    def __iter__(self):
        global SAID
        for each in batches():
            SAID += 1
            yield {**each, "x": each["x"] + SAID}


class WithSlots:
    """A loader whose place is in a slot, and is kept from one epoch to the next."""

    __slots__ = ("at",)

    def __init__(self):
        self.at = 0

    def __iter__(self):
        for each in batches():
            self.at += 1
            yield {**each, "x": each["x"] + self.at}


STATEFUL = {
    "a dataset's generators and counts": lambda path: DataLoader(Augmented(), BATCH_SIZE),
    "a sampler's epoch": lambda path: DataLoader(Rows(), BATCH_SIZE, sampler=OfEpochs()),
    "a closure": lambda path: counting_in_a_closure(),
    "a global": lambda path: OfGlobal(),
    "a slot": lambda path: WithSlots(),
    "an open file": from_file,
}


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
@pytest.mark.parametrize("make", STATEFUL.values(), ids=STATEFUL)
def test_state_of_the_datas_own_is_as_before_planning(loop, make, door, tmp_path, monkeypatch):
    def forget():
        monkeypatch.setattr(Augmented, "total", 0)
        monkeypatch.setitem(globals(), "SAID", 0)

    forget()
    expected = order(make(tmp_path / "a"))
    forget()
    loader = make(tmp_path / "b")
    found = door(loop, loader)
    assert found.notes == ()
    assert order(loader) == expected


def test_batches_that_come_from_elsewhere_are_noted(loop, tmp_path):
    """A file that is opened anew by its descriptor goes on where it was: nothing shows that in the loader."""
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(200)))
    number = os.open(path, os.O_RDONLY)

    class OfDescriptor:
        def __iter__(self):
            while read := os.read(number, BATCH_SIZE):
                yield {"x": torch.tensor(list(read)).float()[:, None].repeat(1, 4), "y": torch.zeros(len(read)).long()}

    try:
        with pytest.warns(RuntimeWarning, match="first epoch"):
            found = loop.profile(data=OfDescriptor(), num_blocks=3)
    finally:
        os.close(number)
    assert [note.code for note in found.notes] == ["data.not_repeatable"]


def test_a_loader_that_fails_is_noted_and_left_to_the_loop(loop):
    class Failing(Rows):
        def __getitem__(self, index):
            raise OSError("the disk's own")

    found = loop.profile(data=DataLoader(Failing(), BATCH_SIZE), num_blocks=3)
    assert [note.code for note in found.notes] == ["data.not_drawn"]
    assert "data" not in found.phases_s


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
