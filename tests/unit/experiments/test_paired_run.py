"""A race: every arm starts alike and keeps its own clock and generators, in whatever turns they run."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy
import pytest
import torch
from raising import raises
from tiny_task import BATCH_SIZE, BUDGET_SAMPLES, EVAL_EVERY_SAMPLES, load_data, task
from torch import Tensor, nn

from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.core.record import Header, RunRecord, read_record, write_record
from trimtab.distributed.coordinator import Coordinator
from trimtab.experiments.baselines.reference import ReferenceLoop
from trimtab.experiments.comparison.comparison_statistics import error_of_run
from trimtab.experiments.paired_runs import paired_run as race_module
from trimtab.experiments.paired_runs.paired_run import PairedArm, race
from trimtab.experiments.paired_runs.plan_loops import PlanLoop, settling_steps
from trimtab.experiments.paired_runs.results_folder import environment_of
from trimtab.planner.statistics import turns
from trimtab.plans.plan import Plan
from trimtab.state import process_state
from trimtab.training.apply_plan import WINDOWS

CPU = torch.device("cpu")


def alone(clock, values, step_s=0.25, rows=100, *, its=None, every=50, batch=10, **options) -> RunRecord:
    """Return the record of a lone arm that has these held-out metrics and steps of this many seconds."""
    its = its or scripted(clock, values, every=every)
    timed_only = {"is_timed_only": True} if options.pop("timed_only", False) else {}
    (found,) = run(PairedArm("a", lambda *_: Timed(clock, step_s, rows=batch), rows, **timed_only), its=its, **options)
    return found


class Watched(ReferenceLoop):
    """The reference loop, with what it started from, what it saw and whether it was closed."""

    made: list[Watched]

    def __init__(self, task, device) -> None:
        super().__init__(task, device)
        self.start = weights(self)
        self.seen: list[Tensor] = []
        self.closed = 0
        Watched.made.append(self)

    def step(self, batches: Iterator) -> int:
        return super().step(self._noting(batches))

    def _noting(self, batches: Iterator) -> Iterator:
        for batch in batches:
            self.seen.append(batch[0])
            yield batch

    def close(self) -> None:
        self.closed += 1


def weights(loop) -> Tensor:
    return torch.cat([p.detach().flatten().clone() for p in loop.model.parameters()])


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    monkeypatch.setattr(race_module, "_BLOCK_S", 1e-6)  # a step on any machine: many turns
    monkeypatch.setattr(race_module, "_BLOCK_STEPS", 1)
    Watched.made = []


def run(*entries: PairedArm, its=task, seed: int = 0, **options) -> list[RunRecord]:
    return race(entries, its, load_data(), seed, CPU, **options)


def test_arms_start_alike_and_see_the_same_data():
    run(*(PairedArm(name, Watched, BUDGET_SAMPLES) for name in ("a", "b", "c")))
    first, *others = Watched.made
    assert len(first.seen) == BUDGET_SAMPLES // BATCH_SIZE
    for other in others:
        assert torch.equal(first.start, other.start)
        assert all(torch.equal(x, y) for x, y in zip(first.seen, other.seen, strict=True))


def test_interleaved_arms_end_where_a_lone_one_ends():
    """Bit for bit, with dropout in the model: each arm has its own generators."""
    alone = [PairedArm("reference", Watched, BUDGET_SAMPLES)]
    run(*alone)
    records = run(*alone, PairedArm("self", Watched, BUDGET_SAMPLES), PairedArm("other", Noisy, BUDGET_SAMPLES))
    lone, reference, again = (weights(loop) for loop in Watched.made if type(loop) is Watched)
    assert torch.equal(reference, lone)
    assert torch.equal(reference, again)
    assert not torch.equal(reference, Watched.made[0].start)
    assert max(len(record.events) for record in records) > 5  # they did take turns
    metrics = [[e.metrics for e in record.evaluations] for record in records]
    assert metrics[0] == metrics[1]


def test_arms_start_alike_whatever_generator_a_model_draws_from():
    def make_model() -> torch.nn.Module:
        model = task.make_model()
        with torch.no_grad():
            model[0].weight.mul_(random.random()).add_(numpy.random.rand())
        return model

    run(*(PairedArm(name, Watched, BATCH_SIZE) for name in ("a", "b")), its=replace(task, make_model=make_model))
    first, second = Watched.made
    assert torch.equal(first.start, second.start)


class Noisy(Watched):
    """Draws from every generator and changes a global mode on the way."""

    def step(self, batches: Iterator) -> int:
        torch.rand(100), random.random(), numpy.random.rand()
        torch.backends.cudnn.conv.fp32_precision = "tf32"
        return super().step(batches)


def test_arms_are_built_in_an_order_that_changes_with_the_seed_and_told_in_their_own():
    built: list[str] = []

    def entry(name: str) -> PairedArm:
        def make(its, device):
            built.append(name)
            return Watched(its, device)

        return PairedArm(name, make, BATCH_SIZE)

    for seed in range(6):
        records = run(*map(entry, "abcd"), seed=seed)
        assert [record.header.name for record in records] == list("abcd")
    orders = {"".join(built[i : i + 4]) for i in range(0, len(built), 4)}
    assert {"".join(sorted(order)) for order in orders} == {"abcd"}
    assert len(orders) > 3
    assert len({order[0] for order in orders}) > 1


def test_another_seed_is_another_race():
    run(PairedArm("a", Watched, BUDGET_SAMPLES))
    run(PairedArm("a", Watched, BUDGET_SAMPLES), seed=1)
    first, second = Watched.made
    assert not torch.equal(first.start, second.start)
    assert not torch.equal(first.seen[0], second.seen[0])


def test_a_plan_that_changes_nothing_trains_as_the_reference_does():
    loops = []

    def make(its, device):
        loops.append(PlanLoop(its, device, Plan.fixed(BATCH_SIZE)))
        return loops[-1]

    run(PairedArm("reference", Watched, BUDGET_SAMPLES), PairedArm("equivalent_plan", make, BUDGET_SAMPLES))
    assert torch.equal(weights(loops[0]), weights(Watched.made[0]))


def state() -> list:
    modes = [place.fp32_precision for place in (torch.backends.cuda.matmul, torch.backends.cudnn.conv)]
    return [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()), modes]


def test_the_process_is_left_as_it_was():
    before = state()
    run(PairedArm("a", Noisy, BUDGET_SAMPLES), PairedArm("b", Watched, BUDGET_SAMPLES))
    assert state() == before
    assert [loop.closed for loop in Watched.made] == [1, 1]


def test_an_error_closes_every_arm_and_restores_the_process():
    def broken(model, batch):
        raise ZeroDivisionError

    def make(its, device):
        return Watched(replace(its, loss_fn=broken), device)

    before = state()
    with raises(LoopError, code="baseline.failed", field="baseline loop") as e:
        run(PairedArm("b", make, BUDGET_SAMPLES), PairedArm("a", Noisy, BUDGET_SAMPLES))
    assert isinstance(e.value.__cause__, ZeroDivisionError)
    assert state() == before
    assert [loop.closed for loop in Watched.made] == [1, 1]


# On a clock that stands still but for training and evaluating.


class Clock:
    """Steps and evaluations take what they are told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return 2 * self.now  # two busy threads


