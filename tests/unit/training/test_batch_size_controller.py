"""The batch while training: what is measured is true, what is decided is applied, and both are recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch
from raising import raises
from small_loops import sgd
from torch import nn

import trimtab
import trimtab.api
from trimtab.adaptive_batch.batch_size_policy import NoiseEstimate, StepTimes, could_save
from trimtab.adaptive_batch.gradient_noise_scale import NoiseAverage
from trimtab.adaptive_batch.noise_probes import FRESH, LIMIT, PAUSE, REVIEW, OverheadBudget
from trimtab.adaptive_batch.step_time_model import MIN_WINDOWS, SKIPPED, UsualWindow
from trimtab.core.batch_rule import BatchRule
from trimtab.core.choice import Choice, Effect, SplitCheck
from trimtab.core.errors import MemoryLimitError, UsageError
from trimtab.losses import Summed
from trimtab.measure.gradient_norms import GradientNorms
from trimtab.measure.timing import AsyncScalar, OverheadTimer, StepTimeStamps
from trimtab.plans.plan import Plan
from trimtab.training.accumulation import WindowWeights
from trimtab.training.batch_size_controller import BatchSizeController
from trimtab.training.metadata_exchange import SingleProcessExchange

pytestmark = pytest.mark.slow

DIM, NOISE = 5, 0.7
TRUE = torch.linspace(-1, 1, DIM, dtype=torch.float64)


class Regression:
    """Gaussian linear regression at weights that do not move: `G = delta` and `tr(Sigma)` are known exactly.

    A row's gradient is `(x . delta - noise e) x`; with x and e standard normal, `E ||g||^2 = (d + 2) |delta|^2 +
    d noise^2`.
    """

    def __init__(self, rows, rule, *, seed=0, check=None, lr=0.0, micro=None):
        torch.manual_seed(0)
        self.model = nn.Linear(DIM, 1, bias=False).double()
        with torch.no_grad():
            self.model.weight.copy_(0.5 * TRUE[None])
        delta = 0.5 * TRUE - TRUE
        self.norm2 = float(delta @ delta)
        self.trace = (DIM + 1) * self.norm2 + DIM * NOISE**2
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        plan = Plan.fixed(rows, micro, batch_rule=rule)
        self.plan = plan if check is None else trimtab.Plan(**(vars(plan) | {"check": check}))
        self._generator = torch.Generator().manual_seed(seed)
        self._rows = rows

    def batches(self, sizes=None):
        for index in itertools.count():
            rows = self._rows if sizes is None else sizes[index % len(sizes)]
            x = torch.randn(rows, DIM, generator=self._generator, dtype=torch.float64)
            noise = NOISE * torch.randn(rows, generator=self._generator, dtype=torch.float64)
            yield x, x @ TRUE + noise

    def run(self, windows, loss=None, sizes=None, **options):
        """Train so many windows; returns the closed run."""
        with trimtab.start(self.model, self.optimizer, self.plan, **options) as run:
            for window in itertools.islice(run.windows(self.batches(sizes)), windows):
                run.train_step(window, loss or mean_loss)
        return run


def mean_loss(model, batch):
    return 0.5 * (model(batch[0])[:, 0] - batch[1]).square().mean()


def counting_loss(model, batch):
    """Return the loss over all rows but every fourth."""
    counts = torch.arange(len(batch[1])) % 4 != 0
    squares = 0.5 * (model(batch[0])[:, 0] - batch[1]).square()
    return Summed(squares[counts].sum(), counts.sum())


def failing_loss(model, batch):
    mean_loss(model, batch)
    raise ZeroDivisionError


@pytest.fixture
def windows_seen(monkeypatch):
    """Collect what each measured window says."""
    seen, add = [], NoiseAverage.add

    def noting(self, window, age=1):
        seen.append(window)
        add(self, window, age)

    monkeypatch.setattr(NoiseAverage, "add", noting)
    return seen


def assert_unbiased(seen, name, truth):
    values = torch.tensor([getattr(each, name) for each in seen], dtype=torch.float64)
    half = 3.3 * values.std() / math.sqrt(len(values))
    assert abs(values.mean() - truth) < half
    assert half < 0.25 * truth  # so that it can fail


def measuring(k, **values):
    return BatchRule("fixed", k=k, learning_rate="none", min_windows=10**6, **values)


def of(problem):
    return problem.model, problem.optimizer, problem.plan


def controller_of(problem, plan=None):
    parts = problem.model, problem.optimizer, SingleProcessExchange(), lambda *_: None, WindowWeights()
    return BatchSizeController(plan or problem.plan, *parts)


def taking(clock, seconds=5.0):
    """A loss that takes a given number of seconds."""
    return lambda model, batch: (clock(seconds), mean_loss(model, batch))[1]


@pytest.fixture
def never_decided(monkeypatch):
    """Keep k as it is, whatever is measured."""
    monkeypatch.setattr("trimtab.adaptive_batch.batch_size_decider.BatchSizeDecider.decide", lambda self: None)


@pytest.fixture
def always_measured(monkeypatch):
    """Measure every window: in steps of a fraction of a millisecond the account would allow one in a hundred."""
    monkeypatch.setattr(OverheadBudget, "is_due", lambda self, sparse=0: not self.is_paused and self.windows >= FRESH)


def penalized_loss(model, batch):
    """The loss takes a gradient of its own, as a gradient penalty does: hooks on the leaves see that gradient too."""
    (found,) = torch.autograd.grad(mean_loss(model, batch), [model.weight], create_graph=True)
    return mean_loss(model, batch) + 0.0 * found.square().sum()


NUMBERS = itertools.cycle((1, 4, 2, 3))
TERMS = torch.tensor([1.0, 3.0] * 4, dtype=torch.float64)


def loss_of_terms_by_micro_batch(model, batch):
    terms = next(NUMBERS)
    return Summed(terms * 0.5 * (model(batch[0])[:, 0] - batch[1]).square().sum(), torch.tensor(8 * terms))


def loss_of_terms_by_sample(model, batch):
    return Summed((TERMS * 0.5 * (model(batch[0])[:, 0] - batch[1]).square()).sum(), TERMS.sum())


# Samples, micro-batch and k; windows; options of the run; and the factor by which the loss changes the trace.
UNBIASED = {
    "whole micro-batches": ((8, 8, 4), 600, {}, 1.0),
    "micro-batches of other sizes": ((8, 3, 3), 600, {}, 1.0),
    "split batches": ((16, 8, 2), 600, {}, 1.0),
    "one micro-batch, which is split in two": ((8, 8, 1), 600, {}, 1.0),
    "samples that the loss ignores": ((8, 8, 4), 600, {"loss": counting_loss}, 8 / 6),
    "batches of other sizes": ((8, 8, 4), 800, {"sizes": (8, 3, 5)}, 1.0),
    "gradients that the loss takes": ((8, 8, 4), 300, {"loss": penalized_loss}, 1.0),
    "terms that differ by micro-batch": ((8, 8, 4), 800, {"loss": loss_of_terms_by_micro_batch}, 1.0),
    "terms that differ by sample": ((8, 8, 4), 800, {"loss": loss_of_terms_by_sample}, 8 * 40 / 16**2),
}


@pytest.mark.parametrize(("shape", "windows", "options", "factor"), UNBIASED.values(), ids=UNBIASED)
def test_a_runs_estimates_are_those_of_the_true_gradient(
    windows_seen, always_measured, shape, windows, options, factor
):
    samples, micro_batch, k = shape
    problem = Regression(samples, measuring(k), micro=micro_batch)
    problem.run(windows, **options)
    assert len(windows_seen) >= windows - 12  # the first ten of a single micro-batch are not split
    assert_unbiased(windows_seen, "trace", factor * problem.trace)
    assert_unbiased(windows_seen, "norm2", problem.norm2)


def test_windows_of_other_numbers_of_micro_batches(windows_seen, always_measured):
    problem = Regression(8, measuring(4))
    with trimtab.start(*of(problem)) as run:
        batches, sizes = problem.batches(), itertools.cycle((2, 3, 7, 1, 4))
        for _ in range(750):
            run.train_step(run.window(*itertools.islice(batches, next(sizes))), mean_loss)
    assert len({each.degrees for each in windows_seen}) == 4
    assert_unbiased(windows_seen, "trace", problem.trace)
    assert_unbiased(windows_seen, "norm2", problem.norm2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_scale_is_taken_out(windows_seen, always_measured, precision):
    problem = Regression(8, measuring(4))
    problem.model.float()
    problem.plan = Plan.fixed(8, batch_rule=problem.plan.batch_rule, precision=precision)
    problem.run(400, loss=lambda model, batch: mean_loss(model, [part.float() for part in batch]))
    assert_unbiased(windows_seen, "norm2", problem.norm2)


def test_a_users_change_between_unscale_and_step_is_not_noise(windows_seen, always_measured):
    problem = Regression(8, measuring(4))
    with trimtab.start(*of(problem)) as run:
        for window in itertools.islice(run.windows(problem.batches()), 300):
            for micro in window:
                run.backward(mean_loss(run.model, micro))
            run.unscale()
            problem.model.weight.grad.mul_(100.0)
            run.step()
    assert_unbiased(windows_seen, "norm2", problem.norm2)


def test_a_window_given_up_says_nothing_and_leaves_no_hook(windows_seen, each_measured):
    problem = Regression(8, measuring(2))
    with trimtab.start(*of(problem)) as run:
        batches = problem.batches()
        for index in range(8):
            window = run.window(*itertools.islice(batches, 2))
            with pytest.raises(ZeroDivisionError) if index < 5 else contextlib.nullcontext():
                run.train_step(window, failing_loss if index < 5 else mean_loss)
            assert not problem.model.weight._backward_hooks
            assert (each_measured.opened, each_measured.closed) == (index + 1, max(0, index - 4))
    assert len(windows_seen) == 1  # of the three that went well, two are still on their way


def test_a_window_that_was_given_up_is_due_again():
    problem = Regression(8, measuring(4))
    with trimtab.start(*of(problem)) as run:
        batches = problem.batches()
        window = lambda: run.window(*itertools.islice(batches, 4))  # noqa: E731
        for _ in range(FRESH):
            run.train_step(window(), mean_loss)
        account = run._control._account
        assert account.is_due()
        with pytest.raises(ZeroDivisionError):
            run.train_step(window(), failing_loss)
        assert account.is_due()
        run.train_step(window(), mean_loss)
        assert (account.opened, account.last) == (1, FRESH)


def test_void_windows_say_nothing(windows_seen, always_measured):
    problem, calls = Regression(8, measuring(2)), itertools.count()

    def loss(model, batch):
        return mean_loss(model, batch) * (math.nan if next(calls) % 8 < 2 else 1.0)  # every fourth window

    run = problem.run(100, loss=loss, nonfinite="skip")
    assert run.applied_steps == 75
    assert len(windows_seen) in (65, 66, 67)  # two are on their way, seven or eight of the first ten not measured
    assert all(math.isfinite(each.trace) for each in windows_seen)


def test_k_follows_the_rule_and_the_record_says_why(tmp_path, always_measured):
    """The norm test asks for trace / (b theta^2 norm2) = 10 micro-batches: 1 to 2 to 4 to 8 to 10 or so."""
    problem = Regression(4, BatchRule("norm_test", theta=0.5, k_max=64, learning_rate="linear"), lr=1e-12)
    wanted = problem.trace / problem.norm2 / (4 * 0.5**2)
    with trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer:
        run = problem.run(400, record=writer)
    record = trimtab.read_record(tmp_path / "run.jsonl")
    events = [event for event in record.events if event.name == "k"]
    ks = [events[0].detail["from"], *(event.detail["to"] for event in events)]
    assert ks[0] == 1
    assert all(after <= 2 * before for before, after in itertools.pairwise(ks))
    assert 0.6 * wanted < ks[-1] < 1.6 * wanted
    assert run.noise.scale == pytest.approx(problem.trace / problem.norm2, rel=0.2)
    assert {"reason", "trace", "norm2", "norm2_error", "num_windows"} <= set(events[0].detail)
    assert record.steps[-1].num_micro_batches in ks[-2:]
    assert record.steps[-1].noise_scale == pytest.approx(run.noise.scale, rel=0.05)  # a window or two before
    rates = [step.learning_rate for step in record.steps]
    assert rates[-1] == pytest.approx(1e-12 * ks[-1], rel=0.2)
    assert max(after / before for before, after in itertools.pairwise(rates)) < 1.08


def windows_of(problem, number, loss=None):
    """Train so many windows; returns (batches, micro-batches) of each, and the run."""
    with trimtab.start(*of(problem)) as run:
        sizes = []
        for window in itertools.islice(run.windows(problem.batches()), number):
            sizes.append((window.num_batches, window.num_micro_batches))
            run.train_step(window, loss or mean_loss)
    return sizes, run


@pytest.mark.parametrize("is_lost", [False, True])
@pytest.mark.parametrize(("policy", "batch_statistics"), [("goodput", False), ("goodput", True), ("fixed", False)])
def test_single_micro_batches_show_their_noise_in_a_few_windows(
    monkeypatch, never_decided, policy, batch_statistics, is_lost
):
    """Split in two, or of two batches where splitting is other maths; for the time of a batch of three in any case.

    As dense as the account allows until the noise is known, for 200 windows at the most; then one in 50. None of the
    first ten: a run does not begin with a batch larger than its user's.
    """
    monkeypatch.setattr(OverheadBudget, "charge", lambda self, window_s, spent_s: setattr(self, "uses", self.uses + 1))
    problem = Regression(4096, BatchRule(policy, k_max=4))  # many rows: what is known stays known
    if batch_statistics:
        problem.model.extra = nn.BatchNorm1d(2)  # takes no part, and refuses the split
    if is_lost:
        with torch.no_grad():
            problem.model.weight.copy_(TRUE[None] * (1 + 1e-6))
    monkeypatch.setattr(
        "trimtab.adaptive_batch.noise_probes.ProbeSelection.told", lambda self, standing: None
    )  # it would save nothing
    sizes, run = windows_of(problem, 400)
    timed, double, split, one = (3, 3), (2, 2), (1, 2), (1, 1)
    expected = {one, double if batch_statistics else split} | ({timed} if policy == "goodput" else set())
    assert set(sizes) == expected
    in_a_row = list(itertools.takewhile(lambda size: size != one, sizes[10:]))
    assert sizes[:10] == 10 * [one]
    lost = 20 if batch_statistics else 191  # larger windows are one in four then; 200 is one in 50
    assert len(in_a_row) == (lost if is_lost else 12)  # of the last two nothing is known yet
    if policy == "goodput":  # five that show a batch's time, and two until that is known
        assert in_a_row[:12] == 7 * [timed] + 5 * [double if batch_statistics else split]
    until = 10 + len(in_a_row)
    sparse = [index for index, size in enumerate(sizes) if size != one and index >= until]
    every = [4 if is_lost and index < 200 else 50 for index in range(400)]
    assert sparse == [index for index in range(until, 400) if index % every[index] == 0]
    assert run.noise.num_windows >= 10


def test_a_decision_for_one_micro_batch_is_carried_out():
    problem = Regression(64, BatchRule("goodput", k_max=16))
    sizes, _ = windows_of(problem, 600)
    later = sizes[40:]  # after each pause some show the time of a batch, and the noise, anew
    assert sum(size[0] > 1 for size in later) <= 4 * 7
    assert sum(size[1] > 1 for size in later) <= 100


@pytest.mark.parametrize("policy", ["goodput", "norm_test"])
def test_batches_that_are_all_alike_have_no_noise(always_measured, policy):
    problem = Regression(8, BatchRule(policy, k=2, min_windows=3))
    problem.model.float()
    batch = [part[:1].repeat(8, *[1] * (part.ndim - 1)).float() for part in next(problem.batches())]
    with trimtab.start(*of(problem)) as run:
        for _ in range(40):
            run.train_step(run.window(*[batch] * run.num_batches), mean_loss)
        assert run.noise.scale < 1e-3
        assert run.num_batches in (1, 2, 3)  # of three where times are looked at again


def test_only_what_the_optimizer_steps_is_seen(windows_seen, always_measured):
    problem = Regression(8, measuring(4))
    problem.model = nn.Sequential(nn.Linear(DIM, DIM).double(), problem.model)
    problem.optimizer = torch.optim.SGD(problem.model[1].parameters(), lr=0.0)
    bias = problem.model[0].bias
    with torch.no_grad():
        problem.model[0].weight.copy_(torch.eye(DIM))
        bias.zero_()
    problem.run(300)
    assert_unbiased(windows_seen, "norm2", problem.norm2)
    assert_unbiased(windows_seen, "trace", problem.trace)


def test_a_layer_frozen_or_unfrozen_on_the_way_is_followed(windows_seen, always_measured):
    problem = Regression(8, measuring(4))
    problem.model.bias = nn.Parameter(torch.zeros(1, dtype=torch.float64), requires_grad=False)
    problem.optimizer = torch.optim.SGD(problem.model.parameters(), lr=0.0)
    with trimtab.start(*of(problem)) as run:
        for index, window in enumerate(itertools.islice(run.windows(problem.batches()), 300)):
            problem.model.bias.requires_grad_(index >= 100)
            run.train_step(window, mean_loss)
    frozen, whole = windows_seen[: 98 - FRESH], windows_seen[102 - FRESH :]
    assert_unbiased(frozen, "trace", problem.trace)
    assert_unbiased(whole, "trace", problem.trace + problem.norm2 + NOISE**2)  # a row's bias gradient is its residual


TRIALS = BatchRule("throughput_per_memory", k_max=8, trials=((1, 100.0, 100.0), (4, 80.0, 40.0), (8, 50.0, 35.0)))


def test_trials_decide_by_throughput_per_byte_at_one_batch():
    problem = Regression(8, TRIALS)
    sizes, run = windows_of(problem, 12)
    assert set(sizes) == {(1, 4)}
    assert run.consumed_samples == 96
    with trimtab.start(*of(problem)) as other:
        other.load_state_dict(run.state_dict())
        assert other.window(next(problem.batches())).num_micro_batches == 4


def test_a_batch_that_cannot_be_cut_is_not_decided_upon():
    problem = Regression(8, TRIALS)
    problem.model.extra = nn.BatchNorm1d(2)
    with raises(UsageError, code="batch_rule.not_splittable", field="plan.batch_rule"):
        trimtab.start(*of(problem))


def times_of(problem, windows, loss, batches=None):
    """Train so many windows; returns the seconds of a micro-batch and the fixed ones that the run decides by."""
    with trimtab.start(*of(problem)) as run:
        for window in itertools.islice(run.windows(batches or problem.batches()), windows):
            run.train_step(window, loss)
    return run._control._decider.standing.times


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only as a test says; returns what lets some pass."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def wait(seconds):
        now[0] += seconds

    return wait


def test_a_small_rest_of_a_batch_is_no_fixed_time(always_measured, clock):
    """100 rows in 32, 32, 32 and 4, all of which take as long: it is the batch's time, however many rows it has."""
    problem = Regression(100, measuring(12), micro=32)
    problem.optimizer.register_step_pre_hook(lambda *_: clock(7.0))
    times = times_of(problem, 10 + FRESH, taking(clock))
    assert (times.micro_s, times.fixed_s) == (pytest.approx(5.0), pytest.approx(7.0))


def test_half_a_batch_that_takes_as_long_as_a_whole_one_is_not_taken_for_half(always_measured, never_decided, clock):
    """At k = 1 the time of a micro-batch is that of whole ones, two to a window until it is known."""
    problem = Regression(8, BatchRule("goodput", k_max=4))
    times = times_of(problem, 30, taking(clock))
    assert (times.micro_s, times.fixed_s) == (pytest.approx(5.0), pytest.approx(0.0))


@pytest.mark.parametrize(("k", "k_max"), [(1, 4), (2, 4), (4, 4), (1, 3)])
def test_adding_to_a_gradient_is_a_further_micro_batchs_time(always_measured, never_decided, clock, k, k_max):
    """A window's first has nothing to add to: with one more of them the window takes 5 + 2 s longer, not 5."""
    problem = Regression(8, BatchRule("goodput", k=k, k_max=k_max))
    problem.optimizer.register_step_pre_hook(lambda *_: clock(7.0))

    def loss(model, batch):
        clock(5.0 if model.weight.grad is None else 5.0 + 2.0)
        return mean_loss(model, batch)

    times = times_of(problem, 40, loss)
    assert (times.micro_s, times.fixed_s) == (pytest.approx(7.0), pytest.approx(5.0))


def test_watching_is_no_micro_batchs_time(always_measured, monkeypatch, clock):
    keep = GradientNorms._keep

    def slowly(self, *seen):
        clock(3.0)
        self.spent.host_s += 3.0
        keep(self, *seen)

    monkeypatch.setattr(GradientNorms, "_keep", slowly)
    times = times_of(Regression(8, measuring(4)), 10 + FRESH, taking(clock))
    assert (times.micro_s, times.fixed_s) == (pytest.approx(5.0), pytest.approx(0.0))


def test_of_two_micro_batches_the_first_tells_where_no_more_are_allowed(always_measured, never_decided, clock):
    problem = Regression(8, BatchRule("goodput", k_max=2))
    sizes, run = windows_of(problem, 30, taking(clock))
    assert {batches for batches, _ in sizes} == {1, 2}
    assert run._control._decider.standing.times.micro_s == pytest.approx(5.0)


def test_waiting_for_data_is_a_micro_batchs_time(always_measured, clock):
    def slowly(batches):
        for batch in batches:
            clock(3.0)
            yield batch

    problem = Regression(8, measuring(4))
    times = times_of(problem, 10 + FRESH, taking(clock), slowly(problem.batches()))
    assert (times.micro_s, times.fixed_s) == (pytest.approx(8.0), pytest.approx(0.0))


def test_figures_are_read_in_a_later_window_than_they_were_made_in(monkeypatch, always_measured):
    made, read, windows = [], [], []
    begin, look = AsyncScalar.__init__, AsyncScalar.read
    monkeypatch.setattr(
        AsyncScalar, "__init__", lambda self, values: (made.append(len(windows)), begin(self, values))[1]
    )
    monkeypatch.setattr(AsyncScalar, "read", lambda self: (read.append(len(windows)), look(self))[1])
    problem = Regression(8, measuring(4))
    with trimtab.start(*of(problem), nonfinite="continue") as run:
        for window in itertools.islice(run.windows(problem.batches()), 20 + FRESH):
            windows.append(window)
            run.train_step(window, mean_loss)
    assert len(read) == 19
    assert all(later == before + 1 for before, later in zip(made, read, strict=False))


def test_a_users_schedule_by_steps_can_follow_the_loader_batches(always_measured):
    problem = Regression(4, BatchRule("norm_test", theta=0.5, k_max=64, learning_rate="linear"), lr=1e-12)
    schedule = torch.optim.lr_scheduler.StepLR(problem.optimizer, 1, 0.999)
    drawn = 0
    with trimtab.start(*of(problem)) as run:
        for window in itertools.islice(run.windows(problem.batches()), 60):
            for micro in window:
                run.backward(mean_loss(run.model, micro))
            if run.step():
                for _ in range(window.num_batches):
                    schedule.step()
            drawn += window.num_batches
    assert drawn > 120
    assert problem.optimizer.param_groups[0]["lr"] == pytest.approx(1e-12 * 0.999**drawn, rel=1e-9, abs=0)


def test_a_split_the_check_refused_is_not_made(each_measured):
    problem = Regression(8, measuring(1), check=SplitCheck(False, "batch statistics"))
    with trimtab.start(*of(problem)) as run:
        window = run.window(next(problem.batches()))
        assert window.num_micro_batches == 1
        run.train_step(window, mean_loss)
        assert run.noise is None


def test_the_last_batches_of_a_loader_are_a_shorter_window():
    problem = Regression(8, measuring(4))
    with trimtab.start(*of(problem)) as run:
        sizes = []
        for window in run.windows(list(itertools.islice(problem.batches(), 10))):
            sizes.append(window.num_batches)
            run.train_step(window, mean_loss)
    assert sizes == [4, 4, 2]
    assert run.consumed_samples == 80


def events_of(path, name):
    return [event for event in trimtab.read_record(path).events if event.name == name]


def recorded(problem, windows, folder, loss=None):
    """Train and record; return the events of the noise monitor's budget."""
    with trimtab.RecordWriter(folder / "run.jsonl", trimtab.Header("test")) as writer:
        problem.run(windows, loss, record=writer)
    found = events_of(folder / "run.jsonl", "account")
    return [event for event in found if event.detail["technique"] == "noise monitor"]


def set_times(monkeypatch, micro_s, fixed_s):
    name = "trimtab.adaptive_batch.step_time_model.WindowTimes.times"
    monkeypatch.setattr(name, lambda self, rows: StepTimes(micro_s, fixed_s))


def test_a_monitor_that_brings_nothing_is_paused_and_says_so(tmp_path, always_measured):
    found = recorded(Regression(64, BatchRule("goodput", k_max=1)), 150, tmp_path)
    paused, last = (event.detail for event in found)
    assert (paused["technique"], paused["pays"], paused["pause"]) == ("noise monitor", False, PAUSE)
    assert paused["gain"] == 0.0 < paused["price"]
    assert last["windows"] == 150
    assert 0 < last["measured"] < 150


def test_a_monitor_that_pays_says_so_too(tmp_path, always_measured, monkeypatch):
    set_times(monkeypatch, 0.001, 0.01)
    monkeypatch.setattr(OverheadBudget, "price", 0.004)
    found = recorded(Regression(8, BatchRule("goodput", k_max=16, learning_rate="linear")), 300, tmp_path)
    assert found[0].detail["pays"] is True
    assert found[0].detail["gain"] > 0.05
    assert [event.detail["pays"] for event in found[:-1]] == [True]


@pytest.mark.parametrize(
    ("make", "learning_rate", "expected"),
    [
        (torch.optim.SGD, "linear", False),
        (torch.optim.SGD, "sqrt", False),
        (torch.optim.AdamW, "auto", True),
        (torch.optim.AdamW, "linear", False),
    ],
)
def test_rows_are_worth_what_the_optimizer_and_its_rate_make_of_them(make, learning_rate, expected):
    problem = Regression(8, BatchRule("goodput", learning_rate=learning_rate))
    problem.optimizer = make(problem.model.parameters(), lr=0.0)
    with trimtab.start(*of(problem)) as run:
        assert run._control._decider.standing.normalises is expected


@pytest.mark.parametrize("fixed_s", [0.04, 1e-6])
def test_a_pause_that_would_miss_growing_noise_is_put_off(tmp_path, always_measured, monkeypatch, fixed_s):
    set_times(monkeypatch, 0.01, fixed_s)
    monkeypatch.setattr(OverheadBudget, "price", 1e-3)
    problem = Regression(8, BatchRule("goodput", k_max=2, learning_rate="linear"), lr=0.0)
    two_rows = NoiseEstimate(2.0, 1.0, norm2_error=0.01, num_windows=100)  # k = 2 is best from four on
    monkeypatch.setattr(NoiseAverage, "noise", two_rows)
    found = [event.detail for event in recorded(problem, REVIEW + 20, tmp_path)]
    assert any(each.get("pause") for each in found) is (fixed_s < 1e-3)


def lost_in_noise(rule, monkeypatch, fixed_s):
    """Return a problem without a gradient but noise, and tell its micro-batches to take a second."""
    set_times(monkeypatch, 1.0, fixed_s)
    problem = Regression(2, rule)
    with torch.no_grad():
        problem.model.weight.copy_(TRUE[None] * (1 + 1e-6))
    return problem


def test_a_gradient_lost_in_noise_is_given_more_micro_batches(always_measured, monkeypatch):
    sizes, run = windows_of(lost_in_noise(BatchRule("goodput", k_max=8), monkeypatch, fixed_s=30.0), 200)
    assert run.noise.relative_error > 0.25
    assert sizes[-1] == (8, 8)


@pytest.mark.parametrize(
    ("k", "fixed_s", "explored"), [(1, 1.0, [4, 8, 16]), (4, 10.0, [8, 16, 16]), (8, 40.0, [16, 16]), (1, 0.01, [])]
)
def test_noise_that_few_batches_do_not_show_is_looked_for_in_many(monkeypatch, k, fixed_s, explored):
    problem = lost_in_noise(BatchRule("goodput", k=k, k_max=16, min_windows=10**6), monkeypatch, fixed_s)
    monkeypatch.setattr("trimtab.adaptive_batch.step_time_model.WindowTimes.is_known", True)
    sizes, run = windows_of(problem, 250)
    many = [batches for batches, _ in sizes if batches > max(3, k)]
    assert many[: len(explored)] == explored
    assert bool(many) is bool(explored)
    share = sum(batches / k - 1 for batches in many) / len(sizes)
    assert share <= 2 / 8 * could_save(problem.plan.batch_rule, run._control._decider.standing) + 0.05


def test_a_window_of_many_is_an_event_of_the_record(monkeypatch, tmp_path):
    problem = lost_in_noise(BatchRule("goodput", k_max=16, min_windows=10**6), monkeypatch, 1.0)
    monkeypatch.setattr("trimtab.adaptive_batch.step_time_model.WindowTimes.is_known", True)
    recorded(problem, 250, tmp_path)
    found = [event.detail for event in events_of(tmp_path / "run.jsonl", "explored")]
    assert [each["batches"] for each in found[:3]] == [4, 8, 16]
    assert all(each["decided"] == 1 and "noise" in each["reason"] for each in found)


@pytest.mark.parametrize(("k", "taken"), [(1, 1), (1, 3), (4, 4), (4, 2)])
def test_a_loop_that_takes_its_own_windows_is_not_explored_in_all_of_them(monkeypatch, k, taken):
    problem = lost_in_noise(BatchRule("goodput", k=k, k_max=16, min_windows=10**6), monkeypatch, 1.0)
    monkeypatch.setattr("trimtab.adaptive_batch.step_time_model.WindowTimes.is_known", True)
    watched, open_ = [], GradientNorms.on
    monkeypatch.setattr(GradientNorms, "on", lambda self: (watched.append(1), open_(self)))
    with trimtab.start(*of(problem)) as run:
        batches = problem.batches()
        for _ in range(300):
            run.train_step(run.window(*itertools.islice(batches, taken)), mean_loss)
    assert 5 <= len(watched) <= 100


@pytest.mark.filterwarnings("ignore:out of memory")
def test_a_probe_that_was_given_up_makes_no_probe_of_the_next_window(each_measured):
    problem, fails = Regression(8, BatchRule("goodput", k_max=8)), True

    def loss(model, batch):
        if fails:
            raise MemoryError("no more")
        return mean_loss(model, batch)

    with trimtab.start(*of(problem)) as run:
        for window in run.windows(problem.batches()):
            fails = window.num_batches > 1
            if fails:
                with pytest.raises(MemoryLimitError):
                    run.train_step(window, loss)
                break
            run.train_step(window, loss)
        fails = False
        run.train_step(run.window(next(problem.batches())), loss)
        assert not run._control._role.is_probe


@pytest.mark.filterwarnings("ignore:out of memory")
def test_memory_that_runs_out_in_a_larger_window_holds_k_for_a_while(tmp_path, each_measured, monkeypatch):
    monkeypatch.setattr("trimtab.adaptive_batch.noise_probes._UNFIT", 10)
    problem, sizes = Regression(8, BatchRule("goodput", k_max=8)), []

    def loss(model, batch):
        if sizes[-1] > 1 and sizes[-1] not in ran_out:
            ran_out.append(sizes[-1])
            raise MemoryError("no more")
        return mean_loss(model, batch)

    writer = trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test"))
    with writer, trimtab.start(*of(problem), record=writer) as run:
        for window in itertools.islice(run.windows(problem.batches()), 50):
            sizes.append(window.num_batches)
            ran_out: list[int] = []
            run.train_step(window, loss)
    larger = [index for index, size in enumerate(sizes) if size > 1]
    assert [later - sooner for sooner, later in itertools.pairwise(larger)] == [10, 20]
    found = [event.detail["code"] for event in trimtab.read_record(tmp_path / "run.jsonl").events if event.name == "k"]
    assert found == ["k.held"] * 3


def test_one_that_is_never_told_is_paused(tmp_path, always_measured, monkeypatch):
    problem = lost_in_noise(BatchRule("goodput", k_max=8), monkeypatch, fixed_s=0.05)
    found = recorded(problem, 260, tmp_path)
    assert (found[0].detail["gain"], found[0].detail["pays"]) == (0.0, False)


def test_a_resumed_run_goes_on_with_k_averages_and_rate(always_measured):
    rule = BatchRule("norm_test", theta=0.5, k_max=64, learning_rate="linear")
    first, second = Regression(4, rule, lr=1e-12), Regression(4, rule, lr=1e-12)
    with trimtab.start(*of(first)) as run:
        for window in itertools.islice(run.windows(first.batches()), 300):
            run.train_step(window, mean_loss)
        state, sizes = run.state_dict(), run.num_batches
    assert sizes > 4
    with trimtab.start(*of(second)) as run:
        run.load_state_dict(state)
        assert run.state_dict() == state
        assert run.num_batches == sizes
        damaged = state | {"batch": state["batch"] | {"decided": state["batch"]["decided"] | {"batches": 0}}}
        with raises(UsageError, code="value.invalid", field="state.batch.decided.batches"):
            run.load_state_dict(damaged)
        assert run.state_dict() == state
        for window in itertools.islice(run.windows(second.batches()), 5):
            run.train_step(window, mean_loss)


def test_a_resumed_run_looks_for_the_times_of_its_own_machine(monkeypatch, clock):
    """At k = 1 only windows of three batches show them: one in 50, until they are known, and one in 200 where they are.

    Until then those of before are the best that is known, and noise is looked for by them.
    """
    monkeypatch.setattr(
        OverheadBudget, "is_due", lambda self, sparse=0: self.windows >= FRESH and not self.windows % (sparse or 9)
    )
    for name in ("decide", "review"):
        monkeypatch.setattr(f"trimtab.adaptive_batch.batch_size_decider.BatchSizeDecider.{name}", lambda self: None)

    first, second = Regression(8, BatchRule("goodput", k_max=4)), Regression(8, BatchRule("goodput", k_max=4))
    with trimtab.start(*of(first)) as run:
        for window in itertools.islice(run.windows(first.batches()), 250):
            run.train_step(window, taking(clock))
        state = run.state_dict()
    with trimtab.start(*of(second)) as run:
        run.load_state_dict(state)
        times, larger = run._control._decider.times, []
        for window in itertools.islice(run.windows(second.batches()), 400):
            assert run._control._decider.standing.times.micro_s == pytest.approx(2.0 if times.is_own else 5.0)
            larger += [window.num_batches == 3]
            run.train_step(window, taking(clock, 2.0))
        assert times.is_own
    assert sum(larger[:250]) >= SKIPPED + MIN_WINDOWS
    assert sum(larger[250:]) <= 2


def test_a_state_that_is_refused_changes_nothing(tmp_path, always_measured, monkeypatch, clock):
    problem = Regression(4, BatchRule("norm_test", theta=0.5, k_max=8, learning_rate="linear"), lr=1e-12)
    writer = trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test"))
    with writer, trimtab.start(*of(problem), record=writer) as run:
        for window in itertools.islice(run.windows(problem.batches()), 60):
            run.train_step(window, taking(clock))
        run._control._probing.ran_out()
        state, inside = run.state_dict(), run._control
        assert (inside._decider.times.is_own, inside._probing.fits) == (True, False)
        decided = state["batch"]["decided"] | {"batches": 99}
        damaged = state | {"batch": state["batch"] | {"decided": decided}, "precision": None}
        with raises(UsageError, code="format.invalid", field="state.precision"):
            run.load_state_dict(damaged)
        assert (inside._decider.times.is_own, inside._probing.fits) == (True, False)
        assert run.state_dict() == state
    whys = [event.detail["reason"] for event in events_of(tmp_path / "run.jsonl", "k")]
    assert not any("k_max" in why for why in whys)


def test_a_resumed_run_has_the_batch_size_that_its_rule_and_micro_batches_allow():
    with trimtab.start(*of(Regression(16, BatchRule("norm_test", k=16)))) as run:
        state = run.state_dict()
    with trimtab.start(*of(Regression(16, BatchRule("norm_test", k_max=8)))) as run:
        run.load_state_dict(state)
        assert run.num_batches == 8
    with trimtab.start(*of(Regression(16, BatchRule("norm_test", k=4), micro=8))) as run:
        assert run.num_batches == 2
        state = run.state_dict()
    with trimtab.start(*of(Regression(16, BatchRule("norm_test")))) as run:
        run.load_state_dict(state)
        assert run.num_batches == 2


@pytest.mark.parametrize(("micro", "batches"), [(8, 8), (2, 2)])
def test_fewer_batches_fit_where_micro_batches_are_smaller(tmp_path, micro, batches):
    with trimtab.start(*of(Regression(16, BatchRule("norm_test", k=8)))) as run:
        state = run.state_dict()
    rule = BatchRule("norm_test", k_max=16)
    with (
        trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer,
        trimtab.start(*of(Regression(16, rule, micro=micro)), record=writer) as run,
    ):
        run.load_state_dict(state)
        assert run.num_batches == batches
    events = [event.detail for event in events_of(tmp_path / "run.jsonl", "k")]
    changes = [(each["code"], each["from"], each["to"]) for each in events]
    assert changes == ([] if batches == 8 else [("k.limited", 64, 16)])


def test_times_that_were_known_are_found_anew_after_a_pause(always_measured, monkeypatch, clock):
    monkeypatch.setattr("trimtab.adaptive_batch.noise_probes.PAUSE", 20)
    monkeypatch.setattr(OverheadBudget, "price", 0.004)
    problem, seconds, counted = Regression(64, BatchRule("goodput", k_max=4)), [5.0], itertools.count()

    def loss(model, batch):
        seconds[0] = 5.0 if next(counted) < 140 else 3.0
        clock(seconds[0])
        return mean_loss(model, batch)

    assert times_of(problem, 60, loss).micro_s == pytest.approx(5.0)
    assert times_of(problem, 320, loss).micro_s == pytest.approx(3.0)


def test_a_loader_that_raised_leaves_no_trace(always_measured):
    problem = Regression(8, measuring(2))

    def failing():
        yield from itertools.islice(problem.batches(), 2)
        raise ZeroDivisionError

    with trimtab.start(*of(problem)) as run:
        windows = run.windows(failing())
        run.train_step(next(windows), mean_loss)
        with pytest.raises(ZeroDivisionError):
            next(windows)
        for _ in range(4):
            run.train_step(run.window(*itertools.islice(problem.batches(), 2)), mean_loss)


def test_a_run_without_a_rule_measures_nothing():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with trimtab.start(model, sgd(model), Plan.fixed(8)) as run:
        run.train_step(run.window(torch.randn(8, 4)), lambda m, x: m(x).mean())
        assert run.noise is None
        assert run.num_batches == 1


def test_adam_keeps_its_moments_when_k_changes(always_measured):
    problem = Regression(4, BatchRule("norm_test", theta=0.5, k_max=64, learning_rate="none"))
    problem.optimizer = torch.optim.Adam(problem.model.parameters(), lr=1e-9)
    seen = []

    def note(optimizer, args, kwargs):
        seen.append(float(next(iter(optimizer.state.values()))["step"]))

    problem.optimizer.register_step_pre_hook(note)
    sizes, _ = windows_of(problem, 300)
    assert sizes[-1][0] > 2 * sizes[0][0]
    assert seen == [float(index) for index in range(300)]


def test_ranks_that_nothing_joins_have_no_k_of_their_own(monkeypatch):
    monkeypatch.setattr("trimtab.distributed.backend_selection.has_peers", lambda: True)
    problem = Regression(8, BatchRule())
    with raises(UsageError, code="batch_rule.ranks_unconnected", field="plan.batch_rule"):
        trimtab.start(*of(problem))
    with pytest.warns(UserWarning, match="DistributedDataParallel"):
        trimtab.start(problem.model, problem.optimizer, Plan.fixed(8)).close()


@pytest.mark.parametrize(("policy", "warns"), [("goodput", True), ("norm_test", True), ("fixed", False)])
def test_a_bound_that_allows_no_other_batch_is_said(policy, warns):
    problem = Regression(16, BatchRule(policy, k_max=7), micro=4)
    with pytest.warns(RuntimeWarning, match="k_max=7") if warns else contextlib.nullcontext():
        controller_of(problem)


def test_the_default_rule_is_of_loader_batches():
    assert trimtab.api.default_rule(Plan.fixed(16, 4)).k_max == 64
    assert trimtab.api.default_rule(Plan.fixed(16)) == BatchRule()


def test_a_model_sharded_in_part_is_refused():
    class Sharded(nn.Linear):
        def set_all_reduce_hook(self, hook):
            """As FSDP2's modules have it."""

    class FullyShardedDataParallel(nn.Linear):
        """Known by its name."""

    problem = Regression(8, BatchRule())
    for model, code in (
        (nn.Sequential(Sharded(DIM, DIM), nn.Linear(DIM, 1)), "batch_rule.partly_sharded"),
        (FullyShardedDataParallel(DIM, 1), "batch_rule.fsdp1"),
    ):
        problem.model = model.double()
        problem.optimizer = sgd(model)
        with raises(UsageError, code=code, field="plan.batch_rule"):
            controller_of(problem)


def test_waiting_for_the_device_is_on_no_account(always_measured, monkeypatch, clock):
    waited = set()
    monkeypatch.setattr(
        StepTimeStamps, "wait", lambda self: None if self in waited else (waited.add(self), clock(40.0))
    )
    problem = Regression(8, BatchRule("norm_test", k=2, k_max=2))
    run = problem.run(30 + FRESH, taking(clock))
    assert run._control._account.uses >= 20
    assert run._control._account.price == 0.0


def test_a_compiled_models_batch_is_not_split():
    problem = Regression(8, BatchRule("goodput", k_max=2))
    compiled = dataclasses.replace(problem.plan, compiled=Choice(True, "by hand", Effect.ROUNDING, changed=True))
    controllers = controller_of(problem), controller_of(problem, compiled)
    assert [each._probing._may_split for each in controllers] == [True, False]


def test_noise_that_is_never_told_is_said(tmp_path, always_measured, monkeypatch):
    monkeypatch.setattr(GradientNorms, "take", lambda self: torch.tensor(math.nan))
    recorded(Regression(8, BatchRule("norm_test", k=2, k_max=4)), 100, tmp_path)
    (said,) = events_of(tmp_path / "run.jsonl", "noise")
    assert said.detail["known"] is False


def test_what_a_window_takes_that_is_made_to_show_more_is_on_the_account(never_decided, clock):
    problem = Regression(8, BatchRule("norm_test", k_max=4))
    run = problem.run(500, taking(clock))
    account = run._control._account
    assert account.price == pytest.approx(1.0)
    assert account.every == math.ceil(1.0 / LIMIT)
    assert account.uses <= 2 * problem.plan.batch_rule.min_windows + 4  # of 500


@pytest.mark.parametrize(("k", "batches"), [(1, 3), (4, 4), (4, 8)])
def test_a_price_is_a_share_of_a_window_as_decided_however_many_batches_the_measured_one_has(
    always_measured, monkeypatch, clock, k, batches, never_decided
):
    """Each batch 5 s, each window 10 s more, and half a second to measure one: of 15 s, or of 30 s at k = 4."""
    problem = Regression(8, BatchRule("norm_test", k=k, k_max=8))
    problem.optimizer.register_step_pre_hook(lambda *_: clock(10.0))
    spend = OverheadTimer.read
    monkeypatch.setattr(OverheadTimer, "read", lambda self: 0.25 + 0 * spend(self))
    monkeypatch.setattr(UsualWindow, "extra", lambda *_: 0.0)
    with trimtab.start(*of(problem)) as run:
        source = problem.batches()
        for _ in range(40):
            window = run.window(*itertools.islice(source, batches))
            run.train_step(window, taking(clock))
        assert run._control._account.price == pytest.approx(0.5 / (10 + 5 * k))
