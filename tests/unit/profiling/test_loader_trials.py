"""Comparison of DataLoader settings in training steps."""

from __future__ import annotations

import contextlib
import multiprocessing
import sqlite3
import time
import types

import pytest
import torch
from small_loops import class_loss, linear_loop
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

import trimtab
from trimtab.core.serialization import from_json, to_json
from trimtab.planner.loader_settings import best_settings
from trimtab.plans.profile import Candidate, Profile
from trimtab.profiling import loader_trials
from trimtab.profiling.loader_trials import LoaderComparison, compare_loaders
from trimtab.profiling.measurement_notes import Notes
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.state.data_state import rebuilt_loader

FETCH_S, STEP_S, ROWS = 0.004, 0.010, 2
CPU = torch.device("cpu")


class Clock:
    """A clock that a test advances. Workers advance their own copy, as if they were on other cores."""

    def __init__(self):
        # Attributes of a module are not restored with the state of the data, of which the clock is a part.
        self._now = types.ModuleType("clock")
        self._now.seconds = 0.0

    def perf_counter(self):
        return self._now.seconds

    def pass_(self, seconds):
        self._now.seconds += seconds


class Rows(Dataset):
    """Samples that take a while each."""

    def __init__(self, clock, num=80, seconds=FETCH_S):
        self.clock, self.num, self.seconds, self.last = clock, num, seconds, None

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        self.clock.pass_(self.seconds)
        self.last = index
        torch.rand(())  # as an augmentation draws
        return torch.full((3,), float(index)), index % 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(32.0).reshape(8, 4))


class OwnIteration(DataLoader):
    def __iter__(self):
        return iter([])


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(loader_trials, "time", made)
    return made


def cores(monkeypatch, number):
    monkeypatch.setattr(loader_trials, "own_cores", lambda: frozenset(range(number)))


def shuffled(dataset, **options):
    return DataLoader(dataset, ROWS, shuffle=True, generator=torch.Generator().manual_seed(3), **options)


def test_the_cost_of_a_loader_and_its_removal_are_measured_in_steps(clock, monkeypatch):
    cores(monkeypatch, 1)
    seen = []

    def step(batch):
        seen.append(batch[0][:, 0].tolist())
        clock.pass_(STEP_S)

    loader, process = shuffled(Rows(clock)), torch.get_rng_state()
    before, children = loader.generator.get_state(), set(multiprocessing.active_children())
    found = LoaderComparison(step, loader, CPU, 4, 100.0).compare(ROWS * FETCH_S, Notes())
    assert found.alone_s == pytest.approx(STEP_S)
    assert found.own.step_s == pytest.approx(STEP_S + ROWS * FETCH_S)
    assert found.noise_s == pytest.approx(0)
    (other,) = found.others
    assert (other.num_workers, other.prefetch_factor, other.pin_memory) == (1, 2, False)
    assert other.step_s == pytest.approx(STEP_S)
    assert (found.num_steps, found.epoch) == (4, 40)
    assert best_settings(found) == other
    # The user's loader, in memory, with a worker, and both loaders again: the same samples in the same order.
    own, alone = seen[:5], seen[5:9]
    assert seen[9:] == 3 * own
    assert alone == own[1:]
    assert torch.equal(loader.generator.get_state(), before)
    assert torch.equal(torch.get_rng_state(), process)
    assert set(multiprocessing.active_children()) <= children
    assert (loader.num_workers, loader.prefetch_factor, loader.dataset.last) == (0, None, None)


def test_a_loader_without_cost_is_not_compared_further(clock):
    loader = shuffled(Rows(clock, seconds=0.0))
    found = LoaderComparison(lambda batch: clock.pass_(STEP_S), loader, CPU, 4, 100.0).compare(0.0, Notes())
    assert found.others == ()


def test_no_more_time_is_used_than_allowed(clock, monkeypatch):
    cores(monkeypatch, 1)
    comparison = LoaderComparison(lambda batch: clock.pass_(STEP_S), shuffled(Rows(clock)), CPU, 4, 0.15)
    assert comparison.compare(ROWS * FETCH_S, Notes()).others == ()
    assert clock.perf_counter() < 0.3