class Timed:
    """A loop of a model without parameters, whose every step takes `step_s`."""

    model, optimizer = nn.Module(), None

    def __init__(self, clock: Clock, step_s: float, rows: int = 10, turns: list[str] | None = None, name: str = ""):
        self._clock, self._step_s, self._rows = clock, step_s, rows
        self._turns, self._name = turns if turns is not None else [], name

    def step(self, batches) -> int:
        self._clock.now += self._step_s
        self._turns.append(self._name)
        return self._rows

    def close(self) -> None:
        pass


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(race_module, "_BLOCK_S", 1.0)
    monkeypatch.setattr(race_module, "_BLOCK_STEPS", 1)
    monkeypatch.setattr(
        race_module, "time", SimpleNamespace(perf_counter=clock.perf_counter, process_time=clock.process_time)
    )
    return clock


def scripted(clock: Clock, values: list[float], *, every: int = 50, seconds: float = 1000.0, **changes):
    """Return a task whose metric takes `seconds` and gives these values, evaluation by evaluation."""
    left = iter(values)

    def evaluate(model, batches) -> float:
        clock.now += seconds
        return next(left)

    metric = replace(task.metric, evaluate=evaluate)
    return replace(task, metric=metric, batch_size=10, eval_every_samples=every, **changes)


