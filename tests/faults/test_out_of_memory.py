"""Memory that runs out in a window: it is run again in smaller micro-batches, as if it had begun so."""

from __future__ import annotations

import copy
import itertools
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest
import torch
from raising import raises
from torch import nn

import trimtab
from trimtab.core.choice import SplitCheck
from trimtab.core.errors import MemoryLimitError
from trimtab.plans.plan import Plan
from trimtab.training import out_of_memory
from trimtab.training.out_of_memory import is_out_of_memory
from trimtab.training.window_snapshot import recovers_from

ROWS, WINDOWS, FAILING = 16, 6, 2


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Loop:
    """A model with dropout and batch statistics whose loss fails once, at a micro-batch of one window."""

    def __init__(
        self,
        *,
        micro: int,
        place: str = "",
        optimizer: type = torch.optim.AdamW,
        dtype: torch.dtype = torch.float64,
    ):
        torch.manual_seed(0)
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4)
        self.model = nn.Sequential(*layers).to(dtype)
        self.optimizer = optimizer(self.model.parameters(), lr=0.05)
        generator = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(ROWS, 6, generator=generator).to(dtype), torch.randint(0, 4, (ROWS,), generator=generator))
            for _ in range(WINDOWS)
        ]
        torch.manual_seed(2)
        self.window, self.call = -1, 0
        self.micro, self.place = micro, place

    def loss(self, model, batch):
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        here = self.place and self.window == FAILING and self.call == self.micro
        self.call += 1
        if here and self.place == "forward":
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you")
        return FailsInBackward.apply(value) if here else value

    def train(self, run, batches):
        for window in run.windows(batches):
            self.window, self.call = self.window + 1, 0
            run.train_step(window, self.loss)


def state_of(loop):
    tensors = [*loop.model.state_dict().values()]
    for each in loop.optimizer.state.values():
        tensors += [value for value in each.values() if isinstance(value, torch.Tensor)]
    return tensors


