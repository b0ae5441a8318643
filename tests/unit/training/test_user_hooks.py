"""Gradient hooks of the user's: found by inspection, and never given scaled or split gradients."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import pytest
import torch
from raising import raises
from small_loops import class_loss as loss_fn
from small_loops import labelled_batches, same_weights, train_plainly, trained
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.core.batch_rule import BatchRule
from trimtab.core.errors import ModelError, OptimizerError
from trimtab.core.objective import Reference
from trimtab.plans.plan import Plan
from trimtab.training.user_hooks import gradient_hooks, stepped_in_backward

ROWS = 8


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batches(count=3):
    return labelled_batches(count, ROWS, seed=0)


def clamp(gradient):
    return gradient.clamp(-1e-2, 1e-2)


class Clipper:
    """A callable object as a hook."""

    def __call__(self, gradient):
        return clamp(gradient)

    def on_accumulated(self, parameter):
        parameter.grad.clamp_(-1e-2, 1e-2)


def clamped_input(module, grad_input, grad_output):
    return tuple(None if each is None else clamp(each) for each in grad_input)


def clamped_output(module, grad_output):
    return tuple(None if each is None else clamp(each) for each in grad_output)


def scaled(factor, gradient):
    return gradient * factor


def on_parameters(register):
    def install(model):
        return [register(parameter) for parameter in model.parameters()]

    return install


class Observer:
    """A callable object that returns nothing, for one gradient or several."""

    def __call__(self, gradients):
        assert gradients is not None


class ObserverModule(nn.Module):
    def forward(self, gradients):
        assert gradients is not None


def on_several(hook, **options):
    return lambda model: [torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), hook, **options)]


HOOKS = {
    "a tensor hook": on_parameters(lambda p: p.register_hook(clamp)),
    "a callable object": on_parameters(lambda p: p.register_hook(Clipper())),
    "a partial": on_parameters(lambda p: p.register_hook(functools.partial(scaled, 2.0))),
    "a function of torch": on_parameters(lambda p: p.register_hook(F.softsign)),
    "a builtin of torch": on_parameters(lambda p: p.register_hook(torch.sign)),
    "an operator of torch": on_parameters(lambda p: p.register_hook(torch.ops.aten.sign.default)),
    "a module of torch": on_parameters(lambda p: p.register_hook(nn.Tanh())),
    "a partial of torch": on_parameters(
        lambda p: p.register_hook(functools.partial(F.hardtanh, min_val=-0.02, max_val=0.02))
    ),
    "a post-accumulate partial of torch": on_parameters(
        lambda p: p.register_post_accumulate_grad_hook(functools.partial(nn.utils.clip_grad_value_, clip_value=0.01))
    ),
    "a post-accumulate hook": on_parameters(lambda p: p.register_post_accumulate_grad_hook(Clipper().on_accumulated)),
    "a backward hook": lambda model: [model[2].register_full_backward_hook(clamped_input)],
    "a backward pre-hook": lambda model: [model[2].register_full_backward_pre_hook(clamped_output)],
    "a hook of several tensors": lambda model: [
        torch.autograd.graph.register_multi_grad_hook(tuple(model.parameters()), lambda grads: None)
    ],
    "a callable object of several tensors": on_several(Observer()),
    "a method of several tensors": on_several(Observer().__call__),
    "a module of several tensors": on_several(ObserverModule()),
    "a function of torch of several tensors": on_several(torch.is_tensor),
    "a callable object of any of several tensors": on_several(Observer(), mode="any"),
    "a callable object within a function of torch": on_several(torch.no_grad()(Observer().__call__)),
}
every_hook = pytest.mark.parametrize("install", HOOKS.values(), ids=HOOKS)


@pytest.fixture
def hook_on_every_module():
    handle = nn.modules.module.register_module_full_backward_hook(clamped_input)
    yield handle
    handle.remove()


@every_hook
def test_a_hook_is_found_until_it_is_removed(install):
    model = mlp()
    assert gradient_hooks(model) == ()
    handles = install(model)
    assert gradient_hooks(model)
    for handle in handles:
        handle.remove()
    assert gradient_hooks(model) == ()


def test_a_hook_on_every_module_is_found(hook_on_every_module):
    assert [hook.owner for hook in gradient_hooks(mlp())] == ["every module"]


def test_hooks_of_the_run_itself_and_of_torch_are_not_the_users():
    model = nn.ModuleList([mlp()])[0]
    rule = BatchRule("fixed")  # its noise monitor has a hook on every parameter
    with trimtab.start(model, sgd(model), Plan.fixed(ROWS, 4, batch_rule=rule)) as run:
        for window in run.windows(batches()):
            run.train_step(window, loss_fn)
            assert gradient_hooks(model) == ()
    model.register_forward_hook(lambda *_: None)
    nn.utils.parametrizations.weight_norm(model[0])
    assert gradient_hooks(model) == ()


def sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


REFUSED = {
    "a loss scale": (Plan.fixed(ROWS, precision="fp16"), {}, "hooks.gradient_scaled"),
    "a split batch": (Plan.fixed(ROWS, 4), {}, "hooks.gradient_split"),
    "an adaptive batch": (Plan.fixed(ROWS, batch_rule=BatchRule()), {}, "hooks.gradient_split"),
    "a split when memory runs out": (Plan.fixed(ROWS), {"out_of_memory": "split"}, "hooks.gradient_split"),
    "CUDA graphs": (Plan.fixed(ROWS, compiled="cuda_graphs"), {}, "hooks.not_run"),
}


@every_hook
@pytest.mark.parametrize(("plan", "options", "code"), REFUSED.values(), ids=REFUSED)
def test_a_plan_that_changes_what_hooks_receive_is_refused(install, plan, options, code):
    model = mlp()
    install(model)
    before = [p.clone() for p in model.parameters()]
    with raises(ModelError, code=code):
        trimtab.start(model, sgd(model), plan, **options)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    trimtab.start(model, sgd(model), Plan.fixed(ROWS)).close()  # nothing was left of the refused one


def test_a_loop_with_a_loss_scale_of_its_own_keeps_it():
    model = mlp()
    HOOKS["a tensor hook"](model)
    plan = replace(Plan.fixed(ROWS, precision="fp16"), reference=Reference("fp16"))
    trimtab.start(model, sgd(model), plan).close()


def assert_trains_as_the_plain_loop(make, plan):
    reference, model = make(), make()
    train_plainly(reference, sgd(reference), batches(), loss_fn)
    trained(model, sgd(model), plan, batches(), loss_fn)
    assert same_weights(reference, model)


@every_hook
@pytest.mark.parametrize("recomputes", [False, True])
def test_whole_batches_train_as_the_plain_loop_to_the_bit(install, recomputes):
    def make():
        model = mlp()
        install(model)
        return model

    plan = Plan.fixed(ROWS)
    assert_trains_as_the_plain_loop(
        make, plan.recomputing("every_block", ("0", "2"), "by hand") if recomputes else plan
    )


def test_a_hook_that_is_registered_after_the_start_is_seen_before_the_first_step():
    model = mlp()
    with trimtab.start(model, sgd(model), Plan.fixed(ROWS, 4)) as run:
        HOOKS["a tensor hook"](model)
        with pytest.raises(ModelError) as caught:
            run.train_step(run.window(batches()[0]), loss_fn)
    assert caught.value.code == "hooks.gradient_split"


def test_memory_that_runs_out_does_not_run_hooks_twice():
    model, calls = mlp(), []

    def hooked(model, batch):
        """The forward registers the hook."""
        activations = model[0](batch[0])
        activations.register_hook(lambda gradient: calls.append(len(calls)))
        return loss_fn(model, batch) + activations.square().mean()

    def fails(model, batch):
        if len(batch[0]) == ROWS:
            raise torch.OutOfMemoryError("out of memory")
        return hooked(model, batch)

    with trimtab.start(model, sgd(model), Plan.fixed(ROWS)) as run:
        run.train_step(run.window(batches()[0]), hooked)
        with pytest.raises(torch.OutOfMemoryError):
            run.train_step(run.window(batches()[0]), fails)
    assert calls == [0]
    model[0].weight.register_hook(lambda gradient: calls.append(1))
    with trimtab.start(model, sgd(model), Plan.fixed(ROWS)) as run, pytest.raises(torch.OutOfMemoryError):
        run.train_step(run.window(batches()[0]), fails)
    assert calls == [0]


@pytest.mark.parametrize("is_summed", [False, True])
def test_several_batches_a_step_keep_the_gradients_of_a_plain_loop_or_are_refused(is_summed):
    seen = []

    def build():
        model = mlp()
        model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        return model

    def summed(model, batch):
        return trimtab.Summed(F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))

    model = build()
    with trimtab.start(model, sgd(model), Plan.fixed(ROWS)) as run:
        if is_summed:
            with raises(ModelError, code="hooks.gradient_scaled"):
                run.train_step(run.window(*batches(2)), summed)
            return
        run.train_step(run.window(*batches(2)), loss_fn)
    ours = list(seen)
    seen.clear()
    model = build()
    for batch in batches(2):
        (loss_fn(model, batch) / 2).backward()
    assert all(torch.equal(a, b) for a, b in zip(ours, seen, strict=True))


# Optimizers that step in the backward.


def in_closure(model):
    each = {p: torch.optim.AdamW([p], lr=0.1) for p in model.parameters()}

    def hook(parameter):
        each[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    return each


def in_a_method(model):
    class LayerWise:
        def __init__(self):
            self.optimizers = {id(p): torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def step(self, parameter):
            self.optimizers[id(parameter)].step()
            parameter.grad = None

    owner = LayerWise()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(owner.step)


def in_an_attribute(model):
    def hook(parameter):
        parameter.own_optimizer.step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.own_optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(hook)


def by_torch(model):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, by torch itself
        from torch.distributed.optim import _apply_optimizer_in_backward

    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})


STEPPING = {
    "in a closure": in_closure,
    "in a method": in_a_method,
    "in an attribute": in_an_attribute,
    "torch": by_torch,
}
every_stepping = pytest.mark.parametrize("install", STEPPING.values(), ids=STEPPING)


@every_stepping
def test_optimizers_that_hooks_step_are_found_refused_by_planning_and_train_as_the_plain_loop(install):
    model, reference = mlp(), mlp()
    install(model)
    assert len(stepped_in_backward(gradient_hooks(model))) == 4
    before = mlp()
    with raises(OptimizerError, code="optimizer.steps_in_backward"):
        trimtab.plan(model, sgd(model, 0.0), loss_fn, batches()[0], num_blocks=3)
    assert same_weights(before, model)
    install(reference)
    for batch in batches():
        loss_fn(reference, batch).backward()
    trained(model, sgd(model, 0.0), Plan.fixed(ROWS), batches(), loss_fn)
    assert same_weights(reference, model)


@every_stepping
@pytest.mark.parametrize(
    ("plan", "options"),
    [
        (Plan.fixed(ROWS), {"clip_norm": 1.0}),
        (Plan.fixed(ROWS), {"nonfinite": "skip"}),
        (Plan.fixed(ROWS, learning_rate_scale=2.0), {}),
        (Plan.fixed(ROWS, schedule="warmup_cosine"), {"total_samples": 100}),
    ],
)
def test_settings_between_backward_and_step_are_refused(install, plan, options):
    model = mlp()
    install(model)
    with raises(OptimizerError, code="optimizer.steps_in_backward"):
        trimtab.start(model, sgd(model, 0.0), plan, **options)


def test_checkpoints_hold_optimizers_that_hooks_step_or_are_refused(tmp_path):
    def train(until, names):
        model = mlp()
        each = in_closure(model)
        also = {str(index): optimizer for index, optimizer in enumerate(each.values())} if names else {}
        checkpoints = trimtab.Checkpoints(tmp_path / "run", every_steps=1, also=also)
        with trimtab.start(model, sgd(model, 0.0), Plan.fixed(ROWS), checkpoints=checkpoints) as run:
            for window in run.windows(batches()):
                run.train_step(window, loss_fn)
                if run.num_windows == until:
                    break
        return model

    with raises(OptimizerError, code="optimizer.steps_in_backward"):
        train(1, names=False)
    train(1, names=True)
    model, reference = train(3, names=True), mlp()
    in_closure(reference)
    for batch in batches():
        loss_fn(reference, batch).backward()
    assert same_weights(reference, model)


@pytest.mark.parametrize("install", [HOOKS["a tensor hook"], HOOKS["a backward hook"]])
def test_a_plan_of_a_model_with_hooks_changes_no_bit(install):
    model = mlp()
    install(model)
    plan = trimtab.plan(model, sgd(model), loss_fn, batches()[0], num_blocks=3)
    assert plan.check is not None
    assert not plan.check.splittable
    assert set(plan.changes) <= {"allocator", "recompute"}
    assert all("hook" in getattr(plan, name).reason for name in ("micro_batch", "precision", "fused_optimizer"))
    trimtab.start(model, sgd(model), plan).close()


# Hooks that a forward registers on its tensors.


class Clamping(nn.Module):
    """A model whose forward clamps the gradient of a hidden tensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            hidden.register_hook(clamp)
        return self.last(hidden)