class Numbers(Coordinator):
    """What sends figures to other ranks, which takes no others."""

    def each(self, figure: float) -> list[float]:
        assert type(figure) is float
        return [figure]


@pytest.mark.parametrize("value", [torch.tensor(0.5), torch.full((1,), 0.5), numpy.float32(0.5)])
def test_a_race_whose_metric_is_a_tensor_is_recorded(clock, tmp_path, value):
    write_record(tmp_path / "a.jsonl", alone(clock, [value], rows=50, together=Numbers()))
    (evaluation,) = read_record(tmp_path / "a.jsonl").evaluations
    assert evaluation.metrics == {task.metric.name: 0.5}


def blocks_of(found: RunRecord) -> list[tuple[int, float]]:
    return [(event.detail["rows"], event.detail["seconds"]) for event in found.events]


def test_blocks_and_evaluations_are_on_clocks_of_their_own(clock, monkeypatch):
    """A block lasts a second or until the next evaluation, and has a few steps however long they are."""
    found = alone(clock, [0.1, 0.2])
    assert [(e.samples, e.train_s) for e in found.evaluations] == [(50, 1.25), (100, 2.5)]
    assert found.end.detail == {"rows": 100, "train_s": 2.5}
    assert clock.now == 2002.5
    assert blocks_of(found) == [(40, 1.0), (10, 0.25), (40, 1.0), (10, 0.25)]
    assert [event.detail["cpu_s"] for event in found.events] == [2.0, 0.5, 2.0, 0.5]  # no evaluation in it
    monkeypatch.setattr(race_module, "_BLOCK_STEPS", 8)
    found = alone(clock, [0.1] * 3, 2.0, 200, every=100)
    assert blocks_of(found) == [(80, 16.0), (20, 4.0), (80, 16.0), (20, 4.0)]


def test_an_arm_that_is_only_timed_settles_before_the_clock_starts(clock):
    """It takes a step, or what a compiled model runs unchanged: that would be a large part of a few dozen steps."""

    class Settling(Timed):
        settling_steps = 45

    found = alone(clock, [0.1], rows=80, timed_only=True)
    assert (found.end.detail, found.evaluations) == ({"rows": 80, "train_s": 2.0}, ())
    assert clock.now == 1002.25  # evaluated where the others are, at 50 rows
    clock.now = 0.0
    entry = PairedArm("a", lambda *_: Settling(clock, 0.25), 80, is_timed_only=True)
    (found,) = run(entry, its=scripted(clock, [0.1]))
    assert found.end.detail == {"rows": 80, "train_s": 2.0}
    assert clock.now == 1002.0 + 45 * 0.25


def test_a_plan_settles_once_its_compiled_model_was_checked():
    its, plan = task, Plan.fixed(BATCH_SIZE)
    for compiled, steps in ((False, 1), (True, WINDOWS)):
        loop = PlanLoop(its, CPU, replace(plan, compiled=replace(plan.compiled, value=compiled)))
        assert settling_steps(loop) == steps
        loop.close()


def orders(names: str, laps: int, seed: int = 0) -> str:
    """Return who ran, block by block, over these laps."""
    before, ran = None, []
    for lap in range(laps):
        ran += turns(names, lap, seed, before)
        before = ran[-1]
    return "".join(ran)


def test_arms_run_in_an_order_that_changes_with_the_lap_and_the_seed(clock):
    order: list[str] = []
    its = scripted(clock, [0.1] * 9, every=1000)
    entries = [PairedArm(n, lambda *_, n=n: Timed(clock, 2.0, turns=order, name=n), 40) for n in "abc"]
    run(*entries, its=its)
    assert "".join(order) == orders("abc", 4) == "abcbacbcacba"
    order.clear()
    its = scripted(clock, [0.1] * 9, every=1000)
    run(*entries, its=its, seed=1)
    assert "".join(order) == orders("abc", 4, 1)
    assert order[:3] == ["b", "c", "a"]
    assert orders("a", 3) == "aaa"


@pytest.mark.parametrize("count", range(2, 9))
def test_every_arm_follows_every_other_about_equally_often_and_never_itself(count):
    names, laps = "abcdefgh"[:count], 40 * count
    ran = orders(names, laps)
    assert all(sorted(ran[i : i + count]) == list(names) for i in range(0, len(ran), count))  # each once a lap
    follows = Counter(itertools.pairwise(ran))
    assert not any(follows[name, name] for name in names)
    for late in names:
        seen = [follows[early, late] for early in names if early != late]
        assert min(seen) > 0.7 * laps / (count - 1)
        assert max(seen) < 1.8 * laps / (count - 1)


