"""The batch while training: what is measured is true, what is decided is applied, and both are recorded."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

import trimtab
from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import UsageError
from trimtab.core.plan import Check, Plan
from trimtab.decide.accounts import PAUSE, Account
from trimtab.decide.noise import NoiseAverage

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
    """Return (loss_sum, count): every fourth row ignored."""
    counts = torch.arange(len(batch[1])) % 4 != 0
    squares = 0.5 * (model(batch[0])[:, 0] - batch[1]).square()
    return squares[counts].sum(), counts.sum()


def failing_loss(model, batch):
    mean_loss(model, batch)
    raise ZeroDivisionError


@pytest.fixture
def windows_seen(monkeypatch):
    """Collect what each measured window says."""
    seen, add = [], NoiseAverage.add

    def noting(self, window):
        seen.append(window)
        add(self, window)

    monkeypatch.setattr(NoiseAverage, "add", noting)
    return seen


def assert_unbiased(seen, name, truth):
    values = torch.tensor([getattr(each, name) for each in seen], dtype=torch.float64)
    half = 3.3 * values.std() / math.sqrt(len(values))
    assert abs(values.mean() - truth) < half
    assert half < 0.25 * truth  # so that it can fail


def measuring(k, **values):
    return BatchRule("fixed", k=k, learning_rate="none", min_windows=10**6, **values)


@pytest.mark.parametrize(("rows", "micro", "k"), [(8, 8, 4), (8, 3, 3), (16, 8, 2), (8, 8, 1)])
def test_a_runs_estimates_are_those_of_the_true_gradient(windows_seen, rows, micro, k):
    """Also of a window of one micro-batch, which is split in two."""
    problem = Regression(rows, measuring(k), micro=micro)
    problem.run(600)
    assert len(windows_seen) >= 598
    assert_unbiased(windows_seen, "trace", problem.trace)
    assert_unbiased(windows_seen, "norm2", problem.norm2)


def test_rows_that_a_loss_ignores_are_no_rows_of_it(windows_seen):
    """A sum over six of eight rows: their mean varies as that of six does, and N counts rows of the batch."""
    problem = Regression(8, measuring(4))
    problem.run(600, loss=counting_loss)
    assert_unbiased(windows_seen, "trace", problem.trace * 8 / 6)
    assert_unbiased(windows_seen, "norm2", problem.norm2)


def test_batches_of_other_sizes(windows_seen):
    problem = Regression(8, measuring(4))
    problem.run(800, sizes=(8, 3, 5))
    assert_unbiased(windows_seen, "trace", problem.trace)
    assert_unbiased(windows_seen, "norm2", problem.norm2)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_loss_scale_is_taken_out(windows_seen, precision):
    problem = Regression(8, measuring(4))
    problem.model.float()
    problem.plan = Plan.fixed(8, batch_rule=problem.plan.batch_rule, precision=precision)
    problem.run(400, loss=lambda model, batch: mean_loss(model, [part.float() for part in batch]))
    assert_unbiased(windows_seen, "norm2", problem.norm2)


def test_a_users_change_between_unscale_and_step_is_not_noise(windows_seen):
    problem = Regression(8, measuring(4))
    with trimtab.start(problem.model, problem.optimizer, problem.plan) as run:
        for window in itertools.islice(run.windows(problem.batches()), 300):
            for micro in window:
                run.backward(mean_loss(run.model, micro))
            run.unscale()
            problem.model.weight.grad.mul_(100.0)
            run.step()
    assert_unbiased(windows_seen, "norm2", problem.norm2)


def test_a_window_given_up_says_nothing_and_leaves_no_hook(windows_seen):
    problem = Regression(8, measuring(2))
    with trimtab.start(problem.model, problem.optimizer, problem.plan) as run:
        batches = problem.batches()
        for _ in range(5):
            window = run.window(*itertools.islice(batches, 2))
            with pytest.raises(ZeroDivisionError):
                run.train_step(window, failing_loss)
            assert not problem.model.weight._backward_hooks
        run.train_step(run.window(*itertools.islice(batches, 2)), mean_loss)
        assert not problem.model.weight._backward_hooks
    assert windows_seen == []  # one is still on its way


def test_void_windows_say_nothing(windows_seen):
    problem, calls = Regression(8, measuring(2)), itertools.count()

    def loss(model, batch):
        return mean_loss(model, batch) * (math.nan if next(calls) % 8 < 2 else 1.0)  # every fourth window

    run = problem.run(100, loss=loss, nonfinite="skip")
    assert run.applied_steps == 75
    assert len(windows_seen) in (73, 74, 75)  # two are on their way
    assert all(math.isfinite(each.trace) for each in windows_seen)


@pytest.fixture
def always_measured(monkeypatch):
    """Measure every window: in steps of a fraction of a millisecond the account would allow one in a hundred."""
    monkeypatch.setattr(Account, "is_due", lambda self, free: not self.is_paused)


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
    assert {"reason", "trace", "norm2", "relative_error", "num_windows"} <= set(events[0].detail)
    assert record.steps[-1].num_micro_batches in ks[-2:]
    assert record.steps[-1].noise_scale == pytest.approx(run.noise.scale, rel=0.05)  # a window or two before
    rates = [step.learning_rate for step in record.steps]
    assert rates[-1] == pytest.approx(1e-12 * ks[-1], rel=0.2)
    assert max(after / before for before, after in itertools.pairwise(rates)) < 1.08


def test_single_micro_batches_are_probed_in_windows_of_two():
    """Nothing else tells their time; before the first windows are seen, each is one."""
    problem = Regression(8, BatchRule("goodput", min_windows=4))
    with trimtab.start(problem.model, problem.optimizer, problem.plan) as run:
        sizes = []
        for window in itertools.islice(run.windows(problem.batches()), 4):
            sizes.append(window.num_micro_batches)
            run.train_step(window, mean_loss)
    assert sizes == [2, 2, 2, 2]


def test_a_split_the_check_refused_is_not_made():
    problem = Regression(8, measuring(1), check=Check(False, "batch statistics"))
    with trimtab.start(problem.model, problem.optimizer, problem.plan) as run:
        window = run.window(next(problem.batches()))
        assert window.num_micro_batches == 1
        run.train_step(window, mean_loss)
        assert run.noise is None


def test_the_last_batches_of_a_loader_are_a_shorter_window():
    problem = Regression(8, measuring(4))
    with trimtab.start(problem.model, problem.optimizer, problem.plan) as run:
        sizes = []
        for window in run.windows(list(itertools.islice(problem.batches(), 10))):
            sizes.append(window.num_batches)
            run.train_step(window, mean_loss)
    assert sizes == [4, 4, 2]
    assert run.consumed_rows == 80


def test_a_monitor_that_brings_nothing_is_paused_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("trimtab.runtime.batch_control.BatchControl._gain", lambda self: 0.0)
    problem = Regression(8, BatchRule("goodput", k_max=2))
    with trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer:
        problem.run(150, record=writer)
    (event,) = [event for event in trimtab.read_record(tmp_path / "run.jsonl").events if event.name == "paused"]
    assert event.detail["technique"] == "noise monitor"
    assert event.detail["gain"] == 0.0 < event.detail["price"]
    assert event.detail["pause"] == PAUSE


def test_a_resumed_run_goes_on_with_k_averages_and_rate(always_measured):
    rule = BatchRule("norm_test", theta=0.5, k_max=64, learning_rate="linear")
    first, second = Regression(4, rule, lr=1e-12), Regression(4, rule, lr=1e-12)
    with trimtab.start(first.model, first.optimizer, first.plan) as run:
        for window in itertools.islice(run.windows(first.batches()), 300):
            run.train_step(window, mean_loss)
        state, sizes = run.state_dict(), run.num_batches
    assert sizes > 4
    with trimtab.start(second.model, second.optimizer, second.plan) as run:
        run.load_state_dict(state)
        assert run.state_dict() == state
        assert run.num_batches == sizes
        damaged = state | {"batch": state["batch"] | {"k": 0}}
        with pytest.raises(UsageError, match=r"state\.batch\.k"):
            run.load_state_dict(damaged)
        assert run.state_dict() == state
        for window in itertools.islice(run.windows(second.batches()), 5):
            run.train_step(window, mean_loss)


def test_a_run_without_a_rule_measures_nothing():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), Plan.fixed(8)) as run:
        run.train_step(run.window(torch.randn(8, 4)), lambda m, x: m(x).mean())
        assert run.noise is None
        assert run.num_batches == 1


def test_adam_keeps_its_moments_when_k_changes():
    """As by hand: the state goes on, nothing is made anew."""
    problem = Regression(4, BatchRule("norm_test", theta=0.5, k_max=64, learning_rate="none"))
    problem.optimizer = torch.optim.Adam(problem.model.parameters(), lr=1e-9)
    seen = []

    def note(optimizer, args, kwargs):
        seen.append(float(next(iter(optimizer.state.values()))["step"]))

    problem.optimizer.register_step_pre_hook(note)
    problem.run(120)
    assert seen == [float(index) for index in range(120)]