class Gathering(Clamping):
    """One that collects gradients of several tensors."""

    def forward(self, x):
        hidden = self.first(x).tanh()
        if hidden.requires_grad:
            torch.autograd.graph.register_multi_grad_hook((hidden,), lambda grads: None)
        return self.last(hidden)


FORWARDS = {"a tensor hook": Clamping, "a hook of several tensors": Gathering}
every_forward = pytest.mark.parametrize("make", FORWARDS.values(), ids=FORWARDS)


@every_forward
@pytest.mark.parametrize(
    ("plan", "code"),
    [
        (Plan.fixed(ROWS, 4), "hooks.gradient_split"),
        (Plan.fixed(ROWS, precision="fp16"), "hooks.gradient_scaled"),
    ],
)
def test_hooks_of_the_forward_are_seen_before_the_first_backward(make, plan, code):
    model = make()
    before = [p.clone() for p in model.parameters()]
    with trimtab.start(model, sgd(model), plan) as run, raises(ModelError, code=code):
        run.train_step(run.window(batches()[0]), loss_fn)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@every_forward
def test_hooks_of_the_forward_keep_a_plan_bitwise(make):
    model = make()
    plan = trimtab.plan(model, sgd(model), loss_fn, batches()[0], num_blocks=3)
    assert plan.check is not None
    assert not plan.check.splittable
    assert set(plan.changes) <= {"allocator", "recompute"}
    assert_trains_as_the_plain_loop(make, plan)


def test_a_forward_that_checkpoints_its_activations_has_no_hooks_of_the_users():
    class Checkpointed(Clamping):
        def forward(self, x):
            hidden = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
            hidden.retain_grad()
            return self.last(hidden)

    model = Checkpointed()
    with trimtab.start(model, sgd(model), Plan.fixed(ROWS, 4)) as run:
        run.train_step(run.window(batches()[0]), loss_fn)
