"""No raw error leaves planning: a stage that fails is left out and noted, a loop that fails is a typed error."""

from __future__ import annotations

import pytest
import torch
from raising import raises
from small_loops import sgd, train_plainly, trained
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.core.errors import LossError, ModelError, TrimtabError
from trimtab.core.serialization import from_json, to_json
from trimtab.planner.plan_choice import choose
from trimtab.plans.plan import Plan
from trimtab.plans.profile import Profile
from trimtab.profiling import block_profile, candidate_traces, loop_facts, profiler, trials
from trimtab.profiling.loop_facts import SoftmaxDetector

ROWS = 16


# torch's own, as it is imported for forward-mode gradients and scripted models.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("brief_trials"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:Sparse CSR tensor:UserWarning"),
]


class Injected(Exception):
    """What a stage raises."""


def fail(*args, **kwargs):
    raise Injected("on purpose")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(rows=ROWS):
    return {"x": torch.randn(rows, 4), "labels": torch.randint(0, 3, (rows,))}


def loss_fn(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def profiled(model=None, loss=loss_fn, make=trimtab.profile, **options):
    model = mlp() if model is None else model
    return make(model, sgd(model), loss, batch_of(), num_blocks=3, **options)


def planned(model=None, loss=loss_fn, **options):
    return profiled(model, loss, trimtab.plan, **options)


def codes(found):
    return {note.code for note in found.notes}


LIMITED = {"budget": trimtab.Budget(memory="1GiB")}
# Of each stage: what is made to raise, the code of its note, and what of the profile is left at its default.
STAGES = {
    "proof": (profiler, "check_splitting", "splitting.not_checked", {}, lambda p: not p.check.splittable),
    "flops": (loop_facts, "count_flops", "flops.not_counted", {}, lambda p: p.loop.flops_per_step is None),
    "attention": (SoftmaxDetector, "__torch_dispatch__", "attention.not_watched", {}, lambda p: p.loop.logits is None),
    "head": (profiler, "count_head_tokens", "loss_head.not_watched", {}, lambda p: p.loop.head_tokens is None),
    "layout": (profiler, "channels_last_hazard", "memory_layout.not_checked", {}, lambda p: p.loop.layout_hazard),
    "phases": (profiler, "measure_phases", "phases.not_timed", {}, lambda p: p.phases_s == {}),
    "padding": (profiler, "padding_saves_s", "padding.not_timed", {}, lambda p: p.loop.padding_saves_s is None),
    "repeats": (profiler, "bytes_to_begin_anew", "memory.not_counted", {}, lambda p: p.trials),
    "peaks": (trials, "peak_bytes", "memory.not_counted", {}, lambda p: p.trials[0].peak_bytes is None),
    "traces": (candidate_traces, "_trace", "peaks.not_traced", LIMITED, lambda p: p.traces == ()),
    "other traces": (
        *(profiler, "trace_for_others", "traces.not_made", {"traces": True}),
        lambda p: p.target_device_traces == (),
    ),
    "other blocks": (
        *(profiler, "trace_blocks_for_others", "traces.not_made", {"traces": True}),
        lambda p: p.target_device_blocks == (),
    ),
}


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_is_left_out_and_noted(monkeypatch, stage):
    where, name, code, options, is_left_out = STAGES[stage]
    monkeypatch.setattr(where, name, fail)
    found = profiled(**options)
    assert code in codes(found)
    assert is_left_out(found)
    assert any("Injected: on purpose" in note.text for note in found.notes)
    assert all(trial.block_s for trial in found.trials if trial.error is None)
    plan = choose(found, found.objective, found.budget)
    assert plan.notes == found.notes
    assert all(note.text in plan.explain() for note in plan.notes)


def test_a_setting_whose_stage_fails_is_not_tried(monkeypatch):
    monkeypatch.setattr(block_profile, "_traced", fail)
    found = profiled(traces=True)
    assert any(trial.block_s for trial in found.trials)
    assert all(each.refusal for each in found.recomputables)


def test_without_a_failure_nothing_is_noted():
    assert planned(**LIMITED).notes == ()


def test_notes_are_kept_in_files():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiler, "measure_phases", fail)
        found = profiled()
    plan = choose(found, found.objective, found.budget)
    assert from_json(Profile, to_json(found)).notes == found.notes != ()
    assert from_json(Plan, to_json(plan)).notes == plan.notes != ()


@pytest.mark.parametrize("name", ["device_spec", "next_measurement", "unchanged_by"])
def test_any_other_failure_is_a_typed_error_with_its_cause(monkeypatch, name):
    monkeypatch.setattr(profiler, name, fail)
    with raises(ModelError, code="planning.failed") as caught:
        profiled()
    assert isinstance(caught.value.__cause__, Injected)


def test_an_error_of_the_progress_callback_ends_planning_as_it_is():
    with pytest.raises(Injected):
        profiled(progress=fail)


# Loops that planning has to survive


def scripted():
    return torch.jit.script(mlp())


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x)


class NotCopied(Wrapped):
    def __deepcopy__(self, memo):
        raise RuntimeError("must not be copied")


class NoHooks(Wrapped):
    def register_forward_pre_hook(self, *args, **kwargs):
        raise RuntimeError("no hooks")

    def register_forward_hook(self, *args, **kwargs):
        raise RuntimeError("no hooks")


