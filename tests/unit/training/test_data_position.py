"""A pass that is gone on with: the batches that were left, in the same order and by the same chance."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from raising import raises
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from trimtab.core.errors import FormatError, ValueGivenError
from trimtab.distributed.sharded_loader import shard
from trimtab.training.batch import EmptyBatch
from trimtab.training.data_position import DataPosition, innermost_loader, require_state_kept


class Noisy(Dataset):
    """Rows by which every global generator is drawn from."""

    def __len__(self):
        return 23

    def __getitem__(self, index):
        return index, torch.rand(1).item(), random.random(), np.random.rand()


class Stateful:
    """A loader that goes on by itself, as torchdata's."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self):
        while self.at < 7:
            self.at += 1
            yield self.at, torch.rand(1).item()
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def shuffled(**options):
    return DataLoader(Noisy(), batch_size=4, shuffle=True, **options)


def by_own_generator():
    sampler = RandomSampler(Noisy(), generator=torch.Generator().manual_seed(7))
    return DataLoader(Noisy(), batch_size=4, sampler=sampler, generator=torch.Generator().manual_seed(8))


def endless():
    def batches():
        generator = torch.Generator().manual_seed(3)
        while True:
            yield torch.randperm(4, generator=generator), torch.rand(1).item()

    return batches()


LOADERS = {
    "shuffled": shuffled,
    "own generators": by_own_generator,
    "workers": lambda: shuffled(num_workers=1),
    "dealt": lambda: shard(shuffled(generator=torch.Generator().manual_seed(5)), 1, 2),
    "dealt by own generator": lambda: shard(by_own_generator(), 0, 2),
    "dealt whole": lambda: shard(list(shuffled()), 1, 2),
    "a list": lambda: [torch.arange(4) + i for i in range(6)],
    "stateful": Stateful,
    "torchdata's": lambda: StatefulDataLoader(Noisy(), batch_size=4, shuffle=True),
    "torchdata's by own generator": lambda: StatefulDataLoader(
        Noisy(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(5)
    ),
    "torchdata's, dealt": lambda: shard(StatefulDataLoader(Noisy(), batch_size=4, shuffle=True), 1, 2),
    "endless": endless,
}


def train(position, loader, passes, windows, saves_after=None, *, between=False):
    """Return what each window saw: its batch, and numbers that the step drew; and what was saved on the way.

    Args:
        between: save between two passes rather than at the end of one.
    """
    seen, saved = [], None
    for number in range(position.passes, passes):
        for batch in position.batches(loader):
            seen.append((number, repr(batch), torch.rand(1).item(), random.random(), np.random.rand()))
            if len(seen) == saves_after:
                saved = position.state_dict()
            if len(seen) == windows:
                return seen, saved
        if len(seen) == saves_after:
            saved = position.state_dict()  # the last batch was drawn for the last window
        position.over()
        torch.rand(1)  # an evaluation
        if len(seen) == saves_after and between:
            saved = position.state_dict()
    return seen, saved


def seeded():
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)


def lost(loader):
    """Draw from everything, as another process would have by the time it goes on."""
    torch.manual_seed(77)
    random.seed(78)
    np.random.seed(79)
    return loader


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize(
    ("at", "between"), [(1, False), (3, False), (6, False), (6, True), (7, False), (7, True), (10, False)]
)
def test_what_follows_is_that_of_a_run_that_was_not_cut_off(kind, at, between):
    if kind == "workers" and at not in (3, 6):
        pytest.skip("two of these show it")
    passes = 1 if kind == "endless" else 3
    seeded()
    loader = LOADERS[kind]()
    whole, saved = train(DataPosition(is_kept=True), loader, passes, 14, saves_after=at, between=between)
    seeded()
    again = LOADERS[kind]()
    position = DataPosition(is_kept=True)
    lost(again)
    position.loading(saved)()
    rest, _ = train(position, again, passes, 14 - at)
    assert rest == whole[at:]


def test_a_pass_that_was_left_early_is_over_once_the_next_begins():
    position = DataPosition(is_kept=True)
    next(iter(position.batches([1, 2, 3])))
    assert position.passes == 0
    assert list(position.batches([1, 2])) == [1, 2]
    assert position.passes == 1
    position.over()
    assert position.passes == 2


def resumed(position):
    """Return a new position with the state of another."""
    other = DataPosition(is_kept=True)
    other.loading(position.state_dict())()
    return other


OTHER_DATA = {
    "less data": (lambda: [torch.ones(1)] * 5, 4, lambda: [torch.ones(1)] * 3, "resume.data_short", "loader"),
    "another kind": (Stateful, 1, lambda: [1, 2, 3], "resume.loader_kind", "loader"),
    "other generators": (
        *(by_own_generator, 1, shuffled),
        *("random_state.other_loader", "state.data.begun.generators"),
    ),
}


@pytest.mark.parametrize(("make", "drawn", "other", "code", "field"), OTHER_DATA.values(), ids=OTHER_DATA)
def test_other_data_than_were_trained_on_are_refused(make, drawn, other, code, field):
    position = DataPosition(is_kept=True)
    batches = position.batches(make())
    for _ in range(drawn):
        next(batches)
    again = resumed(position)
    again.accepted = lambda change: None
    with raises(FormatError, code=code, field=field):
        next(again.batches(other()))


def test_what_is_not_kept_is_not_told():
    position = DataPosition(is_kept=False)
    assert list(position.batches([1, 2])) == [1, 2]
    with raises(ValueGivenError, code="checkpoints.not_configured", field="run"):
        position.state_dict()


