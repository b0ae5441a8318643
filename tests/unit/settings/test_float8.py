"""Float8 products of large layers: near the exact gradient, undone exactly, refused where they have no effect."""

from __future__ import annotations

import copy
import sys

import float8_layers
import pytest
import torch
from raising import raises
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import trimtab
from trimtab.core.errors import DependencyError, ModelError, ValueGivenError
from trimtab.plans.plan import Plan
from trimtab.profiling.training_settings_search import require_adaptable
from trimtab.settings.loss_chunk import LEAST_CLASSES

ROWS = 6


@pytest.fixture(autouse=True)
def torchao(monkeypatch):
    float8_layers.provide(monkeypatch)


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.up, self.down = nn.Linear(4, 32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.odd, self.head = nn.Linear(32, 40), nn.Linear(40, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.odd(self.down(torch.tanh(self.up(self.first(x)))))))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def batch(rows: int = ROWS):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(1)), torch.arange(rows) % 3


def fixed(**values):
    return Plan.fixed(ROWS, **{"precision": "bf16", "float8": 32} | values)


def started(model, plan):
    return trimtab.start(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)


def gradients(model, plan):
    with started(model, plan) as run:
        run.accumulate(run.window(batch()), loss_fn)
        return {name: p.grad.clone() for name, p in model.named_parameters()}


def error(ours, theirs):
    return float((ours - theirs).norm() / theirs.norm())


def test_gradients_are_those_of_float8():
    exact, half, ours = (gradients(Net(), plan) for plan in (Plan.fixed(ROWS), fixed(float8=None), fixed()))
    for name in ("up.weight", "down.weight"):
        assert error(half[name], exact[name]) < 0.02 < error(ours[name], exact[name]) < 0.2
    assert max(error(ours[name], exact[name]) for name in exact) < 0.2


@pytest.mark.parametrize(("least", "names"), [(16, {"up", "down"}), (32, {"up", "down"}), (33, set())])
def test_large_layers_in_multiples_of_sixteen_are_converted(least, names):
    model = Net()
    if not names:
        with raises(ModelError, code="float8.no_layers", field="plan.float8"):
            started(model, fixed(float8=least))
        return
    with started(model, fixed(float8=least)):
        assert {name for name, each in model.named_children() if type(each) is not nn.Linear} == names


def test_objects_parameters_and_keys_stay_the_users():
    model = Net()
    modules, parameters, keys = list(model.modules()), list(model.parameters()), list(model.state_dict())
    calls = []
    model.up.register_forward_hook(lambda *_: calls.append(True))
    with started(model, fixed()) as run:
        run.train_step(run.window(batch()), loss_fn)
        assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert list(model.state_dict()) == keys
        assert type(copy.deepcopy(model).up) is nn.Linear
        assert torch.equal(model(batch()[0]), copy.deepcopy(model)(batch()[0]))  # Without autocast.
    assert calls
    assert all(a is b for a, b in zip(model.modules(), modules, strict=True))
    assert type(model.up) is nn.Linear
    assert "forward" not in vars(model.up)
    assert vars(model.up).keys() == vars(model.odd).keys()


def test_a_replaced_parameter_is_used():
    model = Net()
    with started(model, fixed()) as run:
        run.train_step(run.window(batch()), loss_fn)
        model.up.weight = nn.Parameter(torch.zeros_like(model.up.weight))
        model.up.bias = nn.Parameter(torch.ones_like(model.up.bias))
        with run.autocast():
            assert torch.equal(model.up(torch.randn(2, 32)), torch.ones(2, 64, dtype=torch.bfloat16))


def test_an_empty_input_has_an_empty_result():
    model = Net()
    with started(model, fixed()) as run, run.autocast():
        found = model.up(torch.randn(0, 32, requires_grad=True))
    assert (found.shape, found.dtype) == ((0, 64), torch.bfloat16)


