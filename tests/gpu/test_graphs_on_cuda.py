"""CUDA graphs train what a model as it is trains, whatever the loop does around them; or they are not launched."""

from __future__ import annotations

import copy
import gc
import random
from typing import Any

import pytest
import torch
from raising import raises
from sync import without_waiting
from torch import nn

import trimtab
from benchmarks.paper.tasks import load_task
from trimtab.core.choice import COMPILED_GRAPHS, CUDA_GRAPHS, is_by_compiler
from trimtab.core.errors import LoopError
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Candidate
from trimtab.profiling.cuda_graph_proof import replay_refusal
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.techniques.compiled_call import CompiledCall

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
]
WAYS = (CUDA_GRAPHS, COMPILED_GRAPHS)
CLOSE = {"rtol": 2e-3, "atol": 2e-4}


class Model(nn.Module):
    """With statistics of batches, dropout where it is asked for, and an output beside the one that is trained on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        body = [part for _ in range(4) for part in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU())]
        self.body, self.dropout = nn.Sequential(*body), nn.Dropout(dropout)
        self.head, self.unused = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, rows: Any) -> dict[str, Any]:
        hidden = self.dropout(self.body(rows))
        return {"found": self.head(hidden), "none": None, "hidden": hidden, "top": hidden.argmax(1)}


def loss_fn(model: nn.Module, rows: Any) -> Any:
    return (model(rows)["found"] - rows.sum(1, keepdim=True)).square().mean()


def make(dropout: float = 0.0, kind: type[nn.Module] = Model) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = kind(dropout).cuda() if kind is Model else kind().cuda()
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def recorder_of(model: nn.Module) -> Any:
    call = model._compiled_call_impl
    assert isinstance(call, CompiledCall)
    return call.recorder


def batches(count: int, rows: int = 32) -> list[Any]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 32, generator=draw) for _ in range(count)]


def trained(way: bool | str, *, dropout: float = 0.0, of: int = 1, **settings: Any) -> tuple[nn.Module, list[Any], int]:
    """Train for some windows, look at what is held out between them, and keep what is found there."""
    model, optimizer = make(dropout)
    torch.manual_seed(1)
    kept, data = [], batches(12 * of)
    with trimtab.start(model, optimizer, Plan.fixed(32, compiled=way, **settings)) as run:
        for index in range(0, len(data), of):
            run.train_step(run.window(*data[index : index + of]), loss_fn)
            with torch.no_grad():
                model.eval()
                kept.append(model(torch.ones(8, 32, device="cuda"))["found"])
                model.train()
        launches = recorder_of(model).launches if way in WAYS else 0
        assert way not in WAYS or recorder_of(model).refusal == ""
    return model, kept, launches


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_what_is_launched_trains_as_without(way: str, of: int, precision: str) -> None:
    """Also where a window is of two batches, whose gradients are added."""
    (model, kept, launches), (plain, theirs, _) = (
        trained(each, of=of, precision=precision) for each in (way, is_by_compiler(way))
    )
    assert launches == 12 * of - 2
    for (name, ours), other in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, other, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    torch.testing.assert_close(torch.stack(kept), torch.stack(theirs), **CLOSE)
    assert model.unused.weight.grad is None


@pytest.mark.parametrize("way", WAYS)
def test_dropout_draws_new_masks_each_time_and_those_of_the_model_as_it_is(way: str) -> None:
    (model, _, launches), (plain, _, _) = (trained(each, dropout=0.5) for each in (way, False))
    assert launches > 5
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), **CLOSE)


def test_micro_batches_of_two_sizes_are_launched() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "__init__", without_statistics)
        (model, _, launches), (plain, _, _) = (trained(each, micro_batch=12) for each in (CUDA_GRAPHS, False))
    assert launches == 12 * 3 - 2 * 2  # of 12, 12 and 8 rows: of each kind two are called as they are
    torch.testing.assert_close(dict(model.named_parameters()), dict(plain.named_parameters()), **CLOSE)


@pytest.mark.parametrize("way", WAYS)
def test_inputs_whose_memory_has_gaps_are_launched(way: str) -> None:
    """As a text's tokens less the last of each row: copied without gaps, a model would be compiled while recorded."""

    def loss(model: nn.Module, rows: Any) -> Any:
        return loss_fn(model, rows[:, :-1])

    model, optimizer = make()
    with trimtab.start(model, optimizer, Plan.fixed(32, compiled=way)) as run:
        for rows in batches(6):
            run.train_step(run.window(torch.cat([rows, rows[:, :1]], 1)), loss)
        recorder = recorder_of(model)
        assert (recorder.refusal, recorder.launches) == ("", 4)