@pytest.mark.parametrize("kind", [kind for kind in LOADERS if kind != "endless"])
def test_the_first_batch_of_a_pass_that_is_drawn_is_drawn_anew_without_a_trace(kind):
    def next_pass(*, draws):
        seeded()
        loader, position = LOADERS[kind](), DataPosition(is_kept=True)
        whole = [repr(batch) for batch in position.batches(loader)]
        if draws:
            before = position.state_dict()
            assert repr(position.drawn_anew()) == whole[0]
            assert repr(position.state_dict()) == repr(before)
        position.over()
        return [repr(batch) for batch in position.batches(loader)]

    assert next_pass(draws=True) == next_pass(draws=False)


def test_nothing_is_drawn_anew_in_the_midst_of_a_pass_or_of_none():
    position = DataPosition(is_kept=True)
    assert position.drawn_anew() is None
    next(position.batches([1, 2]))
    assert position.drawn_anew() is None


def test_the_first_batch_with_rows_of_what_was_trained_on_is_told_once():
    batches = [EmptyBatch(), torch.ones(1), torch.ones(2), torch.ones(3)]
    position = DataPosition(is_kept=True)
    drawn = position.batches(batches)
    for _ in range(3):
        next(drawn)
    assert position.taken_first() is None
    other = resumed(position)
    assert len(next(other.batches(batches))) == 3
    assert len(other.taken_first()) == 1
    assert other.taken_first() is None


def test_a_batch_that_holds_no_number_is_none_to_join_others_with():
    batches = [torch.tensor([float("nan")]), torch.ones(1), torch.zeros(1)]
    position = DataPosition(is_kept=True)
    drawn = position.batches(batches)
    next(drawn), next(drawn)
    other = resumed(position)
    next(other.batches(batches))
    assert other.taken_first().tolist() == [1.0]
    assert [*drawn] == [torch.zeros(1)]
    assert position.drawn_anew().tolist() == [1.0]


class Stream(IterableDataset):
    """Rows without an index, of which a loader is dealt as it is."""

    def __len__(self):
        return 23

    def __iter__(self):
        return iter(range(23))


def dealt_twice(**options):
    loader = DataLoader(Stream(), batch_size=4, **options)
    once = shard(loader, 0, 2)
    return loader, once, shard(once, 0, 2)


def test_workers_that_stay_are_found_through_all_that_deal_a_loader_out():
    loaders = dealt_twice(num_workers=1, persistent_workers=True)
    for each in loaders:
        assert innermost_loader(each) is loaders[0]
        with raises(ValueGivenError, code="loader.persistent_workers", field="loader"):
            require_state_kept(each)
    for each in dealt_twice(num_workers=1):
        require_state_kept(each)


def test_rows_of_data_are_counted_through_all_that_deal_a_loader_out():
    for each in dealt_twice():
        position = DataPosition(is_kept=True)
        next(position.batches(each))
        assert position.state_dict()["length"] == {"batches": 6, "rows": 23}


def test_a_loader_that_holds_itself_has_an_end():
    loader = Stateful()
    loader.wrapped = loader
    assert innermost_loader(loader) is loader


def test_a_batch_is_drawn_anew_with_the_loaders_place_saved_and_put_back_once():
    told = []

    class Told(Stateful):
        def state_dict(self):
            told.append("saved")
            return super().state_dict()

        def load_state_dict(self, state):
            told.append("put back")
            super().load_state_dict(state)

    position = DataPosition(is_kept=True)
    list(position.batches(Told()))
    assert position.drawn_anew()[0] == 1
    assert told == ["saved", "put back"]


def test_a_pass_that_nothing_was_drawn_from_yet_is_saved_as_its_own_loader_is():
    position = DataPosition(is_kept=True)
    list(position.batches([1, 2]))
    position.over()
    loader = shuffled(generator=torch.Generator().manual_seed(9))
    position.batches(loader)
    saved = position.state_dict()
    whole = [repr(batch) for batch in position.batches(loader)]
    assert saved["length"] == {"batches": 6, "rows": 23}
    other = DataPosition(is_kept=True)
    other.loading(saved)()
    again = lost(shuffled(generator=torch.Generator().manual_seed(10)))
    assert repr(other.state_dict()["here"]["generators"]) == repr(saved["here"]["generators"])
    assert [batch.split(", tensor(")[0] for batch in map(repr, other.batches(again))] == [
        batch.split(", tensor(")[0] for batch in whole
    ]


class Counted:
    """A loader that orders its rows by how often it was gone through, as Accelerate's."""

    def __init__(self):
        self.iteration = 0

    def set_epoch(self, epoch):
        self.iteration = epoch

    def __iter__(self):
        yield from torch.randperm(6, generator=torch.Generator().manual_seed(self.iteration)).tolist()
        self.iteration += 1


@pytest.mark.parametrize("at", [2, 6, 8, 12, 15])
@pytest.mark.parametrize("between", [False, True])
def test_a_loader_that_counts_its_passes_goes_on_in_its_own(at, between):
    seeded()
    whole, saved = train(DataPosition(is_kept=True), Counted(), 3, 18, saves_after=at, between=between)
    position = DataPosition(is_kept=True)
    position.loading(saved)()
    rest, _ = train(position, Counted(), 3, 18 - at)
    assert [seen[:2] for seen in rest] == [seen[:2] for seen in whole[at:]]