def assert_as_if_begun_smaller(ours, clean, plans, num_batches=FAILING):
    """Against a run that was started anew with the smaller micro-batch at that window: no difference at all.

    Args:
        plans: the run's, and one in micro-batches half as large. num_batches: loader batches before the window.
    """
    rows, half = (plan.micro_batch_of(ROWS) for plan in plans)
    torch.manual_seed(2)
    with (
        trimtab.start(ours.model, ours.optimizer, plans[0], out_of_memory="split") as run,
        pytest.warns(RuntimeWarning, match=f"from {rows} to {half} samples"),
    ):
        ours.train(run, ours.batches)
    torch.manual_seed(2)
    for part, plan in zip((clean.batches[:num_batches], clean.batches[num_batches:]), plans, strict=True):
        with trimtab.start(clean.model, clean.optimizer, plan) as run:
            clean.train(run, part)
    for left, right in zip(state_of(ours), state_of(clean), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(("rows", "micro"), [(8, 0), (8, 1), (4, 2), (4, 3)])
def test_the_window_is_what_it_had_been_in_smaller_micro_batches(rows, micro, place, optimizer):
    ours, clean = (Loop(micro=micro, place=where, optimizer=optimizer) for where in (place, ""))
    assert_as_if_begun_smaller(ours, clean, (Plan.fixed(ROWS, rows), Plan.fixed(ROWS, rows // 2)))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_it_is_so_of_updates_within_the_backward_pass_before_the_first_update(place):
    ours, clean = without_statistics(), without_statistics()
    ours.place = place
    torch.manual_seed(2)
    with (
        pytest.warns(UserWarning, match="no effect in 4 of 6 steps"),
        trimtab.start(ours.model, ours.optimizer, Plan.fixed(ROWS, step_in_backward=True)) as run,
        pytest.warns(RuntimeWarning, match="from 16 to 8 samples"),
    ):
        ours.train(run, ours.batches)
    torch.manual_seed(2)
    for part, rows in (clean.batches[:FAILING], ROWS), (clean.batches[FAILING:], ROWS // 2):
        with trimtab.start(clean.model, clean.optimizer, Plan.fixed(ROWS, rows)) as run:
            clean.train(run, part)
    for left, right in zip(state_of(ours), state_of(clean), strict=True):
        assert torch.equal(left, right)


def test_a_window_is_not_repeated_after_an_update_within_the_backward_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(ROWS, 6), torch.randint(0, 4, (ROWS,))
    model[1].register_forward_hook(lambda module, args, result: FailsInBackward.apply(result))
    before = [p.detach().clone() for p in model.parameters()]
    with trimtab.start(model, optimizer, Plan.fixed(ROWS, step_in_backward=True)) as run:
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run.train_step(
                run.window(batch), lambda called, batch: nn.functional.cross_entropy(called(batch[0]), batch[1])
            )
        assert any("Some parameters were updated" in note for note in caught.value.__notes__)
    assert [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)] == [
        True,
        True,
        False,
        False,
    ]


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_it_is_so_under_a_loss_scale_too(place):
    ours, clean = (Loop(micro=1, place=where, dtype=torch.float32) for where in (place, ""))
    plans = tuple(Plan.fixed(ROWS, rows, precision="fp16") for rows in (8, 4))
    assert_as_if_begun_smaller(ours, clean, plans)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_it_is_so_of_windows_of_several_batches_that_are_measured_too(place, micro, each_measured):
    """Two loader batches a window, and a monitor's hooks on the gradients; memory runs out in either batch."""
    ours, clean = (Loop(micro=micro, place=where) for where in (place, ""))
    rules = (trimtab.BatchRule("fixed", k=k, k_max=k, learning_rate="none") for k in (4, 8))
    plans = tuple(Plan.fixed(ROWS, rows, batch_rule=rule) for rows, rule in zip((8, 4), rules, strict=True))
    assert_as_if_begun_smaller(ours, clean, plans, num_batches=2 * FAILING)
    assert each_measured.opened > each_measured.closed > 0  # the one that failed was measured too


def test_a_run_grows_back_and_records_it(tmp_path, monkeypatch):
    monkeypatch.setattr(out_of_memory, "_GROW_AFTER", 2)
    loop = without_statistics()
    loop.loss = failing(MemoryError("no"))
    with trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer:
        run = trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS), record=writer)
        with (
            run,
            pytest.warns(RuntimeWarning, match=r"from 16 to 8 samples\..*trimtab\.plan"),
        ):
            loop.train(run, loop.batches)
    record = trimtab.read_record(tmp_path / "run.jsonl")
    assert [step.num_micro_batches for step in record.steps] == [2, 2, 1, 1, 1, 1]
    grown = next(event for event in record.events if event.name == "grown")
    assert (grown.detail["from"], grown.detail["to"]) == (8, 16)


def test_without_putting_buffers_and_random_numbers_back_it_would_differ(monkeypatch):
    """So that the test above can fail."""
    monkeypatch.setattr("trimtab.training.window_snapshot.WindowSnapshot.restore", lambda self: None)
    with pytest.raises(AssertionError):
        test_the_window_is_what_it_had_been_in_smaller_micro_batches(8, 1, "backward", torch.optim.AdamW)


def test_it_is_recorded(tmp_path):
    loop = Loop(micro=1, place="forward")
    with trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer:
        run = trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, 8), record=writer, out_of_memory="split")
        with run, pytest.warns(RuntimeWarning):
            loop.train(run, loop.batches)
    record = trimtab.read_record(tmp_path / "run.jsonl")
    (event,) = record.events
    assert (event.name, event.step, event.detail["from"], event.detail["to"]) == ("out_of_memory", FAILING, 8, 4)
    assert [step.num_micro_batches for step in record.steps] == [2, 2, 4, 4, 4, 4]
    assert run.applied_steps == WINDOWS
    assert run.consumed_samples == WINDOWS * ROWS


