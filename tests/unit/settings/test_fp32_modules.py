"""Modules in fp32 under autocast: equal to a hand-written loop, undone, refused if they cannot have an effect."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
from raising import raises
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.core.errors import FormatError, ModelError, ValueGivenError
from trimtab.nn import LossHead
from trimtab.plans.plan import Plan
from trimtab.settings.precision import in_place

ROWS = 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x + scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks and a head; `by_hand` names the modules that the plain loop runs in fp32."""

    def __init__(self, by_hand: tuple[str, ...] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 3)
        self.by_hand, self.dtypes = by_hand, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = self.called(f"blocks.{index}", block, x)
        x = self.called("head", self.head, x)
        self.dtypes.append(x.dtype)
        return x

    def called(self, name: str, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if name not in self.by_hand:
            return module(x)
        with torch.autocast("cpu", enabled=False):
            return module(x.float())


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, 4, generator=generator), torch.arange(ROWS) % 3) for _ in range(2)]


def trained(model: nn.Module, plan: Plan) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    with trimtab.start(model, optimizer, plan) as run:
        for batch in batches():
            run.train_step(run.window(batch), loss_fn)
    return [p.detach() for p in model.parameters()]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def recomputing(plan: Plan, schedule: str = "every_block") -> Plan:
    return plan.recomputing(schedule, ("blocks.0", "blocks.1", "blocks.2"), "by hand")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("micro_batch", [ROWS, 4])
@pytest.mark.parametrize("recompute", [None, "every_block", "(0 1 2)"])
def test_a_run_equals_a_loop_that_disables_autocast_by_hand(precision, micro_batch, recompute):
    half, names = Plan.fixed(ROWS, micro_batch, precision=precision), ("blocks.1", "head")
    plan = Plan.fixed(ROWS, micro_batch, precision=precision, fp32_modules=",".join(names))
    plan = plan if recompute is None else recomputing(plan, recompute)
    ours = Net()
    assert_equal(trained(ours, plan), trained(Net(names), half))
    assert set(ours.dtypes) == {torch.float32}
    assert not all(map(torch.equal, trained(Net(), half), ours.parameters()))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own compiler
def test_modules_of_a_model_that_the_user_compiled_are_not_reported_as_unused():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend="eager")
    with trimtab.start(compiled, optimizer, Plan.fixed(ROWS, precision="bf16", fp32_modules="blocks.1")) as run:
        run.train_step(run.window(batches()[0]), loss_fn)
    torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [True, "compiled_blocks"])
def test_compiled_code_runs_the_modules_in_fp32(compiled, monkeypatch):
    compile_by, compile_of = nn.Module.compile, torch.compile
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: compile_by(module, backend="eager"))
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_of(function, backend="eager"))
    plan = Plan.fixed(ROWS, precision="bf16", fp32_modules="blocks.1,head", compiled=compiled)
    ours = trained(Net(), plan)
    torch._dynamo.reset()
    assert_equal(ours, trained(Net(("blocks.1", "head")), Plan.fixed(ROWS, precision="bf16")))


def test_every_argument_in_half_precision_is_converted():
    seen = []

    class Watching(nn.Module):
        def forward(self, x, pair, *, mask, results):
            seen.extend(each.dtype for each in (x, *pair, mask["a"]))
            results.append(x)
            return x * pair[0]

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.inner, self.results = nn.Parameter(torch.ones(3)), Watching(), []

        def forward(self, x):
            half, whole = x.bfloat16(), torch.arange(3)
            return self.scale * self.inner(half, (half, whole), mask={"a": half}, results=self.results)

    model = Outer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trimtab.start(model, optimizer, Plan.fixed(2, precision="bf16", fp32_modules="inner")) as run:
        with run.autocast():
            run.model(torch.ones(2, 3))
        assert seen == [torch.float32, torch.float32, torch.int64, torch.float32]
        assert len(model.results) == 1, "the forward fills the caller's own list"
        seen.clear()
        run.model(torch.ones(2, 3))
        assert seen[0] is torch.bfloat16, "without autocast, the forward is unchanged"


def test_a_loss_head_computes_its_loss_in_fp32_with_and_without_chunks():
    class Headed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body, self.head = nn.Linear(4, 8), LossHead(8, 3)

        def forward(self, x, targets):
            return trimtab.Summed(*self.head.loss(self.body(x), targets))

    def gradient(**values):
        model = Headed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = Plan.fixed(ROWS, precision="bf16", **values)
        with trimtab.start(model, optimizer, plan) as run:
            run.accumulate(run.window(batches()[0]), lambda model, batch: model(*batch))
            return model.head.weight.grad.clone()

    whole, chunked = gradient(fp32_modules="head"), gradient(fp32_modules="head", loss_chunk=2)
    torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-7)
    assert (gradient(loss_chunk=2) - whole).norm() > 1e-4 * whole.norm()