@pytest.mark.parametrize("count", range(3, 9))
def test_a_few_laps_of_several_seeds_are_balanced_too(count):
    names = "abcdefgh"[:count]
    follows: Counter = Counter()
    for seed in range(8):
        ran = orders(names, 10, seed)
        follows += Counter(itertools.pairwise(ran))
    middle = sum(follows.values()) / (count * (count - 1))
    assert len(follows) == count * (count - 1)
    assert max(follows.values()) < 1.4 * middle
    assert min(follows.values()) > 0.7 * middle


class Breaks(Watched):
    """Raises in its third step."""

    def step(self, batches: Iterator) -> int:
        if len(self.seen) == 2:
            raise RuntimeError("no room left\nwith details")
        return super().step(batches)


def test_an_arm_that_raises_leaves_and_the_others_go_on():
    reference, broken, last = run(
        *(PairedArm(n, m, BUDGET_SAMPLES) for n, m in (("a", Watched), ("b", Breaks), ("c", Watched)))
    )
    assert (broken.end.reason, broken.end.detail["error"]) == ("error", "RuntimeError: no room left")
    assert reference.end.reason == last.end.reason == "budget"
    assert reference.evaluations[-1].metrics == last.evaluations[-1].metrics
    assert [loop.closed for loop in Watched.made] == [1, 1, 1]

    def refuse(task, device):
        raise ValueError("no such recipe")

    reference, broken = run(PairedArm("a", Watched, BUDGET_SAMPLES), PairedArm("b", refuse, BUDGET_SAMPLES))
    assert broken.end.detail == {"rows": 0, "train_s": 0.0, "error": "ValueError: no such recipe"}
    assert reference.end.reason == "budget"


def test_without_the_first_arm_there_is_no_race():
    with raises(LoopError, code="baseline.failed", field="baseline loop"):
        run(PairedArm("a", Breaks, BUDGET_SAMPLES), PairedArm("b", Watched, BUDGET_SAMPLES))
    assert [loop.closed for loop in Watched.made] == [1, 1]


def test_a_shorter_arm_stops_and_the_others_go_on(clock):
    def raced(lengths: dict[str, tuple[float, int]], **options) -> list[RunRecord]:
        entries = (PairedArm(name, lambda *_, s=s: Timed(clock, s), rows) for name, (s, rows) in lengths.items())
        return run(*entries, its=scripted(clock, [0.1] * 19), **options)

    short, long = raced({"short": (0.5, 30), "long": (0.5, 100)})
    assert (short.end.reason, short.end.detail["rows"]) == ("budget", 30)
    assert [e.samples for e in short.evaluations] == [30]  # its last rows are evaluated whatever is due
    assert long.end.detail["rows"] == 100
    slow, fast = raced({"slow": (1.5, 100), "fast": (0.1, 100)}, cap_s=3.0)
    assert (slow.end.reason, slow.end.detail) == ("cap", {"rows": 20, "train_s": 3.0})
    assert fast.end.reason == "budget"
    first, other = raced({"reference": (1.5, 100), "other": (1.5, 100)}, cap_s=3.0, reference_cap_s=6.0)
    assert (first.end.reason, first.end.detail) == ("cap", {"rows": 40, "train_s": 6.0})
    assert (other.end.reason, other.end.detail) == ("cap", {"rows": 20, "train_s": 3.0})
    # An arm with longer steps is evaluated when it is past due.
    assert [e.samples for e in alone(clock, [0.1] * 9, 0.1, 200, batch=40).evaluations] == [80, 120, 160, 200]


def test_a_share_above_one_is_refused_with_the_way_out(clock):
    with raises(ValueGivenError, code="value.invalid", field="metric accuracy"):
        alone(clock, [93.0] * 9)
    its = scripted(clock, [93.0] * 9)
    its = replace(its, metric=replace(its.metric, unit="percent"))
    assert alone(clock, [], its=its).evaluations[0].metrics == {"accuracy": 93.0}