def failing(error, times=1):
    """Return a loss that raises an error so many times."""
    left = [times]

    def loss(model, batch):
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if left[0] > 0:
            left[0] -= 1
            raise error
        return value

    return loss


def test_one_row_that_does_not_fit_is_told():
    loop = Loop(micro=0)
    with trimtab.start(loop.model[4:], torch.optim.SGD(loop.model[4].parameters(), 0.1), Plan.fixed(4)) as run:
        batch = torch.randn(4, 16).double(), torch.zeros(4).long()
        with (
            pytest.warns(RuntimeWarning, match=r"from \d+ to \d+ samples"),
            raises(MemoryLimitError, code="memory.one_sample", field="micro-batch"),
        ):
            run.train_step(run.window(batch), failing(MemoryError("no"), times=10))
        assert torch.isfinite(run.train_step(run.window(batch), failing(MemoryError(), times=0)))


def without_statistics():
    loop = Loop(micro=0)
    loop.model = loop.model[2:]
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), 0.1)
    loop.batches = [(torch.randn(ROWS, 16).double(), labels) for _, labels in loop.batches]
    return loop


def never_fits(model, batch):
    """Run a forward, where that can be done of so few rows, and out of memory."""
    if len(batch[1]) > 1:
        model(batch[0])
    raise MemoryError("no")


@pytest.mark.parametrize("nonfinite", [None, "skip"])
def test_after_one_row_that_does_not_fit_all_is_as_before_the_window(nonfinite):
    loop, options = Loop(micro=0), {"out_of_memory": "split", "nonfinite": nonfinite}
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS), **options) as run:
        before, drawn = copy.deepcopy(loop.model.state_dict()), torch.get_rng_state()
        with pytest.warns(RuntimeWarning, match=r"from \d+ to \d+ samples"), pytest.raises(MemoryLimitError):
            run.train_step(run.window(loop.batches[0]), never_fits)
        for name, value in loop.model.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert torch.equal(torch.get_rng_state(), drawn)
        assert run.window(loop.batches[0]).num_micro_batches == 1  # the next is tried as this one was


def test_a_rank_that_others_wait_for_in_the_middle_cannot_split():
    with raises(trimtab.errors.UsageError, code="out_of_memory.ranks_communicate", field="out_of_memory"):
        recovers_from("split", Plan.fixed(8), nn.Linear(2, 2), may_retry=False)
    assert not recovers_from(None, Plan.fixed(8), nn.Linear(2, 2), may_retry=False)
    assert recovers_from(None, Plan.fixed(8), nn.Linear(2, 2), may_retry=True)


@pytest.mark.parametrize("why", ["stop", "refused", "batch statistics"])
def test_where_splitting_is_not_wanted_the_error_passes(why):
    loop = Loop(micro=0) if why == "batch statistics" else without_statistics()
    plan = Plan.fixed(ROWS)
    if why == "refused":
        plan = replace(plan, check=SplitCheck(False, "it computes over the batch"))
    options = {"out_of_memory": "stop"} if why == "stop" else {}
    before = copy.deepcopy(loop.model.state_dict())
    with trimtab.start(loop.model, loop.optimizer, plan, **options) as run:
        with pytest.raises(MemoryError, match="no") as caught:
            run.train_step(run.window(loop.batches[0]), failing(MemoryError("no")))
        said = caught.value.__notes__[0]
        assert "out_of_memory='split'" in said
        assert ("Batch statistics are then" in said) == (why == "batch statistics")
        for name, value in loop.model.named_parameters():
            assert torch.equal(value, before[name])
        run.train_step(run.window(loop.batches[0]), loop.loss)


def test_by_default_a_window_is_split_where_that_keeps_the_maths():
    loop = without_statistics()
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS)) as run:
        with pytest.warns(RuntimeWarning, match="to 8 samples"):
            run.train_step(run.window(loop.batches[0]), failing(MemoryError("no")))
        assert run.applied_steps == 1