def without_statistics(self: Any, dropout: float = 0.0) -> None:
    nn.Module.__init__(self)
    self.body, self.dropout = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)), nn.Dropout(dropout)
    self.head, self.unused = nn.Linear(32, 1), nn.Linear(32, 1)


def both_loss(model: nn.Module, rows: Any) -> Any:
    found = model(rows)
    return (found["found"] - found["hidden"]).square().mean()


def graphed(
    way: str = CUDA_GRAPHS, kind: type[nn.Module] = Model, loss: Any = loss_fn
) -> tuple[nn.Module, nn.Module, Any]:
    """Return a model that is launched, a copy that is not, and rows, after calls of both."""
    model, _ = make(kind=kind)
    plain = copy.deepcopy(model)
    rows = torch.randn(32, 32, device="cuda")
    CompiledCall(model, lambda: None, way)
    for each in (model, plain):
        for _ in range(4):
            loss(each, rows).backward()
            each.zero_grad(set_to_none=True)
    return model, plain, rows


def require_alike(model: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, **CLOSE)


@pytest.mark.parametrize("way", WAYS)
def test_what_was_found_is_kept_though_the_next_launch_writes_over_it(way: str) -> None:
    model, plain, rows = graphed(way)
    (first, held), _ = [[each(part)["hidden"] for part in (rows, 2 * rows)] for each in (model, plain)]
    assert not torch.equal(first, held)
    before = first.clone()
    loss_fn(model, 3 * rows).backward()
    assert torch.equal(first, before)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held_back = [each.clone() for each in gradients]
    model.zero_grad(set_to_none=True)
    loss_fn(model, rows).backward()
    assert all(torch.equal(each, before) for each, before in zip(gradients, held_back, strict=True))


def test_two_forwards_before_a_backward_are_not_both_launched() -> None:
    model, plain, rows = graphed(loss=both_loss)
    launches = recorder_of(model).launches
    for each in (model, plain):
        (each(rows)["hidden"] - each(2 * rows)["hidden"]).square().sum().backward()
    assert recorder_of(model).launches == launches + 1
    require_alike(model, plain)


def test_a_forward_that_is_given_up_is_not_waited_for() -> None:
    model, plain, rows = graphed()
    launches = recorder_of(model).launches
    for each in (model, plain):
        each(rows)  # without a backward
        loss_fn(each, rows).backward()
    assert recorder_of(model).launches == launches + 2
    require_alike(model, plain)


def test_a_second_backward_is_an_error() -> None:
    """The first writes over what it needs."""
    model, _, rows = graphed()
    loss = loss_fn(model, rows)
    loss.backward(retain_graph=True)
    with raises(LoopError, code="graphs.second_backward"):
        loss.backward()


def test_two_networks_train_each_other() -> None:
    pairs = [graphed(loss=both_loss), graphed(loss=both_loss)]
    for each in (0, 1):
        one, other = pairs[0][each], pairs[1][each]
        rows = pairs[0][2]
        for first, second in ((one, other), (other, one)):
            loss = (first(rows)["hidden"] - second(rows)["hidden"]).square().mean()
            loss.backward()  # each also adds to what is held of the other
    for model, plain, _ in pairs:
        require_alike(model, plain)


def test_weights_that_lie_elsewhere_are_recorded_anew() -> None:
    model, plain, rows = graphed()
    for each in (model, plain):
        for p in each.parameters():
            p.data = 2 * p.data
        for _ in range(4):
            each.zero_grad(set_to_none=True)
            loss_fn(each, rows).backward()
    require_alike(model, plain)
    for each in (model, plain):
        each.body[0].weight.requires_grad_(False)
        for _ in range(4):
            each.zero_grad(set_to_none=True)
            loss_fn(each, rows).backward()
    assert model.body[0].weight.grad is None
    require_alike(model, plain)


def test_a_part_in_evaluation_is_another_kind() -> None:
    model, plain, rows = graphed()
    for each in (model, plain):
        each.body[1].eval()
        for _ in range(4):
            each.zero_grad(set_to_none=True)
            loss_fn(each, rows + 1).backward()
    require_alike(model, plain)
    torch.testing.assert_close(model.body[1].running_mean, plain.body[1].running_mean)


