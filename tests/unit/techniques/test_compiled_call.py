"""A model that is compiled in place: the same object, compiled once however often it is started, and left as it was."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from raising import raises
from torch import nn
from torch._dynamo.utils import counters

import trimtab
from trimtab.adaptive_batch.noise_probes import OverheadBudget
from trimtab.core.errors import LoopError, ValueGivenError
from trimtab.measure.gradient_norms import GradientNorms
from trimtab.plans.plan import Plan
from trimtab.profiling.gradient_equivalence import require_own_forward
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.techniques.compiled_call import CompiledCall, is_compiled, start_compiler
from trimtab.training.apply_plan import PAIRS, WARM_UP, CompileCheck

pytestmark = pytest.mark.slow

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


class Model(nn.Module):
    """With a forward of its own: torch compiles nothing of a bare nn.Sequential."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.layers(x)


def loop():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(4, 6)


def loss_fn(model, batch):
    return model(batch).square().mean()


def train(compiled: bool, steps: int = 3):
    model, optimizer, batch = loop()
    torch.manual_seed(1)
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=compiled)) as run:
        losses = [run.train_step(run.window(batch), loss_fn) for _ in range(steps)]
    return torch.stack(losses), model


@needs_compiler
def test_dropout_draws_the_same_masks_and_the_training_is_the_same():
    (ours, model), (plain, other) = train(compiled=True), train(compiled=False)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(model.state_dict(), other.state_dict())


@needs_compiler
def test_the_compiler_is_started_once_and_draws_no_random_numbers():
    start_compiler.cache_clear()
    state, graphs = torch.get_rng_state(), [counters["stats"]["unique_graphs"]]
    for _ in range(2):
        start_compiler(torch.device("cpu"))
        graphs.append(counters["stats"]["unique_graphs"])
    assert torch.equal(torch.get_rng_state(), state)
    assert (graphs[1] - graphs[0], graphs[2] - graphs[1]) == (1, 0)


@needs_compiler
def test_a_model_is_compiled_once_however_often_it_is_started():
    model, optimizer, batch = loop()
    graphs = []
    for _ in range(12):  # torch compiles nothing for the ninth time
        with trimtab.start(model, optimizer, Plan.fixed(4, compiled=True)) as run:
            run.train_step(run.window(batch), loss_fn)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0, "nothing was compiled"
    assert graphs == graphs[:1] * 12


def test_it_is_put_back():
    model, optimizer, _ = loop()
    assert not is_compiled(model)
    run = trimtab.start(model, optimizer, Plan.fixed(4, compiled=True))
    assert is_compiled(model)
    assert not is_compiled(copy.deepcopy(model))
    run.close()
    assert not is_compiled(model)
    assert "_compiled_call_impl" not in vars(model)


@pytest.mark.parametrize("compiled", ["all", "a part"])
def test_a_plan_that_compiles_is_refused_where_the_loop_has_compiled(compiled):
    """It was left out without a word."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model if compiled == "all" else model[0]).compile()
    with raises(ValueGivenError, code="compiled.twice", field="plan.compiled"):
        trimtab.start(model, optimizer, Plan.fixed(4, compiled=True))
    trimtab.start(model, optimizer, Plan.fixed(4)).close()


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # planning's hooks of all modules, of their own
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("how", ["model.compile()", "torch.compile(model)"])
@pytest.mark.usefixtures("brief_trials")
def test_what_the_loop_has_compiled_is_seen_to_run_forward_and_compiled_once(how, is_warm):
    """Each run, and each trial of a plan, looks at the forward by a hook of its own."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, _, batch = loop()
    if how == "model.compile()":
        model.compile(backend=backend)
    else:
        model = torch.compile(model, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if is_warm:
        model(batch)
    for _ in range(10):  # two more than torch compiles for
        with trimtab.start(model, optimizer, Plan.fixed(4)) as run:
            run.train_step(run.window(batch), loss_fn)
    require_own_forward(TrainingLoop(model, optimizer, loss_fn, batch), "fp32")
    assert len(graphs) == 1
    trimtab.plan(model, optimizer, loss_fn, batch)  # its trials see the forward, in smaller micro-batches too


def test_a_part_that_is_compiled_makes_the_model_compiled():
    model, *_ = loop()
    call = CompiledCall(model.layers[0], lambda: None)
    assert is_compiled(model)
    call.undo()
    assert not is_compiled(model)
    assert is_compiled(torch.compile(model))


@needs_compiler
def test_a_forgotten_model_is_found_though_it_is_compiled():
    model, optimizer, batch = loop()
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=True)) as run:
        run.train_step(run.window(batch), loss_fn)
        other = copy.deepcopy(model)
        with raises(LoopError, code="loop.forward_missing", field="run.backward"):
            run.train_step(run.window(batch), lambda _, rows: loss_fn(other, rows))