def test_split_says_to_split_even_what_the_check_refused():
    loop = Loop(micro=0)
    plan = replace(Plan.fixed(ROWS), check=SplitCheck(False, "batch statistics"))
    with trimtab.start(loop.model, loop.optimizer, plan, out_of_memory="split") as run:
        with pytest.warns(RuntimeWarning, match=r"to 8 samples\..*changes the gradient"):
            run.train_step(run.window(loop.batches[0]), failing(MemoryError("no")))
        assert run.applied_steps == 1


@pytest.mark.parametrize("policy", [None, "split", "stop"])
def test_memory_that_runs_out_inside_the_optimizer_is_not_tried_again(monkeypatch, policy):
    loop = Loop(micro=0)
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, 8), out_of_memory=policy) as run:

        def step(*args):
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(loop.optimizer, "step", step)
        with raises(MemoryLimitError, code="memory.optimizer_step", field="optimizer.step"):
            run.train_step(run.window(loop.batches[0]), loop.loss)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_the_optimizers_state_is_there_from_the_start_and_changes_nothing(optimizer, options):
    ours, plain = Loop(micro=0), Loop(micro=0)
    extra = {"momentum": 0.9} if optimizer is torch.optim.SGD else {"amsgrad": True}
    for loop in (ours, plain):
        loop.optimizer = optimizer(loop.model.parameters(), lr=0.05, **extra, **options)
    with trimtab.start(ours.model, ours.optimizer, Plan.fixed(ROWS), out_of_memory="split") as run:
        assert len(ours.optimizer.state) == len(list(ours.model.parameters()))
        torch.manual_seed(2)
        ours.train(run, ours.batches)
    torch.manual_seed(2)
    for batch in plain.batches:
        plain.optimizer.zero_grad()
        plain.loss(plain.model, batch).backward()
        plain.optimizer.step()
    for left, right in zip(state_of(ours), state_of(plain), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize(
    "text",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "CUDA error: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "[enforce fail at alloc_cpu.cpp:114] . DefaultCPUAllocator: can't allocate memory: you tried to allocate",
        "[enforce fail at alloc_cpu.cpp:81] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
        "std::bad_alloc",
        "MPS backend out of memory",
        "could not create a memory object",
    ],
)
def test_memory_is_recognised_by_what_allocators_say(text):
    assert is_out_of_memory(RuntimeError(text))
    assert not is_out_of_memory(ValueError(text))


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("out of memory"), ValueError("no")]
)
def test_other_errors_pass_untouched(error):
    assert not is_out_of_memory(error)
    loop = Loop(micro=0)
    with trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, 8)) as run:
        with pytest.raises(type(error)) as caught:
            run.train_step(run.window(loop.batches[0]), failing(error))
        assert caught.value is error


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("x"), MemoryError()])
def test_memory_is_recognised_by_type(error):
    assert is_out_of_memory(error)


def test_the_micro_batch_grows_back_and_is_left_alone_longer_where_it_fails_again(monkeypatch):
    monkeypatch.setattr(out_of_memory, "_GROW_AFTER", 3)
    limit, fits = out_of_memory.MicroBatchLimit(), 4
    sizes = []
    for _ in range(40):
        rows = limit.of(16)
        while rows > fits:
            rows = limit.shrink(rows, "no")
        sizes.append(rows)
        limit.passed(16)
    assert set(sizes) == {4}
    assert limit.rows in (4, 8)
    fits = 16
    for _ in range(200):
        limit.passed(16)
    assert limit.rows is None
    assert limit.of(16) == 16


def test_a_larger_micro_batch_is_tried_less_and_less_often():
    limit = out_of_memory.MicroBatchLimit()
    tries = []
    for window in range(2000):
        rows = limit.of(16)
        if rows > 4:
            tries.append(window)
            while (rows := limit.shrink(rows, "no")) > 4:
                pass
        limit.passed(16)
    gaps = [after - before for before, after in itertools.pairwise(tries[1:])]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 2 * gaps[0]