def test_hooks_see_each_gradient_once_and_a_module_that_is_looked_at_is_not_launched() -> None:
    model, _ = make()
    seen: list[Any] = []
    hook = model.head.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    CompiledCall(model, lambda: None, CUDA_GRAPHS)
    rows = torch.randn(32, 32, device="cuda")
    for _ in range(5):
        model.zero_grad(set_to_none=True)
        loss_fn(model, rows).backward()
    assert recorder_of(model).launches == 3
    assert len(seen) == 5
    torch.testing.assert_close(model.head.weight.grad, 2 * seen[-1])
    hook.remove()
    calls: list[int] = []
    model.body[0].register_forward_hook(lambda *_: calls.append(1))
    loss_fn(model, rows).backward()
    assert (len(calls), recorder_of(model).launches) == (1, 3)


class Draws(Model):
    def forward(self, rows: Any) -> dict[str, Any]:
        return super().forward(rows if random.random() < 0.5 else -rows)


class Waits(Model):
    def forward(self, rows: Any) -> dict[str, Any]:
        return super().forward(rows if rows.sum().item() < 1e9 else -rows)


class Asks(Model):
    """What torch does not warn of, and does not record."""

    def forward(self, rows: Any) -> dict[str, Any]:
        torch.cuda.synchronize()
        return super().forward(rows)


class Says(Model):
    def forward(self, rows: Any) -> dict[str, Any]:
        return super().forward(rows) | {"said": "so"}


class Borrows(Model):
    outside: list[Any] = []  # noqa: RUF012

    def forward(self, rows: Any) -> dict[str, Any]:
        if not self.outside:
            self.outside.append(torch.ones(32, device="cuda", requires_grad=True))
        return super().forward(rows * self.outside[0])


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Draws, "graphs.random_on_cpu"),
        (Waits, "graphs.synchronizes"),
        (Asks, "graphs.capture_failed"),
        (Says, "graphs.outputs"),
        (Borrows, "graphs.other_tensor_trained"),
    ],
)
def test_what_cannot_be_recorded_runs_as_it_is(kind: type[nn.Module], code: str) -> None:
    random.seed(3)
    model, plain, rows = graphed(kind=kind)
    torch.rand(3, device="cuda")
    assert recorder_of(model).refusal_code == code
    assert recorder_of(model).launches == 0
    stream = torch.cuda.current_stream()
    for each in (model, plain):
        random.seed(4)
        loss_fn(each, rows).backward()
    require_alike(model, plain)
    assert stream == torch.cuda.default_stream()
    good, other, rows = graphed()  # nor is the next one harmed
    for each in (good, other):
        loss_fn(each, rows).backward()
    require_alike(good, other)
    assert recorder_of(good).launches == 3


class Counts(Model):
    """Takes another way each second time, by what Python counts."""

    count = 0

    def forward(self, rows: Any) -> dict[str, Any]:
        self.count += 1
        return super().forward(rows if self.count % 2 else rows.flip(1) + 1)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Model, ""),
        (Counts, "graphs.state_changes"),
        (Draws, "graphs.random_on_cpu"),
        (Waits, "graphs.synchronizes"),
    ],
)
def test_a_gradient_is_proved_before_it_is_believed(kind: type[nn.Module], code: str) -> None:
    model, optimizer = make(kind=kind)
    subject = TrainingLoop(model, optimizer, loss_fn, torch.randn(32, 32))
    candidate = Candidate(32, precision="bf16", compiled=CUDA_GRAPHS)
    with subject.start(candidate) as run:
        for _ in range(3):
            run.train_step(run.window(subject.batch), loss_fn)
        found = replay_refusal(subject, candidate)
        recorder = recorder_of(model)
        assert (recorder.refusal_code or recorder.left_code) == code
    assert (found is None) == (code == "")


def test_memory_is_given_back() -> None:
    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    torch.manual_seed(0)
    model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(1024, 1024), nn.Tanh())]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows, before = torch.randn(4096, 1024), held()
    with trimtab.start(model, optimizer, Plan.fixed(4096, compiled=CUDA_GRAPHS)) as run:
        for _ in range(4):
            run.train_step(run.window(rows), lambda model, rows: model(rows).square().mean())
        assert recorder_of(model).launches == 2
        assert held() > before + 100 * 2**20
    optimizer.zero_grad(set_to_none=True)
    assert held() <= before + 40 * 2**20