@pytest.mark.skipif(not process_state.can_retain(), reason="needs glibc")
def test_every_arm_that_retains_memory_does_in_each_of_its_steps():
    """Each arm has its modes for itself: what one holds is suspended while the others run."""
    modes: dict[str, set[str]] = {"plain": set(), "first": set(), "second": set()}

    def noting(name: str, make):
        def made(task, device):
            loop = make(task, device)
            step = loop.step

            def noted(batches):
                modes[name].add(process_state.allocator_mode())
                return step(batches)

            loop.step = noted
            return loop

        return made

    retaining = partial(PlanLoop, plan=Plan.fixed(BATCH_SIZE, allocator="retain"))
    run(
        PairedArm("plain", noting("plain", ReferenceLoop), BUDGET_SAMPLES),
        PairedArm("first", noting("first", retaining), BUDGET_SAMPLES),
        PairedArm("second", noting("second", retaining), BUDGET_SAMPLES),
    )
    assert modes == {"plain": {"keep"}, "first": {"retain"}, "second": {"retain"}}
    assert process_state.allocator_mode() == "keep"


@pytest.mark.parametrize(
    ("values", "rows", "cap_s", "reason", "samples"),
    [
        ([0.1, math.nan, 0.1], 150, math.inf, "diverged", [50, 100]),
        ([0.1, math.inf, 0.1], 150, math.inf, "diverged", [50, 100]),
        # At its budget, and at the cap: what it computed in that time is no gain.
        ([0.1, math.nan], 100, math.inf, "diverged", [50, 100]),
        ([0.1, math.nan], 500, 1.0, "diverged", [50, 100]),
        # It may not stop where it looks best: what it ends with is compared.
        ([0.2, 0.7, 0.5, 0.8, 0.9, 0.9, 0.9], 350, math.inf, "budget", [50, 100, 150, 200, 250, 300, 350]),
    ],
)
def test_an_arm_ends_at_its_budget_or_where_it_diverges(clock, values, rows, cap_s, reason, samples):
    its = scripted(clock, values, targets=(0.3, 0.6))
    found = alone(clock, values, 0.1, rows, its=its, cap_s=cap_s)
    assert [e.samples for e in found.evaluations] == samples
    assert (found.end.reason, found.end.detail["rows"]) == (reason, samples[-1])
    if reason == "diverged":
        assert error_of_run(found) == "its held-out metric was not finite"


def test_the_record_holds_all_and_survives_its_file(tmp_path):
    entry = PairedArm("reference", Watched, BUDGET_SAMPLES, detail={"why": "a test"})
    (found,) = run(entry, environment={"torch": torch.__version__}, seed=7)
    assert (found.header.name, found.header.seed) == ("reference", 7)
    assert found.header.detail == {"why": "a test", "given_rows": BUDGET_SAMPLES}
    assert found.header.environment == {"torch": torch.__version__}
    assert [e.samples for e in found.evaluations] == list(
        range(EVAL_EVERY_SAMPLES, BUDGET_SAMPLES + 1, EVAL_EVERY_SAMPLES)
    )
    assert sum(event.detail["rows"] for event in found.events) == found.end.detail["rows"] == BUDGET_SAMPLES
    assert sum(e.detail["seconds"] for e in found.events) == pytest.approx(found.end.detail["train_s"])
    write_record(tmp_path / "reference.jsonl", found)
    assert read_record(tmp_path / "reference.jsonl") == found


def test_progress_and_environment_are_those_of_all_arms():
    told: list[tuple[str, float | None]] = []
    arms = PairedArm("reference", Watched, BUDGET_SAMPLES), PairedArm("equivalent_plan", Watched, BUDGET_SAMPLES)
    run(*arms, progress=lambda text, share=None: told.append((text, share)))
    line, share = told[-1]
    assert line.startswith(f"reference {BUDGET_SAMPLES} rows")
    assert f"equivalent_plan {BUDGET_SAMPLES} rows" in line
    assert share == 1.0
    assert [share for _, share in told] == sorted(share for _, share in told)
    races = {
        seed: {"self": RunRecord(Header("self", seed, environment={"cpu": "a", "sources": state}))}
        for seed, state in enumerate(("abc", "def", "abc"))
    }
    assert environment_of(races) == {"cpu": "a", "sources": "abc / def"}
    assert environment_of({})["sources"], "where nothing ran it is that of now"