class WholeOnly(Wrapped):
    def forward(self, x):
        if len(x) < ROWS:
            raise ValueError("a part of the batch")
        return self.inner(x)


class Branching(Wrapped):
    def forward(self, x):
        return self.inner(x) if x.sum().item() > 0 else 2 * self.inner(x)


class ThroughNumpy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(2 * x.detach().numpy())

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Custom(Wrapped):
    def forward(self, x):
        return ThroughNumpy.apply(self.inner(x))


class InferenceBuffer(Wrapped):
    def __init__(self):
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.inner(x) + self.scale


def parametrized():
    model = mlp()
    torch.nn.utils.parametrizations.weight_norm(model[0])
    torch.nn.utils.parametrizations.spectral_norm(model[2])
    return model


def with_csr_buffer():
    model = mlp()
    model.register_buffer("adjacency", torch.eye(3).to_sparse_csr())
    return model


def with_meta_buffer():
    model = mlp()
    model.register_buffer("unused", torch.empty(3, device="meta"))
    return model


MODELS = (
    *(mlp, scripted, NotCopied, NoHooks, WholeOnly, Branching, Custom, InferenceBuffer),
    *(parametrized, with_csr_buffer, with_meta_buffer),
)


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_a_model_that_an_instrument_does_not_support_is_planned(make):
    plan = planned(make(), **LIMITED)
    assert plan.baseline is not None


@pytest.mark.parametrize("make", [scripted, NoHooks])
def test_and_trains_as_in_a_plain_loop(make):
    batches, models = [batch_of() for _ in range(3)], [make(), make()]
    optimizers = [sgd(model) for model in models]
    train_plainly(models[0], optimizers[0], batches, loss_fn)
    trained(models[1], optimizers[1], trimtab.Plan.fixed(ROWS, 4), batches, loss_fn)
    for ours, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def gradient_penalty(model, batch):
    x = batch["x"].detach().clone().requires_grad_()
    output = model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return F.cross_entropy(output, batch["labels"]) + (slope.norm(dim=1) - 1).square().mean()


def inner_step(model, batch):
    parameters = dict(model.named_parameters())
    inner = torch.func.functional_call(model, parameters, (batch["x"],)).square().mean()
    slopes = torch.autograd.grad(inner, [*parameters.values()], create_graph=True)
    moved = {name: p - 0.1 * slope for (name, p), slope in zip(parameters.items(), slopes, strict=True)}
    return F.cross_entropy(torch.func.functional_call(model, moved, (batch["x"],)), batch["labels"])


def residual_of_an_equation(model, batch):
    x = batch["x"].clone().requires_grad_()
    u = model(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    return (second + u.mean(1, keepdim=True)).square().mean()


def per_sample(model, batch):
    def one(x, label):
        return F.cross_entropy(
            torch.func.functional_call(model, dict(model.named_parameters()), (x[None],)), label[None]
        )

    return torch.vmap(one)(batch["x"], batch["labels"]).mean()


def forward_mode(model, batch):
    output, slope = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
    return F.cross_entropy(output, batch["labels"]) + slope.square().mean()


def nested(model, batch):
    parts = torch.nested.nested_tensor([batch["x"][:3], batch["x"][3:]], layout=torch.jagged)
    return model(parts).values().square().mean()


@pytest.mark.parametrize(
    "loss",
    [gradient_penalty, inner_step, residual_of_an_equation, per_sample, forward_mode, nested],
    ids=lambda loss: loss.__name__,
)
def test_a_loss_that_an_instrument_does_not_support_is_planned(loss):
    plan = planned(loss=loss, **LIMITED)
    assert plan.baseline is not None


@pytest.mark.parametrize("loss", [gradient_penalty, inner_step, residual_of_an_equation])
def test_a_loss_that_takes_gradients_has_its_flop_counted(loss):
    assert profiled(loss=loss).loop.flops_per_step > profiled().loop.flops_per_step


class BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise Injected("in the backward")


@pytest.mark.parametrize(
    ("raised", "where"),
    [
        *((each, "forward") for each in (Injected, ZeroDivisionError, KeyError, StopIteration)),
        (Injected, "backward"),
    ],
)
def test_a_plain_step_that_fails_is_a_typed_error_with_its_cause(raised, where):
    def loss(model, batch):
        found = loss_fn(model, batch)
        if where == "backward":
            return BrokenBackward.apply(found)
        raise raised("in the forward")

    with raises(LossError, code="loss.failed") as caught:
        planned(loss=loss)
    assert isinstance(caught.value.__cause__, raised)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize(
    "lazy", [lambda: nn.LazyLinear(8), lambda: nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d())]
)
def test_a_lazy_module_is_refused_with_the_remedy(lazy):
    with raises(TrimtabError, code="model.uninitialized"):
        planned(nn.Sequential(lazy(), nn.Linear(8, 3)))


def test_planning_logs_nothing_of_steps_that_cannot_be_traced(caplog, capfd):
    planned(loss=lambda model, batch: model(batch["x"] + torch.ones(ROWS, 4)).square().mean(), **LIMITED)
    assert caplog.records == []
    assert capfd.readouterr() == ("", "")