class Spread(Model):
    """A parameter that is returned as it is, and fp32 inside autocast."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(dropout)
        self.spread = nn.Parameter(torch.zeros(1))

    def forward(self, rows: Any) -> dict[str, Any]:
        found = super().forward(rows)
        with torch.autocast("cuda", enabled=False):
            found["found"] = self.head(found["hidden"].float())
        return found | {"spread": self.spread}


def spread_loss(model: nn.Module, rows: Any) -> Any:
    found = model(rows)
    return ((found["found"] - 1).square() * (-found["spread"]).exp() + found["spread"]).mean()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_that_is_returned_is_trained(precision: str) -> None:
    ends = []
    for way in (CUDA_GRAPHS, False):
        model, optimizer = make(kind=Spread)
        with trimtab.start(model, optimizer, Plan.fixed(32, precision=precision, compiled=way)) as run:
            for rows in batches(10):
                run.train_step(run.window(rows), spread_loss)
            assert not way or recorder_of(model).launches == 8
        ends.append(dict(model.named_parameters()))
    assert float(ends[0]["spread"].detach().abs()) > 1e-3
    torch.testing.assert_close(*ends, **CLOSE)


@pytest.mark.parametrize("kind", [Asks, Waits])
def test_memory_of_a_recording_that_fails_is_given_back(kind: type[nn.Module]) -> None:
    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    held()
    model, _, _ = graphed(kind=kind)
    before = held()
    for _ in range(3):
        other, _, _ = graphed(kind=kind)
        assert recorder_of(other).refusal
        del other
    assert held() <= before + 4 * 2**20
    assert recorder_of(model).launches == 0


def test_recordings_that_are_closed_leave_nothing_behind() -> None:
    """Nor a workspace of cuBLAS's each, which it keeps for each stream that it has worked on."""

    def held() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    def once() -> None:
        model, _, _ = graphed()
        assert recorder_of(model).launches == 2
        recorder_of(model).forget()

    once()
    before = held()
    for _ in range(5):
        once()
    assert held() <= before


@pytest.mark.parametrize("way", WAYS)
def test_a_launch_does_not_wait(way: str) -> None:
    model, optimizer = make()
    data = [each.cuda() for each in batches(6)]
    with trimtab.start(model, optimizer, Plan.fixed(32, compiled=way)) as run:
        for each in data:
            run.train_step(run.window(each), loss_fn)
        with without_waiting():
            run.train_step(run.window(data[0]), loss_fn)


def test_a_step_of_many_small_kernels_is_planned_as_graphs() -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(60) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = (torch.randn(64, 64), torch.randint(0, 10, (64,)))

    def loss(model: nn.Module, batch: Any) -> Any:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    plan = trimtab.plan(model, optimizer, loss, batch)
    assert plan.compiled.value == CUDA_GRAPHS, plan.compiled
    assert not is_by_compiler(plan.compiled.value)
    with trimtab.start(model, optimizer, plan) as run:
        for _ in range(4):
            run.train_step(run.window(batch), loss)
        assert recorder_of(model).launches == 2


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
@pytest.mark.parametrize("task", ["cifar10_resnet50", "wikitext2_gpt2"])
def test_the_models_of_the_tasks_are_proved(task: str, precision: str, way: str) -> None:
    """Of each parameter too: rounding refuses none."""
    found = load_task(task)
    torch.manual_seed(0)
    model = found.make_model().cuda()
    drawn = torch.Generator().manual_seed(1)
    is_text = task == "wikitext2_gpt2"
    batch: Any = (torch.randint(0, 50_000, (4, 1025), generator=drawn).cuda(),)
    if not is_text:
        images = torch.randn(64, 3, 32, 32, generator=drawn)
        labels = torch.randint(0, 10, (64,), generator=drawn)
        batch = images.cuda(), labels.cuda()
    rows = len(batch[0])
    candidate = Candidate(rows, precision=precision, memory_layout="keep" if is_text else "channels_last", compiled=way)
    subject = TrainingLoop(model, found.make_optimizer(model), found.loss_fn, batch)
    with subject.start(candidate) as run:
        for _ in range(4):
            run.train_step(run.window(subject.batch), subject.loss_fn)
        assert replay_refusal(subject, candidate) is None