class Seconds:
    """Seconds that pass only as a test says."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr("time.perf_counter", lambda: self.now)


def checked(monkeypatch, tmp_path, compiled_s, windows=60, rows=lambda index: 4):
    """Train a model that takes so long compiled, and a second as it was; returns which were compiled, and events."""
    clock, on = Seconds(monkeypatch), []
    torch.manual_seed(0)
    model = Model()
    monkeypatch.setattr(model, "compile", lambda **options: setattr(model, "_compiled_call_impl", model._call_impl))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        on.append(model._compiled_call_impl.is_on)
        found = loss_fn(model, batch)
        clock.now += compiled_s(len(on)) if on[-1] else 1.0
        return found

    with (
        trimtab.RecordWriter(tmp_path / "run.jsonl", trimtab.Header("test")) as writer,
        trimtab.start(model, optimizer, Plan.fixed(4, compiled=True), record=writer) as run,
    ):
        for index in range(windows):
            run.train_step(run.window(torch.randn(rows(index), 6)), loss)
    events = trimtab.read_record(tmp_path / "run.jsonl").events
    return on, [each.detail for each in events if each.detail.get("technique") == "compile"]


def test_compiling_that_made_it_slower_is_left_off_and_the_record_says_so(monkeypatch, tmp_path):
    on, (off, last) = checked(monkeypatch, tmp_path, lambda index: 1.2)
    assert all(on[:WARM_UP])
    assert on[WARM_UP : WARM_UP + 2 * PAIRS] == PAIRS // 2 * [True, False, False, True]
    assert not any(on[WARM_UP + 2 * PAIRS + 1 :])
    assert (off["pays"], off["gain"]) == (False, pytest.approx(-0.2))
    assert last["gain"] == off["gain"]


@pytest.mark.parametrize(("peak", "checks"), [(50, True), (60, False)])
def test_where_memory_may_not_do_uncompiled_no_window_is(peak, checks, monkeypatch):
    """A plan may fit by being compiled: its run does not end for being looked at."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr("trimtab.training.apply_plan.most_bytes", lambda device: 80)
    monkeypatch.setattr("trimtab.training.apply_plan.stamp", lambda device: None)
    model, optimizer, _ = loop()
    monkeypatch.setattr(model, "compile", lambda **options: setattr(model, "_compiled_call_impl", model._call_impl))
    call = CompiledCall(model, lambda: None)
    check = CompileCheck(call, optimizer, torch.device("cuda"), lambda name, detail: noted.append(name))
    on, noted = [], []
    for _ in range(WARM_UP + 2 * PAIRS - 1):
        check._stepped()
        on.append(call.is_on)
    assert all(on[: WARM_UP - 1])
    assert all(on) is not checks
    assert (call.shapes is None) is not checks
    assert noted == ([] if checks else ["compile_unchecked"])


def test_compiling_that_pays_stays_on(monkeypatch, tmp_path):
    on, (last,) = checked(monkeypatch, tmp_path, lambda index: 30.5 if index == 1 else 0.5)
    assert all(on[WARM_UP + 2 * PAIRS :])
    assert last["gain"] == pytest.approx(0.5)


def test_pairs_of_other_shapes_say_nothing(monkeypatch, tmp_path):
    on, (last,) = checked(monkeypatch, tmp_path, lambda index: 1.2, rows=lambda index: 3 + index % 2)
    assert all(on[WARM_UP + 2 * PAIRS :])
    assert last["gain"] is None


def test_a_run_that_ends_early_says_what_it_knows(monkeypatch, tmp_path):
    on, (last,) = checked(monkeypatch, tmp_path, lambda index: 1.2, windows=5)
    assert all(on)
    assert last["gain"] is None


def test_windows_that_are_split_say_nothing_beside_whole_ones(monkeypatch, tmp_path):
    """As many elements, in other shapes."""
    seen = []

    class Call(CompiledCall):
        def take_shapes(self):
            seen.append(super().take_shapes())
            return seen[-1]

    monkeypatch.setattr("trimtab.techniques.compiled_call.CompiledCall", Call)
    model, optimizer, batch = loop()
    monkeypatch.setattr(model, "compile", lambda **options: setattr(model, "_compiled_call_impl", model._call_impl))
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=True)) as run:
        for window in (run.window(batch), run.window(batch[:2], batch[2:])):
            run.train_step(window, loss_fn)
    assert seen == [(torch.Size([4, 6]),), (torch.Size([2, 6]),) * 2]


def test_a_users_hook_beside_the_check_is_not_disturbed(monkeypatch):
    """One that comes after it: torch goes through them while they are called."""
    model, optimizer, batch = loop()
    monkeypatch.setattr(model, "compile", lambda **options: setattr(model, "_compiled_call_impl", model._call_impl))
    steps = []
    with trimtab.start(model, optimizer, Plan.fixed(4, compiled=True)) as run:
        optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
        for _ in range(WARM_UP + 2 * PAIRS + 5):
            run.train_step(run.window(batch), loss_fn)
        assert model._compiled_call_impl.shapes is None  # else they would grow for as long as the run is
    assert len(steps) == WARM_UP + 2 * PAIRS + 5
    assert len(optimizer._optimizer_step_post_hooks) == 1


@needs_compiler
def test_measuring_some_windows_does_not_compile_the_model_anew(monkeypatch):
    """The monitor's hooks come and go on the parameters that torch guards."""
    monkeypatch.setattr(OverheadBudget, "is_due", lambda self, sparse=0: self.windows % 2 == 0)
    watched, on = [], GradientNorms.on
    monkeypatch.setattr(GradientNorms, "on", lambda self: (watched.append(1), on(self)))
    model, optimizer, batch = loop()
    plan = Plan.fixed(4, compiled=True, batch_rule=trimtab.BatchRule("norm_test", k=2, k_max=2, theta=1e6))
    graphs = []
    with trimtab.start(model, optimizer, plan) as run:
        for _ in range(2 * WARM_UP):
            run.train_step(run.window(batch, batch), loss_fn)
            graphs.append(counters["stats"]["unique_graphs"])
        assert run.noise.num_windows >= 5
    assert len(watched) >= 10
    assert graphs == graphs[:1] * len(graphs)