def test_tensors_in_place_of_parameters_are_used():
    def with_tensors(model, batch):
        tensors = {name: 1.0 * p for name, p in model.named_parameters()}
        return F.cross_entropy(torch.func.functional_call(model, tensors, (batch[0],)), batch[1])

    found = []
    for loss in (loss_fn, with_tensors):
        model = Net()
        with started(model, fixed()) as run:
            run.accumulate(run.window(batch()), loss)
            found.append([p.grad.clone() for p in model.parameters()])
            run.step()
            run.train_step(run.window(batch()), loss_fn)
            found[-1] += [p.detach().clone() for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "computed", [torch.nn.utils.weight_norm, lambda layer: prune.random_unstructured(layer, "weight", 0.5)]
)
def test_layers_with_a_computed_weight_keep_their_precision(computed):
    model = Net()
    computed(model.up)
    with started(model, fixed()) as run:
        run.train_step(run.window(batch()), loss_fn)
        assert (type(model.up) is nn.Linear, type(model.down) is nn.Linear) == (True, False)


@pytest.mark.parametrize("recompute", ["every_block", "(0 1)"])
def test_recomputed_blocks_compute_the_same(recompute):
    def made():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)))

    whole = gradients(made(), fixed())
    again = gradients(made(), fixed().recomputing(recompute, ("1", "2"), "by hand"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own compiler
def test_compiled_code_computes_in_float8(monkeypatch):
    compile_of = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_of(function, backend="eager"))
    whole, compiled = gradients(Net(), fixed()), gradients(Net(), fixed(compiled=True))
    torch._dynamo.reset()
    assert max(error(compiled[name], whole[name]) for name in whole) < 1e-2


def frozen():
    model = Net()
    model.up.weight.requires_grad_(False)
    return model


def test_frozen_weights_and_the_last_layer_keep_their_precision():
    for model, names in ((frozen(), {"down"}), (Net(LEAST_CLASSES), {"up", "down"})):
        model.odd, model.head = nn.Linear(32, 48), nn.Linear(48, model.head.out_features)
        with started(model, fixed()):
            found = {name for name, each in model.named_children() if type(each) is not nn.Linear}
        assert found == names | {"odd"}


def test_a_layer_in_fp32_is_refused():
    with raises(ModelError, code="float8.fp32_modules", field="plan.float8"):
        started(Net(), fixed(fp32_modules="up"))
    with started(model := Net(), fixed(fp32_modules="odd")) as run:
        run.train_step(run.window(batch()), loss_fn)
    assert type(model.odd) is nn.Linear


def test_half_precision_weights_are_refused():
    model = Net()
    model.up.to(torch.bfloat16)
    with raises(ModelError, code="float8.not_fp32", field="plan.float8"):
        started(model, fixed())


def test_a_layer_of_another_run_is_refused():
    model = Net()
    outer = nn.Sequential(model, nn.Linear(3, 3))
    with started(model, fixed()), raises(ModelError, code="float8.in_use", field="plan.float8"):
        started(outer, fixed())


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_float8_needs_bf16(precision):
    with raises(ValueGivenError, code="float8.precision", field="plan.float8"):
        fixed(precision=precision)


def test_without_torchao_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with raises(DependencyError, code="float8.not_installed", field="plan.float8") as caught:
        started(Net(), fixed())
    assert "trimtab[torchao]" in caught.value.hint


@pytest.mark.parametrize(("capability", "version"), [((8, 0), "13.0"), ((9, 0), None)])
def test_a_gpu_without_float8_products_is_refused(capability, version, monkeypatch):
    from trimtab.techniques.float8_products import require_capability

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", version)
    with raises(ValueGivenError, code="float8.capability", field="plan.float8"):
        require_capability(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    require_capability(torch.device("cuda"))


def test_planning_does_not_try_emulated_products():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with raises(ValueGivenError, code="float8.capability", field="plan.float8"):
        require_adaptable(frozenset({"float8"}), model, optimizer, is_alone=True)
