"""Criteria with parameters: modules that the same optimizer steps in addition to the model."""

from __future__ import annotations

import functools

import pytest
import torch
from raising import raises
from small_loops import labelled_batches, sgd, trained
from state_digest import fingerprint
from torch import nn
from torch.nn import functional as F

import trimtab
from trimtab.core.errors import ModelError, OptimizerError, UsageError, ValueGivenError
from trimtab.planner.plan_choice import choose
from trimtab.plans.plan import Plan
from trimtab.profiling.gradient_equivalence import check_splitting
from trimtab.profiling.training_loop import TrainingLoop
from trimtab.profiling.training_settings_search import range_test
from trimtab.techniques.optimizers import with_auxiliary_modules

ROWS = 8


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return self.layers(x)


class ArcHead(nn.Module):
    """Class centres, as of ArcFace."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(5, 3))

    def forward(self, features, labels):
        return F.cross_entropy(F.normalize(features) @ F.normalize(self.weight).T, labels)


class Temperature(nn.Module):
    """A learned temperature, without dimensions."""

    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, features, labels):
        return F.cross_entropy(features * self.log_scale.exp(), labels % 3)


class Weighted(nn.Module):
    """Learned weights of two losses, with a buffer that follows the loss."""

    def __init__(self):
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(2))
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, features, labels):
        losses = torch.stack([features.square().mean(), F.cross_entropy(features, labels % 3)])
        loss = (losses * (-self.log_variances).exp() + self.log_variances).sum()
        self.mean.lerp_(loss.detach(), 0.1)
        return loss


CRITERIA = {"class centres": ArcHead, "a temperature": Temperature, "weights of losses": Weighted}
every_criterion = pytest.mark.parametrize("make", CRITERIA.values(), ids=CRITERIA)
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
}


def batches(count=4):
    return labelled_batches(count, ROWS, classes=5, seed=0)


def squares_of_inputs(model, batch):
    return model(batch[0]).square().mean()


def loss_of(criterion):
    def loss_fn(model, batch):
        return criterion(model(batch[0]), batch[1])

    return loss_fn


def loop(make, make_optimizer=OPTIMIZERS["adamw"]):
    model, criterion = Backbone(), make()
    return model, criterion, make_optimizer([*model.parameters(), *criterion.parameters()])


def plain(make, make_optimizer=OPTIMIZERS["adamw"], clip_norm=None, count=4):
    model, criterion, optimizer = loop(make, make_optimizer)
    for batch in batches(count):
        optimizer.zero_grad()
        loss_of(criterion)(model, batch).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([*model.parameters(), *criterion.parameters()], clip_norm)
        optimizer.step()
    return with_auxiliary_modules(model, (criterion,))


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in pairs)


@every_criterion
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_criterion_is_trained_as_in_the_plain_loop(make, make_optimizer, clip_norm):
    model, criterion, optimizer = loop(make, make_optimizer)
    plan = Plan.fixed(ROWS, fused_optimizer=True)
    trained(model, optimizer, plan, batches(), loss_of(criterion), modules=[criterion], clip_norm=clip_norm)
    assert same(with_auxiliary_modules(model, (criterion,)), plain(make, make_optimizer, clip_norm))
    assert not same(criterion, make())


@pytest.mark.parametrize("make", [ArcHead, Temperature])
def test_a_split_batch_trains_it_too(make):
    model, criterion, optimizer = loop(make)
    trained(model, optimizer, Plan.fixed(ROWS, 3), batches(), loss_of(criterion), modules=[criterion])
    assert same(with_auxiliary_modules(model, (criterion,)), plain(make))


def test_planning_leaves_it_as_it_was_and_counts_it():
    model, criterion, optimizer = loop(Weighted)
    trained = with_auxiliary_modules(model, (criterion,))
    for parameter in trained.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = fingerprint(trained, optimizer)
    found = trimtab.profile(model, optimizer, loss_of(criterion), batches()[0], modules=[criterion], num_blocks=3)
    assert fingerprint(trained, optimizer) == before
    assert found.loop.num_parameters == sum(p.numel() for p in trained.parameters())
    plan = choose(found, found.objective, found.budget)
    trimtab.start(model, optimizer, plan, modules=[criterion]).close()


@every_criterion
def test_splitting_is_proved_on_its_gradients_and_a_range_test_leaves_it_as_it_was(make):
    model, criterion, optimizer = loop(make)
    subject = TrainingLoop(model, optimizer, loss_of(criterion), batches()[0], modules=(criterion,))
    assert check_splitting(subject).splittable is (make is not Weighted)  # whose buffer counts forwards
    before = fingerprint(subject.trained, optimizer)
    points = range_test(subject, Plan.fixed(ROWS), batches(5), lambda _: None, num_steps=5)
    assert fingerprint(subject.trained, optimizer) == before
    assert len({point.loss for point in points}) == 5


def test_a_criterion_whose_gradient_depends_on_the_batch_is_not_split():
    class Balanced(ArcHead):
        def forward(self, features, labels):
            counts = F.one_hot(labels, 5).float().mean(0)
            return features.square().mean() + (counts * self.weight.sum(1)).sum().square()

    model, criterion, optimizer = loop(Balanced)
    subject = TrainingLoop(model, optimizer, loss_of(criterion), batches()[0], modules=(criterion,))
    assert not check_splitting(subject).splittable


@pytest.mark.parametrize("make", [ArcHead, Weighted])
def test_a_window_that_ran_out_of_memory_is_repeated_from_its_start(make):
    model, criterion, optimizer = loop(make)
    fails = iter([True] + [False] * 20)

    def loss_fn(model, batch):
        loss = loss_of(criterion)(model, batch)
        if next(fails):
            raise torch.OutOfMemoryError("out of memory")
        return loss

    given = {"modules": [criterion], "out_of_memory": "split"}
    with (
        trimtab.start(model, optimizer, Plan.fixed(ROWS), **given) as run,
        pytest.warns(RuntimeWarning, match="out of memory"),
    ):
        run.train_step(run.window(batches()[0]), loss_fn)
    if make is ArcHead:
        assert same(with_auxiliary_modules(model, (criterion,)), plain(make, count=1))
    else:  # two halves have moved the buffer, and the attempt that failed has not
        once, twice = Weighted(), Weighted()
        features = Backbone()(batches()[0][0])
        once(features[:4], batches()[0][1][:4])
        once(features[4:], batches()[0][1][4:])
        assert torch.allclose(criterion.mean, once.mean)
        assert twice.mean == 0


def test_checkpoints_hold_it(tmp_path):
    def train(folder, until):
        model, criterion, optimizer = loop(Weighted)
        given = {"modules": [criterion], "checkpoints": trimtab.Checkpoints(folder, every_steps=1)}
        with trimtab.start(model, optimizer, Plan.fixed(ROWS), **given) as run:
            for window in run.windows(batches()):
                run.train_step(window, loss_of(criterion))
                if run.num_windows == until:
                    break
        return with_auxiliary_modules(model, (criterion,))

    train(tmp_path / "run", 2)
    assert same(train(tmp_path / "run", 4), plain(Weighted))


def test_a_checkpoint_without_it_is_refused(tmp_path):
    def train(modules):
        model = Backbone()
        checkpoints = trimtab.Checkpoints(tmp_path / "run", every_steps=1)
        given = {"modules": modules, "checkpoints": checkpoints}
        trained(model, sgd(model), Plan.fixed(ROWS), batches(1), squares_of_inputs, **given)

    train([])
    with pytest.raises(UsageError):
        train([ArcHead()])


def test_parameters_of_others_are_refused_with_the_remedy_that_fits():
    model, criterion, optimizer = loop(ArcHead)
    with pytest.raises(OptimizerError) as started:
        trimtab.start(model, optimizer, Plan.fixed(ROWS))
    with pytest.raises(OptimizerError) as planned:
        trimtab.plan(model, optimizer, loss_of(criterion), batches()[0])
    with pytest.raises(OptimizerError) as of_two_networks:
        trimtab.plan(model, optimizer, lambda model, batch: model(batch[0]).square().mean(), batches()[0])
    assert {each.value.code for each in (started, planned, of_two_networks)} == {"optimizer.foreign_parameters"}
    assert "modules=[criterion]" in started.value.hint
    assert "ArcHead" in planned.value.hint
    assert "modules=[criterion]" in planned.value.hint
    assert "modules" not in of_two_networks.value.hint


@pytest.mark.parametrize("modules", [3, "criterion", ArcHead(), [nn.Parameter(torch.ones(1))], [None]])
def test_other_things_than_modules_are_refused(modules):
    model = Backbone()
    with raises(ValueGivenError, code="modules.not_modules"):
        trimtab.start(model, sgd(model), Plan.fixed(ROWS), modules=modules)


def test_parts_of_the_model_and_modules_without_parameters_change_nothing():
    model = Backbone()
    modules = [model.layers[0], nn.MSELoss(), nn.MSELoss()]
    trained(model, sgd(model), Plan.fixed(ROWS), batches(1), squares_of_inputs, modules=modules)


def test_a_frozen_model_may_train_its_criterion_alone():
    model, criterion = Backbone().requires_grad_(False), ArcHead()
    trained(model, sgd(criterion), Plan.fixed(ROWS), batches(1), loss_of(criterion), modules=[criterion])
    assert not same(criterion, ArcHead())


def test_a_module_on_another_device_is_refused():
    model, criterion = Backbone(), ArcHead().to("meta")
    optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], lr=0.1)
    with pytest.raises(ModelError):
        trimtab.start(model, optimizer, Plan.fixed(ROWS), modules=[criterion])


class Outer:
    """An optimizer that wraps another, and is none of torch's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def zero_grad(self):
        self.optimizer.zero_grad()

    def step(self):
        self.optimizer.step()


def test_a_wrapper_that_is_no_optimizer_of_torch_is_refused_by_name():
    model = Backbone()
    with raises(OptimizerError, code="optimizer.not_torch") as caught:
        trimtab.start(model, Outer(sgd(model)), Plan.fixed(ROWS))
    assert "Outer" in caught.value.hint