def test_a_batch_that_is_too_long_now_and_then_is_not_for_ever_waited_a_hundred_windows_for():
    """It failed at its full size, which had fitted in between."""
    limit, tries = out_of_memory.MicroBatchLimit(), []
    for window in range(6000):
        if window % 250 == 0 and limit.of(16) == 16:
            tries.append(window)
            limit.shrink(16, "no")
        limit.passed(16)
    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 4 * gaps[0]


@pytest.mark.parametrize("batch_statistics", [False, True])
def test_a_window_that_shows_more_and_does_not_fit_is_the_last_of_its_kind(tmp_path, batch_statistics):
    """Gradients do not fit beside a forward of so many rows: the user's own windows go on as they were, and k stays."""
    loop, sizes, too_many = without_statistics(), [], 16 if batch_statistics else 8
    if batch_statistics:
        loop.model[0].extra = nn.BatchNorm1d(2)  # takes no part, and refuses the split

    def loss(model, batch):
        if len(batch[0]) >= too_many and any(p.grad is not None for p in model.parameters()):
            raise MemoryError("no")
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    plan = Plan.fixed(ROWS, batch_rule=trimtab.BatchRule("norm_test", k_max=4, min_windows=2))
    path = tmp_path / "run.jsonl"

    def train(run):
        for window in itertools.islice(run.windows(itertools.cycle(loop.batches)), 30):
            run.train_step(window, loss)
            sizes.append(window.num_micro_batches)

    with trimtab.RecordWriter(path, trimtab.Header("test")) as writer:
        run = trimtab.start(loop.model, loop.optimizer, plan, out_of_memory="split", record=writer)
        with run, pytest.warns(RuntimeWarning, match=r"from \d+ to \d+ samples"):
            train(run)
    assert sizes == 10 * [1] + [4] + 19 * [1]
    held = next(event for event in trimtab.read_record(path).events if event.name == "k")
    assert (held.detail["from"], held.detail["to"]) == (1, 1)


def test_the_limit_is_saved():
    limit, other = out_of_memory.MicroBatchLimit(), out_of_memory.MicroBatchLimit()
    limit.shrink(16, "no")
    other.load_state_dict(limit.state_dict())
    assert other.of(16) == 8
    with pytest.raises(trimtab.errors.UsageError):
        other.load_state_dict(limit.state_dict() | {"rows": 0})
    assert other.of(16) == 8


REAL = """
    import resource, warnings
    import torch
    from torch import nn
    import trimtab

    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randn(16384, 64)
    loss_fn = lambda model, batch: model(batch).square().mean()
    plan = trimtab.Plan.fixed(16384)
    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(batch[:64]), loss_fn)  # threads and kernels are there
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limit = used + 300 * 2**20  # a whole window holds twice 256 MiB of activations
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                loss = run.train_step(run.window(batch), loss_fn)
        print(run.applied_steps, bool(torch.isfinite(loss)), len(caught), run.window(batch).micro_batch)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="sets a limit as Linux has it")
def test_a_real_limit_is_survived():
    found = subprocess.run([sys.executable, "-c", textwrap.dedent(REAL)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    steps, finite, warned, micro = found.stdout.split()
    assert (steps, finite) == ("4", "True")
    assert int(warned) >= 1
    assert int(micro) < 16384


def test_nothing_of_the_failed_attempt_stays_alive():
    """Its frames hold tensors as long as the error is held: it is let go of before the window is run again."""
    import gc
    import weakref

    alive = []

    def loss(model, batch):
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if not alive:
            alive.append(weakref.ref(value))
            raise MemoryError("no")
        assert alive[0]() is None
        return value

    loop = Loop(micro=0)
    gc.disable()
    try:
        run = trimtab.start(loop.model, loop.optimizer, Plan.fixed(ROWS, 8), out_of_memory="split")
        with run, pytest.warns(RuntimeWarning):
            run.train_step(run.window(loop.batches[0]), loss)
    finally:
        gc.enable()
    assert run.applied_steps == 1