def test_copies_and_saved_models_are_plain_and_closing_restores_the_classes():
    model = Net()
    before = [type(each) for each in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = recomputing(Plan.fixed(ROWS, precision="bf16", fp32_modules="blocks.1,head"))
    with trimtab.start(model, optimizer, plan) as run:
        run.train_step(run.window(batches()[0]), loss_fn)
        assert isinstance(model.head, nn.Linear)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert [type(each) for each in other.modules()] == before
            assert [vars(each).keys() for each in other.modules()] == [vars(each).keys() for each in Net().modules()]
            assert_equal(list(other.parameters()), list(model.parameters()))
        with torch.no_grad(), run.autocast():  # Evaluation.
            assert run.model.eval()(batches()[0][0]).dtype is torch.float32
    assert [type(each) for each in model.modules()] == before
    assert [vars(each).keys() for each in model.modules()] == [vars(each).keys() for each in Net().modules()]


def test_names_of_a_wrapped_model_and_repeated_names_are_accepted():
    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Net()

        def forward(self, x):
            return self.module(x)

    model = Wrapper()
    trained(model, Plan.fixed(ROWS, precision="bf16", fp32_modules="head, head"))
    assert set(model.module.dtypes) == {torch.float32}


def test_a_module_that_is_never_called_is_reported():
    model = Net()
    model.unused = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="unused"):
        trained(model, Plan.fixed(ROWS, precision="bf16", fp32_modules="unused"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(Net(), Plan.fixed(ROWS, precision="bf16", fp32_modules="head"))


def replaced():
    model = Net()
    model.head.forward = model.head.forward
    return model


def scripted():
    model = Net()
    model.head = torch.jit.script(model.head)
    return model


def halved():
    model = Net()
    model.head.bfloat16()
    return model


def wide():
    model = Net()
    model.head = nn.Linear(8, 600)
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "values", "code"),
    [
        (Net, {"fp32_modules": "first,haed"}, "unknown"),
        (Net, {"fp32_modules": "blocks"}, "no_forward"),
        (replaced, {"fp32_modules": "first,head"}, "forward_replaced"),
        (scripted, {"fp32_modules": "head"}, "scripted"),
        (halved, {"fp32_modules": "head"}, "half_weights"),
        (wide, {"fp32_modules": "head", "loss_chunk": 2}, "loss_chunk"),
    ],
)
def test_what_cannot_run_in_fp32_is_refused_and_nothing_is_changed(make, values, code):
    model = make()
    before = [type(each) for each in model.modules()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ModelError, code=f"fp32_modules.{code}", field="plan.fp32_modules") as caught:
        trimtab.start(model, optimizer, Plan.fixed(ROWS, precision="bf16", **values))
    assert [type(each) for each in model.modules()] == before
    if code == "unknown":
        assert "haed" in str(caught.value)
        assert "head" in str(caught.value).replace("haed", "")


def test_a_module_of_another_run_is_refused():
    shared = Net()
    other = nn.Sequential(nn.Linear(4, 4), shared)
    plan = Plan.fixed(ROWS, precision="bf16", fp32_modules="head")
    with trimtab.start(shared, torch.optim.SGD(shared.parameters(), lr=0.1), plan):
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        with raises(ModelError, code="fp32_modules.in_use", field="plan.fp32_modules"):
            trimtab.start(other, optimizer, Plan.fixed(ROWS, precision="bf16", fp32_modules="1.head"))


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_a_precision_without_autocast_is_refused(precision):
    with raises(ValueGivenError, code="fp32_modules.no_autocast", field="plan.fp32_modules"):
        Plan.fixed(2, precision=precision, fp32_modules="head")


@pytest.mark.parametrize("value", ["", "head,", "the head", ("head",)])
def test_a_text_without_names_is_refused(value):
    with raises(FormatError, code="format.invalid", field="plan.fp32_modules"):
        Plan.fixed(2, precision="bf16", fp32_modules=value)


def test_leaving_fp16_keeps_the_modules_in_bf16_and_drops_them_in_fp32():
    plan = Plan.fixed(2, precision="fp16", fp32_modules="head")
    assert in_place(plan, "bf16", "overflows").fp32_modules.value == "head"
    without = in_place(plan, "fp32", "overflows")
    assert (without.precision.value, without.fp32_modules.value) == ("fp32", None)
    assert without.changes == ("precision",)