@pytest.mark.parametrize(("extra_s", "is_better"), [(0.0, True), (0.008, False)])
def test_settings_that_are_faster_in_a_single_round_are_not_recommended(clock, monkeypatch, extra_s, is_better):
    cores(monkeypatch, 1)
    steps = []

    def step(batch):
        steps.append(batch)
        clock.pass_(STEP_S + (extra_s if 14 < len(steps) <= 19 else 0.0))  # The worker's second trial.

    found = LoaderComparison(step, shuffled(Rows(clock)), CPU, 4, 100.0).compare(ROWS * FETCH_S, Notes())
    assert len(steps) == 24
    assert (best_settings(found) is not None) is is_better


def test_time_is_left_to_repeat_the_fastest_settings(clock, monkeypatch):
    cores(monkeypatch, 1)
    steps = []

    def step(batch):
        steps.append(batch)
        clock.pass_(STEP_S + (0.003 if 9 < len(steps) <= 19 else 0.0))  # A worker removes a part of the cost only.

    found = LoaderComparison(step, shuffled(Rows(clock)), CPU, 4, 0.38).compare(ROWS * FETCH_S, Notes())
    assert len(found.others) == 1
    assert best_settings(found) is not None


def test_trials_are_kept_without_a_recommendation_if_their_repetition_fails(clock, monkeypatch):
    cores(monkeypatch, 1)
    steps, notes, timeouts = [], Notes(), []

    def step(batch):
        steps.append(batch)
        clock.pass_(STEP_S)
        if len(steps) > 14:
            raise OSError("no longer")

    def rebuilt(*given, **changed):
        timeouts.append(changed.get("timeout"))
        return rebuilt_loader(*given, **changed)

    monkeypatch.setattr(loader_trials, "rebuilt_loader", rebuilt)
    found = LoaderComparison(step, shuffled(Rows(clock)), CPU, 4, 1.0).compare(ROWS * FETCH_S, notes)
    assert len(found.others) == 1
    assert best_settings(found) is None
    assert [note.code for note in notes.found] == ["loader.not_tried"]
    assert timeouts[1] >= 10  # Workers may take longer to start than the time left.


def test_workers_that_exceed_the_time_are_not_started(clock, monkeypatch):
    cores(monkeypatch, 64)
    comparison = LoaderComparison(lambda batch: clock.pass_(STEP_S), shuffled(Rows(clock)), CPU, 4, 40.0)
    notes = Notes()
    assert comparison.compare(10.0, notes).others == ()  # The shortest trial takes 20 s.
    assert notes.found == ()


def test_the_time_limit_ends_the_first_steps_of_workers_too(clock, monkeypatch):
    steps = []

    def step(batch):
        steps.append(batch)
        clock.pass_(STEP_S)

    comparison = LoaderComparison(step, shuffled(Rows(clock), num_workers=2), CPU, 4, STEP_S / 2)
    with pytest.raises(Exception, match="time limit"):
        comparison.compare(FETCH_S, Notes())
    assert len(steps) == 1


@pytest.mark.parametrize("epoch", range(3, 13))
def test_steps_are_counted_within_an_epoch(clock, monkeypatch, epoch):
    monkeypatch.setattr(loader_trials, "next_settings", lambda *given, **options: None)

    def loss(model, batch):
        clock.pass_(STEP_S)
        return class_loss(model, batch)

    data = Rows(clock, num=ROWS * epoch)
    loader, notes = DataLoader(data, ROWS), Notes()
    subject = TrainingLoop(*linear_loop(3, 2), loss, next(iter(loader)))
    found = compare_loaders(subject, Candidate(ROWS), loader, ROWS * FETCH_S, 100.0, notes)
    assert found.num_steps == min(8, epoch - 1)
    assert found.own.step_s == pytest.approx(STEP_S + ROWS * FETCH_S)
    assert found.alone_s == pytest.approx(STEP_S)


class Ending(Sampler):
    """A sampler whose generator changes its state when it ends early."""

    def __init__(self):
        self.num_ended = 0

    def __len__(self):
        return 80

    def __iter__(self):
        try:
            yield from range(80)
        finally:
            self.num_ended += 1


@pytest.mark.parametrize("fails", [False, True])
def test_generators_of_samplers_end_before_the_data_are_restored(clock, monkeypatch, fails):
    cores(monkeypatch, 1)

    def step(batch):
        clock.pass_(STEP_S)
        if fails:
            raise OSError("in a step")

    loader = DataLoader(Rows(clock), ROWS, sampler=Ending())
    with contextlib.suppress(OSError):
        LoaderComparison(step, loader, CPU, 4, 100.0).compare(ROWS * FETCH_S, Notes())
    assert loader.sampler.num_ended == 0


def test_a_worker_that_fails_ends_the_comparison_with_a_note(clock, monkeypatch):
    cores(monkeypatch, 1)

    class OnlyHere(Rows):
        def __getitem__(self, index):
            if torch.utils.data.get_worker_info() is not None:
                raise OSError("not in a worker")
            return super().__getitem__(index)

    notes, children = Notes(), set(multiprocessing.active_children())
    loader = shuffled(OnlyHere(clock))
    found = LoaderComparison(lambda batch: clock.pass_(STEP_S), loader, CPU, 4, 100.0).compare(0.1, notes)
    assert found.others == ()
    assert [note.code for note in notes.found] == ["loader.not_tried"]
    assert set(multiprocessing.active_children()) <= children


def refused():
    ended = Rows(Clock())
    ended.items = iter([1])
    return {
        "iterable dataset": DataLoader(Stream(), 2),
        "iterator": DataLoader(ended, 2),
        "own iteration": OwnIteration(Rows(Clock()), 2),
        "few batches": DataLoader(Rows(Clock(), num=4), 2),
        "few batches for workers": DataLoader(Rows(Clock(), num=6), 2, num_workers=2),
        "no loader": (x for x in range(3)),
    }


def notes_of(loader):
    model, optimizer = linear_loop(3, 2)
    batch = torch.randn(4, 3), torch.tensor([0, 1, 0, 1])
    subject, notes = TrainingLoop(model, optimizer, class_loss, batch), Notes()
    assert compare_loaders(subject, None, loader, 1.0, 1.0, notes) is None
    return [note.code for note in notes.found]


@pytest.mark.parametrize("loader", refused().values(), ids=refused())
def test_a_loader_that_cannot_be_copied_is_left_alone_with_a_reason(loader):
    assert notes_of(loader) == ["loader.not_tried"]


def test_workers_that_would_import_the_main_script_are_not_started(monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert notes_of(DataLoader(Rows(Clock()), 2)) == ["loader.not_tried"]


def test_workers_would_share_the_position_in_an_open_file():
    data = Rows(Clock())
    with open(__file__, "rb") as data.file:
        assert notes_of(DataLoader(data, 2)) == ["loader.not_tried"]


@pytest.mark.parametrize("package", ["sqlite3", "h5py._hl.files", "builtins"])
def test_workers_would_share_a_handle_of_a_file(package):
    data = Rows(Clock())
    kind = type("Environment", (), {"__module__": package})  # as a class of lmdb
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        data.handle = connection if package == "sqlite3" else kind()
        assert notes_of(DataLoader(data, 2)) == ["loader.not_tried"]


@pytest.mark.usefixtures("brief_trials")
def test_planning_compares_a_slow_loader_and_leaves_it_as_it_was(monkeypatch):
    cores(monkeypatch, 1)
    real = Clock()
    real.pass_ = time.sleep
    model, optimizer = linear_loop(3, 2)
    loader, same = shuffled(Rows(real, seconds=0.001)), shuffled(Rows(Clock()))
    found = trimtab.profile(model, optimizer, class_loss, next(iter(same)), data=loader, num_blocks=3)
    assert found.loader is not None
    assert found.loader.own.num_workers == 0
    assert all(each.num_workers <= 1 for each in found.loader.others)
    assert from_json(Profile, to_json(found)) == found
    same = shuffled(Rows(Clock()))
    assert all(map(torch.equal, next(iter(loader)), next(iter(same))))


@pytest.mark.usefixtures("brief_trials")
@pytest.mark.parametrize("options", [{"total_steps": 3}, {}])
def test_a_quick_loader_or_a_short_run_is_not_compared(monkeypatch, options):
    real = Clock()
    real.pass_ = time.sleep
    monkeypatch.setattr("trimtab.profiling.profiler.compare_loaders", lambda *given: pytest.fail("was compared"))
    model, optimizer = linear_loop(3, 2)
    data = [next(iter(shuffled(Rows(Clock()))))] * 4 if not options else shuffled(Rows(real, seconds=0.001))
    batch = next(iter(shuffled(Rows(Clock()))))
    assert trimtab.profile(model, optimizer, class_loss, batch, data=data, num_blocks=3, **options).loader is None
